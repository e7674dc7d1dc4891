"""Traces: requests with the chunks of their tokens, read from a file or generated from a seed.

A file has one request per line, in one of these formats, and may be compressed by gzip. Mooncake's
(https://github.com/kvcache-ai/Mooncake), with one id per 512 tokens of the prompt:

    {"timestamp": 27482, "input_length": 1260, "output_length": 52, "hash_ids": [46, 47, 2353]}

Alibaba's (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon), with one id per 16 tokens, and time
in seconds:

    {"chat_id": 9, "parent_chat_id": 4, "timestamp": 61.1, "input_length": 35, "hash_ids": [8, 3], "turn": 2}

Requests as an OpenAI server or an agent logs them, with the answer last if it is known:

    {"timestamp": 0, "session": "a", "messages": [{"role": "user", "content": "Hi"}]}

kvkit's own, which also has the blocks that the answer fills:

    {"block_tokens": 256}
    {"timestamp": 0, "session": "chat-1", "input_length": 700, "output_length": 150, "blocks": [7, 8, 9]}

A line of these with `"tool_call": true` has an answer that calls a tool; so has a message with `tool_calls`.

Sessions of coding agents (`kvkit.lab.simulate.agent_sessions`), one per line, or each in a file of a folder.
Each starts at a time that is drawn.

CSV traces of Azure and BurstGPT (`kvkit.lab.simulate.trace_files`) have only lengths: no request is known to
share a prefix with another, so each has chunks of its own.

`timestamp` is in milliseconds, lengths are in tokens. `blocks` are the whole blocks of prompt and answer;
equal ids are equal tokens, wherever they stand. A first line with `block_tokens` may precede any format.

ShareGPT's conversations, as vLLM's benchmarks read them, are a JSON list, or one conversation per line:

    {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

Each answer is a request. Conversations have no times, so times are drawn as in `chat`. Four bytes of text
count as a token.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, count
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.lab.simulate import agent_sessions
from kvkit.lab.simulate.agent_sessions import AgentSession
from kvkit.lab.simulate.trace_files import MOST_TOKENS, files_of, read_lines, read_rows
from kvkit.settings import ConfigError, explain

MOONCAKE_BLOCK_TOKENS, ALIBABA_BLOCK_TOKENS, TEXT_BLOCK_TOKENS, LENGTHS_BLOCK_TOKENS = 512, 16, 256, 256
_TOKEN_BYTES = 4  # of text, approximately


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. It is in no reference cycle: the garbage collector need not visit millions of them."""

    timestamp_ms: float  # time of arrival
    session: str  # requests that a router may keep together
    input_tokens: int  # of the prompt
    output_tokens: int  # of the answer
    chunks: tuple[
        str, ...
    ]  # a name per whole chunk of the prompt and, if known, the answer: equal for equal prefixes
    prompt_chunks: int  # number of chunks that the prompt fills
    tool_call: bool = False  # whether the answer calls a tool


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; a chunk is `block_tokens` tokens.

    Attributes:
        prefixes_known: False if the file has only lengths; then no request shares a chunk with another.
        failed: number of requests in the file that failed, and were left out.
    """

    block_tokens: int
    requests: tuple[Request, ...]
    prefixes_known: bool = True
    failed: int = 0


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")
    block_tokens: int = Field(ge=1, le=2**20)
    prefixes_known: bool = True


class _Line(BaseModel):
    """Line with one request as ids of blocks."""

    block: ClassVar[int] = MOONCAKE_BLOCK_TOKENS
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    session: str | int | None = None
    input_length: int = Field(ge=1, le=MOST_TOKENS)
    output_length: int = Field(default=0, ge=0, le=MOST_TOKENS)
    hash_ids: list[int] | None = None
    blocks: list[int] | None = None
    tool_call: bool = False

    def requests(self, file: _TraceFile) -> Iterable[_BlockRequest]:
        """Return the line's requests. Mutates `file`."""
        return _request_of_blocks(self, file)


