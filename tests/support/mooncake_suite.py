"""The tier on Mooncake Store: the contract on a real master, which dies and hangs, as do who give memory.

Run by tests/tiers/test_mooncake.py, in a network of its own: Mooncake's ports are open to whoever reaches
them.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake.store import MooncakeDistributedStore
from remote_tiers import finish, same

from kvkit.config import load_config, open_cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout
from kvkit.lab.testbed.mooncake import GIVEN, Giver, Master
from kvkit.lab.testbed.servers import Process
from kvkit.lab.testbed.waiting import wait_for
from kvkit.observe.inspect import list_tier
from kvkit.staging import Staging, release_all
from kvkit.tiers import mooncake
from kvkit.tiers.base import Tier, TierError, TierFull
from kvkit.tiers.mooncake import PREFIX, MooncakeTier
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    SLOT_BYTES,
    SLOTS,
    Completions,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)

LIMITS = (
    "MC_RPC_TIMEOUT_MS",
    "MC_RPC_CONNECT_TIMEOUT_MS",
    "MC_TCP_STATUS_TIMEOUT_SEC",
    "MC_TCP_PROGRESS_TIMEOUT_SEC",
)
TIMEOUT_S = 0.5


def halt(process: Process) -> None:
    """Stop it and wait until none of its threads runs: an answer takes no longer than the signal does."""
    process.stop()
    tasks = Path(f"/proc/{process.pid}/task")
    wait_for(
        lambda: {(t / "stat").read_text().rpartition(")")[2].split()[0] for t in tasks.iterdir()} == {"T"}
    )


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master that no test harms, and one who gives memory."""
    with (
        Master(tmp_path_factory.mktemp("master")) as master,
        Giver(tmp_path_factory.mktemp("giver"), master),
    ):
        yield master


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path) as master:
        yield master


@pytest.fixture
def giver(tmp_path: Path, master: Master) -> Iterator[Giver]:
    folder = tmp_path / "giver"
    folder.mkdir()
    with Giver(folder, master) as giver:
        yield giver


@pytest.fixture(autouse=True)
def limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tier of a process sets Mooncake's limits in the environment; here, the first of a test."""
    for name in LIMITS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Kept:
    """A client that is set up once: closing one takes Mooncake a second."""

    def __init__(self) -> None:
        self.client = MooncakeDistributedStore()
        self._set_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def setup(self, settings: dict[str, str]) -> int:
        code = 0 if self._set_up else int(self.client.setup(settings))
        self._set_up = True
        return code

    def close(self) -> None:
        pass

    def tier(self, master: Master, staging: Staging, registers: bool = False) -> MooncakeTier:
        """One that has this client, and an empty pool."""
        tier = master.tier(staging)
        tier._new_store = lambda: self
        tier._uses_rdma = registers
        tier.delete([name for name, _ in tier.scan()])
        return tier


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.client.close()


class TestPool(TierContract):
    """A client that gives no memory of its own."""

    @pytest.fixture
    def tier(self, steady: Master, kept: Kept, staging: Staging) -> Tier:
        return kept.tier(steady, staging)


class TestPoolWithRegisteredSlots(TierContract):
    """As RDMA needs them; here there is none."""

    @pytest.fixture
    def tier(self, steady: Master, kept: Kept, staging: Staging) -> Tier:
        return kept.tier(steady, staging, registers=True)


def test_two_clients_share_what_one_gives(master: Master, staging: Staging) -> None:
    """The memory that a client gave goes with it, and what lay there."""
    near, far = master.tier(staging, GIVEN), master.tier(staging)
    names = record_names(12)
    assert put(far, staging, names) == [None] * 12
    assert near.match_prefix(names) == far.match_prefix(names) == 12
    assert all(same(found, name) for found, name in zip(get(near, staging, names), names, strict=True))
    near.delete(names[3:4])  # just read, so that it has a lease
    assert far.match_prefix(names) == 3
    near.close()
    assert far.match_prefix(names) == 0
    assert isinstance(get(far, staging, names[:1])[0], FileNotFoundError)
    finish(far, staging)


