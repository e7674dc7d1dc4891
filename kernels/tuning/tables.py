"""Tables of tuned configurations, a file for each device: they are read, written, merged and searched."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import log2
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from kvkit.environment import cache_folder, driver_version, gpu_name, host_name, slug_of, version_of
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.source import SourceError, source_digest

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "tuned"
"""Folder of the tables that come with the package, <device>.json each."""


RELATED = ("nvidia-h100", "nvidia-h200", "nvidia-gh200")
"""Beginnings of names of devices with equal multiprocessors, which use each other's results."""
SCALED = ("PAGE", "GROUP")
"""Numbers in forms that change code, but hardly the best tiles: tokens of a page, query heads of a KV head.

A 0 is no such number: without pages other tiles are best.
"""
_SCALED = re.compile(rf"\b({'|'.join(SCALED)})=(\d+)")


class TableError(ValueError):
    """A file that is no table of tuned configurations. Names the file and the fault."""


class Build(NamedTuple):
    """Build of a kernel that was measured: another source is another kernel."""

    source: str  # `source_digest` of the kernel
    compiler: str  # name and version: of Triton; on the host, of numba and torch
    driver: str = ""  # the GPU driver's version


class TunedKey(NamedTuple):
    """Key of a tuning result on one device."""

    bucket: ProblemBucket
    build: Build


class Tuned(NamedTuple):
    """Result of tuning."""

    config: KernelConfig  # fastest correct configuration
    us: float  # median time in microseconds, with cold caches
    default_us: float | None  # median time of the kernel's default; None if it cannot run
    untried: int = 0  # configurations left out because the time was over


def device_name(host: bool) -> str | None:
    """Return the device of this process's table: its GPU or, for `host`, its CPU; None without a GPU."""
    return host_name() if host else gpu_name()


def build_of(kernel: Any, host: bool) -> Build:
    """Return how this process builds a kernel, a Triton kernel or a function: see `Build`.

    Raises:
        SourceError: the kernel is no function with Python source.
    """
    return Build(source_digest(kernel), *_compiler(host))


@functools.cache
def _compiler(host: bool) -> tuple[str, str]:
    packages = ("numba", "torch") if host else ("triton",)
    return " ".join(f"{name} {version_of(name)}" for name in packages), "" if host else driver_version()


def best(
    bucket: ProblemBucket,
    default: KernelConfig,
    space: Collection[KernelConfig],
    kernel: Any,
    *,
    host: bool = False,
) -> KernelConfig:
    """Return the configuration to run a problem with on this process's GPU or host; mutates nothing.

    It is the tuned one of `bucket`; else that of the nearest bucket, see `ranked`; else `default`, as on a
    machine without a GPU. Only results for the kernel's present source count; for equal sizes, those of this
    compiler and driver come first. A configuration that is no longer in `space` is skipped, and a kernel
    without source has no results. Tables are read once per process, and its GPUs are assumed to be alike.

    Args:
        bucket, default, space: bucket and configurations of the problem.
        kernel: Triton kernel or function, for its source.
        host: whether it runs on the CPU: looks in the CPU's table instead of the GPU's.
    """
    if not any(_tables_here(host)):
        return default
    try:
        source = source_digest(kernel)
    except SourceError:
        return default
    most_untried = len(space) // 4
    return next((config for config in _known(bucket, source, host, most_untried) if config in space), default)


@functools.lru_cache(1024)
def results_of(op: str, form: str, kernel: Any) -> Mapping[tuple[tuple[int, ...], str], Tuned]:
    """Return this process's GPU's results for a kernel's present source and compiler, by sizes and driver.

    Args:
        op, form: of the buckets.
        kernel: Triton kernel or function, for its source.
    """
    source, compiler, _ = build_of(kernel, False)
    wanted = op, form, source, compiler
    return {
        (bucket.sizes, build.driver): tuned
        for (bucket, build), tuned in _tables_here(False)[0].items()
        if (bucket.op, bucket.form, build.source, build.compiler) == wanted
    }


@functools.lru_cache(1024)
def _known(bucket: ProblemBucket, source: str, host: bool, most_untried: int) -> tuple[KernelConfig, ...]:
    table, *related = _tables_here(host)
    return ranked(table, bucket, Build(source, *_compiler(host)), related, most_untried)


@functools.cache
def _tables_here(host: bool) -> tuple[Mapping[TunedKey, Tuned], ...]:
    """Return the table of this process's device, then those of its relatives."""
    name = device_name(host)
    if name is None:
        return ({},)
    slug = slug_of(name)
    others = sorted(path.stem for path in SHIPPED.glob("*.json")) if slug.startswith(RELATED) else []
    related = (other for other in others if other != slug and other.startswith(RELATED))
    return load_table(slug), *map(load_table, related)


def forget_tables() -> None:
    """Make `best` read the tables again, after tuning in the same process."""
    _known.cache_clear()
    results_of.cache_clear()
    _tables_here.cache_clear()