class _ValidLine(msgspec.Struct):
    """A valid `_Line`, decoded in a third of the time, but without explaining what is invalid."""

    block: ClassVar[int] = _Line.block
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    session: str | int | None = None
    hash_ids: list[int] | None = None
    blocks: list[int] | None = None
    tool_call: bool = False

    def requests(self, file: _TraceFile) -> Iterable[_BlockRequest]:
        return _request_of_blocks(self, file)


def _request_of_blocks(line: _Line | _ValidLine, file: _TraceFile) -> tuple[_BlockRequest]:
    session = str(file.number if line.session is None else line.session)
    ids = _ids(line, file)
    return ((line.timestamp, session, line.input_length, line.output_length, ids, line.tool_call),)


class _Chat(_Line):
    """Line with one request as ids of blocks, in Alibaba's format."""

    block: ClassVar[int] = ALIBABA_BLOCK_TOKENS
    chat_id: str | int
    parent_chat_id: str | int = -1

    def requests(self, file: _TraceFile) -> Iterable[_BlockRequest]:
        first = self.chat_id if self.parent_chat_id == -1 else self.parent_chat_id
        session = file.sessions[self.chat_id] = file.sessions.get(first, str(first))
        ids = _ids(self, file)
        return ((self.timestamp * 1000, session, self.input_length, self.output_length, ids, self.tool_call),)


class _Messages(BaseModel):
    """Line with one request as texts."""

    block: ClassVar[int] = TEXT_BLOCK_TOKENS
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    session: str | int | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)

    def requests(self, file: _TraceFile) -> Iterable[_BlockRequest]:
        session = str(file.number if self.session is None else self.session)
        answered = len(self.messages) > 1 and self.messages[-1].get("role") == "assistant"
        texts = [json.dumps(message, sort_keys=True) for message in self.messages]
        tool_call = answered and bool(self.messages[-1].get("tool_calls"))
        yield file.text_request(self.timestamp, session, texts if answered else [*texts, ""], tool_call)


class _Message(BaseModel):
    """One message of a conversation."""

    speaker: str = Field(alias="from")
    value: str


class _Conversation(BaseModel):
    """Line with a conversation as texts, which has a request for each answer."""

    block: ClassVar[int] = TEXT_BLOCK_TOKENS
    conversations: list[_Message]

    def requests(self, file: _TraceFile) -> Iterable[_BlockRequest]:
        file.start_ms += file.source.gap_ms(0.5)
        time_ms, texts = file.start_ms, [message.value for message in self.conversations]
        for i, message in enumerate(self.conversations):
            if i and message.speaker in ("gpt", "assistant"):
                yield file.text_request(time_ms, str(file.number), texts[: i + 1])
                time_ms += 5_000 + file.source.gap_ms(60)


_AnyLine = _Line | _ValidLine | _Messages | _Conversation
_FORMATS: Mapping[str, type[_Line | _Messages | _Conversation]] = {
    "chat_id": _Chat,
    "messages": _Messages,
    "conversations": _Conversation,
}
"""Formats by a field that no other format has."""
_FORMAT_FIELDS = tuple(f'"{name}"'.encode() for name in _FORMATS)
_VALID_LINES = msgspec.json.Decoder(_ValidLine)


