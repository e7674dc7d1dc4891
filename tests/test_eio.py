"""A disk that dies under a cache and comes back: calls fail with EIO (tests/eio.c), in a child process."""

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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_cache import make_engine, open_cache, sequence, store

from kvkit import access
from kvkit.policy import Policy
from kvkit.staging import Staging
from kvkit.testing import DEADLINE_S, SLOT_BYTES, SLOTS, get, put, record_bytes, record_names
from kvkit.tiers.files import TEMPORARY
from kvkit.tiers.health import FAILURES_TO_PAUSE, PAUSES_S
from kvkit.tiers.objects import ObjectTier

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Calls a function in a process whose disks `failing` breaks. Building that takes a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None and not os.environ.get("CI"):
        pytest.skip("there is no cc to build tests/eio.c")
    assert compiler is not None, "there is no cc to build tests/eio.c"
    library = tmp_path_factory.mktemp("eio") / "eio.so"
    source = Path(__file__).with_name("eio.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("LD_PRELOAD", str(library))
            process.submit(os.getpid).result(DEADLINE_S)
        yield lambda function, *arguments: process.submit(function, *arguments).result(DEADLINE_S)


def disks(folder: Path) -> list[ObjectTier]:
    return [ObjectTier(str(folder / name), name=name, fsync=True) for name in ("broken", "sound")]


@contextmanager
def failing(call: str, folder: Path, after: int = 0) -> Iterator[None]:
    """`call` fails on the files below `folder`, but for the first `after` times; once at least."""
    library = ctypes.CDLL(None)
    library.eio_start(call.encode(), os.fsencode(folder.resolve()), after)
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
    tier = ObjectTier(str(folder), fsync=True)
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
    engine, tokens = make_engine(), sequence(40)
    table = engine.table(40)
    policy = Policy(("broken", *others), ("broken", "sound"))
    with (
        open_cache(engine, None, memory_slots=0, policy=policy, extra=disks(folder)) as cache,
        pytest.MonkeyPatch.context() as patch,
    ):

        def load(source: str, chunks: int) -> None:
            """A lookup and a load: the disk that was believed to hold them, and the chunks that came."""
            engine.wipe()
            hit = cache.lookup(tokens)
            assert hit.by_tier == ({source: 40} if source else {})
            assert cache.load(hit, engine.places(table)).tokens == chunks * 8
            engine.assert_loaded(tokens, table, chunks)

        store(cache, engine, tokens)
        elsewhere = 5 if others else 0
        with failing("preadv2", folder / "broken"):
            for count in range(1, FAILURES_TO_PAUSE + 1):
                assert cache.tier_states()["broken"] == "ok"
                load("broken", elsewhere)
                assert cache.counts().read_errors == {"broken": count}
            assert cache.tier_states() == {"broken": "open", "sound": "ok"}
            load("".join(others), elsewhere)
            assert cache.counts().read_errors == {"broken": FAILURES_TO_PAUSE}, "it was asked"
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + PAUSES_S[0])
        patch.setattr(access, "time", later)
        assert cache.tier_states()["broken"] == "half-open"
        load("broken", 5)
        assert cache.tier_states() == {"broken": "ok", "sound": "ok"}
        assert not cache.counts().damaged, "an error is no damage, for which records are deleted"
        cache.check_integrity()
    assert cache.staging.free == cache.staging.slots
