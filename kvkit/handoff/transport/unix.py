"""Channels on one host: frames through an AF_UNIX socket, payloads written into the peer's arena.

A payload takes one copy, or none if it was packed into a slot of that arena. Both sides must be processes of
one user, or of root. Only the listening side shares its arena.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvkit.handoff.transport.channel import (
    BACKLOG,
    HEADER,
    SHARED,
    Channel,
    ChannelError,
    FrameError,
    Listener,
    connecting,
)
from kvkit.handoff.transport.stream import Stream, set_timeout
from kvkit.staging import PAGE_BYTES, Arena, Lease, Staging, map_shared, prefault

_ARENA = struct.Struct("<QQ")
_MAX_DESCRIPTORS = 2  # one more than an arena has
_MAX_PATH_BYTES = 107
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class PeerArena(Arena):
    """A peer's shared arena, mapped here. The memory stays while it is mapped, even if the peer is gone.

    A background thread touches only the pages that the peer has populated, and no page is pinned for a GPU:
    a peer that announces more memory than it has makes this process allocate none.

    Args:
        descriptor: memfd of the arena. This object closes it, also if the constructor raises.

    Raises:
        ValueError: the descriptor is not memory of this size that is sealed against resizing.
    """

    def __init__(self, descriptor: int, slot_bytes: int, slots: int) -> None:
        self._descriptor = descriptor
        self._on_return: dict[int, Callable[[], None]] = {}
        try:
            super().__init__(_map_sealed(descriptor, slot_bytes, slots), slot_bytes, "a peer's arena")
        except BaseException:
            os.close(descriptor)
            raise

    def borrow_slot(self, slot: int, on_return: Callable[[], None]) -> Lease | None:
        """As `Channel.borrow_slot`."""
        with self._changed:
            if not 0 <= slot < self.slots or self._references[slot]:
                return None
            self._references[slot] = 1
            self._on_return[slot] = on_return
        return Lease(self, slot)

    def write(self, slot: int, payload: memoryview) -> None:
        """Copy `payload`, which fits, to the start of a slot, unless it was packed there."""
        source, target = np.frombuffer(payload, np.uint8), self.arrays[slot][: payload.nbytes]
        if source.ctypes.data != target.ctypes.data:
            np.copyto(target, source)

    def _release(self, lease: Lease) -> None:
        self._fork_guard.check()
        with self._changed:
            on_return = self._on_return.pop(lease.slot) if self._drop_reference(lease) else None
        if on_return is not None:
            on_return()

    def _prefault_and_pin(self) -> None:
        stop, descriptor = 0, self._descriptor
        try:
            with suppress(OSError):  # ENXIO: the rest is one hole
                while True:
                    start = os.lseek(descriptor, stop, os.SEEK_DATA)
                    stop = os.lseek(descriptor, start, os.SEEK_HOLE)
                    prefault(self._memory, lambda: self._closed, start, stop)
        finally:
            os.close(descriptor)
            self.ready.set()


def _map_sealed(descriptor: int, slot_bytes: int, slots: int) -> mmap.mmap:
    """Map sealed memory of this size. Raises ValueError if its size differs, or could change later."""
    size = slot_bytes * slots
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        actual = os.fstat(descriptor).st_size
    except OSError as error:
        raise ValueError(f"not memory that can be shared: {error}") from error
    if seals & _SEALS != _SEALS or not 0 < size == actual or slot_bytes % PAGE_BYTES:
        raise ValueError(f"{slots} slots of {slot_bytes} bytes in {actual} bytes with seals {seals:#x}")
    return map_shared(descriptor, size)


class LocalStream(Stream):
    """Stream that can pass file descriptors.

    Args:
        takes_descriptors: True if it accepts descriptors; otherwise the kernel drops them.

    Attributes:
        passed: descriptors that were received and are neither used nor closed.
    """

    def __init__(self, sock: socket.socket, takes_descriptors: bool) -> None:
        super().__init__(sock)
        self._takes_descriptors = takes_descriptors
        self.passed: list[int] = []

    def read(self, buffer: memoryview, wait_s: float, flags: int = 0) -> int:
        if flags or not self._takes_descriptors:  # with flags, a frame is continued, which has no descriptor
            return super().read(buffer, wait_s, flags)
        if self.passed:
            raise FrameError("a descriptor arrived without an arena")
        set_timeout(self.socket, socket.SO_RCVTIMEO, wait_s)
        try:
            data, passed, _, _ = socket.recv_fds(self.socket, len(buffer), _MAX_DESCRIPTORS)
        except BlockingIOError:
            raise TimeoutError from None
        buffer[: len(data)] = data
        self.passed += passed
        return len(data)

    def pass_on(self, data: bytes, descriptor: int, deadline: float) -> None:
        """Send `data`, and the descriptor with its first byte."""
        while True:
            try:
                sent = socket.send_fds(self.socket, [data], [descriptor], socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                self._wait_for_room(deadline)
        if sent < len(data):
            self.send([memoryview(data)[sent:]], deadline)

    def close_passed(self) -> None:
        """Close the received descriptors."""
        while self.passed:
            os.close(self.passed.pop())


class LocalChannel(Channel):
    """Channel between two processes of one host.

    A frame with the payload size `SHARED` shares the peer's arena: its body is (u64 slot bytes, u64 slots),
    little endian, and a memfd is attached. `receive` does not return it.

    Args:
        takes_arena: True if the peer may share its arena.

    Raises:
        PermissionError: the peer is a process of another user.
    """

    _stream: LocalStream

    def __init__(self, sock: socket.socket, timeout_s: float, *, takes_arena: bool) -> None:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.geteuid(), 0):
            raise PermissionError(f"process {pid} is of user {uid}, want {os.geteuid()} or root")
        super().__init__(LocalStream(sock, takes_arena), peer=f"process {pid}", timeout_s=timeout_s)
        self._arena: PeerArena | None = None

    def share(self, arena: Staging) -> bool:
        if arena.descriptor is None:
            raise ValueError("this arena cannot be shared: want Staging(..., shared=True) that is not closed")
        body = _ARENA.pack(arena.slot_bytes, arena.slots)
        frame = HEADER.pack(len(body), SHARED) + body
        with self._frame() as deadline:
            self._send_unsent(deadline)
            self._stream.pass_on(frame, arena.descriptor, deadline)
        return True

    def borrow_slot(self, slot: int, on_return: Callable[[], None]) -> Lease | None:
        return None if self._arena is None else self._arena.borrow_slot(slot, on_return)

    def close(self) -> None:
        super().close()
        self._stream.close_passed()
        if self._arena is not None:
            self._arena.close()

    def _take_arena(self, body: bytes) -> tuple[int, int]:
        try:
            if len(self._stream.passed) != 1 or len(body) != _ARENA.size:
                raise ValueError("want one arena for each channel, and its sizes")
            slot_bytes, slots = _ARENA.unpack(body)
            try:
                self._arena = PeerArena(self._stream.passed.pop(), slot_bytes, slots)
            except RuntimeError as error:
                raise ChannelError(f"{self.peer}: no thread for its arena: {error}") from error
            return slots, slot_bytes
        finally:
            self._stream.close_passed()

    def _copy(self, slot: int, payload: memoryview) -> None:
        assert self._arena is not None
        self._arena.write(slot, payload)


class LocalListener(Listener):
    """Listening socket whose file has mode 0600, in a folder of mode 0700."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        _make_folder(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _bind(sock, path)
            os.chmod(path, 0o600)
            sock.listen(BACKLOG)
            self._identity = _identity(path)
        except BaseException:
            sock.close()
            raise
        self._path = path
        super().__init__(sock, f"unix://{path}", timeout_s)

    def close(self) -> None:
        super().close()
        with suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:  # else it is the file of a later listener
                self._path.unlink()

    def _channel(self, connection: socket.socket) -> Channel:
        return LocalChannel(connection, self._timeout_s, takes_arena=False)


def connect(path: Path, timeout_s: float) -> LocalChannel:
    """Return a channel to the endpoint that listens at `path`.

    Raises:
        ChannelError: no endpoint listens there, or it did not answer within `timeout_s` seconds.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with connecting(f"unix://{path}"):
            set_timeout(sock, socket.SO_SNDTIMEO, timeout_s)
            try:
                sock.connect(str(path))
            except BlockingIOError:  # the listener's backlog stayed full
                raise TimeoutError from None
            return LocalChannel(sock, timeout_s, takes_arena=True)
    except BaseException:
        sock.close()
        raise


def _make_folder(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ValueError(f"unix://{path}: a socket's path may have {_MAX_PATH_BYTES} bytes")
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"unix://{path}: others may enter {folder} (mode {mode:04o}), want mode 0700")


def _bind(sock: socket.socket, path: Path) -> None:
    """Bind the socket. Replaces the file that a killed process left behind."""
    try:
        sock.bind(str(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_stale(path):
            raise OSError(error.errno, f"unix://{path} cannot be listened at: {error.strerror}") from error
        path.unlink(missing_ok=True)
        sock.bind(str(path))


def _is_stale(path: Path) -> bool:
    """Return whether `path` is a socket without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
        return is_socket and probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
