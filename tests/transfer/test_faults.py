"""A cache over damaged files returns no wrong byte, loses no slot, does not hang, and leaves no litter."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from repository import SUPPORT
from two_tier_caches import make_engine, open_cache, sequence, store
from victim_record import TOKENS, VICTIM, victim_file

from kvkit.cache import Cache
from kvkit.format.record import HEADER, RecordFormat
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.transfer.policy import Policy

# forks of a clean process: quick to start, and torch's threads are not in them
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["test_faults", "fork_server_preload"])


@pytest.fixture(autouse=True)
def preload_finds_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server of Python 3.11 ignores sys.path, and passes over what it cannot import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (Path(__file__).parent, SUPPORT))))


def flip(offset: int) -> Callable[[Path, Engine], None]:
    def harm(file: Path, engine: Engine) -> None:
        data = bytearray(file.read_bytes())
        data[offset] ^= 0x10
        file.write_bytes(data)

    return harm


def regions() -> Iterator[tuple[str, int]]:
    """A byte of every region of a record."""
    layout = small_layout()
    form = RecordFormat.of(layout, 0, small_namespace(layout))
    sums = HEADER.itemsize
    yield from {
        "magic": 0,
        "version": 8,
        "codec": 10,
        "key width": 11,
        "header bytes": 12,
        "group": 16,
        "shape": 20,
        "k size": 36,
        "chunk tokens": 40,
        "reserved": 44,
        "dtype": 48,
        "namespace": 64,
        "record bytes": 96,
        "layers end": 104,
        "parent": 112,
        "key": 144,
        "header checksum": 176,
        "trailer checksum": 184,
        "layer checksum": sums,
        "token ids": sums + 8 * 2,
        "header padding": form.header_bytes - 1,
        "first layer": form.header_bytes,
        "last layer": form.layers_end - 1,
        "padding": form.layers_end,
        "shard index": form.record_bytes - 36,
        "shard index checksum": form.record_bytes - 1,
    }.items()


def truncate(size: int) -> Callable[[Path, Engine], None]:
    return lambda file, engine: os.truncate(file, size)


def foreign_namespace(file: Path, engine: Engine) -> None:
    """Another tenant's record of the same tokens under this one's name."""
    other = Engine(engine.layout, small_namespace(engine.layout, salt="other"))
    elsewhere = file.parent.parent.parent / "other"
    with open_cache(other, elsewhere, memory_slots=0) as cache:
        store(cache, other, sequence(TOKENS))
    file.write_bytes(victim_file(other, sequence(TOKENS), elsewhere).read_bytes())


def colliding_key(file: Path, engine: Engine) -> None:
    """Another chunk's record of the same namespace where the truncated coordinates would put it."""
    elsewhere = file.parent.parent.parent / "collision"
    with open_cache(engine, elsewhere, memory_slots=0) as cache:
        store(cache, engine, sequence(TOKENS, seed=7))
    file.write_bytes(victim_file(engine, sequence(TOKENS, seed=7), elsewhere).read_bytes())


def same_tokens_other_past(file: Path, engine: Engine) -> None:
    """A record of the same chunk after another prefix."""
    elsewhere = file.parent.parent.parent / "past"
    tokens = sequence(TOKENS)
    tokens[:8] += 1
    with open_cache(engine, elsewhere, memory_slots=0) as cache:
        store(cache, engine, tokens)
    file.write_bytes(victim_file(engine, tokens, elsewhere).read_bytes())


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path, Engine], None]:
    def harm(file: Path, engine: Engine) -> None:
        file.unlink()
        make(file)

    return harm


def a_socket(file: Path) -> None:
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{file.name}")  # a path of its own may be too long
    finally:
        os.close(folder)


def a_folder_that_holds_something(file: Path) -> None:
    file.mkdir()
    (file / "c.1.2.0.0.0.0").write_text("somebody's")


def a_link_to_a_record(file: Path) -> None:
    """To what is well, but could be anything."""
    other = min(path for path in file.parent.glob("c.*") if path != file)
    file.symlink_to(other)


