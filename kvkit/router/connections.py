"""The router's connections: their limit, and the idle ones that are closed for new ones.

At the limit, the oldest idle connections are closed, so sockets that clients hold open without a request do
not keep other clients out. asyncio itself would accept the whole backlog at once, and write a traceback for
each connection without a file descriptor.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

from aiohttp import web
from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16_384
IDLE_S = 75.0
"""Time that a connection may be idle, or take to send the head of a request, in seconds."""
_RESERVED = 64
"""File descriptors that are not for requests."""
_PER_REQUEST = 3
"""File descriptors per request: for its client, for its engine, and for a lookup in another engine."""
_CLOSED_FRACTION = 16
"""Share of connections (1 in 16) that may be closed at once: the search for idle ones takes time."""
_PAUSE_S = 0.1


def raise_limit() -> int:
    """Raise the process's limit of file descriptors; return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = MAX_CONNECTIONS * _PER_REQUEST + _RESERVED
    if 0 <= soft < required:  # (a negative value means no limit)
        soft = required if hard < 0 else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft < 0 else max(1, min(required, soft) - _RESERVED) // _PER_REQUEST


class BusyConnections:
    """The connections with a request in flight, recorded by `middleware`."""

    def __init__(self) -> None:
        self._busy = set[object]()

    def __contains__(self, connection: object) -> bool:
        return connection in self._busy

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record a connection while it has a request."""
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)


class BoundedSite(web.BaseSite):
    """Site that accepts connections one at a time, up to a limit. Lives in one event loop.

    Args:
        listening: listening socket.
        limit: maximum number of connections.
    """

    def __init__(
        self, runner: web.AppRunner, listening: socket.socket, busy: BusyConnections, limit: int
    ) -> None:
        super().__init__(runner)
        self._listening = listening
        self._busy = busy
        self._limit = limit
        self._accepting: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return str(self._listening.getsockname())

    async def start(self) -> None:
        await super().start()
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listening.close()
        await super().stop()

    async def _accept(self) -> None:
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        failing = False
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
                while not self._make_room(server):
                    if not failing:
                        log.warning("all %d connections have requests: none is accepted for now", self._limit)
                    failing = True
                    await asyncio.sleep(_PAUSE_S)
                await loop.connect_accepted_socket(server, accepted)
                failing = False
            except ConnectionError:  # the client has disconnected
                continue
            except OSError as error:  # usually the process has no file descriptor left
                if not failing:
                    log.warning("no connection can be accepted for now: %s", error)
                failing = True
                await asyncio.sleep(_PAUSE_S)

    def _make_room(self, server: web.Server) -> bool:
        """Close the oldest idle connections, if the limit is reached; return whether there is room."""
        connected = [connection for connection in server.connections if connection.transport is not None]
        if len(connected) < self._limit:
            return True
        idle = [connection for connection in connected if connection not in self._busy]
        for connection in idle[: max(1, self._limit // _CLOSED_FRACTION)]:
            connection.force_close()
        return bool(idle)
