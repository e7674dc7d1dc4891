"""Tables of tuned configurations, a file for each device: read, written, merged, and asked for the best."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Iterable, Mapping
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
"""Tables that come with the package, <device>.json each."""


class TableError(ValueError):
    """A file is no table of tuned configurations. Names the file and what is wrong."""


class Build(NamedTuple):
    """What was measured, beside the problem: another source is another kernel."""

    source: str  # `source_digest` of the kernel
    compiler: str  # with its version: Triton; on the host numba and torch
    driver: str = ""  # the GPU driver's version


class TunedKey(NamedTuple):
    """What a result of tuning is for, on one device."""

    bucket: ProblemBucket
    build: Build


class Tuned(NamedTuple):
    """What tuning found."""

    config: KernelConfig  # the fastest that is correct
    us: float  # its median time in microseconds, with cold caches
    default_us: float | None  # that of the kernel's default; None if it cannot run
    untried: int = 0  # configurations that were left out because the time was over


def device_name(host: bool) -> str | None:
    """Whose table kernels of this process use: its GPU's or, for `host`, its CPU's; None without a GPU."""
    return host_name() if host else gpu_name()


def build_of(kernel: Any, host: bool) -> Build:
    """How this process builds a kernel, a Triton kernel or a function: see `Build`.

    Raises:
        SourceError: it is no function with Python source.
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
    """The configuration to run a problem with on this process's GPU or host; mutates nothing.

    The tuned one of `bucket`; else that of the bucket of equal op and form with the nearest sizes; else
    `default`, as on a machine without a GPU. Only results for the kernel's present source count, those of
    this compiler and driver before others of the same sizes. A configuration that is not in `space`, what
    the kernel has now, is passed over, and a kernel without source has no results. Tables are read once per
    process, whose GPUs are taken to be alike.

    Args:
        bucket, default, space: of the problem.
        kernel: whose source counts, a Triton kernel or a function.
        host: it runs on the CPU: asks the CPU's table instead of the GPU's.
    """
    if not _table_here(host):
        return default
    try:
        source = source_digest(kernel)
    except SourceError:
        return default
    return next((config for config in _known(bucket, source, host) if config in space), default)


@functools.lru_cache(1024)
def _known(bucket: ProblemBucket, source: str, host: bool) -> tuple[KernelConfig, ...]:
    return ranked(_table_here(host), bucket, Build(source, *_compiler(host)))


@functools.cache
def _table_here(host: bool) -> Mapping[TunedKey, Tuned]:
    name = device_name(host)
    return {} if name is None else load_table(slug_of(name))


def forget_tables() -> None:
    """Have `best` read the tables again: after tuning in the same process."""
    _known.cache_clear()
    _table_here.cache_clear()


def ranked(table: Mapping[TunedKey, Tuned], bucket: ProblemBucket, build: Build) -> tuple[KernelConfig, ...]:
    """Configurations for buckets of equal op and form and an equal source, the best guess first.

    By the L1 distance of their sizes' logarithms; at equal sizes `build`'s own, then those of its compiler,
    then those of its driver, then the fastest.
    """

    def distance(sizes: tuple[int, ...]) -> float:
        return sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in zip(sizes, bucket.sizes, strict=True))

    def rank(key: TunedKey) -> tuple[Any, ...]:
        sizes, (_, compiler, driver) = key.bucket.sizes, key.build
        return distance(sizes), sizes, compiler != build.compiler, driver != build.driver, table[key].us

    form = bucket.op, bucket.form, len(bucket.sizes), build.source
    alike = (key for key in table if (*key.bucket[:2], len(key.bucket.sizes), key.build.source) == form)
    return tuple(table[key].config for key in sorted(alike, key=rank))


def merged(tables: Iterable[Mapping[TunedKey, Tuned]]) -> dict[TunedKey, Tuned]:
    """All results of some tables of one device; of equal keys the one that is faster.

    Times of two runs compare by what each gains over the default, which both measured.
    """
    found: dict[TunedKey, Tuned] = {}
    for table in tables:
        for key, tuned in table.items():
            other = found.get(key)
            if other is None or _faster(tuned, other):
                found[key] = tuned
    return found


def _faster(one: Tuned, two: Tuned) -> bool:
    if one.default_us is None or two.default_us is None:
        return one.us < two.us
    return one.us * two.default_us < two.us * one.default_us


def tuned_folder() -> Path:
    """Where this user's tables are: $KVKIT_TUNED, else kvkit/tuned below $XDG_CACHE_HOME or ~/.cache.

    Raises:
        FileNotFoundError: there is neither, nor a home.
    """
    if folder := os.environ.get("KVKIT_TUNED"):
        return Path(folder)
    return cache_folder() / "tuned"


def load_table(device: str) -> Mapping[TunedKey, Tuned]:
    """What was tuned for a device, this user's results over those that come with the package.

    A file that is broken or belongs to another device is logged as a warning and left out.

    Args:
        device: `slug_of` its name.
    """
    found: dict[TunedKey, Tuned] = {}
    for shipped in (True, False):
        try:
            folder = SHIPPED if shipped else tuned_folder()
            found |= read_table(folder / f"{device}.json", device)
        except FileNotFoundError:
            continue
        except (OSError, TableError) as error:
            log.warning("tuned configurations are left out: %s", error)
    return MappingProxyType(found)


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A key of a table's file, with what was tuned for it."""

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
    """The device's name and the table in a file that `write_table` wrote.

    Raises:
        FileNotFoundError, OSError: it is not there, or cannot be read.
        TableError: it is no table.
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
    """The table in a device's file.

    Raises:
        FileNotFoundError, OSError: it is not there, or cannot be read.
        TableError: it is no table, or that of another device than `device`, a `slug_of` its name.
    """
    name, table = read_file(path)
    if (found := slug_of(name)) != device:
        raise TableError(f"{path}: device is {found}, want {device}")
    return table


def write_table(path: Path, name: str, table: Mapping[TunedKey, Tuned]) -> None:
    """Replace a file by a table, all of it or nothing; makes its folder. `best` here reads it from then on.

    Args:
        path: <folder>/<slug_of(name)>.json.
        name: the device's, as `device_name` says it.
        table: everything that the file shall hold.
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
