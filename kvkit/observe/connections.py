"""The connections of the HTTP endpoint, on uvicorn: how many there are, and which gives way to a new one.

A stranger is a connection that has not shown the token, a client one that has. Of both there is a limited
number. The oldest stranger gives way to the next, so that sockets which are held open neither take the
process's descriptors nor keep anyone else out: who has the token shows it at once, and is a client from then
on. Among clients the one gives way that was idle the longest. Who does not send the head of a request in time
is cut off. A stranger costs no thread, no line in the log, and no memory but for the head of one request and
what one read brings.
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
_uvicorn.setLevel(logging.ERROR)  # it warns of every request that is none, and anyone can send those

MAX_STRANGERS = 32
MAX_CLIENTS = 32
HEAD_S = 5.0
"""How long a connection may take to send the head of its first, or its next, request, in seconds."""
_PAUSE_S = 0.1


class Connection(H11Protocol):
    """One connection. Everything runs in the thread of the event loop."""

    _late: asyncio.TimerHandle

    def __init__(self, *args: Any, room: Room, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.app_state = {"connection": self}  # uvicorn hands a copy to each request
        self.logger = _uvicorn
        self._room = room

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def show_token(self) -> bool:
        """Be a client from now on; False if there are too many, all of them busy."""
        return self.transport.is_closing() or self._room.promote(self)

    def cut(self) -> None:
        """Close, whatever is under way."""
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
            self._late.cancel()  # its head is there

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.busy:  # the next request may have been there already
            self._late.cancel()
            self._late = self.loop.call_later(HEAD_S, self.cut)


class Room:
    """The connections that are there, strangers and clients, each in the order in which they came."""

    def __init__(self) -> None:
        self._strangers: dict[Connection, None] = {}
        self._clients: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> None:
        """Take a stranger in; the oldest one leaves if there are too many."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self.leave(oldest)
            oldest.cut()
        self._strangers[connection] = None

    def promote(self, connection: Connection) -> bool:
        """Make a client of a stranger, or have a client be the latest; False if all others are busy."""
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
        """Forget a connection; fine if it is not there."""
        self._strangers.pop(connection, None)
        self._clients.pop(connection, None)


class HttpListener(uvicorn.Server):
    """uvicorn's server, but that it accepts one connection at a time, and only as many as `Room` has.

    asyncio's own loop accepts a whole backlog before the first of them is heard of.
    """

    _accepting: asyncio.Task[None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, for one socket that listens."""
        assert sockets is not None
        (listening,) = sockets
        listening.setblocking(False)
        await super().startup([])
        self._accepting = asyncio.create_task(self._accept(listening))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
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
            except ConnectionError:  # the client is gone already
                continue
            except OSError as error:  # of descriptors, as a rule: the process is short of them
                if not failing:
                    log.warning("no connection can be accepted for now: %s", error)
                failing = True
                await asyncio.sleep(_PAUSE_S)
