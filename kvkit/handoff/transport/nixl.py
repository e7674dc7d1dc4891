"""Channels by NIXL: it writes payloads into the peer's arena, by RDMA if available. Frames travel over TCP.

NIXL neither encrypts nor authenticates: use it on private networks only.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from kvkit.environment import is_loopback
from kvkit.handoff.transport import tcp
from kvkit.handoff.transport.channel import HEADER, SHARED, Channel
from kvkit.handoff.transport.stream import Stream
from kvkit.staging import Staging
from kvkit.tiers.nixl_api import import_nixl, translated

_ARENA = struct.Struct("<QQQ32s")
_SPIN_S = 100e-6
_SLEEP_S = 20e-6
_DEVICES = "UCX_NET_DEVICES"


class Agent:
    """NIXL agent of this process. Its thread keeps a core busy. Thread-safe.

    Attributes:
        users: number of channels and listeners that use it; counted by `agent_of`.
        loopback: True if it uses the loopback network device only.
        name: globally unique name of the agent.

    Raises:
        ValueError: the package is missing, or has no plugin for UCX.
        OSError: UCX does not start.
    """

    def __init__(self, loopback: bool) -> None:
        api = import_nixl()
        self.loopback = loopback
        self.users = 0
        self.name = uuid.uuid4().hex
        self._agent: Any = api.nixl_agent(
            self.name,
            api.nixl_agent_config(backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT),
        )
        if "UCX" not in self._agent.plugin_list:
            raise ValueError(f"NIXL has no plugin UCX, only {', '.join(self._agent.plugin_list)}")
        confined = loopback and _DEVICES not in os.environ
        if confined:  # UCX reads it from the environment only
            os.environ[_DEVICES] = "lo"
        try:
            with translated():
                self._agent.create_backend("UCX")
        finally:
            if confined:
                del os.environ[_DEVICES]
        self._lock = threading.Lock()
        self._memories: dict[int, tuple[mmap.mmap, Any, set[Channel]]] = {}
        self._peers: dict[str, set[Channel]] = {}

    def close(self) -> None:
        """End NIXL's thread: it runs while the agent is referenced."""
        self._agent = None

    def register(self, memory: mmap.mmap, user: Channel) -> None:
        """Let NIXL read and write `memory` until `release` was called for every channel that registered it.

        Raises:
            OSError: NIXL cannot register it, for example because it may not lock memory.
        """
        with self._lock, translated():
            if id(memory) not in self._memories:
                region = (address_of(memory), len(memory), 0, "")
                self._memories[id(memory)] = memory, self._agent.register_memory([region], "DRAM"), set()
            self._memories[id(memory)][2].add(user)

    def metadata(self) -> bytes:
        """Return NIXL's description of the registered memory, which a peer needs to write into it."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, name: str, metadata: bytes, user: Channel) -> None:
        """Add a peer's agent; it is removed when its last user is released.

        Raises:
            ValueError: `metadata` is not that of the agent `name`.
        """
        with self._lock:
            if name != self.name:
                try:
                    added = self._agent.add_remote_agent(metadata)
                except Exception as error:
                    raise ValueError(f"invalid metadata of NIXL: {error}") from error
                if added not in (name, name.encode()):
                    self._agent.remove_remote_agent(added)
                    raise ValueError(f"the metadata of {added!r} is not that of {name!r}")
            self._peers.setdefault(name, set()).add(user)

    def release(self, user: Channel) -> None:
        """Deregister the memory and remove the agents that only `user` uses."""
        with self._lock:
            for key, (_, region, users) in list(self._memories.items()):
                users.discard(user)
                if not users:
                    del self._memories[key]
                    with suppress(Exception):  # closing the agent also deregisters it
                        self._agent.deregister_memory(region)
            for name, users in list(self._peers.items()):
                users.discard(user)
                if not users:
                    del self._peers[name]
                    if name != self.name:
                        with suppress(Exception):  # the peer may be gone
                            self._agent.remove_remote_agent(name)

    def write(
        self, peer: str, source: int, target: int, size: int, deadline: float, stop: Callable[[], bool]
    ) -> None:
        """Copy `size` bytes from address `source` here to address `target` at the peer, and wait for the end.

        Raises:
            TimeoutError: the deadline passed, or `stop` returned True.
            ConnectionError: the peer is gone.
            OSError: NIXL failed.
        """
        agent = self._agent
        with translated():
            local = agent.get_xfer_descs([(source, size, 0)], "DRAM")
            remote = agent.get_xfer_descs([(target, size, 0)], "DRAM")
            transfer = agent.initialize_xfer("WRITE", local, remote, peer)
            try:
                began = time.monotonic()
                state = agent.transfer(transfer)
                while state == "PROC":
                    now = time.monotonic()
                    if now >= deadline or stop():
                        raise TimeoutError
                    if now - began > _SPIN_S:
                        time.sleep(_SLEEP_S)
                    state = agent.check_xfer_state(transfer)
                if state != "DONE":
                    raise OSError(f"NIXL: the transfer ended as {state}")
            finally:
                with suppress(Exception):  # the agent keeps a transfer that cannot be cancelled yet
                    agent.release_xfer_handle(transfer)


class NixlChannel(Channel):
    """Channel that writes payloads into the peer's arena, once the peer has shared it.

    A frame with the payload size `SHARED` describes the peer's arena: its body is (u64 address, u64 slot
    bytes, u64 slots, 32 bytes agent name), little endian, then NIXL's metadata. `receive` does not return it.
    Payloads outside mappings (mmap) follow their bodies; arenas are mappings.

    Args:
        use: context in which the agent is used, closed with the channel.
        takes_arena: True if the peer may share its arena.
    """

    def __init__(
        self, stream: Stream, agent: Agent, use: ExitStack, *, peer: str, timeout_s: float, takes_arena: bool
    ) -> None:
        super().__init__(stream, peer=peer, timeout_s=timeout_s)
        self._agent = agent
        self._takes_arena = takes_arena
        self._target: tuple[str, int, int] | None = None
        self._use = use
        use.callback(agent.release, self)

    def share(self, arena: Staging) -> bool:
        memory = arena.buffers[0].obj
        assert isinstance(memory, mmap.mmap)
        agent = self._agent
        with self._frame() as deadline:
            agent.register(memory, self)
            arena_header = _ARENA.pack(address_of(memory), arena.slot_bytes, arena.slots, agent.name.encode())
            body = arena_header + agent.metadata()
            self._unsent.append(HEADER.pack(len(body), SHARED) + body)
            self._send_unsent(deadline)
        return True

    def close(self) -> None:
        super().close()
        self._use.close()

    def _take_arena(self, body: bytes) -> tuple[int, int]:
        if not self._takes_arena or len(body) < _ARENA.size:
            raise ValueError("want one arena for each channel, and its sizes")
        address, slot_bytes, slots, agent = _ARENA.unpack_from(body)
        name = agent.decode(errors="replace")
        self._agent.add_peer(name, body[_ARENA.size :], self)
        self._target = name, address, slot_bytes
        return slots, slot_bytes

    def _can_write(self, payload: memoryview) -> bool:
        return isinstance(payload.obj, mmap.mmap)

    def _copy(self, slot: int, payload: memoryview) -> None:
        assert self._target is not None
        assert isinstance(payload.obj, mmap.mmap)
        if payload.nbytes:
            self._agent.register(payload.obj, self)  # the whole mapping: the first call takes long
            peer, address, slot_bytes = self._target
            source, target = address_of(payload), address + slot * slot_bytes
            deadline = time.monotonic() + self.timeout_s
            self._agent.write(peer, source, target, payload.nbytes, deadline, lambda: self._ended)


class NixlListener(tcp.TcpListener):
    """Listening socket for the frames. NIXL itself listens at a port that it chooses."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._loopback = is_loopback(host)
        with ExitStack() as use:
            use.enter_context(agent_of(self._loopback))  # its errors are raised at start-up
            super().__init__(host, port, timeout_s, None)
            self._use = use.pop_all()
        self.address = self.address.replace("tcp:", "nixl:", 1)

    def close(self) -> None:
        super().close()
        self._use.close()

    def _channel(self, connection: socket.socket) -> Channel:
        peer = tcp.name(connection.getpeername())
        tcp.tune(connection, self._timeout_s)
        use = ExitStack()
        agent, stream = use.enter_context(agent_of(self._loopback)), Stream(connection)
        return NixlChannel(stream, agent, use, peer=peer, timeout_s=self._timeout_s, takes_arena=False)


