"""Traces: requests with the chunks of their tokens, read from JSON lines or generated from a seed.

Two formats are read, a request a line. Mooncake's (https://github.com/kvcache-ai/Mooncake), where an id
stands for 512 tokens of the prompt:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

and our own, which also knows sessions, and the blocks that the answer fills:

    {"block_tokens": 256}
    {"timestamp": 0, "session": "chat-1", "input_length": 700, "output_length": 150, "blocks": [7, 8, 9]}

`timestamp` is in milliseconds, lengths are in tokens. `blocks` are the whole blocks of prompt and answer;
equal ids are equal tokens, wherever they stand. A first line with `block_tokens` may precede either format.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, chain, count
from operator import itemgetter
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.settings import ConfigError, explain

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    timestamp_ms: float  # when it arrives
    session: str  # what a router may keep together
    input_tokens: int  # of the prompt
    output_tokens: int  # of the answer
    chunks: tuple[
        str, ...
    ]  # a name per whole chunk of prompt and, where known, answer: equal for equal prefixes
    prompt_chunks: int  # how many of them the prompt fills


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; a chunk is `block_tokens` tokens."""

    block_tokens: int
    requests: tuple[Request, ...]


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")
    block_tokens: int = Field(ge=1, le=2**20)


class _Line(BaseModel):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    session: str | int | None = None
    input_length: int = Field(ge=1, le=2**31)
    output_length: int = Field(default=0, ge=0, le=2**31)
    hash_ids: list[int] | None = None
    blocks: list[int] | None = None


