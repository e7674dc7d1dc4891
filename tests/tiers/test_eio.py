"""A cache survives a disk that dies and comes back, and a file that cannot be read.

Calls fail with EIO by tests/support/eio.c.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from repository import SUPPORT
from two_tier_caches import make_engine, open_cache, sequence, store

from kvkit.cache import Cache
from kvkit.format.record import Damage
from kvkit.staging import Staging
from kvkit.tiers.folder import TEMPORARY, Folder
from kvkit.tiers.health import FAILURES_TO_PAUSE, PAUSES_S
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import DEADLINE_S, SLOT_BYTES, SLOTS, get, put, record_bytes, record_names
from kvkit.transfer import tier_set
from kvkit.transfer.policy import Policy

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Calls a function in a process whose disks `failing` breaks. Building that takes a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None and not os.environ.get("CI"):
        pytest.skip("there is no cc to build tests/support/eio.c")
    assert compiler is not None, "there is no cc to build tests/support/eio.c"
    library = tmp_path_factory.mktemp("eio") / "eio.so"
    subprocess.run(
        [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SUPPORT / "eio.c"], check=True
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("LD_PRELOAD", str(library))
            process.submit(os.getpid).result(DEADLINE_S)
        yield lambda function, *arguments: process.submit(function, *arguments).result(DEADLINE_S)


def disks(folder: Path) -> list[ObjectTier]:
    return [
        ObjectTier(TierConfig(url=str(folder / name), fsync=True), name=name) for name in ("broken", "sound")
    ]


@contextmanager
def failing(call: str, path: Path, after: int = 0) -> Iterator[None]:
    """`call` fails on `path` and the files below it, but for the first `after` times; once at least."""
    library = ctypes.CDLL(None)
    library.eio_start(call.encode(), os.fsencode(path.resolve()), after)
    try:
        yield
    finally:
        failures = library.eio_stop()
    assert failures, f"{call} was not called, and nothing is proven"


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_put_that_fails_says_so_once(call: str, after: int, run: Run, tmp_path: Path) -> None:
    run(puts_that_fail, call, after, tmp_path)


def puts_that_fail(call: str, after: int, folder: Path) -> None:
    names, staging = record_names(8), Staging(SLOT_BYTES, SLOTS)
    tier = ObjectTier(TierConfig(url=str(folder), fsync=True))
    with failing(call, folder, after):
        errors = put(tier, staging, names)
    assert {(error.errno, error.filename) for error in errors if error is not None} <= {
        (errno.EIO, name) for name in names
    }
    failed = [name for name, error in zip(names, errors, strict=True) if error is not None]
    assert failed
    assert not list(folder.rglob(f"*{TEMPORARY}*")), "litter"
    for name, error in zip(names, errors, strict=True):
        (found,) = get(tier, staging, [name])
        if isinstance(found, OSError):
            assert error is not None
            assert found.errno == errno.ENOENT, "half a record is there"
        else:  # also where the name alone could not be made durable
            assert np.array_equal(found, record_bytes(name))
    assert put(tier, staging, failed) == [None] * len(failed), "the disk works again"
    for name, found in zip(names, get(tier, staging, names), strict=True):
        assert np.array_equal(found, record_bytes(name))
    tier.close()
    staging.check_integrity()
    assert staging.free == SLOTS


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_store_to_a_disk_that_fails_reaches_the_others(call: str, run: Run, tmp_path: Path) -> None:
    run(stores_that_fail, call, tmp_path)


def stores_that_fail(call: str, folder: Path) -> None:
    engine, tokens = make_engine(), sequence(40)
    table = engine.table(40)
    policy = Policy(("broken", "sound"), ("broken", "sound"))
    with open_cache(engine, None, memory_slots=0, policy=policy, extra=disks(folder)) as cache:
        with failing(call, folder / "broken"):
            store(cache, engine, tokens)
        assert cache.counts().write_errors == {"broken": 5}
        assert cache.counts().stored_records == {"sound": 5}
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 40
        engine.assert_loaded(tokens, table, 5)
        store(cache, engine, tokens)
        assert cache.lookup(tokens).by_tier == {"broken": 40}
        assert cache.counts().write_errors == {"broken": 5}, "reported again"
        cache.check_integrity()
    assert cache.staging.free == cache.staging.slots


@pytest.mark.parametrize("others", [(), ("sound",)])
def test_reads_that_fail_are_misses_until_the_disk_is_back(
    others: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    run(reads_that_fail, others, tmp_path)


def reads_that_fail(others: tuple[str, ...], folder: Path) -> None:
    engine = make_engine()
    prompts = [sequence(40, seed) for seed in range(FAILURES_TO_PAUSE + 1)]
    table = engine.table(40)
    policy = Policy(("broken", *others), ("broken", "sound"))
    with (
        open_cache(engine, None, memory_slots=0, policy=policy, extra=disks(folder)) as cache,
        pytest.MonkeyPatch.context() as patch,
    ):

        def load(tokens: np.ndarray, source: str, chunks: int) -> None:
            """A lookup and a load: the disk that was believed to hold them, and the chunks that came."""
            engine.wipe()
            hit = cache.lookup(tokens)
            assert hit.by_tier == ({source: 40} if source else {})
            assert cache.load(hit, engine.places(table)).tokens == chunks * 8
            engine.assert_loaded(tokens, table, chunks)

        for tokens in prompts:
            store(cache, engine, tokens)
        elsewhere = 5 if others else 0
        *failed, last = prompts
        with failing("preadv2", folder / "broken"):
            for count, tokens in enumerate(failed, 1):
                assert cache.tier_states()["broken"] == "ok"
                load(tokens, "broken", elsewhere)
                assert cache.counts().damaged == {("broken", Damage.UNREADABLE): count}
            assert cache.tier_states() == {"broken": "open", "sound": "ok"}
            load(last, "".join(others), elsewhere)
            assert sum(cache.counts().damaged.values()) == FAILURES_TO_PAUSE, "it was asked"
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + PAUSES_S[0])
        patch.setattr(tier_set, "time", later)
        assert cache.tier_states()["broken"] == "half-open"
        load(last, "broken", 5)
        assert cache.tier_states() == {"broken": "ok", "sound": "ok"}
        assert not cache.counts().read_errors
        assert len(list((folder / "broken").rglob("c.*"))) == 5 * len(prompts) - FAILURES_TO_PAUSE, (
            "what the disk was to blame for was deleted"
        )
        cache.check_integrity()
    assert cache.staging.free == cache.staging.slots


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layers"])
@pytest.mark.parametrize("fault", ["EIO", "EACCES"])
def test_one_record_that_cannot_be_read_is_stored_anew_and_costs_no_other_a_hit(
    fault: str, layerwise: bool, run: Run, tmp_path: Path
) -> None:
    run(one_bad_record, fault, layerwise, tmp_path)


def one_bad_record(fault: str, layerwise: bool, folder: Path) -> None:
    engine, tokens, others = make_engine(), sequence(40), sequence(40, 1)
    table = engine.table(40)
    if fault == "EACCES":
        obey_modes()

    def load(cache: Cache, tokens: np.ndarray, chunks: int) -> None:
        engine.wipe()
        hit = cache.lookup(tokens)
        if layerwise:
            layers = cache.load_layers(hit, engine.places(table))
            list(layers)
            assert layers.loaded.tokens == chunks * 8
        else:
            assert cache.load(hit, engine.places(table)).tokens == chunks * 8
            engine.assert_loaded(tokens, table, chunks)

    with open_cache(engine, folder, memory_slots=0) as cache:
        store(cache, engine, tokens)
        store(cache, engine, others)
        stale = cache.lookup(tokens)
        bad = folder / stale.chunks.names[0]
        if fault == "EACCES":
            bad.chmod(0)
        with failing("preadv2", bad) if fault == "EIO" else nullcontext():
            load(cache, tokens, 0)
            for _ in range(2 * FAILURES_TO_PAUSE):  # by who looked it up before, too
                assert cache.load(stale, engine.places(table)).tokens == 0
                assert cache.lookup(tokens).tokens == 0, "it is a hit again"
            assert cache.tier_states() == {"disk": "ok"}
            for _ in range(99):
                load(cache, others, 5)
        assert cache.counts().damaged == {("disk", Damage.UNREADABLE): 1}
        store(cache, engine, tokens)
        load(cache, tokens, 5)
        cache.check_integrity()


def obey_modes() -> None:
    """Have this thread, and those that it starts, obey the modes of files, root or not."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0


def test_a_file_that_cannot_be_looked_at_does_not_end_a_scan(run: Run, tmp_path: Path) -> None:
    run(scans_past_a_bad_file, tmp_path)


def scans_past_a_bad_file(root: Path) -> None:
    names, folder = record_names(3), Folder(str(root))
    for name in names:
        folder.write(name, memoryview(record_bytes(name)))
    with failing("lstat", root / names[1]):
        assert {name for name, _ in folder.scan()} == {names[0], names[2]}
