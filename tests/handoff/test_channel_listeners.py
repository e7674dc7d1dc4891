"""Endpoints accept peers at unix, TCP and TLS addresses, and replace only dead ones' sockets."""
# ruff: noqa: F811

from __future__ import annotations

import os
import resource
import socket
import ssl
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from channels import (  # noqa: F401 - some are fixtures
    DEADLINE_S,
    Certificates,
    Pair,
    Raw,
    Transport,
    address,
    certificates,
    nowhere,
    threads,
    transport,
)

from kvkit.handoff.transport.addresses import connect, listen, of_rank, parse
from kvkit.handoff.transport.channel import (
    ChannelClosed,
    ChannelError,
    ChannelIdle,
)
from kvkit.handoff.transport.tls import server_context


def test_accept_waits_for_a_while_and_wakes_on_close(address: str, threads: ThreadPoolExecutor) -> None:
    listener = listen(address, timeout_s=DEADLINE_S)
    with pytest.raises(ChannelIdle):
        listener.accept(0.01)
    waiting = threads.submit(listener.accept, DEADLINE_S)
    listener.close()
    with pytest.raises(ChannelClosed):
        waiting.result(DEADLINE_S)
    with pytest.raises(ChannelError, match="cannot be reached"):
        connect(listener.address, timeout_s=DEADLINE_S)


def test_a_listener_outlives_a_shortage_of_descriptors(address: str) -> None:
    listener = listen(address, timeout_s=DEADLINE_S)
    with closing(connect(listener.address, timeout_s=DEADLINE_S)):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with pytest.raises(ChannelIdle, match="Too many open files"):
                listener.accept(DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        listener.accept(DEADLINE_S).close()
    listener.close()


def test_a_peer_that_leaves_at_once() -> None:
    listener = listen("tcp://127.0.0.1:0", timeout_s=DEADLINE_S)
    where = parse(listener.address)
    assert not isinstance(where, Path)
    gone = socket.create_connection(where)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()  # resets
    with pytest.raises(ChannelIdle, match="is refused or has disconnected"):
        listener.accept(DEADLINE_S)
    with closing(connect(listener.address, timeout_s=DEADLINE_S)):
        listener.accept(DEADLINE_S).close()
    listener.close()


def test_only_its_owner_reaches_a_local_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvkit.sock"
    listener = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()
    assert not path.exists()
    path.parent.chmod(0o750)
    with pytest.raises(ValueError, match=f"others may enter {path.parent} .mode 0750., want mode 0700"):
        listen(f"unix://{path}", timeout_s=DEADLINE_S)


def test_a_local_endpoint_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvkit.sock"
    path.parent.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    with pytest.raises(OSError, match=f"unix://{path} cannot be listened at: Address already in use"):
        listen(f"unix://{path}", timeout_s=DEADLINE_S)
    dead.close()
    listener = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    connect(listener.address, timeout_s=DEADLINE_S).close()
    listener.close()
    path.write_text("no socket")
    with pytest.raises(OSError, match="Address already in use"):
        listen(f"unix://{path}", timeout_s=DEADLINE_S)
    assert path.read_text() == "no socket"


def test_a_local_endpoint_leaves_the_socket_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvkit.sock"
    first = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    path.rename(path.with_name("kept"))  # so that its number is not given to the next
    second = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    first.close()
    connect(second.address, timeout_s=DEADLINE_S).close()
    second.close()


@pytest.mark.parametrize(
    "bad", ["", "unix://run/s", "tcp://h", "tcp://:1", "tcp://h:99999", "tcp://h:x", "http://h:1", "/run/s"]
)
def test_what_is_no_address(bad: str) -> None:
    with pytest.raises(ValueError, match="want unix:///<path>, tcp"):
        connect(bad, timeout_s=DEADLINE_S)


def test_a_path_that_no_socket_can_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="may have 107 bytes"):
        listen(f"unix://{tmp_path}/{'x' * 108}", timeout_s=DEADLINE_S)


def attempt(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, str]:
    """What both sides say when their first frames cannot be exchanged."""
    listener = listen("tcp://127.0.0.1:0", timeout_s=DEADLINE_S, tls=server)

    def call() -> None:
        channel = connect(listener.address, timeout_s=DEADLINE_S, tls=client)
        try:
            channel.receive(nowhere, DEADLINE_S)
        finally:
            channel.close()

    with ThreadPoolExecutor(1) as other:
        calling = other.submit(call)
        channel = listener.accept(DEADLINE_S)
        with pytest.raises(ChannelError) as here:
            channel.receive(nowhere, DEADLINE_S)
        channel.close()
        listener.close()
        with pytest.raises(ChannelError) as there:
            calling.result(DEADLINE_S)
    return str(here.value), str(there.value)


def test_only_a_certificate_of_the_authority_and_for_the_address_is_accepted(
    certificates: Certificates, tmp_path: Path
) -> None:
    others = Certificates(tmp_path, "127.0.0.1")
    here, there = attempt(others.server(), certificates.client())
    assert "CERTIFICATE_VERIFY_FAILED" in there
    assert "UNKNOWN_CA" in here
    elsewhere = Certificates(tmp_path, "10.0.0.1")
    _, there = attempt(elsewhere.server(), elsewhere.client())
    assert "IP address mismatch" in there


def test_peers_may_be_asked_for_a_certificate(certificates: Certificates) -> None:
    here, there = attempt(certificates.server(peers=certificates.ca), certificates.client())
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in here
    assert "CERTIFICATE_REQUIRED" in there
    transport = Transport(
        "tcp://127.0.0.1:0",
        certificates.server(peers=certificates.ca),
        certificates.client(shown=certificates.own),
    )
    pair = Pair(transport)
    pair.client.send(b"known")
    assert pair.server.receive(nowhere, DEADLINE_S) == b"known"
    pair.close()


def test_garbage_instead_of_tls(certificates: Certificates) -> None:
    listener = listen("tcp://127.0.0.1:0", timeout_s=DEADLINE_S, tls=certificates.server())
    raw = Raw(listener)
    raw.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ChannelError, match="HTTP_REQUEST"):
        raw.channel.receive(nowhere, DEADLINE_S)
    raw.close()
    listener.close()


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    with pytest.raises(ValueError, match=f"certificate={missing}, key={missing}, ca=None: .*No such file"):
        server_context(missing, missing)


def test_every_rank_has_an_address() -> None:
    assert of_rank("unix:///run/kvkit/d-{rank}.sock", 1) == "unix:///run/kvkit/d-1.sock"
    assert of_rank("tcp://[::1]:700{rank}", 0) == "tcp://[::1]:7000"
    assert of_rank("tcp://[::1]:7000", 3) == "tcp://[::1]:7000"
