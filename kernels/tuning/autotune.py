"""Triton's autotuner: its configurations and cache files, and a decorator that takes its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from kvkit.environment import slug_of
from kvkit.kernels.tuning.cases import POISON, Case, Problem, Work, different, not_close
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket, power_of_2
from kvkit.kernels.tuning.planned import COMPILER_OPTIONS
from kvkit.kernels.tuning.tables import (
    Tuned,
    TunedKey,
    best,
    build_of,
    device_name,
    merged,
    read_table,
    tuned_folder,
    write_table,
)


def from_triton(config: Any) -> KernelConfig:
    """Return the `KernelConfig` of a `triton.Config`; `maxnreg` and `num_ctas` become tiles if set.

    Raises:
        ValueError: it has a keyword that is no whole number, a hook, or an override of the compiled code.
    """
    if config.pre_hook is not None or config.ir_override is not None:
        raise ValueError(f"{config}: kvkit keeps no pre_hook and no ir_override")
    if wrong := {name: value for name, value in config.kwargs.items() if not isinstance(value, int)}:
        raise ValueError(f"{config}: kvkit keeps whole numbers, got {wrong}")
    tiles = {name: int(value) for name, value in config.kwargs.items()}
    if config.num_ctas != 1:
        tiles["num_ctas"] = config.num_ctas
    if config.maxnreg is not None:
        tiles["maxnreg"] = config.maxnreg
    return KernelConfig(tuple(tiles.items()), config.num_warps, config.num_stages)


def to_triton(config: KernelConfig) -> Any:
    """Return the `triton.Config` of a Triton kernel's configuration."""
    tiles = dict(config.tiles)
    options = {name: tiles.pop(name) for name in COMPILER_OPTIONS if name in tiles}
    return triton.Config(tiles, num_warps=config.warps, num_stages=config.stages, **options)


class AutotuneCache(NamedTuple):
    """Contents of a file that `triton.autotune(..., cache_results=True)` wrote.

    Args:
        key: values of the arguments in its `key`, then the dtypes of all tensors, as text.
        us: median microseconds of each configuration; None: it did not run.
    """

    key: tuple[Any, ...]
    us: Mapping[KernelConfig, float | None]


