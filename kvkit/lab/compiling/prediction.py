"""Least time of a kernel on a GPU, by a model of its instructions: nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvkit.kernels.tuning.assembly import Compiled
from kvkit.kernels.tuning.cases import Work


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of a GPU, by its data sheet."""

    name: str
    sms: int
    clock_hz: float  # clock of `flops_per_s`
    issues: int  # warp instructions that a multiprocessor issues per clock
    bytes_per_s: float  # bytes of its memory
    flops_per_s: float  # flops of dense bfloat16 products


RATES: Mapping[str, Rates] = {
    "sm_80": Rates("A100 SXM 80 GB", 108, 1.41e9, 4, 2.039e12, 312e12),
    "sm_90": Rates("H100 SXM", 132, 1.83e9, 4, 3.35e12, 989.4e12),
    "sm_100": Rates("B200", 148, 1.85e9, 4, 8.0e12, 2250e12),
    "gfx942": Rates("MI300X", 304, 2.1e9, 1, 5.3e12, 1307.4e12),
}
"""Rates by target. An H200 is an H100 with 4.8e12 bytes a second.

From NVIDIA's A100 data sheet, H100 architecture white paper and HGX B200 data sheet, AMD's MI300X data sheet.
Clocks follow from the flops, with 1024, 2048, 4096 and 1024 multiplications and additions per multiprocessor
and clock. A multiprocessor has 4 schedulers; AMD's issue an instruction of 64 lanes every fourth clock.
"""

LINE = 128
"""Bytes that memory moves at a time."""
MMA_FLOPS = 2 * 16 * 8 * 16
"""Flops of one m16n8k16 product, the unit that matrix instructions of any shape are counted in."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Least time of a kernel."""

    per_line: float | None  # warp instructions for each `LINE` that the problem moves
    per_mma: float | None  # or, where it multiplies matrices, for each m16n8k16 product
    roof_us: float  # the problem's bytes or flops at the GPU's rates, whichever takes longer
    predicted_us: float  # `roof_us`, or the time of the instructions if longer


def predict(work: Work, compiled: Compiled, warps: int, programs: int, rates: Rates) -> Prediction:
    """Predict a kernel's time if memory, matrix units and schedulers all were busy without a pause.

    Instructions are counted in the code: with matrix products, those of the main loop for each iteration;
    without, those of the whole kernel for each program. All branches are taken, and other loops run once.

    Args:
        work: work of the problem in this configuration.
        compiled: kernel compiled for the target of `rates`.
        warps: warps of a program.
        programs: programs of the launch.
        rates: peak rates of the GPU.
    """
    roofline_s = max(work.moved_bytes / rates.bytes_per_s, work.flops / rates.flops_per_s)
    times = 0 if bool(work.flops) != bool(compiled.mma) else work.iterations if work.flops else programs
    issued = compiled.instructions * warps * times
    per_mma = issued * MMA_FLOPS / work.flops if issued and work.flops else None
    per_line = issued * LINE / work.moved_bytes if issued and not work.flops else None
    seconds = max(roofline_s, issued / (rates.issues * rates.sms * rates.clock_hz))
    return Prediction(per_line, per_mma, roofline_s * 1e6, seconds * 1e6)
