"""Conversation over documents in a new order every turn, over vLLM that blends and over plain vLLM.

Both use vLLM's prefix cache, which finds common prefixes of prompts. Plain vLLM holds the conversation; vLLM
with kvkit first computes each document once, as when it is indexed, then gets the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvkit.adapters.huggingface import smollm2
from kvkit.lab.demo.conversation import render_text
from kvkit.lab.files import (
    BenchError,
    check_folders,
    load_tokenizer,
    model_folder,
    split_options,
    write_figures,
)
from kvkit.lab.serve import memory
from kvkit.lab.serve.client import Completion, Target, ask, blend_tokens, connect
from kvkit.lab.serve.systems import (
    BLEND_CHUNK_TOKENS,
    STAGING_BYTES,
    Setup,
    ended_by_sigterm,
    missing,
    started,
)
from kvkit.lab.serve.workloads import NAMES, CompletionRequest, with_access_code
from kvkit.observe.progress import Report, timed
from kvkit.observe.terminal import print_text, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0))
"""Order of the documents in each turn's prompt."""
ASKED = (1, 3, 0, 2)
"""Document that each turn asks about."""
CODES = ("48217", "90356", "17742", "63085")
TASK = "Answer by these documents."
DOCUMENT_TOKENS = 4 * BLEND_CHUNK_TOKENS + 8
"""Approximate tokens of a document and the text before the first one: slightly more than whole chunks."""
ANSWER_TOKENS = 8
LISTED = 100
"""Number of tokens with probabilities in an answer."""
BLOCK_BYTES = 1 << 30
"""Maximum bytes of vLLM's blocks: one conversation needs no more."""
_TIMEOUT_S = 300.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BlendTurn:
    """Measurements of one turn, over vLLM that blends and over plain vLLM; tokens are those of the prompt."""

    prompt_tokens: int
    exact_tokens: int  # their KV was found after the same tokens
    blended_tokens: int  # their KV was found after other tokens, and reused
    recomputed_tokens: int  # their KV was found after other tokens, and recomputed
    computed_tokens: int  # their KV was not found
    ttft_s: float  # time to the first piece of text
    ttft_cold_s: float  # the same of plain vLLM
    kl: float  # KL divergence of the first token from plain vLLM, in nats; see `divergence`
    answer: str
    answer_cold: str
    exact: bool  # whether the answer is correct
    exact_cold: bool

    @property
    def identical(self) -> bool:
        return self.answer == self.answer_cold


def run(model: str | None, vllm: str, json_path: Path, png_path: Path, console: Console) -> list[BlendTurn]:
    """Hold the conversation twice, print a table, write figures and a picture; returns the turns.

    Args:
        model: hub id, folder or gemma; None: SmolLM2-135M-Instruct; both from PyPI packages.
        vllm: additional options of vLLM; options about memory override kvkit's choice.

    Raises:
        BenchError: an argument is wrong, vLLM is missing, the machine has too little memory, a server
            cannot be started, or a request failed or was not blended.
        ModelError: the model cannot be fetched.
    """
    check_folders(json_path, png_path)
    options = split_options(vllm)
    if lacking := missing("kvkit-blend"):
        raise BenchError(f"demo --blend: {lacking}")
    with TemporaryDirectory(prefix="kvkit-blend-") as folder, ended_by_sigterm():
        name = model_folder(model, console)
        share = memory.share(name, tiers=(1 << 30) + STAGING_BYTES, most=BLOCK_BYTES, options=options)
        print_text(share.description, console)
        vllm_options = ("--enable-prefix-caching", "--max-logprobs", str(LISTED), *share.options, *options)
        setup = Setup(name, 1, None, vllm_options, Path(folder), memory=share.description)
        tokenizer = load_tokenizer(name)
        documents = texts(tokenizer)
        warm = turn_request(tokenizer, documents[len(CODES) :], [], 0)
        report = timed(console)
        report("starting plain vLLM")
        with started("plain", setup) as url:
            plain = converse(connect("plain", url), tokenizer, documents[: len(CODES)], warm, report)
        report("starting vLLM that blends")
        with started("kvkit-blend", setup) as url:
            turns = replay(replace(connect("kvkit", url), blends=True), plain, warm, report)
    for number, turn in enumerate(turns):
        console.print(f"[bold]{_question(number)}[/bold] {escape(turn.answer.strip())}", highlight=False)
    show(table(turns), console)
    write_figures(
        json_path,
        command="kvkit demo --blend",
        model=model or smollm2.NAME,
        turns=[asdict(turn) | {"identical": turn.identical} for turn in turns],
    )
    picture(turns).savefig(png_path, dpi=110)
    print_text(f"figures: {json_path}", console)
    print_text(f"picture: {png_path}", console)
    return turns