def read_autotune_cache(path: Path) -> AutotuneCache:
    """Read <kernel>.autotune.json of Triton's cache folder, of Triton 3.4 or later.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or has a configuration that `from_triton` refuses.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        timings = [(triton.Config(**config), median) for config, (median, *_) in document["configs_timings"]]
        us = {from_triton(one): median * 1e3 if math.isfinite(median) else None for one, median in timings}
        return AutotuneCache(tuple(document["key"]), us)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no cache of Triton's autotuner: {error}") from error


def write_autotune_cache(autotuner: Any, key: Sequence[Any], us: Mapping[KernelConfig, float | None]) -> None:
    """Write times to the cache file of Triton's autotuner, where its next process finds them.

    The file belongs to the source of the kernel, the version of Triton, the active device and exactly the
    configurations of the autotuner, none of them pruned; an existing file is kept. Mutates the autotuner's
    own results.

    Args:
        autotuner: kernel decorated by `triton.autotune(..., cache_results=True)`.
        key: values of the arguments in its `key`, then the dtypes of all tensors, as text.
        us: microseconds of each configuration; None, or none at all: it is slower than any other.

    Raises:
        ValueError: no configuration of the autotuner has a time, or the key is empty: Triton keeps no file.
    """
    times = {config: us.get(from_triton(config)) for config in autotuner.configs}
    if not key or not any(times.values()):
        fault = "none of its configurations has a time" if key else "want a key"
        raise ValueError(f"{autotuner.base_fn.__name__}: {fault}")

    def measured() -> None:
        autotuner.configs_timings = {
            config: [math.inf if time is None else time * 1e-3] * 3 for config, time in times.items()
        }
        autotuner.cache[tuple(key)] = min(
            autotuner.configs_timings, key=lambda config: autotuner.configs_timings[config][0]
        )

    autotuner.check_disk_cache(tuple(key), autotuner.configs, measured)


@dataclass(frozen=True, slots=True, eq=False)
class TunedKernel:
    """A Triton kernel that runs with the best known configuration for its arguments; it measures nothing.

    `kernel[grid](...)` starts it, as `triton.autotune` does: without the arguments in the configurations.

    Args:
        fn: the `triton.jit` function.
        configs: configurations, the default first.
        key: names of the arguments that a configuration depends on. Whole numbers count as rounded up to
            powers of two, other values and the dtypes of all tensors as they are.
    """

    fn: Any
    configs: tuple[KernelConfig, ...]
    key: tuple[str, ...]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return a function that starts the kernel on a grid, as that of `triton.jit`."""
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Start the kernel with the best known configuration, as `triton.jit` functions do."""
        config = self.config(*args, **kwargs)
        options = {**dict(config.tiles), "num_warps": config.warps, "num_stages": config.stages}
        return self.fn.run(*args, grid=grid, warmup=warmup, **kwargs, **options)

    def config(self, *args: Any, **kwargs: Any) -> KernelConfig:
        """Return the configuration for these arguments: see `tables.best`."""
        return best(self.bucket(*args, **kwargs), self.configs[0], self.configs, self.fn)

    def bucket(self, *args: Any, **kwargs: Any) -> ProblemBucket:
        """Return the bucket of these arguments."""
        given = dict(zip(self.fn.arg_names, args, strict=False)) | kwargs
        values = {name: given[name] for name in self.key if name in given}
        return self._bucket(values, [str(value.dtype) for value in given.values() if hasattr(value, "dtype")])

    def _bucket(self, values: Mapping[str, Any], dtypes: Sequence[str]) -> ProblemBucket:
        sizes = {name: value for name, value in values.items() if type(value) is int and value > 0}
        words = [f"{name}={value}" for name, value in values.items() if name not in sizes]
        form = " ".join([dtype.removeprefix("torch.") for dtype in dtypes] + words)
        return ProblemBucket(self.fn.__name__, form, tuple(map(power_of_2, sizes.values())))

    def result(self, cache: AutotuneCache) -> tuple[TunedKey, Tuned]:
        """Return the entry of a table for the contents of a cache of Triton's autotuner of this kernel.

        Raises:
            ValueError: it has too few values for `key`, or none of the configurations has a time.
        """
        if len(cache.key) < len(self.key):
            raise ValueError(f"{self.fn.__name__}: key {cache.key}: want values of {', '.join(self.key)}")
        values = dict(zip(self.key, cache.key, strict=False))
        us = {config: us for config in self.configs if (us := cache.us.get(config)) is not None}
        if not us:
            raise ValueError(f"{self.fn.__name__}: none of its configurations has a time in the cache")
        fastest = min(us, key=lambda config: us[config])
        bucket = self._bucket(values, cache.key[len(self.key) :])
        return TunedKey(bucket, build_of(self.fn, False)), Tuned(
            fastest, us[fastest], us.get(self.configs[0]), len(self.configs) - len(us)
        )

    def keep(self, path: Path, device: str | None = None) -> Tuned:
        """Merge a cache file of Triton's autotuner into this user's table, which `best` then reads.

        Args:
            path: <kernel>.autotune.json.
            device: name of the GPU that it was measured on; None: this process's.

        Raises:
            OSError, ValueError: as `read_autotune_cache` and `result`; or there is no GPU and no `device`.
            TableError: the user's table is broken.
        """
        name = device or device_name(host=False)
        if name is None:
            raise ValueError(f"{path}: want the device that it was measured on; there is no GPU here")
        key, tuned = self.result(read_autotune_cache(path))
        table = tuned_folder() / f"{slug_of(name)}.json"
        known = read_table(table, slug_of(name)) if table.exists() else {}
        write_table(table, name, merged([known, {key: tuned}]))
        return tuned

    def problem(
        self,
        name: str,
        arguments: Callable[[torch.device], Mapping[str, Any]],
        grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
        reference: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]],
        *,
        work: Work,
        tolerance: float = 0.0,
    ) -> Problem:
        """Return a problem for `kvkit tune --problems`.

        Args:
            name: unique name.
            arguments: makes the kernel's arguments by name, without those in the configurations, on a device;
                on the meta device, for the shapes.
            grid: returns the grid for the arguments and the tiles of a configuration.
            reference: returns the right results of the arguments, by the name of the argument they are in.
            work: least work of the problem.
            tolerance: relative and absolute; 0: results have equal bits.
        """

        def make(device: torch.device, filled: bool) -> Case:
            given = arguments(device)
            right = reference(given) if filled else {}

            def launches(config: KernelConfig | None) -> tuple[Launch, ...]:
                config = config or self.config(**given)
                return (Launch(self.fn, grid({**given, **dict(config.tiles)}), given, config),)

            def poison() -> None:
                for result in right:
                    given[result].view(torch.uint8).fill_(POISON)

            def fault() -> str:
                faults = (
                    not_close(result, given[result], want, tolerance, tolerance)
                    if tolerance
                    else different(result, given[result], want)
                    for result, want in right.items()
                )
                return "; ".join(filter(None, faults))

            return Case(launches, poison, fault, tuple(given[result] for result in right))

        bucket = self.bucket(**arguments(torch.device("meta")))
        return Problem(name, bucket, self.fn, self.configs, make, lambda config: work)


def autotuned(
    configs: Sequence[Any] | None = None, key: Sequence[str] | None = None
) -> Callable[[Any], TunedKernel]:
    """Decorate a Triton kernel so that it runs with the best configuration in kvkit's tables.

    Above `triton.autotune` it takes the autotuner's place, with its configurations and key.

    Args:
        configs: `triton.Config`s or `KernelConfig`s, the default first; None: those of the autotuner.
        key: see `TunedKernel`; None: that of the autotuner.

    Raises:
        ValueError: the kernel has no autotuner and there are no configurations, a name in `key` is no
            argument, or a configuration is refused by `from_triton`.
    """

    def decorate(kernel: Any) -> TunedKernel:
        is_autotuned = hasattr(kernel, "configs") and hasattr(kernel, "keys")
        fn = kernel.fn if is_autotuned else kernel
        chosen = kernel.configs if configs is None and is_autotuned else configs
        names = tuple(kernel.keys if key is None and is_autotuned else key or ())
        if not chosen:
            raise ValueError(f"{fn.__name__}: want configs, or a kernel with triton.autotune")
        if unknown := [name for name in names if name not in fn.arg_names]:
            raise ValueError(f"{fn.__name__}: key {unknown}: want arguments, {', '.join(fn.arg_names)}")
        space = (one if isinstance(one, KernelConfig) else from_triton(one) for one in chosen)
        return TunedKernel(fn, tuple(dict.fromkeys(space)), names)

    return decorate
