"""Sessions of coding agents, published by https://github.com/callanjfox/kv-cache-tester, a session per line.

    {"id": "trace_0004", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 51.0, "in": 84806, "out": 268, "hash_ids": [1, 2, 3], "stop": "tool_use"},
        {"t": 134.2, "type": "subagent", "agent_id": "agent_001", "requests": []}]}

Times are in seconds since the session began, of a subagent since it began; ids are of `block_size` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from kvkit.lab.simulate.trace_files import MOST_TOKENS
from kvkit.settings import ConfigError

FIELD = b'"hash_id_scope"'
"""What no other format has."""
BLOCK_TOKENS = 1024
"""Tokens of a chunk, unless the file sets others."""
START_GAP_S = 240.0
"""Mean seconds from the start of one session to that of the next, which the files do not tell."""


class _AgentRequest(msgspec.Struct):
    """A request, or a subagent with requests of its own."""

    t: Annotated[float, msgspec.Meta(ge=0)]
    input_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = msgspec.field(name="in", default=1)
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    agent_id: str = ""
    stop: str | None = None
    requests: list[_AgentRequest] | None = None


class AgentSession(msgspec.Struct):
    """A session."""

    hash_id_scope: str
    requests: list[_AgentRequest]
    id: str = ""
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 64


_DECODER = msgspec.json.Decoder(AgentSession)


def read_session(text: bytes, where: str) -> AgentSession:
    """Parse a session.

    Raises:
        ConfigError: a field is missing or invalid. The message begins with `where`.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error


def requests_of(
    session: AgentSession,
    where: str,
    number: int,
    start_ms: float,
    block_tokens: int,
    ids: dict[tuple[int, ...], int],
) -> Iterator[tuple[float, str, int, int, Sequence[int], bool]]:
    """Yield the requests of a session and its subagents.

    Each is (time in ms, session, tokens of the prompt, of the answer, ids of chunks, answer calls a tool).

    Args:
        where: the file and line, for errors.
        number: tells the session's ids from those of others, if they are its own.
        ids: ids of chunks by their blocks. Mutated.

    Raises:
        ConfigError: a chunk is no whole number of blocks, or a prompt has too few ids.
    """
    size, scope = session.block_size, number if session.hash_id_scope == "local" else 0
    blocks = block_tokens // size
    if block_tokens % size:
        raise ConfigError(f"{where}: block_tokens = {block_tokens}: want a multiple of block_size, {size}")
    pending = [(start_ms, session.id or str(number), session.requests)]
    for began_ms, name, requests in pending:
        for request in requests:
            time_ms = began_ms + request.t * 1000
            if request.requests is not None:
                pending.append((time_ms, f"{name}/{request.agent_id}", request.requests))
                continue
            if len(request.hash_ids) < request.input_tokens // size:
                raise ConfigError(
                    f"{where}: hash_ids: {len(request.hash_ids)} ids; {request.input_tokens} tokens in "
                    f"blocks of {size} have at least {request.input_tokens // size}"
                )
            chunks = [
                ids.setdefault((scope, *request.hash_ids[i * blocks : (i + 1) * blocks]), len(ids))
                for i in range(request.input_tokens // block_tokens)
            ]
            tool_call = request.stop == "tool_use"
            yield time_ms, name, request.input_tokens, request.output_tokens, chunks, tool_call
