"""The client of one request to the router, and the stream that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kvkit.router import openai

MAX_BODY_BYTES = 64 << 20
"""The longest request, after it was unpacked."""
_ENCODINGS = ("identity", "gzip", "deflate")


class ClientDisconnected(Exception):
    """The client has gone, or takes nothing."""


class Client:
    """The client of one request, and the stream that it gets."""

    def __init__(self, request: web.Request, patience_s: float) -> None:
        self._request = request
        self._patience_s = patience_s
        self._stream: web.StreamResponse | None = None
        self._ended = False

    @property
    def began(self) -> bool:
        """Whether it has got anything."""
        return self._stream is not None

    async def read(self) -> bytes:
        """The body of its request.

        Raises:
            BadRequest: it is too long, or not packed as it says.
            ClientDisconnected: it does not come.
        """
        encoding = self._request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in _ENCODINGS:
            raise openai.BadRequest(f"Content-Encoding: want one of {', '.join(_ENCODINGS)}", 415)
        try:
            async with self._patience():
                return await self._request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise openai.BadRequest(f"the body is longer than {MAX_BODY_BYTES} bytes", 413) from error
        except web.RequestPayloadError as error:
            raise openai.BadRequest(f"the body is not packed with {encoding}, or is cut off") from error

    async def send(self, data: bytes) -> web.StreamResponse:
        """Events of the stream, which begins with the first."""
        async with self._patience():
            if self._stream is None:
                headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
                self._stream = web.StreamResponse(headers=headers)
                await self._stream.prepare(self._request)
            await self._stream.write(data)
            return self._stream

    async def end(self, events: bytes = b"") -> web.StreamResponse:
        """Send the last events of the stream, and that it ends."""
        self._ended = True  # a deadline may come while they are taken: they are sent by then
        return await self.send(events + openai.DONE_EVENT)

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """Say what went wrong: in the stream, where that has begun; nowhere, where that has ended."""
        error = openai.error_body(status, message)
        if self._stream is None:
            return web.json_response(error, status=status)
        if self._ended:
            return self._stream
        return await self.end(openai.event_bytes(error))

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._patience_s):
                yield
        except (TimeoutError, ConnectionError) as error:
            raise ClientDisconnected from error


class NullClient(Client):
    """Of a request that the router makes itself, for no stream."""

    def __init__(self) -> None:
        self._stream = None
