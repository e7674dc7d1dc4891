"""The router's connections: how many there are, and which give way to a new one.

Where there is room for no more, the idle ones that came first give way: sockets that clients hold open
without a request keep nobody out. asyncio accepts a whole backlog at once instead, however many there are,
and writes a traceback for each that it has no descriptor for.
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
"""How long a connection may be idle, or take to send the head of a request."""
_OTHERS = 64
"""Descriptors of other things than requests."""
_OF_REQUEST = 3
"""Descriptors of a request: its client's, an engine's, and another engine's that is asked what it holds."""
_AT_ONCE = 16
"""One in so many connections gives way at once: to look for the idle ones takes time."""
_PAUSE_S = 0.1


def raise_limit() -> int:
    """Let the process have as many descriptors as it may, and return for how many connections they do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = MAX_CONNECTIONS * _OF_REQUEST + _OTHERS
    if 0 <= soft < want:  # (no limit is negative)
        soft = want if hard < 0 else min(want, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft < 0 else max(1, min(want, soft) - _OTHERS) // _OF_REQUEST


class BusyConnections:
    """The connections that have a request under way. `middleware` keeps count."""

    def __init__(self) -> None:
        self._busy = set[object]()

    def __contains__(self, connection: object) -> bool:
        return connection in self._busy

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a connection while it has a request."""
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)


class BoundedSite(web.BaseSite):
    """Accepts connections one at a time, as many as there is room for. One event loop.

    Args:
        listening: a socket that listens.
        most: connections.
    """

    def __init__(
        self, runner: web.AppRunner, listening: socket.socket, busy: BusyConnections, most: int
    ) -> None:
        super().__init__(runner)
        self._listening = listening
        self._busy = busy
        self._most = most
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
                        log.warning("%d connections have requests: no more are accepted for now", self._most)
                    failing = True
                    await asyncio.sleep(_PAUSE_S)
                await loop.connect_accepted_socket(server, accepted)
                failing = False
            except ConnectionError:  # the client is gone already
                continue
            except OSError as error:  # of descriptors, as a rule: the process is short of them
                if not failing:
                    log.warning("no connection can be accepted for now: %s", error)
                failing = True
                await asyncio.sleep(_PAUSE_S)

    def _make_room(self, server: web.Server) -> bool:
        """Have the first idle connections give way to one that comes; False: all have requests."""
        there = [connection for connection in server.connections if connection.transport is not None]
        if len(there) < self._most:
            return True
        idle = [connection for connection in there if connection not in self._busy]
        for connection in idle[: max(1, self._most // _AT_ONCE)]:
            connection.force_close()
        return bool(idle)