def connect(host: str, port: int, timeout_s: float) -> Channel:
    """Return a channel to the endpoint that listens at `host` and `port`.

    Raises:
        ValueError: NIXL is missing.
        OSError: UCX does not start.
        ChannelError: no endpoint listens there, or it did not answer within `timeout_s` seconds.
    """
    address = f"nixl://{tcp.name((host, port))}"
    with ExitStack() as use:
        agent = use.enter_context(agent_of(is_loopback(host)))
        stream = tcp.open_stream(address, host, port, timeout_s, None)
        return NixlChannel(stream, agent, use.pop_all(), peer=address, timeout_s=timeout_s, takes_arena=True)


_agents: dict[bool, Agent] = {}
_opening = threading.Lock()


@contextmanager
def agent_of(loopback: bool) -> Iterator[Agent]:
    """Yield this process's agent, created for its first user and closed after its last one.

    Raises:
        ValueError: NIXL is missing.
        OSError: UCX does not start.
    """
    with _opening:
        if loopback not in _agents:
            _agents[loopback] = Agent(loopback)
        agent = _agents[loopback]
        agent.users += 1
    try:
        yield agent
    finally:
        with _opening:
            agent.users -= 1
            if not agent.users:
                del _agents[loopback]
                agent.close()


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return the address of the first byte of `memory`."""
    return np.frombuffer(memory, np.uint8).ctypes.data