def read_trace(path: str | Path) -> Trace:
    """Read a trace in either format; lines out of order are sorted by time.

    Raises:
        ConfigError: the file cannot be read or is no trace. The message names file, line and field.
    """
    try:
        texts = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    block_tokens, headed = MOONCAKE_BLOCK_TOKENS, False
    found: list[_Named] = []
    for number, text in enumerate(texts, 1):
        where = f"{path}:{number}"
        if not text.strip():
            continue
        try:
            if not found and not headed and '"block_tokens"' in text:
                block_tokens, headed = _Header.model_validate_json(text).block_tokens, True
                continue
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(explain(error, _Header, f"{where}: ")) from error
        session = str(len(found) if line.session is None else line.session)
        ids = _ids(line, block_tokens, headed, where)
        found.append((line.timestamp, session, line.input_length, line.output_length, ids))
    if not found:
        raise ConfigError(f"{path}: no requests")
    return _trace(block_tokens, sorted(found, key=itemgetter(0)))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` in our own format. A name of a chunk becomes a number.

    Raises:
        OSError: it cannot be written.
    """
    numbers: dict[str, int] = {}
    lines = [json.dumps({"block_tokens": trace.block_tokens})]
    for request in trace.requests:
        blocks = [numbers.setdefault(name, len(numbers)) for name in request.chunks]
        fields = {
            "timestamp": request.timestamp_ms,
            "session": request.session,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "blocks": blocks,
        }
        lines.append(json.dumps(fields, separators=(",", ":")))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _ids(line: _Line, block_tokens: int, headed: bool, where: str) -> list[int]:
    """The ids of a line's whole blocks."""
    prompt = line.input_length // block_tokens
    if (line.hash_ids is None) == (line.blocks is None):
        raise ConfigError(f"{where}: want hash_ids or blocks, one of the two")
    if line.hash_ids is not None:
        least, most, ids, name = prompt, -(-line.input_length // block_tokens), line.hash_ids, "hash_ids"
    else:
        if not headed:
            raise ConfigError(f'{where}: blocks without a first line such as {{"block_tokens": 256}}')
        most = (line.input_length + line.output_length) // block_tokens
        least, ids, name = prompt, line.blocks or [], "blocks"
    if not least <= len(ids) <= most:
        raise ConfigError(
            f"{where}: {name}: {len(ids)} ids; {line.input_length} + {line.output_length} tokens in blocks "
            f"of {block_tokens} have {least}{f' to {most}' if most > least else ''}"
        )
    return ids[:prompt] if line.hash_ids is not None else ids


_Named = tuple[float, str, int, int, Sequence[int]]
"""(time in ms, session, tokens of the prompt, of the answer, ids of blocks)"""


def _trace(block_tokens: int, lines: Iterable[_Named]) -> Trace:
    """Name chunks by what precedes them, as chained keys do: (parent, id) -> name."""
    names: dict[tuple[str, int], str] = {}
    requests = []
    for time, session, input_tokens, output_tokens, ids in lines:
        name = ""
        chunks = tuple(name := names.setdefault((name, block), str(len(names))) for block in ids)
        prompt = min(len(chunks), input_tokens // block_tokens)
        requests.append(Request(time, session, input_tokens, output_tokens, chunks, prompt))
    return Trace(block_tokens, tuple(requests))


_Text = tuple[tuple[int, int], ...]
"""Text as segments (id, tokens): equal ids are equal text."""
_Event = tuple[float, str, _Text]
"""(time in ms, session, text of a prompt and, in the last segment, its answer)"""


class _Writer:
    """Draws texts, lengths and times; every segment that it makes is new."""

    def __init__(self, seed: int, kind: str) -> None:
        self.chance = random.Random(f"{kind} {seed}")
        self._segments = count(1)

    def text(self, tokens: int) -> tuple[int, int]:
        return next(self._segments), tokens

    def length(self, median: float, spread: float = 0.8, most: int = 16_384) -> int:
        """Tokens, log-normally distributed."""
        return max(1, min(most, round(median * math.exp(self.chance.gauss(0, spread)))))

    def pick(self, size: int, skew: float) -> Callable[[], int]:
        """Draws from range(size), the i-th with a weight of (i + 1)^-skew."""
        items = range(size)
        weights = list(accumulate((i + 1) ** -skew for i in items))
        return lambda: self.chance.choices(items, cum_weights=weights)[0]

    def gap_ms(self, mean_s: float) -> float:
        return self.chance.expovariate(1.0) * mean_s * 1000


def chat(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Conversations: each turn repeats what was said. 12 assistants with system prompts, 2 new sessions a
    second, 5 turns on average (some have many more), a minute between them."""
    w = _Writer(seed, "chat")
    assistants = [w.text(w.length(900)) for _ in range(12)]
    pick = w.pick(len(assistants), 1.0)

    def session(number: int, start_ms: float) -> Iterator[_Event]:
        said, time = [assistants[pick()]], start_ms
        go_on = w.chance.betavariate(4, 1)  # some talk once, some all day
        while True:
            said += [w.text(w.length(120, 1.2)), w.text(w.length(250))]
            yield time, f"chat-{number}", tuple(said)
            if w.chance.random() > go_on or _tokens(said) > 30_000:
                return
            time += 5_000 + w.gap_ms(60)

    return _generate(requests, block_tokens, session, w, sessions_per_s=2.0)


def rag(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Questions over shared documents: instructions, one to three of 2,000 documents (Zipf, 1.0), a question.
    Eight a second; no question returns."""
    w = _Writer(seed, "rag")
    instructions = w.text(600)
    documents = [w.text(w.length(2_500, 0.6)) for _ in range(2_000)]
    pick = w.pick(len(documents), 1.0)

    def session(number: int, start_ms: float) -> Iterator[_Event]:
        chosen = dict.fromkeys(pick() for _ in range(w.chance.randint(1, 3)))
        question, answer = w.text(w.length(40)), w.text(w.length(200))
        yield start_ms, f"rag-{number}", (instructions, *(documents[d] for d in chosen), question, answer)

    return _generate(requests, block_tokens, session, w, sessions_per_s=8.0)


def agents(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Agents: one of 6 long prefixes of tools (4,000 to 16,000 tokens), a task, then steps of an action and
    what a tool returned, seconds apart, 12 on average. A new task every 2 seconds."""
    w = _Writer(seed, "agents")
    prefixes = [w.text(w.chance.randint(4_000, 16_000)) for _ in range(6)]
    pick = w.pick(len(prefixes), 0.8)

    def session(number: int, start_ms: float) -> Iterator[_Event]:
        said, time = [prefixes[pick()], w.text(w.length(400))], start_ms
        while True:
            said.append(w.text(w.length(80, 0.6)))  # the action
            yield time, f"agent-{number}", tuple(said)
            if w.chance.random() < 1 / 12 or _tokens(said) > 100_000:
                return
            said.append(w.text(w.length(600, 1.2)))
            time += 1_500 + w.gap_ms(6)

    return _generate(requests, block_tokens, session, w, sessions_per_s=0.5)


def mixed(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """A third each of `chat`, `rag` and `agents`, at the same time."""
    parts = []
    for make in (chat, rag, agents):
        part = make(-(-requests // 3), seed, block_tokens).requests
        mark = make.__name__  # chunks of different parts differ
        parts.append([replace(r, chunks=tuple(f"{mark}-{name}" for name in r.chunks)) for r in part])
    together = sorted(chain.from_iterable(parts), key=lambda r: r.timestamp_ms)
    return Trace(block_tokens, tuple(together[:requests]))


GENERATORS: dict[str, Callable[[int, int], Trace]] = {
    make.__name__: make for make in (chat, rag, agents, mixed)
}
"""name -> (number of requests, seed) -> trace; equal arguments make equal traces."""


def _generate(
    requests: int,
    block_tokens: int,
    session: Callable[[int, float], Iterator[_Event]],
    writer: _Writer,
    sessions_per_s: float,
) -> Trace:
    """The first `requests` events of sessions that arrive at random."""
    events: list[_Event] = []
    later: list[_Event] = []  # what sessions to come may still precede
    start_ms = 0.0
    for number in count():
        while later and later[0][0] <= start_ms:
            events.append(heappop(later))
        if len(events) >= requests:
            break
        for event in session(number, start_ms):
            heappush(later, event)
        start_ms += writer.gap_ms(1 / sessions_per_s)
    ids: dict[tuple[tuple[int, int, int], ...], int] = {}
    return _trace(
        block_tokens,
        (
            (round(time, 3), name, _tokens(text[:-1]), text[-1][1], _blocks(text, block_tokens, ids))
            for time, name, text in events[:requests]
        ),
    )


def _tokens(text: Iterable[tuple[int, int]]) -> int:
    return sum(tokens for _, tokens in text)


def _blocks(text: _Text, block_tokens: int, ids: dict[tuple[tuple[int, int, int], ...], int]) -> list[int]:
    """An id per whole block; equal pieces of equal segments make equal blocks. Mutates `ids`."""
    found, pieces, room = [], [], block_tokens
    for segment, tokens in text:
        offset = 0
        while offset < tokens:
            taken = min(room, tokens - offset)
            pieces.append((segment, offset, taken))
            offset += taken
            room -= taken
            if room == 0:
                found.append(ids.setdefault(tuple(pieces), len(ids)))
                pieces, room = [], block_tokens
    return found
