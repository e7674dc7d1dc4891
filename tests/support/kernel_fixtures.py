"""Two small kernels with their problems: what tuning and compiling are tested with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvkit.kernels.tuning.cases import Case, Problem, Work
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket

COUNT = 4096


@triton.jit
def scale_kernel(
    x, y, count, factor, unused, ADD: tl.constexpr, BLOCK: tl.constexpr, WRONG: tl.constexpr = 0
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    if WRONG:
        inside = i < count - 1
    tl.store(y + i, tl.load(x + i, mask=inside, other=0.0) * factor + ADD, mask=inside)


@triton.jit
def product_kernel(a, b, c, steps: tl.int32, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    place = row[:, None] * SIZE + row[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(steps):
        offset = step * SIZE * SIZE
        total = tl.dot(tl.load(a + offset + place), tl.load(b + offset + place), total)
    tl.store(c + place, total)


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["loose"])
def taking_kernel(
    tensor,
    number,
    wide,
    one,
    plain,
    loose,
    flag,
    real,
    nothing,
    count: tl.int32,
    first: tl.int64,
    SIZE: tl.constexpr,
):
    total = number + wide + one + plain + loose + count + first + SIZE
    tl.store(tensor.to(tl.pointer_type(tl.int8), bitcast=True), total.to(tl.int8))


def taking_launches() -> list[Launch]:
    """Every kind of argument, divisible by 16 and not."""
    memory = torch.zeros(1 << 10, dtype=torch.uint8)
    base = memory[-memory.data_ptr() % 16 :]
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
    tensors = [base[first : first + 64].view(dtype) for dtype in dtypes for first in (0, 8)]
    numbers = (0, 1, 7, 16, -16, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, 1 << 63)
    launches = [(tensor, 3) for tensor in tensors] + [(base, number) for number in numbers]
    names = ("number", "wide", "one", "plain", "loose")
    return [
        Launch(
            taking_kernel,
            (1,),
            {"tensor": tensor, **dict.fromkeys(names, number), "flag": True, "real": 1.0, "nothing": None}
            | {"count": 1 if number == 1 else 32, "first": 5},
            KernelConfig((("SIZE", 8),)),
        )
        for tensor, number in launches
    ]


def scale_launch(
    x: torch.Tensor, y: torch.Tensor, config: KernelConfig, count: int = COUNT, add: int = 3
) -> Launch:
    """y = 2.5 x + add."""
    arguments = {"x": x, "y": y, "count": count, "factor": 2.5, "unused": None, "ADD": add}
    return Launch(scale_kernel, (triton.cdiv(count, dict(config.tiles)["BLOCK"]),), arguments, config)


def product_launch(a: torch.Tensor, c: torch.Tensor, config: KernelConfig) -> Launch:
    """c = the sum of squares of the square matrices in a."""
    size = dict(config.tiles)["SIZE"]
    arguments = {"a": a, "b": a, "c": c, "steps": a.numel() // size**2}
    return Launch(product_kernel, (1,), arguments, config)


def tiled(block: int, wrong: int = 0, warps: int = 4) -> KernelConfig:
    return KernelConfig((("BLOCK", block), ("WRONG", wrong)), warps)


SPACE = (tiled(1024), tiled(256), tiled(512), tiled(512, wrong=1), tiled(2048))


def scale_problem(
    form: str = "float32", count: int = COUNT, space: tuple[KernelConfig, ...] = SPACE
) -> Problem:
    def make(device: torch.device, filled: bool) -> Case:
        x = torch.arange(count, dtype=torch.float32, device=device) if filled else torch.empty(count)
        y = torch.empty_like(x)

        def fault() -> str:
            bad = int((y != 2.5 * x + 3).sum())
            return f"{bad} elements differ" if bad else ""

        return Case(lambda config: (scale_launch(x, y, config, count),), lambda: _poison(y), fault)

    return Problem(
        name=f"scale {form} {count}",
        bucket=ProblemBucket("scale", form, (count,)),
        kernel=scale_kernel,
        space=space,
        make=make,
        work=lambda config: Work(8 * count, dict(config.tiles)["BLOCK"]),
        wide={"scale_kernel": (1, 1)},
    )


def product_problem(size: int) -> Problem:
    def make(device: torch.device, filled: bool) -> Case:
        a = torch.ones(4, size, size, dtype=torch.bfloat16, device=device)
        c = torch.empty(size, size, device=device)
        return Case(lambda config: (product_launch(a, c, config),), lambda: _poison(c), lambda: "")

    return Problem(
        name=f"product {size}",
        bucket=ProblemBucket("product", "bfloat16", (size,)),
        kernel=product_kernel,
        space=(KernelConfig((("SIZE", size),)),),
        make=make,
        work=lambda config: Work(4 * size**2, 8 * size**3),
        wide={"product_kernel": (1, 1)},
    )


def problems() -> Sequence[Problem]:
    return scale_problem(), product_problem(64)


def flawed() -> Sequence[Problem]:
    """What the gate must not let through: a count that forbids vectors, and what Triton refuses."""
    odd = scale_problem("odd", COUNT + 1)
    return odd, scale_problem("refused", space=(tiled(1000),))


def everything() -> Sequence[Problem]:
    return *problems(), *flawed()


def spilling() -> Sequence[Problem]:
    return (scale_problem("spilling", 1 << 16, (tiled(16384, warps=1),)),)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan"))
