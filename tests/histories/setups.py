"""What processes share in a run: a folder, a pool, a server, or a store and what one hands to the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from histories.client import DECODE, HANDOFF_S, PREFILL, SHARED, Member
from histories.history import MEMORY, PEER, STORE
from histories.network import Host
from kvkit.lab.testbed.servers import RedisServer, free_ports
from kvkit.tiers.shm.file import pool_path

OWN = {MEMORY: {"capacity": "64KiB"}}
"""Memory of a process's own, which holds a few records: others are evicted."""

SERVER_TIMEOUT_S = 0.3
"""Of requests to a server: shorter than a cut lasts."""

UNUSED_S = 600.0
"""What was handed over stays longer than a run lasts."""

SECRET = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of.

    Attributes:
        members: the parts that processes play, by name.
        hosts: where members live, of those that a link can be cut of.
        late, stale: as in `histories.history.History`.
        server: which may be stopped for a while.
    """

    members: Mapping[str, Member]
    hosts: Mapping[str, Host] = field(default_factory=dict)
    late: bool = False
    stale: bool = False
    server: RedisServer | None = None

    @property
    def last(self) -> Member:
        """Who looks at the store in the end."""
        (tiers, *_) = [member.tiers for member in self.members.values()]
        return Member({STORE: tiers[STORE]}, SHARED)


@contextmanager
def folder(scratch: Path, hosts: Sequence[Host]) -> Iterator[Setup]:
    """Processes over one folder, two of them with memory in front."""
    store = {STORE: {"url": str(scratch / "store")}}
    over = {"c0": store, "c1": OWN | store, "c2": OWN | store}
    yield Setup({name: Member(tiers, SHARED) for name, tiers in over.items()}, stale=True)


@contextmanager
def pool(scratch: Path, hosts: Sequence[Host]) -> Iterator[Setup]:
    """Processes over one pool in shared memory, which has room for all records."""
    url = f"shm://histories-{os.getpid()}"
    store = {STORE: {"url": url, "capacity": "4MiB"}}
    try:
        yield Setup({f"c{number}": Member(store, SHARED) for number in range(3)})
    finally:
        with suppress(FileNotFoundError):
            os.unlink(pool_path(url))


@contextmanager
def server(scratch: Path, hosts: Sequence[Host]) -> Iterator[Setup]:
    """Processes over one Valkey server, each behind a link of its own."""
    place = scratch / "server"
    place.mkdir()
    reachable = ("bind 0.0.0.0", "protected-mode no") if hosts else ()
    with RedisServer(place, "valkey", *reachable) as valkey:
        members = {}
        for number in range(3):
            address = hosts[number].gateway if hosts else "127.0.0.1"
            url = f"redis://{address}:{valkey.port}/0"
            store = {STORE: {"url": url, "timeout_s": SERVER_TIMEOUT_S, "scope": "shared"}}
            members[f"c{number}"] = Member(store if number else OWN | store, SHARED)
        yield Setup(members, dict(zip(members, hosts, strict=False)), late=True, server=valkey)


@contextmanager
def prefill_decode(scratch: Path, hosts: Sequence[Host]) -> Iterator[Setup]:
    """Two that prefill and hand over to one that decodes, over TCP, and a folder that all share."""
    store = {STORE: {"url": str(scratch / "store"), "scope": "shared"}}
    (port,) = free_ports(1)
    limits = {
        "secret": SECRET,
        "allocation_timeout_s": HANDOFF_S,
        "transfer_timeout_s": HANDOFF_S,
        "shutdown_timeout_s": HANDOFF_S,
        "idle_timeout_s": UNUSED_S,
    }
    everywhere = "0.0.0.0" if hosts else "127.0.0.1"
    listening = {"listen": [f"tcp://{everywhere}:{port}"], "buffer": "256KiB", "role": "decode"}
    members = {PEER: Member(OWN | store, DECODE, handoff=limits | listening)}
    for number in range(2):
        address = hosts[number].gateway if hosts else "127.0.0.1"
        sending = {"role": "prefill", "peers": {PEER: f"tcp://{address}:{port}"}}
        # one thread: what one sends, another's transfer would take for its own
        members[f"P{number}"] = Member(store, PREFILL, 1, limits | sending, HANDOFF_S)
    yield Setup(members, dict(zip(("P0", "P1"), hosts, strict=False)), stale=True)


SETUPS: Mapping[str, Callable[[Path, Sequence[Host]], AbstractContextManager[Setup]]] = {
    "folder": folder,
    "pool": pool,
    "server": server,
    "pd": prefill_decode,
}
HOSTS = 3
"""That the set-ups need at most."""
