"""A conversation over documents that change their order every turn: vLLM that blends, and plain vLLM.

Both have vLLM's prefix cache on, which finds what begins as an earlier prompt did. Plain vLLM leads the
conversation; vLLM with kvkit is given each document once, as when it is indexed, then the same prompts.
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
from kvkit.bench import memory
from kvkit.bench.client import Completion, Target, ask, blend_tokens, connect
from kvkit.bench.demo import render_text
from kvkit.bench.files import (
    BenchError,
    check_folders,
    load_tokenizer,
    model_folder,
    split_options,
    write_figures,
)
from kvkit.bench.systems import BLEND_CHUNK_TOKENS, STAGING_BYTES, Setup, ended_by_sigterm, missing, started
from kvkit.bench.workloads import NAMES, CompletionRequest, told
from kvkit.observe.progress import Say, timed
from kvkit.observe.terminal import show, tell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0))
"""In which order each turn's prompt has the documents."""
ASKED = (1, 3, 0, 2)
"""Which of them each turn asks about."""
CODES = ("48217", "90356", "17742", "63085")
TASK = "Answer by these documents."
DOCUMENT_TOKENS = 4 * BLEND_CHUNK_TOKENS + 8
"""Of a document with what stands before the first, about: a bit more than whole chunks, which are reused."""
ANSWER_TOKENS = 8
LISTED = 100
"""Of so many tokens a server tells the probability."""
BLOCK_BYTES = 1 << 30
"""Of vLLM's blocks, at most: more is of no use to one conversation."""
_TIMEOUT_S = 300.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BlendTurn:
    """One turn over vLLM that blends, and over plain vLLM; tokens are of its prompt."""

    prompt_tokens: int
    exact_tokens: int  # whose KV was found behind the same tokens
    blended_tokens: int  # whose KV was computed behind others, and is used so
    recomputed_tokens: int  # whose KV was, and is computed again
    computed_tokens: int  # whose KV was nowhere
    ttft_s: float  # to the first piece of text
    ttft_cold_s: float  # of plain vLLM
    kl: float  # of the first token's distribution from plain vLLM's, in nats; see `divergence`
    answer: str
    answer_cold: str
    exact: bool  # whether the answer is right
    exact_cold: bool

    @property
    def identical(self) -> bool:
        return self.answer == self.answer_cold


def run(model: str | None, vllm: str, json_path: Path, png_path: Path, console: Console) -> list[BlendTurn]:
    """Have the conversation twice, print it as a table, write its figures and draw it; returns its turns.

    Args:
        model: hub id, folder or gemma; None: SmolLM2-135M-Instruct; both from PyPI packages.
        vllm: more of vLLM's command line; what is there of memory stands.

    Raises:
        BenchError: an argument is wrong, vLLM is missing, there is too little memory, a server cannot be
            started, a request failed or was not blended.
        ModelError: the model cannot be fetched.
    """
    check_folders(json_path, png_path)
    options = split_options(vllm)
    if lacking := missing("kvkit-blend"):
        raise BenchError(f"demo --blend: {lacking}")
    with TemporaryDirectory(prefix="kvkit-blend-") as folder, ended_by_sigterm():
        name = model_folder(model, console)
        share = memory.share(name, tiers=(1 << 30) + STAGING_BYTES, most=BLOCK_BYTES, options=options)
        console.print(share.words, highlight=False, soft_wrap=True)
        chosen = ("--enable-prefix-caching", "--max-logprobs", str(LISTED), *share.options, *options)
        setup = Setup(name, 1, None, chosen, Path(folder), memory=share.words)
        tokenizer = load_tokenizer(name)
        documents = texts(tokenizer)
        warm = turn_request(tokenizer, documents[len(CODES) :], [], 0)
        say = timed(console)
        say("starting plain vLLM")
        with started("plain", setup) as url:
            plain = converse(connect("plain", url), tokenizer, documents[: len(CODES)], warm, say)
        say("starting vLLM that blends")
        with started("kvkit-blend", setup) as url:
            turns = replay(replace(connect("kvkit", url), blends=True), plain, warm, say)
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
    tell(f"figures: {json_path}", console)
    tell(f"picture: {png_path}", console)
    return turns


def converse(
    server: Target, tokenizer: Any, documents: Sequence[str], warm: CompletionRequest, say: Say
) -> list[tuple[CompletionRequest, Completion]]:
    """The conversation as `server` leads it after it was warmed up: each turn's request, and its answer.

    Raises:
        BenchError: a request failed.
    """
    say(f"{server.name}: warming up")
    _answer(server, warm)
    history: list[dict[str, str]] = []
    found = []
    for number, order in enumerate(ORDERS):
        request = turn_request(tokenizer, [documents[d] for d in order], history, number)
        say(f"{server.name}: turn {number + 1} of {len(ORDERS)}")
        answer = _answer(server, request)
        found.append((request, answer))
        said = f"{_lead(number)}{answer.text.strip()}"
        history += [_user(_question(number)), {"role": "assistant", "content": said}]
    return found