def test_only_its_own_keys(steady: Master, kept: Kept, staging: Staging) -> None:
    """Others may use the same pool; a long run takes several round trips."""
    tier = kept.tier(steady, staging)
    names = record_names(1100)
    (lease,) = staging.acquire(1, DEADLINE_S)
    others = ["another's", names[1], f"{PREFIX}no record"]
    keys = [f"{PREFIX}{name}" for name in names[:1050]]
    with tier._client() as store:
        count = len(keys) + len(others)
        codes = store.batch_put_from(keys + others, [lease.array.ctypes.data] * count, [8] * count)
    lease.release()
    assert codes == [0] * count
    assert tier.match_prefix(names) == 1050
    tier.delete([names[700]])
    assert tier.match_prefix(names) == 700
    assert dict(tier.scan()) == {name: 8 for name in names[:1050] if name != names[700]}
    tier.delete(names)
    assert list(tier.scan()) == []
    assert set(steady.asked("get_all_keys").split("\n")) >= set(others)
    finish(tier, staging)


def test_it_opens_without_its_master_and_has_an_end(tmp_path: Path) -> None:
    """Until there is a master, an error; beyond the memory that was given, another."""
    master = Master(tmp_path)
    staging = Staging(GIVEN + 4096, 2)
    tier = master.tier(staging, GIVEN)
    names = record_names(2)
    with pytest.raises(TierError, match=rf"the master 127.0.0.1:{master.port}: .* refused"):
        tier.match_prefix(names)
    assert isinstance(put(tier, staging, names[:1])[0], TierError)
    with pytest.raises(TierError, match="cannot be listed"):
        list(tier.scan())
    with master:
        assert put(tier, staging, names[:1]) == [None]
        assert tier.match_prefix(names) == 1
        # for which the master may evict the first
        assert isinstance(put(tier, staging, names[1:], GIVEN + 4096)[0], TierFull)
        finish(tier, staging)


def test_the_master_is_killed_amid_a_load_and_comes_back(
    master: Master, giver: Giver, staging: Staging
) -> None:
    """Each record is right or an error; a new master knows nothing, and the pool fills again."""
    tier = master.tier(staging, threads=1, timeout_s=TIMEOUT_S)
    names = record_names(16)
    assert put(tier, staging, names) == [None] * 16
    leases = staging.acquire(16, DEADLINE_S, at_least=16)
    errors: dict[str, BaseException | None] = {}
    done = Completions()

    def on_complete(name: str, error: BaseException | None) -> None:
        if not errors:
            master.kill()
        errors[name] = error
        done(name, error)

    tier.get(names, leases, on_complete)
    done.wait(16)
    for name, lease in zip(names, leases, strict=True):
        assert isinstance(errors[name], TierError) or np.array_equal(lease.record, record_bytes(name))
    assert any("the master cannot be reached" in str(error) for error in errors.values())
    release_all(leases)
    master.start()
    wait_for(lambda: put(tier, staging, names[:2]) == [None] * 2)
    assert tier.match_prefix(names) == 2
    assert same(get(tier, staging, names[:1])[0], names[0])
    finish(tier, staging)