@dataclass(slots=True)
class _TraceFile:
    """State of a file that is being read, with what its earlier lines defined."""

    path: str | Path
    files: Sequence[Path]  # of a folder, each of which is a line
    source: _RandomSource
    header: _Header | None = None
    block_tokens: int = 0
    number: int = 0  # of the line
    sessions: dict[str | int, str] = field(default_factory=dict)  # by chat
    start_ms: float = 0.0  # of the last conversation
    segments: dict[str, int] = field(default_factory=dict)  # by text
    ids: dict[tuple[tuple[int, int, int], ...], int] = field(default_factory=dict)
    chunk_ids: dict[tuple[int, ...], int] = field(default_factory=dict)  # of sessions of agents

    @property
    def where(self) -> str:
        return str(self.files[self.number - 1]) if self.files else f"{self.path}:{self.number}"

    def agent_requests(self, session: AgentSession) -> Iterable[_BlockRequest]:
        """Build the requests of a session that starts some time after the one before. Mutates."""
        self.start_ms += self.source.gap_ms(agent_sessions.START_GAP_S)
        return agent_sessions.requests_of(
            session, self.where, self.number, self.start_ms, self.block_tokens, self.chunk_ids
        )

    def text_request(
        self, time_ms: float, session: str, texts: Sequence[str], tool_call: bool = False
    ) -> _BlockRequest:
        """Build a request with the last text as its answer. Mutates `segments` and `ids`."""
        segments = [
            (
                self.segments.setdefault(t, len(self.segments)),
                -(-len(t.encode(errors="surrogatepass")) // _TOKEN_BYTES),
            )
            for t in texts
        ]
        prompt = max(1, _tokens(segments[:-1]))
        return (
            time_ms,
            session,
            prompt,
            segments[-1][1],
            _blocks(tuple(segments), self.block_tokens, self.ids),
            tool_call,
        )


def trace_of(name: str, requests: int, seed: int = 0) -> Trace:
    """Read the trace file `name`; if there is none, generate `requests` with the generator `name`.

    Raises:
        ConfigError: `name` is neither a trace nor one of `GENERATORS`.
    """
    generated = name in GENERATORS and not Path(name).exists()
    return GENERATORS[name](requests, seed) if generated else read_trace(name, seed)


def read_trace(path: str | Path, seed: int = 0) -> Trace:
    """Read a trace in any of the formats, and sort its requests by time.

    Lines are read one by one, so memory holds the requests but not the text, except of a JSON list. Of a
    folder, each .json file is a line.

    Args:
        seed: of times that are drawn because the trace has none, and of the order of a folder's files.

    Raises:
        ConfigError: the file cannot be read or is no trace. The message names file, line and field.
    """
    files = files_of(path, seed) if Path(path).is_dir() else []
    lines = (b"".join(read_lines(f)).replace(b"\n", b" ") for f in files) if files else read_lines(path)
    blank_lines = []  # blank lines before the first request
    for line in lines:
        if line.strip():
            break
        blank_lines.append(line)
    else:
        raise ConfigError(f"{path}: no requests")
    all_lines = chain(blank_lines, (line,), lines)
    kind = line.lstrip()[:1]
    trace = (
        _read_csv_lines(all_lines, path)
        if kind not in b"{["
        else _read_json_lines(
            all_lines, _TraceFile(path, files, _RandomSource(seed, "conversations")), listed=kind == b"["
        )
    )
    if not trace.requests:
        raise ConfigError(f"{path}: no requests")
    return trace


def _read_json_lines(lines: Iterable[bytes], file: _TraceFile, listed: bool) -> Trace:
    """Build the trace of JSON lines or of a JSON list. Mutates `file`."""
    if listed:
        try:
            lines = map(bytes, msgspec.json.decode(b"".join(lines), type=list[msgspec.Raw]))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"{file.path}: {error}") from error
    names = _ChunkNames()
    requests: list[Request] = []
    for file.number, text in enumerate(lines, 1):
        if text.isspace():
            continue
        try:
            if not file.block_tokens and b'"block_tokens"' in text:
                file.header = _Header.model_validate_json(text)
                file.block_tokens = file.header.block_tokens
                continue
            if agent_sessions.FIELD in text:
                session = agent_sessions.read_session(text, file.where)
                file.block_tokens = file.block_tokens or agent_sessions.BLOCK_TOKENS
                requests += [names.request(each, file.block_tokens) for each in file.agent_requests(session)]
                continue
            line = _read_line(text)
        except ValidationError as error:
            raise ConfigError(explain(error, _Header, f"{file.where}: ")) from error
        file.block_tokens = file.block_tokens or line.block
        requests += [names.request(described, file.block_tokens) for described in line.requests(file)]
    return _sorted(file.block_tokens, requests, file.header is None or file.header.prefixes_known)


