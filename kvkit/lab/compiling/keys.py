"""Compilation of launches by key: launches with a known key are not compiled again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from kvkit.environment import version_of
from kvkit.kernels.tuning.assembly import Compiled, reader_of
from kvkit.kernels.tuning.compiling import compile_for, compiling_for
from kvkit.kernels.tuning.configs import Launch
from kvkit.kernels.tuning.source import source_digest


@dataclass(frozen=True, slots=True)
class KeyedCompiled(Compiled):
    """Properties of a compiled launch, with its key and size."""

    key: str = ""  # see `compile_key`
    programs: int = 0


def compile_keyed(known: Mapping[str, Compiled], launch: Launch, target: str) -> KeyedCompiled:
    """Compile a launch for a target, unless its key is `known`; arguments and errors as of `compile_for`."""
    key = compile_key(launch, target)
    compiled = known.get(key) or compile_for(launch, target)
    return KeyedCompiled(**asdict(compiled) | {"key": key, "programs": prod(launch.grid)})


def compile_key(launch: Launch, target: str) -> str:
    """Digest everything that the result of `compile_for` depends on, 16 hex digits; compiles nothing.

    These are the kernel's source, the values that Triton specialises it by (dtypes, alignment, compile-time
    values, options), the target, the versions of Triton and its assembler, and the code that reads their
    assembly. Launches with equal keys compile to the same on any machine.

    Args:
        launch: as for `compile_for`.
        target: name in `gpus.GPUS`.

    Raises:
        CompileError: as for `compile_for`, except for failures of its compiler.
    """
    # each target has its own device: Triton calls no hook for a kernel already compiled for a device
    with compiling_for(launch, target, f"keys of {target}") as gpu:
        from triton import knobs
        from triton.compiler import make_backend
        from triton.runtime import driver

        reported = list[str]()
        backend = make_backend(driver.active.get_current_target())

        def note(**about: Any) -> bool:
            # `repr` also has options that the caller did not set
            reported.extend((about["key"], about["repr"]))
            return True  # do not compile

        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = note
            launch.compile()
        if not reported:
            raise RuntimeError("Triton does not report what it would compile")
        versions = version_of("triton"), backend.hash(), gpu, source_digest(reader_of(gpu))
        texts = [source_digest(launch.kernel), *reported, *map(str, versions)]
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