def ranked(
    table: Mapping[TunedKey, Tuned],
    bucket: ProblemBucket,
    build: Build,
    related: Sequence[Mapping[TunedKey, Tuned]] = (),
    most_untried: int = 0,
) -> tuple[KernelConfig, ...]:
    """Return configurations for buckets like `bucket`, of an equal source, the best guess first.

    Buckets are alike if their ops are equal and their forms differ at most in SCALED. They are sorted by the
    L1 distance of the logarithms of SCALED, then of their sizes; for equal ones, those of `build` come first,
    then those of its compiler, then those of its driver, then the fastest.

    Args:
        table: results of this device.
        bucket, build: problem, and how this process builds its kernel.
        related: results of devices with equal multiprocessors; after those of this device, if equally near.
        most_untried: results of related devices or of other forms do not count if more configurations were
            left out of their search.
    """
    found = []
    for other, results in enumerate((table, *related)):
        for key, tuned in results.items():
            form = _distance_of_forms(key.bucket.form, bucket.form)
            alike = key.bucket.op, len(key.bucket.sizes), key.build.source
            if form is None or alike != (bucket.op, len(bucket.sizes), build.source):
                continue
            if (form or other) and tuned.untried > most_untried:
                continue
            sizes, (_, compiler, driver) = key.bucket.sizes, key.build
            builds = compiler != build.compiler, driver != build.driver
            rank = form, distance(sizes, bucket.sizes), bool(other), sizes, *builds, tuned.us, other
            found.append((rank, tuned.config))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0]))


def distance(sizes: Sequence[int], others: Sequence[int]) -> float:
    """Return the distance of two problems by their sizes: the sum of their ratios' logarithms, to base 2."""
    return sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in zip(sizes, others, strict=True))


def _distance_of_forms(form: str, other: str) -> float | None:
    """Return the distance of two forms by SCALED, 0 if they are equal; None if something else differs."""
    if form == other:
        return 0
    ours, theirs = _scaled(form), _scaled(other)
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return None
    return distance(ours[1], theirs[1])


@functools.lru_cache(4096)
def _scaled(form: str) -> tuple[str, tuple[int, ...]] | None:
    """Split a form into its text without the values of SCALED, and these values; None if one is 0."""
    values = tuple(int(value) for _, value in _SCALED.findall(form))
    return None if 0 in values else (_SCALED.sub(r"\1", form), values)


def merged(tables: Iterable[Mapping[TunedKey, Tuned]]) -> dict[TunedKey, Tuned]:
    """Merge the results of tables of one device; of equal keys, the faster result is kept.

    Times of two runs are compared by their gain over the default, which both measured.
    """
    results: dict[TunedKey, Tuned] = {}
    for table in tables:
        for key, tuned in table.items():
            old = results.get(key)
            if old is None or _is_faster(tuned, old):
                results[key] = tuned
    return results


def _is_faster(new: Tuned, old: Tuned) -> bool:
    if new.default_us is None or old.default_us is None:
        return new.us < old.us
    return new.us * old.default_us < old.us * new.default_us


def tuned_folder() -> Path:
    """Return the folder of this user's tables.

    It is $KVKIT_TUNED, else kvkit/tuned in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        FileNotFoundError: neither variable is set, and there is no home.
    """
    if folder := os.environ.get("KVKIT_TUNED"):
        return Path(folder)
    return cache_folder() / "tuned"


def load_table(device: str) -> Mapping[TunedKey, Tuned]:
    """Load the results for a device, this user's over those that come with the package.

    A file that is broken or belongs to another device is logged as a warning and left out.

    Args:
        device: `slug_of` the device's name.
    """
    results: dict[TunedKey, Tuned] = {}
    for shipped in (True, False):
        try:
            folder = SHIPPED if shipped else tuned_folder()
            results |= read_table(folder / f"{device}.json", device)
        except FileNotFoundError:
            continue
        except (OSError, TableError) as error:
            log.warning("tuned configurations are left out: %s", error)
    return MappingProxyType(results)


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A key of a table's file, with its result."""

    op: str
    form: str
    sizes: tuple[_Size, ...]
    source: str
    compiler: str
    driver: str
    tiles: dict[str, _Size]
    warps: _Size
    stages: _Size
    us: float
    default_us: float | None
    untried: _Size


class _File(msgspec.Struct, kw_only=True):
    device: str
    entries: list[_Entry]


def read_file(path: Path) -> tuple[str, dict[TunedKey, Tuned]]:
    """Read the device's name and the table from a file that `write_table` wrote.

    Raises:
        FileNotFoundError, OSError: the file does not exist, or cannot be read.
        TableError: the file is no table.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: no table of tuned configurations: {error}") from error
    return file.device, {
        TunedKey(ProblemBucket(e.op, e.form, e.sizes), Build(e.source, e.compiler, e.driver)): Tuned(
            KernelConfig(tuple(e.tiles.items()), e.warps, e.stages), e.us, e.default_us, e.untried
        )
        for e in file.entries
    }


def read_table(path: Path, device: str) -> dict[TunedKey, Tuned]:
    """Read the table from a device's file.

    Raises:
        FileNotFoundError, OSError: the file does not exist, or cannot be read.
        TableError: the file is no table, or that of another device than `device`, a `slug_of` its name.
    """
    name, table = read_file(path)
    if (slug := slug_of(name)) != device:
        raise TableError(f"{path}: device is {slug}, want {device}")
    return table


def write_table(path: Path, name: str, table: Mapping[TunedKey, Tuned]) -> None:
    """Replace a file by a table, atomically; make its folder. `best` in this process then reads it.

    Args:
        path: <folder>/<slug_of(name)>.json.
        name: name of the device, as in `device_name`.
        table: complete contents of the file.
    """
    entries = [
        _Entry(*bucket, *build, dict(config.tiles), config.warps, config.stages, us, default_us, untried)
        for (bucket, build), (config, us, default_us, untried) in sorted(table.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = msgspec.json.encode(_File(device=name, entries=entries))
        draft.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    forget_tables()