HARMS: dict[str, Callable[[Path, Engine], None]] = {
    **{f"bit flipped in {region}": flip(offset) for region, offset in regions()},
    "zero length": truncate(0),
    "one byte": truncate(1),
    "half a header": truncate(2048),
    "header only": truncate(4096),
    "last byte missing": lambda file, engine: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file, engine: os.truncate(file, file.stat().st_size + 4096),
    "a byte longer": lambda file, engine: os.truncate(file, file.stat().st_size + 1),
    "deleted": lambda file, engine: file.unlink(),
    "a folder": in_its_place(Path.mkdir),
    "a folder that holds something": in_its_place(a_folder_that_holds_something),
    "a pipe": in_its_place(os.mkfifo),
    "a socket": in_its_place(a_socket),
    "a link to itself": in_its_place(lambda file: file.symlink_to(file)),
    "a link to nothing": in_its_place(lambda file: file.symlink_to("nowhere")),
    "a link to another record": in_its_place(a_link_to_a_record),
    "a link to a pipe": in_its_place(
        lambda file: (os.mkfifo(file.with_name("pipe")), file.symlink_to("pipe"))
    ),
    "foreign namespace": foreign_namespace,
    "colliding key": colliding_key,
    "same tokens, other past": same_tokens_other_past,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS.keys())
