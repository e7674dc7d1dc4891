"""A network in memory, as `kvkit/handoff/transport` calls it: `socket` and `select`, below every frame.

Streams keep their order, as those of TCP and of AF_UNIX do; what is sent arrives late, in pieces, or, where
a connection breaks, not at all. Each call is one step, at which others have their turn, an error may come,
and the life of the process that calls may end: then the system closes its sockets, as a real one does.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from simulation.scheduler import Scheduler, Task
from simulation.world import Faults

ERRORS = (errno.ENOBUFS, errno.ENOMEM, errno.EIO, errno.EMFILE, errno.EHOSTUNREACH, errno.ETIMEDOUT)
KERNEL_S = 5.0
"""After so long the system takes a host of which nothing comes for gone, as `tcp.tune` has it."""
_TIMEVAL = struct.Struct("@ll")


@dataclass(eq=False)
class Process:
    """Who calls. `dead`: it was killed, and nothing of it runs any more."""

    name: str
    dead: bool = False


@dataclass(eq=False)
class Piece:
    """Bytes on their way, and the descriptor that comes with the first of them."""

    at: float
    data: bytes
    passed: int | None = None


@dataclass(eq=False)
class Inbox:
    """One way of a connection: what was sent and not received.

    Attributes:
        size: bytes of it: there is room for no more than the network's `room`.
        ends: when the end arrives; None: nobody has shut this way.
    """

    pieces: deque[Piece] = field(default_factory=deque)
    size: int = 0
    ends: float | None = None

    def last(self) -> float:
        return self.pieces[-1].at if self.pieces else 0.0


class Network:
    """Sockets of the processes of one simulation.

    Attributes:
        room: bytes that a stream holds.
        breaks: how often a connection is cut off for good, as a share of what is sent.
        short: how often a call moves less than it could.
        calls_left: until the process that calls then dies; -1: none does.
        descriptors: those that were passed and are not closed: which socket each was sent by.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        self.scheduler = scheduler
        self.faults = faults
        self.room = 1 << 16
        self.breaks = 0.0
        self.short = 0.0
        self.calls_left = -1
        self.mortal: set[Process] = set()
        self.on_death: Callable[[Process], None] = lambda process: None
        self.listeners: dict[str, SimulatedSocket] = {}
        self.sockets: list[SimulatedSocket] = []
        self.descriptors: dict[int, SimulatedSocket] = {}
        self._ports = 40_000
        self.socket = SimpleNamespace(
            **{name: getattr(socket, name) for name in dir(socket) if name.isupper() or "_" in name},
        )
        vars(self.socket).update(
            socket=lambda family=0, kind=0: self.new(),
            getaddrinfo=lambda host, port, type=0: [(socket.AF_INET,)],
            create_server=self._create_server,
            create_connection=self._create_connection,
            send_fds=lambda sock, data, fds, flags=0: sock.send(data, fds[0]),
            recv_fds=lambda sock, size, most: (*sock.receive_passed(size), 0, None),
        )
        self.select = SimpleNamespace(
            **{name: getattr(select, name) for name in dir(select) if name.startswith("POLL")},
            poll=lambda: SimulatedPoll(),
        )
        self.os = SimpleNamespace(
            close=self._close_descriptor,
            chmod=lambda *_: None,
            geteuid=lambda: 0,
            lseek=_no_data,
            **{name: getattr(os, name) for name in ("fstat", "fsencode", "SEEK_DATA", "SEEK_HOLE")},
        )

    # processes

    @property
    def process(self) -> Process:
        """Of the current thread."""
        process = self.scheduler.current.process
        assert isinstance(process, Process)
        return process

    def kill(self, process: Process) -> None:
        """End a process at once: the system closes its sockets, and its threads run no further."""
        self.scheduler.say(f"{process.name} is killed")
        process.dead = True
        for sock in list(self.sockets):
            if sock.process is process:
                sock.vanish()
        for number, sender in list(self.descriptors.items()):
            if sender.other is not None and sender.other.process is process:
                self._close_descriptor(number)
        self.on_death(process)
        self.scheduler.kill(process)

    def new(self) -> SimulatedSocket:
        """A socket of the current process."""
        self.meet("socket", self.faults.fails)
        sock = SimulatedSocket(self, self.process)
        self.sockets.append(sock)
        return sock

    # what goes wrong

    def meet(self, what: str, fails: float) -> None:
        """A call: others may have their turn, it may fail, its process may die."""
        self.scheduler.pause()
        if self.calls_left >= 0 and self.process in self.mortal:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.kill(self.process)
        if self.faults.happens(fails):
            number = self.scheduler.random.choice(ERRORS)
            self.scheduler.say(f"{what}: {os.strerror(number)}")
            raise OSError(number, os.strerror(number))

    def delay(self) -> float:
        """How long something is on its way; it may be long."""
        random = self.scheduler.random
        if self.faults.happens(self.faults.hangs):
            return random.uniform(1.0, 60.0)
        return random.choice((0.001, 0.05, 1.5)) if self.faults.happens(self.faults.slow) else 0.0

    def less(self, count: int) -> int:
        """How much of `count` bytes a call moves."""
        if count > 1 and self.faults.happens(self.short):
            return 1 + self.scheduler.random.randrange(count)
        return count

    def pair(self, client: SimulatedSocket, listener: SimulatedSocket) -> None:
        """Have a connection wait to be accepted."""
        server = SimulatedSocket(self, listener.process)
        self.sockets.append(server)
        for one, other in ((client, server), (server, client)):
            one.other, one.address = other, listener.address
            one.stream = listener.address.startswith("/")
        listener.backlog.append(server)
        listener.wake()

    # functions of the modules

    def _create_server(self, address: tuple[str, int], family: int = 0, backlog: int = 0) -> SimulatedSocket:
        self._ports += 1
        sock = self.new()
        sock.bind((address[0], address[1] or self._ports))
        return sock

    def _create_connection(self, address: tuple[str, int], timeout: float) -> SimulatedSocket:
        sock = self.new()
        sock.timeout_s = timeout
        try:
            sock.connect(address)
        except OSError as error:
            sock.vanish()
            if isinstance(error, BlockingIOError):
                raise TimeoutError("timed out") from None
            raise
        return sock

    def pass_on(self, number: int, sender: SimulatedSocket) -> int:
        """A descriptor of the process that receives one."""
        copy = os.dup(number)
        self.descriptors[copy] = sender
        return copy

    def _close_descriptor(self, number: int) -> None:
        del self.descriptors[number]
        os.close(number)


