"""Nodes for the tests of handoff: in this process, in processes of their own, and peers that misbehave.

`python tests/support/handoff_nodes.py receiver|sender FOLDER` answers lines of JSON, [method, arguments].
A receiver whose folder has a certificate, own.pem, wants TLS.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from repository import ROOT, SUPPORT

from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.protocol.messages import AnyMessage, Hello, Message, Proof, decode, encode
from kvkit.handoff.protocol.states import Limits, RequestRef
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import Sender
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport import addresses, handshake
from kvkit.handoff.transport.channel import Channel, ChannelError
from kvkit.handoff.transport.handshake import Identity
from kvkit.handoff.transport.tls import server_context
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import Tier
from kvkit.tiers.testing.contract import SLOT_BYTES, record_bytes

LONG_S = 60.0
"""Longer than any test takes."""

IDENTITY = Identity("here", namespace="n1", layout="l1", slot_bytes=SLOT_BYTES, secret=b"of the tests")
PATIENT = Limits(allocation_s=LONG_S, transfer_s=LONG_S, idle_s=LONG_S)


class Node:
    """A receiver with an endpoint at a unix and a TCP address; `close` proves that no slot is lost."""

    def __init__(
        self,
        folder: Path,
        slots: int = 8,
        *,
        limits: Limits = PATIENT,
        near: Sequence[Tier] = (),
        identity: Identity = IDENTITY,
        timeout_s: float = LONG_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.receiver = Receiver(Staging(SLOT_BYTES, slots, shared=True), limits)
        self.tier = HandoffTier(self.receiver, None, shutdown_s=LONG_S)
        listen = [f"unix://{folder}/sockets/{os.getpid()}-{id(self):x}", "tcp://127.0.0.1:0"]
        self.endpoint = Endpoint(
            self.receiver, near, identity, listen, timeout_s=timeout_s, pin_s=LONG_S, tls=tls
        )
        self.unix, self.tcp = self.endpoint.addresses

    def close(self) -> None:
        self.receiver.check_integrity()
        self.receiver.close(0.0)
        self.endpoint.close(LONG_S)
        arena = self.receiver.arena
        arena.check_integrity()
        assert arena.free == arena.slots, "a slot is lost"


def new_sender(
    identity: Identity = IDENTITY,
    transfer_s: float = LONG_S,
    timeout_s: float = LONG_S,
    tls: ssl.SSLContext | None = None,
) -> Sender:
    return Sender(replace(identity, node="sender"), timeout_s=timeout_s, transfer_s=transfer_s, tls=tls)


def fill(staging: Staging, names: Sequence[str]) -> list[Any]:
    """Leases with the bytes that belong to `names`."""
    leases = staging.acquire(len(names), LONG_S, at_least=len(names))
    for name, lease in zip(names, leases, strict=True):
        lease.array[:] = record_bytes(name)
        lease.used = SLOT_BYTES
    return leases


def assert_holds(tier: Tier, names: Sequence[str]) -> None:
    """All of `names` are available, and are what they should be."""
    assert tier.match_prefix(names) == len(names)
    for name in names:
        lease = tier.borrow(name)
        assert lease is not None
        with lease:
            assert lease.record.tobytes() == record_bytes(name).tobytes(), f"{name} differs"


class Speaker:
    """A peer that says what it is told to, after a handshake (`hello`) or without one."""

    def __init__(self, address: str, *, timeout_s: float = LONG_S) -> None:
        self.channel: Channel = addresses.connect(address, timeout_s=timeout_s)
        self.socket: socket.socket = self.channel._stream.socket  # for what is no frame

    def hello(self, identity: Identity = IDENTITY, **changes: Any) -> AnyMessage:
        """Shake hands; the last thing that the other side said."""
        hello = identity.hello()
        ours = encode(Hello(**({f: getattr(hello, f) for f in hello.__struct_fields__} | changes)))
        self.channel.send(ours)
        theirs = self.channel.receive(lambda _: None, LONG_S)
        self.say(Proof(handshake.prove(identity.secret, "client", ours, theirs)))
        answer = self.hear()
        self.channel.trusted = isinstance(answer, Proof)
        return answer

    def say(self, message: Message, payload: bytes | None = None, slot: int | None = None) -> None:
        self.channel.send(encode(message), None if payload is None else memoryview(payload), slot)

    def hear(self) -> AnyMessage:
        return decode(self.channel.receive(lambda _: None, LONG_S))

    def hear_all(self) -> list[AnyMessage]:
        """What is said until the other side ends the connection."""
        heard = []
        with suppress(ChannelError):
            while True:
                heard.append(self.hear())
        return heard

    def close(self) -> None:
        self.channel.close()


def raw_socket(address: str) -> socket.socket:
    """A socket connected to an endpoint, for what is no protocol at all."""
    where = addresses.parse(address)
    if isinstance(where, Path):
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(str(where))
    else:
        plain = socket.create_connection(where)
    plain.settimeout(LONG_S)
    return plain


class Process:
    """A node in a process of its own; `call` has it do something."""

    def __init__(self, role: str, folder: Path) -> None:
        path = os.pathsep.join([str(ROOT), str(SUPPORT)])
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        """Have it hang: it lives, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Have it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(LONG_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class _Commands:
    """What `Process.call` calls."""

    def __init__(self, role: str, folder: Path) -> None:
        certificate = folder / "own.pem"
        tls = server_context(certificate, certificate) if certificate.exists() else None
        self.node = Node(folder, tls=tls) if role == "receiver" else None
        self.sender = new_sender()
        self.staging = Staging(SLOT_BYTES, 16)
        self.handles: dict[str, Any] = {}

    def addresses(self) -> list[str]:
        assert self.node is not None
        return [self.node.unix, self.node.tcp]

    def wait(self, transfer: str) -> str | None:
        assert self.node is not None
        status = self.node.receiver.wait(transfer, LONG_S)
        return None if status is None else status.phase

    def release(self, transfer: str) -> None:
        assert self.node is not None
        self.node.receiver.release(transfer)

    def holds(self, names: list[str]) -> bool:
        assert self.node is not None
        assert_holds(self.node.tier, names)
        return True

    def open(
        self, transfer: str, address: str, names: list[str], request: str | None = None, parts: int = 1
    ) -> int:
        """Open a transfer and wait until it is admitted; how many records it wants."""
        of = RequestRef(request or transfer, parts)
        self.handles[transfer] = self.sender.open(transfer, address, names, LONG_S, request=of)
        admitted: int = self.handles[transfer].admitted.result(LONG_S)
        return admitted

    def put(self, names: list[str]) -> None:
        leases = fill(self.staging, names)
        self.sender.put(names, leases, lambda name, error: None)
        release_all(leases)

    def pack(self, transfer: str, address: str, names: list[str]) -> None:
        """Begin to make records in the receiver's slots."""
        self.open(transfer, address, names)
        loan = self.sender.borrow_slots([self.handles[transfer]], names)
        assert loan is not None
        with loan.writing():
            for lease in loan.leases:
                lease.array[: SLOT_BYTES // 2] = 7

    def done(self, transfer: str) -> int:
        missing: int = self.handles[transfer].done.result(LONG_S)
        return missing


def main() -> None:
    commands = _Commands(sys.argv[1], Path(sys.argv[2]))
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(commands, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
