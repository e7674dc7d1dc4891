"""Clusters of real Redis or Valkey servers, which divide the hash slots among them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import redis

from kvkit.lab.testbed.servers import RedisServer, free_ports
from kvkit.lab.testbed.waiting import wait_for

SLOTS = 16384


class Cluster:
    """Three servers and `replicas` more, which copy the first ones; a context manager."""

    def __init__(
        self,
        folder: Path,
        kind: Literal["redis", "valkey"],
        *settings: str,
        replicas: int = 0,
        address: str = "127.0.0.1",
    ) -> None:
        self._address = address
        self.servers: list[RedisServer] = []
        self.buses: list[int] = []
        self._replicas = replicas
        self._stack = ExitStack()
        for number in range(3 + replicas):
            (folder / str(number)).mkdir(parents=True)
            (bus,) = free_ports(1)
            own = ["cluster-enabled yes", "cluster-require-full-coverage no"]
            # a busy machine must not look like a dead server, unless a replica is to notice one
            own += [f"cluster-node-timeout {3_000 if replicas else 30_000}"]
            own += [f"cluster-port {bus}"] if kind == "valkey" else []
            self.servers.append(RedisServer(folder / str(number), kind, *own, *settings, address=address))
            self.buses.append(bus)
        self.kind = kind
        self.url = "redis+cluster://" + ",".join(f"{address}:{s.port}" for s in self.servers[:2])

    def __enter__(self) -> Self:
        for server in self.servers:
            self._stack.enter_context(server)
        first = self.call(0)
        for number, server in enumerate(self.servers):
            if number < 3:
                slots = range(number * SLOTS // 3, (number + 1) * SLOTS // 3)
                self.call(number).execute_command("CLUSTER ADDSLOTS", *slots)
            self.call(number).execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number:
                bus = [self.buses[number]] if self.kind == "valkey" else []
                first.execute_command("CLUSTER MEET", self._address, server.port, *bus)
        wait_for(lambda: all(self.knows_all(i) for i in range(len(self.servers))))
        for number in range(self._replicas):
            primary = self.call(number).execute_command("CLUSTER MYID").decode()
            self.call(3 + number).execute_command("CLUSTER REPLICATE", primary)
            copy = self.call(3 + number)
            wait_for(partial(_has_copied, copy))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def call(self, number: int) -> redis.Redis:
        """Return a client of one server."""
        return redis.Redis(self._address, self.servers[number].port, protocol=2)

    def knows_all(self, number: int) -> bool:
        """Return whether a server knows all others and who has which slots."""
        found = self.call(number).execute_command("CLUSTER INFO")
        wanted = {
            "cluster_state": "ok",
            "cluster_slots_ok": str(SLOTS),
            "cluster_known_nodes": str(len(self.servers)),
        }
        return all(found[name] == value for name, value in wanted.items())

    def owner(self, key: str) -> int:
        """Return the number of the server that has a key's slot."""
        slot = int(self.call(0).execute_command("CLUSTER KEYSLOT", key))
        return next(i for i in range(3) if slot < (i + 1) * SLOTS // 3)

    def move(self, key: str, target: int, complete: bool = True) -> None:
        """Move a key's slot, and the key, to another server; not `complete`: up to the point of asking."""
        source, slot = self.owner(key), int(self.call(0).execute_command("CLUSTER KEYSLOT", key))
        ids = {i: self.call(i).execute_command("CLUSTER MYID").decode() for i in (source, target)}
        self.call(target).execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
        self.call(source).execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        address = self._address, self.servers[target].port
        self.call(source).execute_command("MIGRATE", *address, key, 0, 5000)
        for number in range(3) if complete else ():
            self.call(number).execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])


def _has_copied(replica: redis.Redis) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")
