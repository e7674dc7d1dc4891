"""The connections of the HTTP endpoint: limits against clients that send nothing, which uvicorn lacks.

A connection is authenticated once a request has carried the token. The numbers of authenticated and of other
connections are limited: beyond a limit, the connection that was idle longest is closed. So sockets that are
held open neither exhaust the process's file descriptors nor keep clients out. uvicorn's `limit_concurrency`
would refuse the new connection instead. A connection that sends no request head in time is closed, too:
uvicorn's `timeout_keep_alive` only runs between two requests. An unauthenticated connection takes no thread,
no line in the log, and no memory except the head of one request and the data of one read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_uvicorn = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn.setLevel(logging.ERROR)  # it warns of every malformed request, and anyone can send those

MAX_UNAUTHENTICATED = 32
MAX_AUTHENTICATED = 32
_BACKLOG = 128
"""Connections that the system queues until they are accepted."""
HEAD_S = 5.0
"""Time limit for the head of a connection's first or next request, in seconds."""


class Connection(H11Protocol):
    """One connection. Everything runs in the event loop's thread."""

    _head_timer: asyncio.TimerHandle

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.app_state = {"connection": self}  # uvicorn hands a copy to each request
        self.logger = _uvicorn
        self._authenticated = False
        self._counted_at = 0.0

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def authenticate(self) -> bool:
        """Count as authenticated; return False if there are too many such connections, all of them busy."""
        return self._count(MAX_AUTHENTICATED, authenticated=True)

    def abort(self) -> None:
        """Close at once, even during a request."""
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self.abort)
        if not self._count(MAX_UNAUTHENTICATED, authenticated=False):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._head_timer.cancel()  # the head has arrived

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.busy:  # the next request may have arrived already
            self._head_timer.cancel()
            self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def _count(self, limit: int, authenticated: bool) -> bool:
        """Count as authenticated or not; beyond `limit` of a kind, close the one that was idle longest.
        Return False if all other connections of the kind are busy."""
        self._authenticated, self._counted_at = authenticated, self.loop.time()
        members = [
            c for c in self.connections if isinstance(c, Connection) and c._authenticated is authenticated
        ]
        idle = [c for c in members if c is not self and not c.busy]
        if len(members) > limit and idle:
            min(idle, key=lambda c: c._counted_at).abort()
        return len(members) <= limit or bool(idle)


class HttpListener(uvicorn.Server):
    """uvicorn's server with a `backlog` of 1, as asyncio accepts a whole backlog before it counts."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, and let the system queue more connections than are accepted at once."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)