def replay(
    server: Target, plain: Sequence[tuple[CompletionRequest, Completion]], warm: CompletionRequest, say: Say
) -> list[BlendTurn]:
    """The turns of a conversation over `server`, which blends, beside the answers that there are.

    Raises:
        BenchError: a request failed, or was not blended.
    """
    say(f"{server.name}: warming up")
    index(server, warm)
    _answer(server, warm)
    say(f"{server.name}: computing the documents")
    index(server, plain[0][0])
    turns = []
    for number, (request, cold) in enumerate(plain, 1):
        say(f"{server.name}: turn {number} of {len(plain)}")
        before = blend_tokens(server)
        answer = _answer(server, request)
        grown = blend_tokens(server) - before
        if not grown["reused"]:
            raise BenchError(f"turn {number} was not blended: none of its documents was found")
        turns.append(
            BlendTurn(
                prompt_tokens=answer.prompt_tokens,
                exact_tokens=grown["exact"],
                blended_tokens=grown["reused"] - grown["selected"],
                recomputed_tokens=grown["selected"],
                computed_tokens=grown["computed"],
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
    """Have `server` compute each document of a request behind what stands before the first, and store it."""
    before = request.text[: request.documents[0][0]]
    for start, stop in request.documents:
        text = before + request.text[start:stop]
        alone = CompletionRequest(0, text, False, max_tokens=1, documents=((len(before), len(text)),))
        _answer(server, alone)


def turn_request(
    tokenizer: Any, documents: Sequence[str], history: Sequence[dict[str, str]], number: int
) -> CompletionRequest:
    """The request of a turn: documents in front of what was said before, and the turn's question."""
    said = [*history, _user(_question(number))]
    said[0] = _user("\n\n".join([TASK, *documents, said[0]["content"]]))
    text = render_text(tokenizer, said).removeprefix(tokenizer.bos_token or "") + _lead(number)
    starts = [text.index(document) for document in documents]
    spans = tuple((start, start + len(d)) for start, d in zip(starts, documents, strict=True))
    return CompletionRequest(0, text, True, ANSWER_TOKENS, documents=spans, answer=CODES[ASKED[number]])


def texts(tokenizer: Any) -> list[str]:
    """Documents, each from a text that every Python has, with an access code in it; then two to warm up."""
    from pydoc_data.topics import topics

    before = render_text(tokenizer, [_user(TASK)]).partition(TASK)[0] + TASK
    room = DOCUMENT_TOKENS - _count(tokenizer, before)
    long = sorted((text.strip() for text in topics.values() if len(text) > 4 * DOCUMENT_TOKENS), key=len)
    found = []
    for text, name, code in zip(long, NAMES, (*CODES, "10000", "10000"), strict=False):
        cut = room - _count(tokenizer, told("", name, code))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:cut]
        found.append(told(tokenizer.decode(ids), name, code).strip())
    return found


def divergence(plain: Mapping[str, float], ours: Mapping[str, float]) -> float:
    """KL divergence of `ours` from `plain`, log-probabilities of the likeliest tokens, in nats.

    Tokens that only one of them lists are taken together, as one: the result is never more than the true one
    (by the log sum inequality), and less by little, where the lists have nearly all of the probability.
    """
    pairs = [(math.exp(plain[token]), math.exp(ours[token])) for token in plain.keys() & ours.keys()]
    rests = (max(_ROUNDING, 1 - sum(probabilities)) for probabilities in zip(*pairs, strict=True))
    return math.fsum(p * math.log(p / q) for p, q in (*pairs, tuple(rests) or (1.0, 1.0)))


def table(turns: Sequence[BlendTurn]) -> Table:
    """The turns as a table."""
    kinds = ("exact", "blended", "recomputed", "computed")
    heads = ("exact", "blended", "re-\ncomputed", "computed")
    columns = ("turn", "prompt", *heads, "plain\nTTFT", "TTFT", "speedup", "KL", "right")
    words = "tokens of prompts, times to the first token; right: plain vLLM/vLLM that blends"
    numbers = (Column(name, justify="right") for name in columns)
    shown = Table(*numbers, caption=words, box=None, padding=(0, 1, 0, 0))  # within 80 columns
    for number, turn in enumerate(turns, 1):
        shown.add_row(
            *(str(number), str(turn.prompt_tokens)),
            *(str(getattr(turn, f"{kind}_tokens")) for kind in kinds),
            *(f"{turn.ttft_cold_s:.2f} s", f"{turn.ttft_s:.2f} s", f"{turn.ttft_cold_s / turn.ttft_s:.1f}×"),
            *(f"{turn.kl:.3f}", "/".join("yes" if x else "no" for x in (turn.exact_cold, turn.exact))),
        )
    return shown


def picture(turns: Sequence[BlendTurn]) -> Figure:
    """Where each prompt's KV came from, and the time to the first token beside plain vLLM's."""
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
    cold, ours = ([getattr(turn, name) for turn in turns] for name in ("ttft_cold_s", "ttft_s"))
    right.bar([n - 0.2 for n in numbers], cold, 0.36, color="#d1495b", label="plain vLLM")
    bars = right.bar([n + 0.2 for n in numbers], ours, 0.36, color="#66a182", label="blended")
    right.bar_label(bars, [f"{c / o:.1f}×" for c, o in zip(cold, ours, strict=True)], fontsize=9)
    right.set(title="time to first token", xlabel="turn, KL of the first token", ylabel="seconds")
    right.set_xticks(numbers, [f"{n}\n{turn.kl:.3f}" for n, turn in zip(numbers, turns, strict=True)])
    for axes in (left, right):  # below the bars, which fill a panel
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    return figure


def _answer(server: Target, request: CompletionRequest) -> Completion:
    """What a server says to a request, with the probabilities of its first token.

    Raises:
        BenchError: it failed.
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
    """What the answer begins with: its first token is then the first of the code."""
    return f"Access code of {NAMES[ASKED[number]]}: "
