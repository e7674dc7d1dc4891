"""The connections of the HTTP endpoint: limits against clients that send nothing, which uvicorn lacks.

A stranger is a connection that has not shown the token; a client is one that has. The number of each is
limited: beyond the limit, the connection that was idle longest is closed. So sockets that are held open
neither exhaust the process's descriptors nor keep others out. uvicorn's `limit_concurrency` would refuse the
new connection instead. A connection that sends no head of a request in time is closed, too: uvicorn's
`timeout_keep_alive` only runs between two requests. A stranger costs no thread, no line in the log, and no
memory except the head of one request and the data of one read.
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

MAX_STRANGERS = 32
MAX_CLIENTS = 32
_QUEUE = 128
"""Connections that the system queues until they are accepted."""
HEAD_S = 5.0
"""Time limit for the head of a connection's first or next request, in seconds."""


class Connection(H11Protocol):
    """One connection. Everything runs in the event loop's thread."""

    _late: asyncio.TimerHandle

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.app_state = {"connection": self}  # uvicorn hands a copy to each request
        self.logger = _uvicorn
        self._known = False
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def show_token(self) -> bool:
        """Become a client; return False if there are too many clients, all of them busy."""
        return self._enter(MAX_CLIENTS, known=True)

    def cut(self) -> None:
        """Close at once, even during a request."""
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, self.cut)
        if not self._enter(MAX_STRANGERS, known=False):
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._late.cancel()  # the head has arrived

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.busy:  # the next request may have arrived already
            self._late.cancel()
            self._late = self.loop.call_later(HEAD_S, self.cut)

    def _enter(self, limit: int, known: bool) -> bool:
        """Count among clients or strangers; beyond `limit` of them, close the one that was idle longest.

        Return False if all the others are busy.
        """
        self._known, self._since = known, self.loop.time()
        members = [c for c in self.connections if isinstance(c, Connection) and c._known is known]
        idle = [c for c in members if c is not self and not c.busy]
        if len(members) > limit and idle:
            min(idle, key=lambda c: c._since).cut()
        return len(members) <= limit or bool(idle)


class HttpListener(uvicorn.Server):
    """uvicorn's server, for a `backlog` of 1: asyncio accepts a whole backlog before one is counted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, and let the system queue more connections than are accepted at once."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)
