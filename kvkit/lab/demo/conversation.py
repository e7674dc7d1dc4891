"""Demo: a conversation over a long document, then again in a new process with its KV on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkit.adapters.huggingface import smollm2
from kvkit.lab.files import BenchError, check_folders, load_model, model_folder, write_figures
from kvkit.observe.progress import timed
from kvkit.observe.terminal import print_text, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTIONS = (
    "Which method is called when the default attribute access fails?",
    "What is a descriptor?",
    "What does __slots__ do, and what does it save?",
    "In one sentence: what have we talked about?",
)
DOCUMENT_TOKENS = 3000
CHUNK_TOKENS = 64
ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurements of one turn with kvkit and, in a comparison, without it in the same process."""

    prompt_tokens: int
    hit_tokens: dict[str, int]  # prompt tokens loaded, by tier
    computed_tokens: int  # prompt tokens computed
    ttft_s: float  # from the question to the first token of the answer
    ttft_cold_s: float | None = None  # the same without kvkit
    identical: bool | None = None  # whether both gave the same tokens


def run(model: str | None, json_path: Path, png_path: Path, console: Console) -> list[Turn]:
    """Run the demo and write its figures and picture; returns the second process's turns.

    Args:
        model: hub id, folder or gemma; None: SmolLM2-135M-Instruct; both from PyPI packages.

    Raises:
        BenchError: the folder to write to does not exist, a process failed, or the text of the second one
            differs from the text without kvkit.
        ModelError: the model cannot be fetched.
    """
    check_folders(json_path, png_path)
    folder = model_folder(model, console)
    with tempfile.TemporaryDirectory(prefix="kvkit-demo-") as store:
        first = _run_process("first process: computes and stores", folder, store, False, console)
        second = _run_process("second process: every hit is read from disk", folder, store, True, console)
    show(table(second), console)
    turns, before = ([asdict(turn) for turn in process] for process in (second, first))
    write_figures(json_path, "kvkit demo", model=model or smollm2.NAME, turns=turns, first_process=before)
    picture(first, second).savefig(png_path, dpi=110)
    print_text(f"figures: {json_path}", console)
    print_text(f"picture: {png_path}", console)
    if not all(turn.identical for turn in second):
        raise BenchError("the text with kvkit differs from the text without it")
    return second


def table(turns: list[Turn]) -> Table:
    """Return the turns as a table."""
    shown = Table(title="second process: time to first token without kvkit (cold) and with it")
    for heading in ("turn", "prompt", "hits", "computed", "cold", "kvkit", "speedup", "identical"):
        shown.add_column(heading, justify="right")
    for number, turn in enumerate(turns, 1):
        hits = ", ".join(f"{tier} {n}" for tier, n in turn.hit_tokens.items()) or "none"
        cold = turn.ttft_cold_s or float("nan")
        shown.add_row(
            *(str(number), str(turn.prompt_tokens), hits, str(turn.computed_tokens)),
            *(f"{cold:.2f} s", f"{turn.ttft_s:.2f} s", f"{cold / turn.ttft_s:.1f}×"),
            "✓" if turn.identical else "✗",
        )
    return shown


