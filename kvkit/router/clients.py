"""The client of one request to the router, and the stream sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kvkit.router import openai

MAX_BODY_BYTES = 64 << 20
"""Maximum length of a request's body, after decompression."""
_ENCODINGS = ("identity", "gzip", "deflate")


class ClientDisconnected(Exception):
    """The client disconnected, or did not send or receive in time."""


class Client:
    """The client of one request, and the stream sent to it.

    Args:
        timeout_s: timeout of the client's request body, and of each send.
    """

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._stream: web.StreamResponse | None = None
        self._ended = False

    @property
    def stream_began(self) -> bool:
        """True if the stream to the client has begun."""
        return self._stream is not None

    async def read(self) -> bytes:
        """Return the body of the request.

        Raises:
            BadRequest: the body is too long, or not encoded as its header states.
            ClientDisconnected: the body does not arrive in time.
        """
        encoding = self._request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in _ENCODINGS:
            raise openai.BadRequest(f"Content-Encoding: want one of {', '.join(_ENCODINGS)}", 415)
        try:
            async with self._deadline():
                return await self._request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise openai.BadRequest(f"the body is longer than {MAX_BODY_BYTES} bytes", 413) from error
        except web.RequestPayloadError as error:
            raise openai.BadRequest(f"the body is not encoded as {encoding}, or is cut off") from error

    async def send(self, data: bytes) -> web.StreamResponse:
        """Send events; the first begin the stream."""
        async with self._deadline():
            if self._stream is None:
                headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
                self._stream = web.StreamResponse(headers=headers)
                await self._stream.prepare(self._request)
            await self._stream.write(data)
            return self._stream

    async def end_stream(self, events: bytes = b"") -> web.StreamResponse:
        """Send the last events, and end the stream."""
        self._ended = True  # set first: if a deadline expires while the client reads, these are already sent
        return await self.send(events + openai.DONE_EVENT)

    async def send_error(self, status: int, message: str) -> web.StreamResponse:
        """Send an error: in the stream if that has begun, not at all if that has ended."""
        error = openai.error_body(status, message)
        if self._stream is None:
            return web.json_response(error, status=status)
        if self._ended:
            return self._stream
        return await self.end_stream(openai.event_bytes(error))

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (TimeoutError, ConnectionError) as error:
            raise ClientDisconnected from error


class NullClient(Client):
    """Client of a request that the router itself makes; there is no stream."""

    def __init__(self) -> None:
        self._stream = None
