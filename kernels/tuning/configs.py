"""How a Triton kernel is compiled and started: configurations, launches, the best one for a problem."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from kvkit.environment import cache_folder, gpu_name, slug_of

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "tuned"
"""Tables that come with the package, <gpu>.json each."""


class KernelConfig(NamedTuple):
    """One way to compile a kernel."""

    tiles: tuple[tuple[str, int], ...]  # its compile-time sizes by argument name
    warps: int = 4  # Triton's num_warps
    stages: int = 2  # and num_stages

    def __str__(self) -> str:
        sizes = *self.tiles, ("warps", self.warps), ("stages", self.stages)
        return " ".join(f"{name}={size}" for name, size in sizes)


class ProblemBucket(NamedTuple):
    """Problems that share a configuration."""

    op: str  # the name of an operation's function in an `api`, or of one of its kernels
    form: str  # what is compiled differently, as text: dtype, head sizes, alignment, flags
    sizes: tuple[int, ...]  # what is not, rounded up to powers of two


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with its grid and arguments, ready to run or to compile for another target."""

    kernel: Any  # the `triton.jit` function
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # tensors, numbers, and the compile-time ones but for those of `config`
    config: KernelConfig

    def run(self) -> None:
        """Start the kernel on the current device and stream; mutates what the kernel writes."""
        self.kernel[self.grid](**self._given())

    def compile(self) -> Any:
        """What `run` would start on Triton's active driver; starts nothing."""
        return self.kernel.warmup(grid=self.grid, **self._given())

    def _given(self) -> dict[str, Any]:
        options = {"num_warps": self.config.warps, "num_stages": self.config.stages}
        return {**self.arguments, **dict(self.config.tiles), **options}


class TableError(ValueError):
    """A file is no table of tuned configurations. Names the file and what is wrong."""


class Tuned(NamedTuple):
    """What tuning found for a bucket."""

    config: KernelConfig  # the fastest that is correct
    us: float  # its median time in microseconds, with a cold L2 cache
    default_us: float | None  # that of the kernel's default; None if it cannot run


def best(bucket: ProblemBucket, default: KernelConfig, space: Collection[KernelConfig]) -> KernelConfig:
    """The configuration to run a problem with on this process's GPU; mutates nothing.

    The tuned one of `bucket`; else that of the bucket of equal op and form with the nearest sizes; else
    `default`, as on a machine without a GPU. One that is not in `space`, what the kernel has now, was tuned
    for another version of it and is passed over. Tables are read once per process, whose GPUs are taken to
    be alike.
    """
    return next((config for config in _ranked(bucket) if config in space), default)


@functools.lru_cache(1024)
def _ranked(bucket: ProblemBucket) -> tuple[KernelConfig, ...]:
    """Tuned configurations for `bucket` on this process's GPU, nearest first."""
    name = gpu_name()
    return () if name is None else ranked(load_table(slug_of(name)), bucket)


def ranked(table: Mapping[ProblemBucket, Tuned], bucket: ProblemBucket) -> tuple[KernelConfig, ...]:
    """Configurations of the buckets of equal op and form, by the L1 distance of their sizes' logarithms."""

    def distance(sizes: tuple[int, ...]) -> float:
        return sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in zip(sizes, bucket.sizes, strict=True))

    form = bucket.op, bucket.form, len(bucket.sizes)
    alike = [other for other in table if (other.op, other.form, len(other.sizes)) == form]
    alike.sort(key=lambda other: (distance(other.sizes), other.sizes))
    return tuple(table[other].config for other in alike)


def tuned_folder() -> Path:
    """Where this user's tables are: $KVKIT_TUNED, else kvkit/tuned below $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("KVKIT_TUNED"):
        return Path(folder)
    return cache_folder() / "tuned"


def load_table(gpu: str) -> Mapping[ProblemBucket, Tuned]:
    """What was tuned for a GPU, this user's results over those that come with the package.

    A file that is broken or belongs to another GPU is logged as a warning and left out.

    Args:
        gpu: `slug_of` its name.
    """
    found: dict[ProblemBucket, Tuned] = {}
    for folder in (SHIPPED, tuned_folder()):
        try:
            found |= read_table(folder / f"{gpu}.json", gpu)
        except FileNotFoundError:
            continue
        except (OSError, TableError) as error:
            log.warning("tuned configurations are left out: %s", error)
    return MappingProxyType(found)


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A bucket of a table's file, with what was tuned for it."""

    op: str
    form: str
    sizes: tuple[_Size, ...]
    tiles: dict[str, _Size]
    warps: _Size
    stages: _Size
    us: float
    default_us: float | None


class _File(msgspec.Struct, kw_only=True):
    gpu: str
    versions: dict[str, str | None] = {}
    entries: list[_Entry]


def read_table(path: Path, gpu: str) -> dict[ProblemBucket, Tuned]:
    """The table in a file that `write_table` wrote.

    Raises:
        FileNotFoundError, OSError: it is not there, or cannot be read.
        TableError: it is no table, or that of another GPU than `gpu`.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: no table of tuned configurations: {error}") from error
    if (name := slug_of(file.gpu)) != gpu:
        raise TableError(f"{path}: gpu is {name}, want {gpu}")
    return {
        ProblemBucket(e.op, e.form, e.sizes): Tuned(
            KernelConfig(tuple(e.tiles.items()), e.warps, e.stages), e.us, e.default_us
        )
        for e in file.entries
    }


def write_table(
    path: Path, gpu_name: str, table: Mapping[ProblemBucket, Tuned], versions: Mapping[str, str | None]
) -> None:
    """Replace a file by a table, all of it or nothing; makes its folder.

    Args:
        path: <folder>/<slug_of(gpu_name)>.json.
        gpu_name: as torch calls it.
        table: everything that the file shall hold.
        versions: of what it was measured with, by package.
    """
    entries = [
        _Entry(*bucket, dict(config.tiles), config.warps, config.stages, us, default_us)
        for bucket, (config, us, default_us) in sorted(table.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = msgspec.json.encode(_File(gpu=gpu_name, versions=dict(versions), entries=entries))
        draft.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
