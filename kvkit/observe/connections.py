"""The connections of the HTTP endpoint, on uvicorn: their limits, and which one yields to a new one.

A stranger is a connection that has not shown the token; a client is one that has. The number of each is
limited. The oldest stranger gives way to the next, so sockets that are held open neither exhaust the
process's descriptors nor keep others out: a user with the token shows it at once, and is a client from then
on. Among clients, the one that was idle longest gives way. A connection that does not send the head of a
request in time is closed. A stranger costs no thread, no line in the log, and no memory except the head of
one request and the data of one read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)
_uvicorn = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn.setLevel(logging.ERROR)  # it warns of every malformed request, and anyone can send those

MAX_STRANGERS = 32
MAX_CLIENTS = 32
HEAD_S = 5.0
"""Time limit for the head of a connection's first or next request, in seconds."""
_PAUSE_S = 0.1


class Connection(H11Protocol):
    """One connection. Everything runs in the event loop's thread."""

    _late: asyncio.TimerHandle

    def __init__(self, *args: Any, room: Room, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.app_state = {"connection": self}  # uvicorn hands a copy to each request
        self.logger = _uvicorn
        self._room = room

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def show_token(self) -> bool:
        """Become a client; return False if there are too many clients, all of them busy."""
        return self.transport.is_closing() or self._room.promote(self)

    def cut(self) -> None:
        """Close at once, even during a request."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._room.enter(self)
        self._late = self.loop.call_later(HEAD_S, self.cut)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.leave(self)
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


class Room:
    """The open connections, strangers and clients, each in order of arrival."""

    def __init__(self) -> None:
        self._strangers: dict[Connection, None] = {}
        self._clients: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> None:
        """Add a stranger; cut the oldest one if there are too many."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self.leave(oldest)
            oldest.cut()
        self._strangers[connection] = None

    def promote(self, connection: Connection) -> bool:
        """Turn a stranger into a client, or make a client the latest; return False if all others are busy."""
        if connection not in self._clients and len(self._clients) >= MAX_CLIENTS:
            idle = next((client for client in self._clients if not client.busy), None)
            if idle is None:
                return False
            self.leave(idle)
            idle.cut()
        self.leave(connection)
        self._clients[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a connection if it is there."""
        self._strangers.pop(connection, None)
        self._clients.pop(connection, None)


class HttpListener(uvicorn.Server):
    """uvicorn's server, but it accepts one connection at a time, and no more than `Room` allows.

    asyncio's own loop accepts a whole backlog before it reports the first connection.
    """

    _accepting: asyncio.Task[None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, on one listening socket."""
        assert sockets is not None
        (listening,) = sockets
        listening.setblocking(False)
        await super().startup([])
        self._accepting = asyncio.create_task(self._accept(listening))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop, failing = asyncio.get_running_loop(), False
        protocol = partial(
            Connection, config=self.config, server_state=self.server_state, app_state={}, room=Room()
        )
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
                await loop.connect_accepted_socket(protocol, accepted)
                failing = False
            except ConnectionError:  # the client has left already
                continue
            except OSError as error:  # usually the process has no descriptors left
                if not failing:
                    log.warning("no connection can be accepted for now: %s", error)
                failing = True
                await asyncio.sleep(_PAUSE_S)