@pytest.mark.parametrize("harmed", ["before opening", "after the lookup"])
def test_a_harmed_record_is_a_miss(harm: Callable[[Path, Engine], None], harmed: str, tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(TOKENS)
    folder = tmp_path / "store"
    with open_cache(engine, folder, memory_slots=0) as cache:
        store(cache, engine, tokens)
    file = victim_file(engine, tokens, folder)
    if harmed == "before opening":
        harm(file, engine)
    with open_cache(engine, folder, memory_slots=0) as cache:
        hit = cache.lookup(tokens)
        if harmed == "after the lookup":
            assert hit.tokens == TOKENS
            harm(file, engine)
        table = engine.table(TOKENS)
        loaded = cache.load(hit, engine.places(table))
        assert loaded.tokens == VICTIM * 8
        engine.assert_loaded(tokens, table, VICTIM)
        assert cache.lookup(tokens).tokens == VICTIM * 8, "the harmed record is gone"
        assert cache.tier_states() == {"disk": "ok"}
        assert not cache.counts().read_errors
        # what is computed anew is stored anew
        store(cache, engine, tokens)
        loaded = cache.load(cache.lookup(tokens), engine.places(table))
        assert loaded.tokens == TOKENS
        engine.assert_loaded(tokens, table, 5)


def test_a_harmed_record_is_sought_in_the_next_tier(tmp_path: Path) -> None:
    from kvkit.tiers.objects import ObjectTier

    engine = make_engine()
    tokens = sequence(TOKENS)
    backup = ObjectTier(str(tmp_path / "b"), name="backup")
    policy = Policy(("disk", "backup"), ("disk", "backup"))
    with open_cache(engine, tmp_path / "a", memory_slots=0, policy=policy, extra=[backup]) as cache:
        store(cache, engine, tokens)
        flip(5000)(victim_file(engine, tokens, tmp_path / "a"), engine)
        table = engine.table(TOKENS)
        loaded = cache.load(cache.lookup(tokens), engine.places(table))
        assert loaded.by_tier == {"disk": 16, "backup": 24}
        engine.assert_loaded(tokens, table, 5)
        assert sum(cache.counts().damaged.values()) == 1


def test_a_full_disk_stores_what_fits_and_loses_nothing(small_disk: Path) -> None:
    engine = Engine(small_layout(), small_namespace(small_layout()), blocks=512)
    tokens = sequence(8 * 200)  # 200 records of 8 KiB on 1 MiB
    with open_cache(engine, small_disk / "store", memory_slots=0) as cache:
        store(cache, engine, tokens)
        assert cache.counts().write_errors["disk"] > 50
        hit = cache.lookup(tokens)
        assert 0 < hit.tokens < len(tokens)
        table = engine.table(len(tokens))
        assert cache.load(hit, engine.places(table)).tokens == hit.tokens
        engine.assert_loaded(tokens, table, hit.tokens // 8)
    assert cache.staging.free == cache.staging.slots
    assert not list(small_disk.rglob(".tmp-*"))


def test_a_read_only_store_serves_reads(small_disk: Path) -> None:
    engine = make_engine()
    tokens, more = sequence(16), sequence(16, seed=1)
    folder = small_disk / "store"
    with open_cache(engine, folder, memory_slots=0) as cache:
        store(cache, engine, tokens)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with open_cache(engine, folder, memory_slots=0) as cache:
        store(cache, engine, more)
        assert cache.counts().write_errors == {"disk": 2}
        assert cache.lookup(more).tokens == 0
        table = engine.table(16)
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 16
        engine.assert_loaded(tokens, table, 2)
    assert cache.staging.free == cache.staging.slots


def test_a_harmed_record_that_cannot_be_deleted_is_still_a_miss(small_disk: Path) -> None:
    engine = make_engine()
    tokens = sequence(TOKENS)
    folder = small_disk / "store"
    with open_cache(engine, folder, memory_slots=0) as cache:
        store(cache, engine, tokens)
    flip(5000)(victim_file(engine, tokens, folder), engine)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with open_cache(engine, folder, memory_slots=0) as cache:
        table = engine.table(TOKENS)
        assert cache.lookup(tokens).tokens == TOKENS
        for _ in range(2):
            assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == VICTIM * 8
            assert cache.lookup(tokens).tokens == VICTIM * 8, "it is a hit again"
        engine.assert_loaded(tokens, table, VICTIM)
        store(cache, engine, tokens)
        assert cache.counts().write_errors == {"disk": 1}, "what lies there was taken for the record"
        assert sum(cache.counts().damaged.values()) == 1
        assert cache.tier_states() == {"disk": "ok"}


def _store_for_ever(folder: Path, seed: int, started: Connection) -> None:
    """In a process to be killed: store one sequence after the other, and report each."""
    engine = make_engine()
    cache = open_cache(engine, folder, memory_slots=2, slots=6)
    for number in range(10_000):
        tokens = sequence(TOKENS, seed=seed * 10_000 + number)
        table = engine.table(TOKENS)
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        started.send(number)


def _check_store(cache: Cache, engine: Engine, seeds: range) -> int:
    """Load every sequence; whatever is there is right. Returns the tokens found."""
    found = 0
    table = engine.table(TOKENS)
    for seed in seeds:
        tokens = sequence(TOKENS, seed=seed)
        engine.wipe()
        loaded = cache.load(cache.lookup(tokens), engine.places(table))
        engine.assert_loaded(tokens, table, loaded.tokens // 8)
        found += loaded.tokens
    return found


def test_kill_9_during_stores(tmp_path: Path) -> None:
    """60 rounds; a process is killed after a random number of stores, most likely within one."""
    engine = make_engine()
    pick = random.Random(0)
    found = 0
    for seed in range(60):
        mine, theirs = PROCESSES.Pipe(duplex=False)
        writer = PROCESSES.Process(target=_store_for_ever, args=(tmp_path, seed, theirs), daemon=True)
        writer.start()
        theirs.close()
        last = -1
        for _ in range(pick.randint(1, 6)):
            assert mine.poll(60), "the writer hangs"
            last = mine.recv()
        for _ in range(pick.randint(0, 20_000)):  # a random instant, without a clock
            pass
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        assert writer.exitcode == -signal.SIGKILL
        with open_cache(engine, tmp_path, memory_slots=2, slots=6) as cache:
            assert not list(tmp_path.rglob(".tmp-*")), "a temporary file outlived its writer"
            found += _check_store(cache, engine, range(seed * 10_000, seed * 10_000 + last + 2))
            cache.check_integrity()
            assert cache.counts().damaged == {}, "a record became visible before it was complete"
    assert found > 60 * TOKENS


def _store_and_load(folder: Path, seed: int, done: Connection) -> None:
    engine = make_engine()
    with open_cache(engine, folder, memory_slots=0, slots=6) as cache:
        for number in range(40):
            tokens = sequence(TOKENS, seed=number % 7)
            table = engine.table(TOKENS)
            engine.compute(tokens, table)
            cache.store(tokens, engine.places(table))
            engine.wipe()
            loaded = cache.load(cache.lookup(tokens), engine.places(table))
            engine.assert_loaded(tokens, table, loaded.tokens // 8)
        cache.flush()
        assert _check_store(cache, engine, range(7)) == 7 * TOKENS
        assert cache.counts().damaged == {}
        assert not cache.counts().write_errors
    done.send("done")


def test_two_processes_store_and_load_the_same_keys(tmp_path: Path) -> None:
    running = []
    for seed in range(2):
        mine, theirs = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=_store_and_load, args=(tmp_path, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, mine))
    for process, mine in running:
        assert mine.poll(120), "a process hangs"
        assert mine.recv() == "done"
        process.join(60)
        assert process.exitcode == 0
    assert not list(tmp_path.rglob(".tmp-*"))