class SimulatedSocket:
    """`socket.socket`, one that listens or one of a connection.

    Attributes:
        stream: whether it is of AF_UNIX, whose connections do not break.
        error: what the next call says, from `breaks_at` on.
        shut: whether this side ended both ways.
        cut: whether it did so while the other side could still be writing.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.scheduler = network.scheduler
        self.process = process
        self.other: SimulatedSocket | None = None
        self.stream = False
        self.address = ""
        self.backlog: deque[SimulatedSocket] = deque()
        self.inbox = Inbox()
        self.error = 0
        self.breaks_at = 0.0
        self.shut = self.cut = False
        self.closed = False
        self.timeout_s: float | None = None
        self._calls = 0
        self._waiters: list[Task] = []

    def __str__(self) -> str:
        return f"the socket of {self.process.name} at {self.address}"

    # calls

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        with self.call("setsockopt", 0.0):
            if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                seconds, micros = _TIMEVAL.unpack(value)
                self.timeout_s = seconds + micros / 1e6

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return struct.pack("3i", 1, 0, 0)

    def getsockname(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def getpeername(self) -> tuple[str, int]:
        return self.getsockname()

    def bind(self, address: Any) -> None:
        self.address = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        if self.address in self.network.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.network.listeners[self.address] = self

    def listen(self, backlog: int) -> None:
        pass

    def connect(self, address: Any) -> None:
        where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        with self.call("connect"):
            left, delay = self.timeout_s or KERNEL_S, self.network.delay()
            if delay >= left:
                self.wait(left)
                raise BlockingIOError
            self.wait_until(self.scheduler.now + delay)
            listener = self.network.listeners.get(where)
            if listener is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            self.network.pair(self, listener)

    def accept(self) -> tuple[SimulatedSocket, None]:
        with self.call("accept"):
            until = None if self.timeout_s is None else self.scheduler.now + self.timeout_s
            while not self.backlog:
                if self.shut:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                left = None if until is None else until - self.scheduler.now
                if left is not None and left <= 0:
                    raise BlockingIOError
                self.wait(left)
            return self.backlog.popleft(), None

    def sendmsg(self, buffers: Sequence[Any], ancillary: object = (), flags: int = 0) -> int:
        assert flags & socket.MSG_DONTWAIT
        return self.send(buffers)

    def send(self, buffers: Sequence[Any], passed: int | None = None) -> int:
        """As much of `buffers` as there is room for, with a descriptor or none."""
        with self.call("send"):
            self._raise_error()
            if self.shut:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            other, network = self.other, self.network
            assert other is not None
            if other.shut or other.closed:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            room = network.room - other.inbox.size
            if room <= 0:
                raise BlockingIOError
            data = b"".join(bytes(buffer) for buffer in buffers)
            data = data[: network.less(min(room, len(data)))]
            if not self.stream and network.faults.happens(network.breaks):
                self._break()
                return len(data)
            other.deliver(data, None if passed is None else network.pass_on(passed, self))
            return len(data)

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        with self.call("recv"):
            data, passed = self._take(len(buffer), bool(flags & socket.MSG_WAITALL))
            buffer[: len(data)] = data
        for number in passed:  # nobody takes it
            self.network.os.close(number)
        return len(data)

    def receive_passed(self, size: int) -> tuple[bytes, list[int]]:
        """Bytes, and the descriptor that came with the first of them."""
        with self.call("recvmsg"):
            return self._take(size, False)

    def shutdown(self, how: int) -> None:
        with self.call("shutdown", 0.0):
            if self.shut or (self.other is None and self.network.listeners.get(self.address) is not self):
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            self.shut = True
            self.cut = self.other is not None and not self.other.shut
            self._end_other()
            self.wake()

    def close(self) -> None:
        self.scheduler.check(not self._calls, "{} is closed while a call uses it", self)
        self.scheduler.pause()
        self.vanish()

    # what calls have in common

    @contextmanager
    def call(self, what: str, fails: float | None = None) -> Iterator[None]:
        """A call under way: nobody may close the descriptor meanwhile."""
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._calls += 1
        try:
            self.network.meet(what, self.network.faults.fails if fails is None else fails)
            yield
        finally:
            self._calls -= 1

    def deliver(self, data: bytes, passed: int | None = None) -> None:
        """Have bytes come in, after those before them."""
        at = max(self.inbox.last(), self.scheduler.now + self.network.delay())
        self.inbox.pieces.append(Piece(at, data, passed))
        self.inbox.size += len(data)
        self.wake()

    def vanish(self) -> None:
        """The descriptor is closed; the other side hears so when what was sent before has arrived."""
        if self.closed:
            return
        self.closed = self.shut = True
        self.network.sockets.remove(self)
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]
        for waiting in self.backlog:
            waiting.vanish()
        if self.other is not None and self.inbox.size:  # what came in is read by nobody
            self.other.fail(errno.ECONNRESET, self.scheduler.now)
        for piece in self.inbox.pieces:
            if piece.passed is not None:
                self.network.os.close(piece.passed)
        self.inbox.pieces.clear()
        self._end_other()
        self.wake()

    def fail(self, number: int, at: float) -> None:
        """Have the next call from then on say this, and no further byte come or go."""
        if not self.error:
            self.error, self.breaks_at = number, at
        self.wake()

    def wake(self) -> None:
        """Have those who wait at this socket look again."""
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self.scheduler.wake(task)

    def wait(self, left_s: float | None) -> None:
        """Wait for `wake`, or so long."""
        me = self.scheduler.current
        self._waiters.append(me)
        if not self.scheduler.block(self, left_s) and me in self._waiters:
            self._waiters.remove(me)

    def wait_until(self, when: float) -> None:
        while self.scheduler.now < when:
            self.wait(when - self.scheduler.now)

    def writable(self) -> bool:
        """Whether `send` does not wait."""
        other = self.other
        assert other is not None
        full = other.inbox.size >= self.network.room
        return not full or self.shut or other.shut or self._broken()

    def _broken(self) -> bool:
        return bool(self.error) and self.breaks_at <= self.scheduler.now

    def _raise_error(self) -> None:
        if self._broken():
            raise OSError(self.error, os.strerror(self.error))

    def _end_other(self) -> None:
        other = self.other
        if other is not None and other.inbox.ends is None:
            other.inbox.ends = max(other.inbox.last(), self.scheduler.now + self.network.delay())
            other.wake()

    def _break(self) -> None:
        """The network loses both ways; each side hears so from its own system, at a time of its own."""
        assert self.other is not None
        self.scheduler.say(f"{self} is cut off")
        for side in (self, self.other):
            later = self.scheduler.random.choice((0.0, 0.01, KERNEL_S, 2 * KERNEL_S))
            number = self.scheduler.random.choice((errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH))
            side.fail(number, self.scheduler.now + later)

    def _take(self, most: int, all_of_it: bool) -> tuple[bytes, list[int]]:
        """What came in, at most so much; waits for the first byte, or for all."""
        until = None if self.timeout_s is None else self.scheduler.now + self.timeout_s
        inbox, taken, passed = self.inbox, bytearray(), list[int]()
        while True:
            now = self.scheduler.now
            came = bool(inbox.pieces) and inbox.pieces[0].at <= now
            if came and not passed:
                piece = inbox.pieces.popleft()
                count = self.network.less(min(most - len(taken), len(piece.data)))
                taken += piece.data[:count]
                inbox.size -= count
                if piece.passed is not None:
                    passed.append(piece.passed)
                if count < len(piece.data):
                    inbox.pieces.appendleft(Piece(piece.at, piece.data[count:]))
                if self.other is not None:
                    self.other.wake()
                full = len(taken) == most or (count < len(piece.data) and len(taken) < most)
                if full or (not all_of_it and not (inbox.pieces and inbox.pieces[0].at <= now)):
                    return bytes(taken), passed
                continue
            if taken and not all_of_it:
                return bytes(taken), passed
            if self._broken() and not taken:
                self._raise_error()
            if self.shut or self._broken() or (inbox.ends is not None and inbox.ends <= now):
                return bytes(taken), passed
            left = None if until is None else until - now
            if left is not None and left <= 0:
                if taken:
                    return bytes(taken), passed
                raise BlockingIOError
            events = [inbox.pieces[0].at] if inbox.pieces else []
            events += [] if inbox.ends is None else [inbox.ends]
            events += [self.breaks_at] if self.error else []
            events += [] if until is None else [until]
            self.wait(min(events) - now if events else None)


class SimulatedPoll:
    """`select.poll` of one socket that is to be written to."""

    def __init__(self) -> None:
        self._socket: SimulatedSocket | None = None

    def register(self, sock: SimulatedSocket, events: int) -> None:
        assert events == select.POLLOUT
        self._socket = sock

    def poll(self, timeout_ms: float) -> list[object]:
        sock = self._socket
        assert sock is not None
        with sock.call("poll", 0.0):
            until = sock.scheduler.now + timeout_ms / 1000
            while not sock.writable():
                left = until - sock.scheduler.now
                if left <= 0:
                    return []
                later = [sock.breaks_at - sock.scheduler.now] if sock.error else []
                sock.wait(min([left, *later]))
            return [sock]


def _no_data(descriptor: int, offset: int, whence: int) -> int:
    """`lseek` for data in a file that nobody has written to."""
    raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
