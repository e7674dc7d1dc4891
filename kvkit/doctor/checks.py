"""Checks of `kvkit doctor`: the kernels of the CPU, and a record in every tier."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from pydantic import ByteSize

from kvkit.config import Config
from kvkit.format import record
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.names import quantised_name
from kvkit.format.record import RecordFormat
from kvkit.format.urls import hide
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import OnComplete, Tier
from kvkit.tiers.registry import FOLDERS, TIERS, kind_of
from kvkit.tiers.settings import TierConfig, open_tier
from kvkit.tiers.shm.file import pool_path
from kvkit.workers import within

OPEN_S, COMPILE_S = 60.0, 600.0
"""Timeouts in seconds: a tier lists its records while it opens, and kernels may have to be compiled."""
SMALL_BYTES = 4 << 20
"""Maximum capacity of a tier in memory during a check."""
LAYOUT = KVLayout(
    (LayerGroup((0, 1, 2, 3), kv_heads=4, k_size=64, v_size=64, dtype="float16", block_tokens=16),)
)
FORMAT = RecordFormat.of(
    LAYOUT, 0, Namespace("kvkit doctor", layout=LAYOUT.fingerprint(), dtype="float16", chunk_tokens=32)
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        name: name of the checked part, such as "tiers.disk".
        error: failed step and reason; "": the check passed.
        seconds: duration of each successful step, in order.
        warnings: warnings of the library during the check.
        notes: further information.
    """

    name: str
    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _Steps:
    """Steps of one check, with their durations and the error of a failed one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.error = ""

    def run(self, name: str, step: Callable[[], T], limit_s: float) -> T:
        """Run a step; after a timeout it continues in a daemon thread.
        Raises what the step raises; `error` then names the step and the reason."""
        start = time.monotonic()
        try:
            result = within(limit_s, step, "kvkit-doctor")
        except Exception as error:  # a tier's library may raise any type
            timed_out = isinstance(error, TimeoutError) and not str(error)
            reason = f"no answer within {limit_s:g} s" if timed_out else str(error) or type(error).__name__
            self.error = f"{name}: {reason}"
            raise
        self.seconds[name] = time.monotonic() - start
        return result


def check_kernels() -> Finding:
    """Pack and unpack pages on the CPU; the notes name the folder of compiled kernels."""
    steps = _Steps()
    notes: list[str] = []
    with _warnings() as warnings, suppress(Exception):
        folder = steps.run("pack and unpack", _move_pages, COMPILE_S)
        notes.append(f"compiled kernels are in {folder}" if folder else "each process compiles kernels anew")
    return Finding("kernels on the CPU", steps.error, steps.seconds, tuple(warnings), tuple(notes))


def _move_pages() -> str | None:
    """Move KV to a record and back; return numba's cache folder.
    Raises ValueError if the unpacked KV differs."""
    from kvkit.kernels.pages import numba
    from kvkit.kernels.pages.api import Pages, pack, unpack

    group, blocks = LAYOUT.groups[0], np.array([[2, 1]])
    source, target = group.pages(3), group.pages(3)
    for layer in source:
        layer.normal_()
    payload = np.zeros(group.chunk_bytes(FORMAT.namespace.chunk_tokens), np.uint8)
    pack(Pages.of(group, source), [payload], blocks=blocks)
    unpack(Pages.of(group, target), [payload], blocks=blocks)
    if not all(bool((a[1:] == b[1:]).all()) for a, b in zip(source, target, strict=True)):
        raise ValueError("the unpacked KV differs from the packed KV")
    folder: str | None = numba.move_rows.stats.cache_path  # type: ignore[attr-defined]
    return folder


def check_tiers(config: Config) -> Iterator[Finding]:
    """Put, get and delete a record of 128 KiB in every tier, on each path of a tier with several.

    Nothing is evicted. A tier where the policy stores nothing gets only a lookup.
    """
    policy = config.resolved_policy()
    for name, tier in config.tiers.items():
        stored = name in policy.store_to or name in policy.write_back_to
        several = tier.kind is None and len(tier.urls) > 1 and tier.spread != "stripe"
        for i, path in enumerate(map(tier.at_url, range(len(tier.urls))) if several else [tier]):
            yield _check_tier(f"{name}[{i}]" if several else name, path, stored, config.timeout_s)


def _check_tier(name: str, config: TierConfig, stored: bool, timeout_s: float) -> Finding:
    steps = _Steps()
    with _warnings() as warnings, suppress(Exception):
        _run_steps(steps, name, config, stored, max(timeout_s, 2 * config.timeout_s))
    notes = () if stored else ("nothing was put: the policy stores nothing there",)

    def hidden(text: str) -> str:
        for url in config.urls:
            text = hide(text, url, config.plain_options())
        return text

    return Finding(f"tiers.{name}", hidden(steps.error), steps.seconds, tuple(map(hidden, warnings)), notes)


def _run_steps(steps: _Steps, name: str, config: TierConfig, stored: bool, limit_s: float) -> None:
    key = secrets.token_bytes(len(FORMAT.digest))
    names, expected = [FORMAT.name(key)], _record(key)
    with ExitStack() as opened:
        small = steps.run("settings", lambda: opened.enter_context(_small_tier(config)), limit_s)
        del steps.seconds["settings"]
        staging = Staging(-(-FORMAT.record_bytes // 4096) * 4096, 2 + SMALL_BYTES // FORMAT.record_bytes)
        opened.callback(staging.close)
        tier = steps.run("open", lambda: open_tier(name, small, staging), OPEN_S + limit_s)
        opened.callback(_close, tier, limit_s)
        tier.limit(staging.slot_bytes)
        if not stored:
            steps.run("lookup", lambda: tier.match_prefix(names), limit_s)
            return
        steps.run("put", lambda: _put(tier, staging, names, expected), limit_s)
        try:
            steps.run("get", lambda: _get(tier, staging, names, expected, config), limit_s)
        except Exception:
            with suppress(Exception):
                within(limit_s, lambda: tier.delete(names), "kvkit-doctor")
            raise
        steps.run("delete", lambda: tier.delete(names), limit_s)


@contextmanager
def _small_tier(config: TierConfig) -> Iterator[TierConfig]:
    """Yield settings to check a tier: stores evict nothing, memory is small, a shared pool is a new one.

    Afterwards, removes the pool and empty folders of records.
    Raises OSError if shared memory has no room for the capacity."""
    url = config.urls[0] if config.urls else None
    small_capacity = ByteSize(min(SMALL_BYTES, config.capacities[0] or SMALL_BYTES))
    if config.kind is not None:
        yield config
    elif config.in_memory:
        yield config.model_copy(update={"capacity": small_capacity, "quota": None})
    elif kind_of(url) is TIERS["shm"]:
        path, capacity = pool_path(str(url)), config.capacities[0] or 0
        free = shutil.disk_usage(os.path.dirname(path)).free
        if not os.path.exists(path) and free < capacity:
            raise OSError(f"capacity={capacity}: {os.path.dirname(path)} has {free} bytes free")
        pool_url = f"shm://doctor-{secrets.token_hex(8)}"
        try:
            yield config.model_copy(update={"url": pool_url, "capacity": small_capacity})
        finally:
            with suppress(FileNotFoundError):
                os.unlink(pool_path(pool_url))
    else:
        try:
            yield config.model_copy(update={"capacity": None, "quota": None})
        finally:
            for root in (folder_url for folder_url in config.urls if kind_of(folder_url) in FOLDERS):
                array = quantised_name(FORMAT.array, config.precision) if config.precision else FORMAT.array
                array = os.path.join(LocalFileSystem._strip_protocol(root.removeprefix("nixl+")), array)
                with suppress(OSError):  # missing, not empty, or in use by another check
                    os.rmdir(array)
                    os.rmdir(os.path.dirname(array))


def _record(key: bytes) -> NDArray[np.uint8]:
    """Return a record with pseudorandom KV, uint8 [record_bytes]."""
    data: NDArray[np.uint8] = np.zeros(FORMAT.record_bytes, np.uint8)
    payload = record.payload(FORMAT, data)
    kv = np.random.default_rng(0).standard_normal(len(payload) // 2).astype(np.float16)
    payload[:] = kv.view(np.uint8)
    tokens = np.arange(FORMAT.namespace.chunk_tokens, dtype=np.int32)
    record.seal(FORMAT, memoryview(data.data), FORMAT.digest, key, tokens)
    return data


def _put(tier: Tier, staging: Staging, names: list[str], expected: NDArray[np.uint8]) -> None:
    (lease,) = staging.acquire(1, OPEN_S)
    with lease:
        lease.array[: len(expected)] = expected
        lease.used = len(expected)
        _wait(partial(tier.put, names, [lease]))


def _get(
    tier: Tier, staging: Staging, names: list[str], expected: NDArray[np.uint8], config: TierConfig
) -> None:
    (lease,) = staging.acquire(1, OPEN_S)
    with lease:
        _wait(partial(tier.get, names, [lease]))
        _compare(lease, expected, exact=config.precision is None)


def _compare(lease: Lease, expected: NDArray[np.uint8], exact: bool) -> None:
    """Check that a loaded record equals the one put, or only its size unless `exact`.
    Raises ValueError if it differs."""
    loaded = lease.record
    if len(loaded) != len(expected) or (exact and not np.array_equal(loaded, expected)):
        raise ValueError("the record read back differs from the one put")


def _wait(move: Callable[[OnComplete], None]) -> None:
    """Start the move of one record, wait for its end, and raise its error."""
    done, errors = threading.Event(), list[BaseException]()

    def on_complete(name: str, error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        done.set()

    move(on_complete)
    done.wait()
    for error in errors:
        raise error


def _close(tier: Tier, limit_s: float) -> None:
    with suppress(Exception):
        within(limit_s, tier.close, "kvkit-doctor")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that collects the library's warnings; they are not logged elsewhere."""
    collected: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(record.getMessage())

    library, handler = logging.getLogger("kvkit"), Collecting(logging.WARNING)
    propagated, library.propagate = library.propagate, False
    library.addHandler(handler)
    try:
        yield collected
    finally:
        library.removeHandler(handler)
        library.propagate = propagated
