"""How a Triton kernel is compiled and started: configurations, launches, the best one for a problem."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvkit.environment import gpu_name, slug_of

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "tuned"
"""Tables that come with the package, <gpu>.json each."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One way to compile a kernel.

    Args:
        tiles: the kernel's compile-time sizes by argument name.
        warps, stages: Triton's num_warps and num_stages.
    """

    tiles: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 2

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in (*self.tiles, *self._options()))

    def _options(self) -> tuple[tuple[str, int], ...]:
        return ("warps", self.warps), ("stages", self.stages)


@dataclass(frozen=True, slots=True)
class ProblemBucket:
    """Problems that share a configuration.

    Args:
        op: operation: the name of its function in an `api`, or of one of its kernels.
        form: what is compiled differently, as text: dtype, head sizes, alignment, flags.
        sizes: what is not, rounded up to powers of two.
    """

    op: str
    form: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with its grid and arguments, ready to run or to compile for another target.

    Args:
        kernel: the `triton.jit` function.
        grid: programs along each axis.
        arguments: by name: tensors, numbers, and the compile-time ones among them.
        config: where the compile-time sizes came from.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
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


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found for a bucket.

    Args:
        config: the fastest that is correct.
        us: its median time in microseconds, with a cold L2 cache.
        default_us: that of the kernel's default; None if it cannot run.
    """

    config: KernelConfig
    us: float
    default_us: float | None


def best(bucket: ProblemBucket, default: KernelConfig, space: Collection[KernelConfig]) -> KernelConfig:
    """The configuration to run a problem with on this process's GPU; mutates nothing.

    The tuned one of `bucket`; else that of the bucket of equal op and form with the nearest sizes; else
    `default`, as on a machine without a GPU. One that is not in `space` was tuned for another version of
    the kernel and is passed over. Tables are read once per process, whose GPUs are taken to be alike. Takes
    about a microsecond where `space` is the same object as before.

    Args:
        bucket: of the problem.
        default: what runs where nothing was tuned.
        space: the configurations that the kernel has now.
    """
    return _chosen(bucket, default, _Same(space))


class _Same:
    """A space as a key: equal to itself alone, so that a look-up compares no configurations."""

    __slots__ = ("space",)

    def __init__(self, space: Collection[KernelConfig]) -> None:
        self.space = space

    def __hash__(self) -> int:
        return id(self.space)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.space is self.space


@functools.lru_cache(1024)
def _chosen(bucket: ProblemBucket, default: KernelConfig, same: _Same) -> KernelConfig:
    return next((config for config in _ranked(bucket) if config in same.space), default)


@functools.cache
def _ranked(bucket: ProblemBucket) -> tuple[KernelConfig, ...]:
    """Tuned configurations for `bucket` on this process's GPU, nearest first."""
    name = gpu_name()
    return () if name is None else ranked(load_table(slug_of(name)), bucket)


def ranked(table: Mapping[ProblemBucket, Tuned], bucket: ProblemBucket) -> tuple[KernelConfig, ...]:
    """Configurations of the buckets of equal op and form, by the L1 distance of their sizes' logarithms."""

    def distance(sizes: tuple[int, ...]) -> float:
        return sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in zip(sizes, bucket.sizes, strict=True))

    form = bucket.op, bucket.form, len(bucket.sizes)
    alike = [other.sizes for other in table if (other.op, other.form, len(other.sizes)) == form]
    alike.sort(key=lambda sizes: (distance(sizes), sizes))
    return tuple(table[ProblemBucket(bucket.op, bucket.form, sizes)].config for sizes in alike)


def tuned_folder() -> Path:
    """Where this user's tables are: $KVKIT_TUNED, else kvkit/tuned below $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("KVKIT_TUNED"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkit" / "tuned"


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


def read_table(path: Path, gpu: str) -> dict[ProblemBucket, Tuned]:
    """The table in a file that `write_table` wrote.

    Raises:
        FileNotFoundError, OSError: it is not there, or cannot be read.
        TableError: it is no table, or that of another GPU than `gpu`.
    """
    try:
        document = json.loads(path.read_text())
        if (name := slug_of(document["gpu"])) != gpu:
            raise TableError(f"{path}: gpu is {name}, want {gpu}")
        return dict(_entry(entry) for entry in document["entries"])
    except TableError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(f"{path}: no table of tuned configurations: {error!r}") from error


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
        {
            "op": bucket.op,
            "form": bucket.form,
            "sizes": bucket.sizes,
            "tiles": dict(tuned.config.tiles),
            "warps": tuned.config.warps,
            "stages": tuned.config.stages,
            "us": tuned.us,
            "default_us": tuned.default_us,
        }
        for bucket, tuned in sorted(table.items(), key=lambda item: (item[0].op, item[0].form, item[0].sizes))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(
            json.dumps({"gpu": gpu_name, "versions": dict(versions), "entries": entries}, indent=1) + "\n"
        )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _entry(entry: Mapping[str, Any]) -> tuple[ProblemBucket, Tuned]:
    sizes, tiles = tuple(entry["sizes"]), tuple(entry["tiles"].items())
    numbers = (*sizes, *(size for _, size in tiles), entry["warps"], entry["stages"])
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TypeError(f"sizes, tiles, warps and stages are whole numbers, not {numbers}")
    if not all(isinstance(entry[name], str) for name in ("op", "form")):
        raise TypeError("op and form are text")
    us, default_us = float(entry["us"]), entry["default_us"]
    return ProblemBucket(entry["op"], entry["form"], sizes), Tuned(
        KernelConfig(tiles, entry["warps"], entry["stages"]),
        us,
        None if default_us is None else float(default_us),
    )