def picture(first: list[Turn], second: list[Turn]) -> Figure:
    """Draw the source of each prompt's tokens, and the times to first token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = list(range(1, len(second) + 1))
    colors = {"computed": "#d1495b", "memory": "#66a182", "disk": "#2e4057"}
    labelled: set[str] = set()
    for offset, turns in ((-0.2, first), (0.2, second)):
        bottom = [0] * len(turns)
        for tier in [*dict.fromkeys(t for turn in turns for t in turn.hit_tokens), "computed"]:
            counts = [t.computed_tokens if tier == "computed" else t.hit_tokens.get(tier, 0) for t in turns]
            label = None if tier in labelled else tier
            left.bar([n + offset for n in numbers], counts, 0.36, bottom, color=colors.get(tier), label=label)
            labelled.add(tier)
            bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    left.set(title="prompt tokens by source", xlabel="turn: 1st process, 2nd process", ylabel="tokens")
    left.set(xticks=numbers)
    cold, warm = ([t.ttft_cold_s or 0 for t in second], [t.ttft_s for t in second])
    right.bar([n - 0.2 for n in numbers], cold, 0.36, color="#d1495b", label="without kvkit")
    bars = right.bar([n + 0.2 for n in numbers], warm, 0.36, color="#2e4057", label="with kvkit, from disk")
    right.bar_label(bars, [f"{(t.ttft_cold_s or 0) / t.ttft_s:.0f}×" for t in second], fontsize=9)
    right.set(title="time to first token, 2nd process", xlabel="turn", xticks=numbers, ylabel="seconds")
    for axes in (left, right):  # legends go below the panels, which bars fill
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    return figure


def converse(
    folder: str, store: str, compare: bool, emit: Callable[[dict[str, Any]], None], device: str | None = None
) -> None:
    """Hold one process's conversation on `device`; None: a GPU if there is one.

    With `compare`, load from disk only, and also generate each answer without kvkit.

    Raises:
        BenchError: the model cannot be loaded.
    """
    import torch

    from kvkit.adapters.huggingface.cached import CachedModel
    from kvkit.config import load_config

    emit({"status": "loading the model"})
    tokenizer, loaded = load_model(folder)
    loaded = loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    policy = {"retrieve_from": ["disk"], "write_back_to": []} if compare else {}
    config = load_config(
        chunk_tokens=CHUNK_TOKENS,
        staging="128MiB",
        tiers={"memory": {"capacity": "256MiB"}, "disk": {"url": f"file://{store}"}},
        policy=policy,
    )
    with CachedModel.open(loaded, config) as model:
        plain = CachedModel(loaded, model.layout, None)
        for _ in range(2):  # warm up like a server: compute a prompt, then load it from the cache
            model.generate(list(range(5, 205)), max_new_tokens=2)
            model.flush()
        history: list[dict[str, str]] = []
        for number, question in enumerate(QUESTIONS, 1):
            text = f"{document(tokenizer)}\n\n{question}" if number == 1 else question
            history.append({"role": "user", "content": text})
            prompt = render(tokenizer, history)
            emit({"status": f"turn {number}: {len(prompt)} tokens"})
            answer = model.generate(prompt, ANSWER_TOKENS)
            turn = Turn(answer.prompt_tokens, dict(answer.hit_tokens), answer.computed_tokens, answer.ttft_s)
            if compare:
                emit({"status": f"turn {number}: {len(prompt)} tokens, once more without kvkit"})
                cold = plain.generate(prompt, ANSWER_TOKENS)
                turn = replace(turn, ttft_cold_s=cold.ttft_s, identical=cold.tokens == answer.tokens)
            answer_text = tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
            history.append({"role": "assistant", "content": answer_text})
            emit({"turn": asdict(turn), "question": question, "answer": answer_text})


def document(tokenizer: Any) -> str:
    """Return a long text from Python's documentation: attribute access, mappings, debugger."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in ("attribute-access", "typesmapping", "debugger"))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:DOCUMENT_TOKENS]
    return str(tokenizer.decode(ids))


def render(tokenizer: Any, history: list[dict[str, str]]) -> list[int]:
    """Return the conversation as token ids, up to the start of the assistant's next answer."""
    text = render_text(tokenizer, history)
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])


def render_text(tokenizer: Any, history: list[dict[str, str]]) -> str:
    """Return the conversation as text, with special tokens if there is a chat template."""
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False))
    return "".join(f"{m['role']}: {m['content']}\n" for m in history) + "assistant:"


def _run_process(title: str, folder: str, store: str, compare: bool, console: Console) -> list[Turn]:
    console.rule(title)
    turns, report = [], timed(console)
    report("starting")
    for event in _events([folder, store, str(int(compare))]):
        if "status" in event:
            report(event["status"])
        else:
            turn = Turn(**event["turn"])
            turns.append(turn)
            hits = sum(turn.hit_tokens.values())
            answer = escape(event["answer"])
            console.print(f"[bold]{event['question']}[/bold]\n  {answer}", highlight=False)
            console.print(f"  [dim]{hits} of {turn.prompt_tokens} tokens hit, {turn.ttft_s:.2f} s[/dim]")
    return turns


def _events(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Run one process of the demo and yield its reports, a JSON object per line."""
    command = [sys.executable, "-m", "kvkit.lab.demo.conversation", *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        for line in process.stdout or ():
            yield json.loads(line)
        if process.wait():
            errors.seek(0)
            raise BenchError(f"a process of the demo failed:\n{errors.read()[-4000:]}")


def _main() -> None:
    folder, store, compare = sys.argv[1:]
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not break the protocol
    try:
        converse(folder, store, bool(int(compare)), lambda event: print(json.dumps(event), file=out))
    except BenchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