def _read_csv_lines(lines: Iterable[bytes], path: str | Path) -> Trace:
    """Build the trace of a CSV file: each request has chunks of its own, for its prompt and answer."""
    requests: list[Request] = []
    failed = used_chunks = 0
    for number, row in enumerate(read_rows(lines, path), 1):
        if row is None:
            failed += 1
            continue
        time_ms, session, prompt, answer = row
        first, used_chunks = used_chunks, used_chunks + (prompt + answer) // LENGTHS_BLOCK_TOKENS
        chunks = tuple(map(str, range(first, used_chunks)))
        prompt_chunks = prompt // LENGTHS_BLOCK_TOKENS
        requests.append(Request(time_ms, session or str(number), prompt, answer, chunks, prompt_chunks))
    return _sorted(LENGTHS_BLOCK_TOKENS, requests, False, failed)


def _sorted(
    block_tokens: int, requests: list[Request], prefixes_known: bool = True, failed: int = 0
) -> Trace:
    """Build a trace of `requests`, sorted by time. Mutates the list."""
    requests.sort(key=attrgetter("timestamp_ms"))
    return Trace(block_tokens, tuple(requests), prefixes_known, failed)


def _read_line(text: bytes) -> _AnyLine:
    """Parse one line in the format that its fields indicate."""
    for field_name in _FORMAT_FIELDS:
        if field_name in text:  # as a field or within a text
            break
    else:
        try:
            return _VALID_LINES.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            return _Line.model_validate_json(text)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return _Line.model_validate_json(text)  # raises an error that explains why
    return next((line_type for name, line_type in _FORMATS.items() if name in fields), _Line).model_validate(
        fields
    )


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` in kvkit's own format, line by line. Names of chunks become numbers.

    Raises:
        OSError: the file cannot be written.
    """
    numbers: dict[str, int] = {}
    header = {"block_tokens": trace.block_tokens}
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(json.dumps(header | ({} if trace.prefixes_known else {"prefixes_known": False})) + "\n")
        for request in trace.requests:
            fields = {
                "timestamp": request.timestamp_ms,
                "session": request.session,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "blocks": [numbers.setdefault(name, len(numbers)) for name in request.chunks],
                **({"tool_call": True} if request.tool_call else {}),
            }
            file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def _ids(line: _Line | _ValidLine, file: _TraceFile) -> list[int]:
    """Return the ids of a line's whole blocks."""
    block_tokens = file.block_tokens
    prompt = line.input_length // block_tokens
    if (line.hash_ids is None) == (line.blocks is None):
        raise ConfigError(f"{file.where}: want hash_ids or blocks, one of the two")
    if line.hash_ids is not None:
        minimum, maximum, ids, name = prompt, -(-line.input_length // block_tokens), line.hash_ids, "hash_ids"
    else:
        if file.header is None:
            raise ConfigError(f'{file.where}: blocks without a first line such as {{"block_tokens": 256}}')
        maximum = (line.input_length + line.output_length) // block_tokens
        minimum, ids, name = prompt, line.blocks or [], "blocks"
    if not minimum <= len(ids) <= maximum:
        raise ConfigError(
            f"{file.where}: {name}: {len(ids)} ids; {line.input_length} + {line.output_length} tokens in "
            f"blocks of {block_tokens} have {minimum}{f' to {maximum}' if maximum > minimum else ''}"
        )
    return ids[:prompt] if line.hash_ids is not None else ids


_BlockRequest = tuple[float, str, int, int, Sequence[int], bool]
"""Request as ids of blocks: (time in ms, session, tokens of the prompt, tokens of the answer, ids)."""


class _ChunkNames:
    """Names of chunks that depend on all chunks before, as chained keys do. `request` mutates it.

    Most blocks always follow the same chunk: a dictionary by block id finds their names in half the time and
    memory of one by (parent, block).
    """

    def __init__(self) -> None:
        self._parents: dict[int, str] = {}  # by block: name of the first chunk that it followed
        self._names: dict[int, str] = {}  # by block: its name after that chunk
        self._later_names: dict[tuple[str, int], str] = {}  # by parent and block: its name after other chunks

    def request(self, described: _BlockRequest, block_tokens: int) -> Request:
        """Build the request from the ids of its blocks."""
        time_ms, session, input_tokens, output_tokens, ids, tool_call = described
        parents, names, later_names = self._parents, self._names, self._later_names
        name, chunks = "", []
        for block in ids:
            parent = parents.get(block)
            if parent == name:
                name = names[block]
            elif parent is None:
                parents[block] = name
                name = names[block] = str(len(names) + len(later_names))
            else:
                name = later_names.setdefault((name, block), str(len(names) + len(later_names)))
            chunks.append(name)
        prompt = min(len(chunks), input_tokens // block_tokens)
        return Request(time_ms, session, input_tokens, output_tokens, tuple(chunks), prompt, tool_call)


_Text = tuple[tuple[int, int], ...]
"""Text as segments (id, tokens): equal ids are equal text."""
_Event = tuple[float, str, _Text]
"""(time in ms, session, text of a prompt and, in the last segment, its answer)."""


class _RandomSource:
    """Random texts, lengths and times of generated requests; each new segment has a new id."""

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(f"{kind} {seed}")
        self._segments = count(1)

    def text(self, tokens: int) -> tuple[int, int]:
        return next(self._segments), tokens

    def length(self, median: float, spread: float = 0.8, maximum: int = 16_384) -> int:
        """Draw a number of tokens from a log-normal distribution."""
        return max(1, min(maximum, round(median * math.exp(self.rng.gauss(0, spread)))))

    def pick(self, size: int, skew: float) -> Callable[[], int]:
        """Return a function that draws i from range(size) with weight (i + 1)^-skew."""
        items = range(size)
        weights = list(accumulate((i + 1) ** -skew for i in items))
        return lambda: self.rng.choices(items, cum_weights=weights)[0]

    def gap_ms(self, mean_s: float) -> float:
        return self.rng.expovariate(1.0) * mean_s * 1000


def chat(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Generate conversations: the prompt of each turn repeats all earlier turns.

    12 assistants with system prompts, 2 new sessions a second, 5 turns on average (some have many more), a
    minute between turns.
    """
    source = _RandomSource(seed, "chat")
    assistants = [source.text(source.length(900)) for _ in range(12)]
    pick = source.pick(len(assistants), 1.0)

    def session(number: int, start_ms: float) -> Iterator[_Event]:
        texts, time = [assistants[pick()]], start_ms
        continue_probability = source.rng.betavariate(4, 1)  # some sessions have one turn, some very many
        while True:
            texts += [source.text(source.length(120, 1.2)), source.text(source.length(250))]
            yield time, f"chat-{number}", tuple(texts)
            if source.rng.random() > continue_probability or _tokens(texts) > 30_000:
                return
            time += 5_000 + source.gap_ms(60)

    return _generate(requests, block_tokens, session, source, sessions_per_s=2.0)


def rag(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Generate questions over shared documents.

    A prompt has instructions, one to three of 2,000 documents (Zipf, 1.0) and a question. Eight a second; no
    question is repeated.
    """
    source = _RandomSource(seed, "rag")
    instructions = source.text(600)
    documents = [source.text(source.length(2_500, 0.6)) for _ in range(2_000)]
    pick = source.pick(len(documents), 1.0)

    def session(number: int, start_ms: float) -> Iterator[_Event]:
        chosen = dict.fromkeys(pick() for _ in range(source.rng.randint(1, 3)))
        question, answer = source.text(source.length(40)), source.text(source.length(200))
        yield start_ms, f"rag-{number}", (instructions, *(documents[d] for d in chosen), question, answer)

    return _generate(requests, block_tokens, session, source, sessions_per_s=8.0)


def agents(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Generate the requests of agents that call tools.

    A session has one of 6 long prefixes of tools (4,000 to 16,000 tokens), a task, then steps of an action
    and the tool's result, seconds apart, 12 on average. A new task starts every 2 seconds.
    """
    source = _RandomSource(seed, "agents")
    prefixes = [source.text(source.rng.randint(4_000, 16_000)) for _ in range(6)]
    pick = source.pick(len(prefixes), 0.8)

    def session(number: int, start_ms: float) -> Iterator[_Event]:
        texts, time = [prefixes[pick()], source.text(source.length(400))], start_ms
        while True:
            texts.append(source.text(source.length(80, 0.6)))  # the action
            yield time, f"agent-{number}", tuple(texts)
            if source.rng.random() < 1 / 12 or _tokens(texts) > 100_000:
                return
            texts.append(source.text(source.length(600, 1.2)))
            time += 1_500 + source.gap_ms(6)

    return _generate(requests, block_tokens, session, source, sessions_per_s=0.5)


def mixed(requests: int, seed: int = 0, block_tokens: int = 256) -> Trace:
    """Generate a third each of `chat`, `rag` and `agents`, at the same time."""
    traces = []
    for make in (chat, rag, agents):
        generated = make(-(-requests // 3), seed, block_tokens).requests
        prefix = make.__name__  # keeps the chunks of different generators distinct
        traces.append([replace(r, chunks=tuple(f"{prefix}-{name}" for name in r.chunks)) for r in generated])
    together = sorted(chain.from_iterable(traces), key=lambda r: r.timestamp_ms)
    return Trace(block_tokens, tuple(together[:requests]))


GENERATORS: dict[str, Callable[[int, int], Trace]] = {
    make.__name__: make for make in (chat, rag, agents, mixed)
}
"""Generators by name, (number of requests, seed) -> trace; equal arguments make equal traces."""


def _generate(
    requests: int,
    block_tokens: int,
    session: Callable[[int, float], Iterator[_Event]],
    source: _RandomSource,
    sessions_per_s: float,
) -> Trace:
    """Build a trace of the first `requests` events of sessions that arrive at random."""
    events: list[_Event] = []
    pending: list[_Event] = []  # a heap: sessions to come may have earlier events
    start_ms = 0.0
    for number in count():
        while pending and pending[0][0] <= start_ms:
            events.append(heappop(pending))
        if len(events) >= requests:
            break
        for event in session(number, start_ms):
            heappush(pending, event)
        start_ms += source.gap_ms(1 / sessions_per_s)
    ids: dict[tuple[tuple[int, int, int], ...], int] = {}
    names, built = _ChunkNames(), []
    for time, name, text in events[:requests]:
        blocks = _blocks(text, block_tokens, ids)
        described = round(time, 3), name, _tokens(text[:-1]), text[-1][1], blocks, False
        built.append(names.request(described, block_tokens))
    return Trace(block_tokens, tuple(built))


def _tokens(text: Iterable[tuple[int, int]]) -> int:
    return sum(tokens for _, tokens in text)


def _blocks(text: _Text, block_tokens: int, ids: dict[tuple[tuple[int, int, int], ...], int]) -> list[int]:
    """Return an id per whole block; equal pieces of equal segments make equal blocks. Mutates `ids`."""
    block_ids, pieces, remaining = [], [], block_tokens
    for segment, tokens in text:
        offset = 0
        while offset < tokens:
            piece_tokens = min(remaining, tokens - offset)
            pieces.append((segment, offset, piece_tokens))
            offset += piece_tokens
            remaining -= piece_tokens
            if remaining == 0:
                block_ids.append(ids.setdefault(tuple(pieces), len(ids)))
                pieces, remaining = [], block_tokens
    return block_ids