def converse(
    server: Target, tokenizer: Any, documents: Sequence[str], warm: CompletionRequest, report: Report
) -> list[tuple[CompletionRequest, Completion]]:
    """Warm up `server`, hold the conversation, and return the request and answer of each turn.

    Raises:
        BenchError: a request failed.
    """
    report(f"{server.name}: warming up")
    _answer(server, warm)
    history: list[dict[str, str]] = []
    turns = []
    for number, order in enumerate(ORDERS):
        request = turn_request(tokenizer, [documents[d] for d in order], history, number)
        report(f"{server.name}: turn {number + 1} of {len(ORDERS)}")
        answer = _answer(server, request)
        turns.append((request, answer))
        answer_text = f"{_lead(number)}{answer.text.strip()}"
        history += [_user(_question(number)), {"role": "assistant", "content": answer_text}]
    return turns


def replay(
    server: Target,
    plain: Sequence[tuple[CompletionRequest, Completion]],
    warm: CompletionRequest,
    report: Report,
) -> list[BlendTurn]:
    """Repeat a conversation over `server`, which blends; returns turns that compare both answers.

    Raises:
        BenchError: a request failed, or was not blended.
    """
    report(f"{server.name}: warming up")
    index(server, warm)
    _answer(server, warm)
    report(f"{server.name}: computing the documents")
    index(server, plain[0][0])
    turns = []
    for number, (request, cold) in enumerate(plain, 1):
        report(f"{server.name}: turn {number} of {len(plain)}")
        before = blend_tokens(server)
        answer = _answer(server, request)
        increase = blend_tokens(server) - before
        if not increase["reused"]:
            raise BenchError(f"turn {number} was not blended: none of its documents was found")
        turns.append(
            BlendTurn(
                prompt_tokens=answer.prompt_tokens,
                exact_tokens=increase["exact"],
                blended_tokens=increase["reused"] - increase["selected"],
                recomputed_tokens=increase["selected"],
                computed_tokens=increase["computed"],
                ttft_s=answer.ttft_s,
                ttft_cold_s=cold.ttft_s,
                kl=divergence(cold.top or {}, answer.top or {}),
                answer=answer.text,
                answer_cold=cold.text,
                exact=bool(answer.exact),
                exact_cold=bool(cold.exact),
            )
        )
    return turns


def index(server: Target, request: CompletionRequest) -> None:
    """Make `server` compute and store each document of a request, after the text before the first one."""
    prefix = request.text[: request.documents[0][0]]
    for start, stop in request.documents:
        text = prefix + request.text[start:stop]
        document_request = CompletionRequest(
            0, text, False, max_tokens=1, documents=((len(prefix), len(text)),)
        )
        _answer(server, document_request)


def turn_request(
    tokenizer: Any, documents: Sequence[str], history: Sequence[dict[str, str]], number: int
) -> CompletionRequest:
    """Return the request of a turn: documents, the conversation so far, and the turn's question."""
    messages = [*history, _user(_question(number))]
    messages[0] = _user("\n\n".join([TASK, *documents, messages[0]["content"]]))
    text = render_text(tokenizer, messages).removeprefix(tokenizer.bos_token or "") + _lead(number)
    starts = [text.index(document) for document in documents]
    spans = tuple((start, start + len(d)) for start, d in zip(starts, documents, strict=True))
    return CompletionRequest(0, text, True, ANSWER_TOKENS, documents=spans, answer=CODES[ASKED[number]])


def texts(tokenizer: Any) -> list[str]:
    """Return documents from Python's documentation, each with an access code; the last two for warm-up."""
    from pydoc_data.topics import topics

    prefix = render_text(tokenizer, [_user(TASK)]).partition(TASK)[0] + TASK
    document_tokens = DOCUMENT_TOKENS - _count(tokenizer, prefix)
    long = sorted((text.strip() for text in topics.values() if len(text) > 4 * DOCUMENT_TOKENS), key=len)
    documents = []
    for text, name, code in zip(long, NAMES, (*CODES, "10000", "10000"), strict=False):
        text_tokens = document_tokens - _count(tokenizer, with_access_code("", name, code))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:text_tokens]
        documents.append(with_access_code(tokenizer.decode(ids), name, code).strip())
    return documents


