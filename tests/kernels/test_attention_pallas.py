"""Pallas attention kernels compile for GPUs that are not here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton
from jax_reference import nvidia
from jaxlib.mlir import ir
from jaxlib.triton import dialect
from run_sizes import nightly
from triton.backends.compiler import GPUTarget

from kvkit.kernels.attention import pallas
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.tuning.assembly import read_nvidia
from kvkit.kernels.tuning.gpus import GPUS


def lowered(
    dtype: str, size: int, v_size: int, group: int, n: int, window: int | None, softcap: float | None
) -> tuple[str, int, int]:
    """The kernel in Triton's language, its warps and its stages."""
    m, blocks, requests = 512, 4096, 3
    specs = (
        ((m, 2 * group, size), dtype),
        ((blocks, 2, n, size), dtype),
        ((blocks, 2, n, v_size), dtype),
    )
    arrays = (jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in specs)
    ids = ((requests, 64), (m,), (requests + 1,), (requests,))
    rows = Requests(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ids))
    attend = jax.jit(partial(pallas.blend_attention, scoring=Scoring(0.125, window, softcap)))
    traced = attend.trace(*arrays, rows)
    calls = []

    def keep(operation: ir.Operation) -> ir.WalkResult:
        if "xla.gpu.triton" in str(operation.attributes.get("call_target_name")):
            calls.append(operation.attributes["mhlo.backend_config"])
        return ir.WalkResult.ADVANCE

    with nvidia():
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    module.operation.walk(keep)
    [call] = calls
    with ir.Context() as context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        text = str(ir.Module.parse(call["ir"].value_bytes))
    return text, call["num_warps"].value, call["num_stages"].value


@pytest.mark.parametrize(
    ("dtype", "size", "v_size", "group", "n", "window", "softcap"),
    [
        ("bfloat16", 80, 96, 4, 13, 300, 30.0),
        *nightly(
            ("bfloat16", 128, 128, 4, 16, None, None),
            ("float16", 64, 64, 3, 64, 300, None),
            ("bfloat16", 256, 256, 2, 16, None, None),
            ("bfloat16", 576, 512, 64, 64, None, None),
            ("float32", 64, 64, 3, 16, 300, None),
            ("float32", 128, 128, 4, 16, None, None),
            ("float32", 256, 256, 2, 16, None, None),
        ),
    ],
)
def test_compiles_without_spills(
    dtype: str,
    size: int,
    v_size: int,
    group: int,
    n: int,
    window: int | None,
    softcap: float | None,
    tmp_path: Path,
) -> None:
    """By PyTorch's Triton, for XLA's is in its GPU plugin: products on tensor cores, rows in 16 bytes.

    With three stages, keys and values are under way while a tile is computed.
    """
    text, warps, stages = lowered(dtype, size, v_size, group, n, window, softcap)
    (tmp_path / "attention.ttir").write_text(text)
    for target in ("sm_80", "sm_90"):
        gpu = GPUS[target]
        done = triton.compile(
            str(tmp_path / "attention.ttir"),
            target=GPUTarget(gpu.backend, gpu.arch, gpu.threads),
            options={"num_warps": warps, "num_stages": stages},
        )
        made = read_nvidia(done.asm, done.metadata.shared, warps, gpu)
        assert made.rejection() == "", target
        assert bool(made.mma) == (dtype != "float32")
        assert made.loads_16 > made.loads / 3
        assert made.stores_16
        assert bool(made.in_flight) == (stages > 2)
