"""Traces: requests with the chunks of their tokens, read from JSON lines or generated from a seed.

A file has a request a line, in one of these formats. Mooncake's (https://github.com/kvcache-ai/Mooncake), an
id of which stands for 512 tokens of the prompt:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

Alibaba's (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon), for 16 tokens, with seconds:

    {"chat_id": 9, "parent_chat_id": 4, "timestamp": 61.1, "input_length": 35, "hash_ids": [8, 3], "turn": 2}

Requests as an OpenAI server or an agent logs them, with the answer last where it is known:

    {"timestamp": 0, "session": "a", "messages": [{"role": "user", "content": "Hi"}]}

Our own, which knows the blocks that the answer fills, too:

    {"block_tokens": 256}
    {"timestamp": 0, "session": "chat-1", "input_length": 700, "output_length": 150, "blocks": [7, 8, 9]}

`timestamp` is in milliseconds, lengths are in tokens. `blocks` are the whole blocks of prompt and answer;
equal ids are equal tokens, wherever they stand. A first line with `block_tokens` may precede any format.

ShareGPT's conversations, as vLLM's benchmarks read them, are a JSON list, or one of them a line:

    {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

Each answer is a request. They have no times: these are drawn as `chat` has them. Of texts, four bytes are a
token.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, chain, count
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.settings import ConfigError, explain

MOONCAKE_BLOCK_TOKENS, ALIBABA_BLOCK_TOKENS, TEXT_BLOCK_TOKENS = 512, 16, 256
_TOKEN_BYTES = 4  # of text, about


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
    """A request as ids of blocks."""

    block: ClassVar[int] = MOONCAKE_BLOCK_TOKENS
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    session: str | int | None = None
    input_length: int = Field(ge=1, le=2**31)
    output_length: int = Field(default=0, ge=0, le=2**31)
    hash_ids: list[int] | None = None
    blocks: list[int] | None = None

    def requests(self, file: _TraceFile, where: str) -> Iterator[_Named]:
        """What the line tells of. Mutates `file`."""
        session = str(file.number if self.session is None else self.session)
        ids = _ids(self, file.block_tokens, file.headed, where)
        yield self.timestamp, session, self.input_length, self.output_length, ids


class _Chat(_Line):
    """The same of Alibaba's."""

    block: ClassVar[int] = ALIBABA_BLOCK_TOKENS
    chat_id: str | int
    parent_chat_id: str | int = -1

    def requests(self, file: _TraceFile, where: str) -> Iterator[_Named]:
        first = self.chat_id if self.parent_chat_id == -1 else self.parent_chat_id
        session = file.sessions[self.chat_id] = file.sessions.get(first, str(first))
        for time_s, _, tokens, answer, ids in super().requests(file, where):
            yield time_s * 1000, session, tokens, answer, ids


class _Messages(BaseModel):
    """A request as texts."""

    block: ClassVar[int] = TEXT_BLOCK_TOKENS
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    session: str | int | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)

    def requests(self, file: _TraceFile, where: str) -> Iterator[_Named]:
        session = str(file.number if self.session is None else self.session)
        answered = len(self.messages) > 1 and self.messages[-1].get("role") == "assistant"
        texts = [json.dumps(message, sort_keys=True) for message in self.messages]
        yield file.said(self.timestamp, session, texts if answered else [*texts, ""])


class _Part(BaseModel):
    speaker: str = Field(alias="from")
    value: str


class _Conversation(BaseModel):
    """Requests as texts: one for each answer."""

    block: ClassVar[int] = TEXT_BLOCK_TOKENS
    conversations: list[_Part]

    def requests(self, file: _TraceFile, where: str) -> Iterator[_Named]:
        file.start_ms += file.writer.gap_ms(0.5)
        time_ms, texts = file.start_ms, [part.value for part in self.conversations]
        for i, part in enumerate(self.conversations):
            if i and part.speaker in ("gpt", "assistant"):
                yield file.said(time_ms, str(file.number), texts[: i + 1])
                time_ms += 5_000 + file.writer.gap_ms(60)


_FORMATS: Mapping[str, type[_Line | _Messages | _Conversation]] = {
    "chat_id": _Chat,
    "messages": _Messages,
    "conversations": _Conversation,
}
"""By a field that no other has."""


@dataclass(slots=True)
class _TraceFile:
    """What earlier lines of a file said."""

    block_tokens: int = 0
    headed: bool = False
    number: int = 0  # of the line
    sessions: dict[str | int, str] = field(default_factory=dict)  # by chat
    start_ms: float = 0.0  # of the last conversation
    writer: _Writer = field(default_factory=lambda: _Writer(0, "conversations"))
    segments: dict[str, int] = field(default_factory=dict)  # by text
    ids: dict[tuple[tuple[int, int, int], ...], int] = field(default_factory=dict)

    def said(self, time_ms: float, session: str, texts: Sequence[str]) -> _Named:
        """A request whose answer is the last text. Mutates."""
        text = [
            (
                self.segments.setdefault(t, len(self.segments)),
                -(-len(t.encode(errors="surrogatepass")) // _TOKEN_BYTES),
            )
            for t in texts
        ]
        prompt = max(1, _tokens(text[:-1]))
        return time_ms, session, prompt, text[-1][1], _blocks(tuple(text), self.block_tokens, self.ids)


def trace_of(name: str, requests: int, seed: int = 0) -> Trace:
    """The trace in a file of that name; where there is none, one of `GENERATORS`: `requests` of it.

    Raises:
        ConfigError: it is neither.
    """
    made = name in GENERATORS and not Path(name).exists()
    return GENERATORS[name](requests, seed) if made else read_trace(name)


def read_trace(path: str | Path) -> Trace:
    """Read a trace in any of the formats; requests out of order are sorted by time.

    Raises:
        ConfigError: the file cannot be read or is no trace. The message names file, line and field.
    """
    try:
        whole = Path(path).read_text(encoding="utf-8")
        texts = map(json.dumps, json.loads(whole)) if whole.lstrip().startswith("[") else whole.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    file = _TraceFile()
    found: list[_Named] = []
    for file.number, text in enumerate(texts, 1):
        where = f"{path}:{file.number}"
        if not text.strip():
            continue
        try:
            if not file.block_tokens and '"block_tokens"' in text:
                file.block_tokens, file.headed = _Header.model_validate_json(text).block_tokens, True
                continue
            line = _read_line(text)
        except ValidationError as error:
            raise ConfigError(explain(error, _Header, f"{where}: ")) from error
        file.block_tokens = file.block_tokens or line.block
        found += line.requests(file, where)
    if not found:
        raise ConfigError(f"{path}: no requests")
    return _trace(file.block_tokens, sorted(found, key=itemgetter(0)))


def _read_line(text: str) -> _Line | _Messages | _Conversation:
    """One line, by the format that its fields name."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return _Line.model_validate_json(text)  # it says why not
    return next((form for name, form in _FORMATS.items() if name in fields), _Line).model_validate(fields)


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