def test_a_master_that_hangs(master: Master, giver: Giver, staging: Staging) -> None:
    tier = master.tier(staging, timeout_s=TIMEOUT_S)
    names = record_names(2)
    assert put(tier, staging, names[:1]) == [None]
    halt(master)
    with pytest.raises(TierError, match="the master does not answer"):
        tier.match_prefix(names)
    (error,) = get(tier, staging, names[:1])
    assert isinstance(error, TierError)
    assert "does not answer" in str(error)
    master.resume()
    assert same(get(tier, staging, names[:1])[0], names[0])
    finish(tier, staging)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_who_gave_the_memory_is_gone(
    how: str,
    master: Master,
    giver: Giver,
    staging: Staging,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master still says that it has them. Where a transfer may go on, the client goes before the slot."""
    tier = master.tier(staging, timeout_s=TIMEOUT_S)
    names = record_names(3)
    assert put(tier, staging, names[:2]) == [None] * 2
    if how == "killed":
        giver.kill()
    else:
        halt(giver)
        monkeypatch.setattr(mooncake, "_TRANSFER_TIMEOUT_S", TIMEOUT_S)
    assert tier.match_prefix(names) == 2
    client = tier._store
    for error in get(tier, staging, names[:2]):
        assert isinstance(error, TierError)
        assert "the machine that holds it cannot be reached" in str(error)
    assert tier._store is (client if how == "killed" else None)
    giver.kill()  # Mooncake waits a minute for a machine that hangs when it first meets it
    with Giver(tmp_path_factory.mktemp("other"), master):
        assert put(tier, staging, names[2:]) == [None]
        assert same(get(tier, staging, names[2:])[0], names[2])
        finish(tier, staging)


def test_a_cache_computes_what_the_pool_lost(master: Master, giver: Giver) -> None:
    layout = small_layout()
    tiers = {"pool": {"url": master.url, "timeout_s": TIMEOUT_S}}
    config = load_config(chunk_tokens=8, staging="64KiB", tiers=tiers)
    engine = Engine(layout, config.namespace(layout, model="m", dtype="float32"))
    tokens = np.arange(24, dtype=np.int32)
    places = engine.places(engine.table(24))
    with open_cache(config, layout, engine.namespace) as cache:
        assert cache.tiers["pool"].scope == "shared"
        engine.compute(tokens, engine.table(24))
        cache.store(tokens, places)
        cache.flush()
        engine.wipe()
        assert cache.load(cache.lookup(tokens), places).by_tier == {"pool": 24}
        engine.assert_loaded(tokens, engine.table(24), 3)
        engine.wipe()
        hit = cache.lookup(tokens)
        giver.kill()
        assert hit.tokens == 24
        assert cache.load(hit, places).tokens == 0
        cache.check_integrity()


def test_a_pool_is_listed(master: Master, giver: Giver) -> None:
    layout = small_layout()
    pool = {"url": master.url, "options": {"metrics_port": master.metrics_port}}
    config = load_config(chunk_tokens=8, staging="64KiB", tiers={"pool": pool})
    engine = Engine(layout, config.namespace(layout, model="m", dtype="float32"))
    tokens = np.arange(24, dtype=np.int32)
    with open_cache(config, layout, engine.namespace) as cache:
        engine.compute(tokens, engine.table(24))
        cache.store(tokens, engine.places(engine.table(24)))
        cache.flush()
    (listing,) = (listing for listing, done in list_tier("pool", config.tiers["pool"]) if done)
    assert (listing.chunks, listing.tokens, listing.damaged) == (3, 24, [])


def test_closing_while_others_ask(steady: Master, staging: Staging) -> None:
    """A client that is used after its end takes the process with it."""
    tier = steady.tier(staging)
    names = record_names(4)
    put(tier, staging, names)
    errors: list[BaseException] = []
    asked = threading.Barrier(5)

    def ask() -> None:
        tier.match_prefix(names)
        asked.wait(DEADLINE_S)
        try:
            while True:
                tier.match_prefix(names)
                tier.size(names[0])
        except TierError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    asked.wait(DEADLINE_S)
    finish(tier, staging)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [str(error) for error in errors] == ["tier 'mooncake' is closed"] * 4


def test_nobody_reaches_the_slots(steady: Master, kept: Kept, staging: Staging) -> None:
    """With TCP a client's port gives whoever asks what is registered with Mooncake; the slots are not."""
    tier = kept.tier(steady, staging)
    put(tier, staging, record_names(SLOTS))
    staging.arrays[0][:] = 66
    answers = []
    for port in own_ports():
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock, suppress(ConnectionError):
            sock.sendall(struct.pack("<QQQ", 16, staging.arrays[0].ctypes.data, 0))
            sock.shutdown(socket.SHUT_WR)
            answers.append(sock.recv(16))
    assert answers
    assert b"B" * 16 not in answers
    finish(tier, staging)


def own_ports() -> set[int]:
    """Where this process listens."""
    inodes = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    }


def test_closing_leaves_no_thread(steady: Master) -> None:
    """But for those that Mooncake has once for the process."""

    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    def use() -> None:
        staging = Staging(SLOT_BYTES, 4)
        tier = steady.tier(staging)
        put(tier, staging, record_names(1))
        finish(tier, staging)

    use()
    before = tasks()
    use()
    wait_for(lambda: tasks() <= before)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvkit")]