def divergence(plain: Mapping[str, float], blended: Mapping[str, float]) -> float:
    """Return the KL divergence of `blended` from `plain` in nats; both: log-probabilities of likely tokens.

    Tokens not in both lists count as one token. So the result never exceeds the true divergence (by the log
    sum inequality), and is close to it if the common tokens have nearly all of the probability.
    """
    pairs = [(math.exp(plain[token]), math.exp(blended[token])) for token in plain.keys() & blended.keys()]
    rests = (max(_ROUNDING, 1 - sum(probabilities)) for probabilities in zip(*pairs, strict=True))
    return math.fsum(p * math.log(p / q) for p, q in (*pairs, tuple(rests) or (1.0, 1.0)))


def table(turns: Sequence[BlendTurn]) -> Table:
    """Return the turns as a table."""
    kinds = ("exact", "blended", "recomputed", "computed")
    heads = ("exact", "blended", "re-\ncomputed", "computed")
    columns = ("turn", "prompt", *heads, "plain\nTTFT", "TTFT", "speedup", "KL", "right")
    caption = "tokens of prompts, times to the first token; right: plain vLLM/vLLM that blends"
    numbers = (Column(name, justify="right") for name in columns)
    shown = Table(*numbers, caption=caption, box=None, padding=(0, 1, 0, 0))  # within 80 columns
    for number, turn in enumerate(turns, 1):
        shown.add_row(
            *(str(number), str(turn.prompt_tokens)),
            *(str(getattr(turn, f"{kind}_tokens")) for kind in kinds),
            *(f"{turn.ttft_cold_s:.2f} s", f"{turn.ttft_s:.2f} s", f"{turn.ttft_cold_s / turn.ttft_s:.1f}×"),
            *(f"{turn.kl:.3f}", "/".join("yes" if x else "no" for x in (turn.exact_cold, turn.exact))),
        )
    return shown


def picture(turns: Sequence[BlendTurn]) -> Figure:
    """Draw the source of each prompt's KV, and the times to first token of both servers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = list(range(1, len(turns) + 1))
    colors = {"exact": "#2e4057", "blended": "#66a182", "recomputed": "#edae49", "computed": "#d1495b"}
    bottom = [0] * len(turns)
    for kind, color in colors.items():
        counts = [getattr(turn, f"{kind}_tokens") for turn in turns]
        left.bar(numbers, counts, 0.6, bottom, color=color, label=kind)
        bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    left.set(title="prompt tokens by source", xlabel="turn", xticks=numbers, ylabel="tokens")
    cold, blended = ([getattr(turn, name) for turn in turns] for name in ("ttft_cold_s", "ttft_s"))
    right.bar([n - 0.2 for n in numbers], cold, 0.36, color="#d1495b", label="plain vLLM")
    bars = right.bar([n + 0.2 for n in numbers], blended, 0.36, color="#66a182", label="blended")
    right.bar_label(bars, [f"{c / o:.1f}×" for c, o in zip(cold, blended, strict=True)], fontsize=9)
    right.set(title="time to first token", xlabel="turn, KL of the first token", ylabel="seconds")
    right.set_xticks(numbers, [f"{n}\n{turn.kl:.3f}" for n, turn in zip(numbers, turns, strict=True)])
    for axes in (left, right):  # legends go below the panels, which bars fill
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    return figure


def _answer(server: Target, request: CompletionRequest) -> Completion:
    """Send a request and return its answer, with probabilities of the first token.

    Raises:
        BenchError: the request failed.
    """
    listed = {"logprobs": LISTED, "return_tokens_as_token_ids": True}
    answer = ask(server, request, request.text, _TIMEOUT_S, **listed)
    if answer.error is not None:
        raise BenchError(f"{server.name}: {answer.error}")
    return answer


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _question(number: int) -> str:
    return f"What is the access code of {NAMES[ASKED[number]]}?"


def _lead(number: int) -> str:
    """Return the start of the answer, so that the first generated token is the first of the code."""
    return f"Access code of {NAMES[ASKED[number]]}: "
