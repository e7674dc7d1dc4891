"""Folders on a real NFSv4.2 mount: two clients and their caches, a server that dies, a disk that is full.

Run by `make test-nfs` (tests/nfs/run.py), which makes the network that this needs.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import LEASE_S, Client, Server

from kvkit.tiers.folder import TEMPORARY, Folder
from kvkit.tiers.testing.contract import SLOT_BYTES, TierContract, record_bytes, record_names

NAMES = record_names(8)
ARRAY = NAMES[0].rpartition("/")[0]
BIG = (1 << 20) + 4097
CONTRACT = [name for name in dir(TierContract) if name.startswith("test_")]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("server"), 48 << 20)


@pytest.fixture(scope="session")
def clients(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Client]:
    folder = tmp_path_factory.mktemp("clients")
    clients = [Client(number, folder) for number in (1, 2)]
    for client in clients:
        client.wait()
    return clients


@pytest.fixture(autouse=True)
def the_server_lives(server: Server) -> Iterator[None]:
    """What a client makes of a dead server would hide the cause."""
    yield
    server.check_alive()


@pytest.fixture
def a(clients: list[Client]) -> Client:
    return clients[0]


@pytest.fixture
def b(clients: list[Client]) -> Client:
    return clients[1]


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    """The name of a folder that no other test uses."""
    return str(request.node.name)


def files(server: Server, root: str) -> list[str]:
    """What the server holds."""
    folder = server.export / root
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check(server: Server, root: str, names: list[str], size: int) -> None:
    """The server holds these records, whole, and no other file."""
    assert files(server, root) == sorted(names)
    check_records(server, root, names, size)


def check_records(server: Server, root: str, names: list[str], size: int) -> None:
    """The server holds these records, whole."""
    for name in names:
        assert (server.export / root / name).read_bytes() == record_bytes(name, size).tobytes(), name


def clean_up(client: Client, server: Server, root: str, temporary: str = TEMPORARY) -> None:
    """Clean until no such file is left: a server keeps the locks of a lost client for a lease."""
    deadline = time.monotonic() + 3 * LEASE_S
    while any(temporary in name for name in files(server, root)):
        assert time.monotonic() < deadline, files(server, root)
        client.call("clean", root=root)


@pytest.mark.parametrize("test", CONTRACT)
def test_contract(test: str, a: Client, root: str) -> None:
    a.call("contract", root=root, test=test)


def test_the_mount_is_known(a: Client, root: str) -> None:
    assert a.call("kind", root=root) == a.call("kind", root=".") == "nfs4"
    assert a.call("kind", root="..") == "tmpfs"


@pytest.mark.parametrize("there", ["", "abc", "abc/0"])
def test_a_name_that_was_missing_is_seen_when_another_client_makes_it(
    there: str, a: Client, b: Client, server: Server, root: str
) -> None:
    (server.export / root / there).mkdir(parents=True)
    for name in record_names(2, "abc"):
        assert a.call("size", root=root, name=name) is None
        assert b.call("write", root=root, name=name, size=SLOT_BYTES) is None
        assert not a.call("exists", root=root, name=name), "nothing to prove: the client forgot by itself"
        assert a.call("size", root=root, name=name) == SLOT_BYTES
        assert a.call("read", root=root, name=name, size=SLOT_BYTES)


def test_a_read_alone_sees_it_too(a: Client, b: Client, root: str) -> None:
    (missing, _, _) = a.call("read", root=root, name=NAMES[0], size=BIG)
    assert missing == "FileNotFoundError"
    b.call("write", root=root, name=NAMES[0], size=BIG)
    assert not a.call("exists", root=root, name=NAMES[0])
    assert a.call("read", root=root, name=NAMES[0], size=BIG) is True


def test_a_name_that_was_missing_can_be_written_and_deleted(a: Client, b: Client, root: str) -> None:
    for name in NAMES[:2]:
        assert not a.call("exists", root=root, name=name)
        b.call("write", root=root, name=name, size=SLOT_BYTES)
    assert a.call("write", root=root, name=NAMES[0], size=SLOT_BYTES) is None
    assert a.call("delete", root=root, name=NAMES[1]) is None
    assert a.call("scan", root=root) == NAMES[:1]
    assert b.call("scan", root=root) == NAMES[:1]


def test_an_open_tier_sees_the_records_of_another_client(a: Client, b: Client, root: str) -> None:
    tier = a.start("watch_tier", root=root, names=NAMES)
    tier.heard()
    for name in NAMES[:3]:
        tier.tell("look")
        tier.heard()
        b.call("write", root=root, name=name, size=SLOT_BYTES)
    tier.tell("look")
    tier.heard()
    tier.tell("stop")
    assert tier.result() == [0, 1, 2, 3]


def test_a_look_costs_one_request_at_most(a: Client, b: Client, root: str) -> None:
    b.call("write", root=root, name=NAMES[0], size=SLOT_BYTES)
    for name in NAMES[:2]:
        a.call("size", root=root, name=name)
    assert a.call("traffic", root=root, name=NAMES[0]) == {}, "a record that is there"
    missing = a.call("traffic", root=root, name=NAMES[1])
    assert missing.pop("SEQUENCE", 0) <= 1, "the session's own heartbeat"
    assert missing == {"GETATTR": 1}


def test_whole_pages_are_written_past_the_page_cache(a: Client, server: Server, root: str) -> None:
    traffic = a.call("traffic", root=root, name=NAMES[0], write_bytes=BIG)
    assert traffic["direct"] == BIG - BIG % 4096
    check(server, root, NAMES[:1], BIG)


def test_a_durable_write(a: Client, b: Client, server: Server, root: str) -> None:
    assert a.call("write", root=root, name=NAMES[0], size=BIG, fsync=True) is None
    assert b.call("read", root=root, name=NAMES[0], size=BIG) is True
    check(server, root, NAMES[:1], BIG)


def test_two_clients_put_and_get_the_same_keys(a: Client, b: Client, server: Server, root: str) -> None:
    puts = [
        a.start("put_and_get", root=root, names=NAMES),
        b.start("put_and_get", root=root, names=NAMES[::-1]),
    ]
    for client in puts:
        client.heard()
    for client in puts:
        client.tell("go")
    assert [client.result() for client in puts] == [[], []]
    check(server, root, NAMES, SLOT_BYTES)


def test_what_is_seen_is_whole(a: Client, b: Client, server: Server, root: str) -> None:
    reader = b.start("read_as_they_come", root=root, names=NAMES, size=BIG)
    reader.heard()
    for name in NAMES:
        assert a.call("write", root=root, name=name, size=BIG) is None
    assert reader.result() == []
    check(server, root, NAMES, BIG)


def test_a_record_that_goes_while_it_is_read(a: Client, b: Client, root: str) -> None:
    a.call("write", root=root, name=NAMES[0], size=2 * BIG)
    reader = b.start("read_in_two", root=root, name=NAMES[0], size=2 * BIG)
    assert reader.heard() == "half"
    a.call("delete", root=root, name=NAMES[0])
    reader.tell("go on")
    found = reader.result()
    assert found is True or found[0] == "FileNotFoundError", found
    assert b.call("size", root=root, name=NAMES[0]) is None


def test_cleaners_tell_a_live_writer_from_a_killed_one(
    a: Client, b: Client, server: Server, root: str
) -> None:
    """On the other client, and on the server's own machine."""
    writer = a.start("hold", root=root, array=ARRAY)
    pid = writer.heard()
    (half,) = files(server, root)
    b.call("clean", root=root)
    Folder(str(server.export / root)).clean()
    a.call("clean", root=root)
    assert files(server, root) == [half], "its writer lives"
    a.call("kill", pid=pid)
    assert writer.result() == signal.SIGKILL
    b.call("clean", root=root)
    assert files(server, root) == []


def test_a_writer_outlives_the_cleaners_of_another_client(
    a: Client, b: Client, server: Server, root: str
) -> None:
    cleaner = b.start("keep_cleaning", root=root)
    cleaner.heard()
    for name in record_names(40):
        assert a.call("write", root=root, name=name, size=100) is None
    cleaner.tell("stop")
    assert cleaner.result() > 0
    check(server, root, record_names(40), 100)


def test_a_full_disk_of_the_server(a: Client, b: Client, server: Server, root: str) -> None:
    assert a.call("write", root=root, name=NAMES[0], size=BIG) is None
    filler = server.fill()
    for size in (BIG, 100):  # past the page cache, and through it
        kind, number, message = a.call("write", root=root, name=NAMES[1], size=size)
        assert (kind, number) == ("OSError", errno.ENOSPC)
        assert NAMES[1] in message
        check(server, root, NAMES[:1], BIG)
    assert b.call("read", root=root, name=NAMES[0], size=BIG) is True
    filler.unlink()
    assert a.call("write", root=root, name=NAMES[1], size=BIG) is None
    check(server, root, NAMES[:2], BIG)


def test_a_server_that_is_killed_and_restarted(a: Client, b: Client, server: Server, root: str) -> None:
    names, size = record_names(401), 65536 + 100
    held = a.start("hold", root=root, array=ARRAY)
    pid = held.heard()
    (half,) = files(server, root)
    writers = [
        client.start("write_until_it_fails", root=root, names=part, size=size)
        for client, part in ((a, names[:200]), (b, names[200:400]))
    ]
    written = [writer.heard() for writer in writers for _ in range(2)]
    server.kill()
    reader = a.start("read", root=root, name=names[-1], size=size)
    for writer in writers:
        while isinstance(message := writer.heard(), str):  # what was on its way
            written.append(message)
        kind, number, text = message["result"]
        assert kind in ("OSError", "TimeoutError"), message
        assert number in (errno.EIO, errno.ETIMEDOUT), message
        assert NAMES[0].partition("/")[0] in text
    (kind, _, _) = reader.result()
    assert kind != "FileNotFoundError", "a server that does not answer is no miss"
    server.start()
    for client, name in ((a, names[0]), (b, names[200])):
        assert client.call("read", root=root, name=name, size=size) is True
    assert a.call("write", root=root, name=names[-1], size=size) is None
    assert b.call("read", root=root, name=names[-1], size=size) is True
    b.call("clean", root=root)
    assert half in files(server, root), "its writer lives, and the restarted server knows"
    a.call("kill", pid=pid)
    held.result()
    # a writer that could not give back its lock while the server was dead keeps its own until it ends
    clean_up(b, server, root, temporary=half)
    left = [name for name in files(server, root) if TEMPORARY not in name]
    assert set(left) >= {*written, names[-1]}
    check_records(server, root, left, size)


def test_a_client_machine_that_dies(a: Client, server: Server, root: str, tmp_path: Path) -> None:
    """Its temporary file can be removed once the server has given up on it."""
    third = Client(3, tmp_path)
    third.wait()
    third.start("hold", root=root, array=ARRAY).heard()
    assert len(files(server, root)) == 1
    third.kill()
    clean_up(a, server, root)
    assert files(server, root) == []
