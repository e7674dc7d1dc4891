"""Attention's Triton kernels are lowered for CUDA through jax-triton as planned; run by `make test-jax`.

$JAX_PLANS is what jax_plans.py wrote. No GPU is needed: jax-triton compiles to PTX with the Triton that is
installed, and needs `jax_cuda13_plugin` to encode its calls.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jax_plans import CASES, Planned
from jax_reference import H100, nvidia
from jaxlib.mlir import ir
from triton.backends.compiler import GPUTarget

from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention import jax_choice, jax_plan, jax_triton
from kvkit.kernels.attention.layer import Requests

# the GPU that Triton sees: on none, it would not take float32 products apart for tensor cores
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
CALL = "triton_kernel_call_ffi"
PLANS: dict[str, Planned] = pickle.loads(Path(os.environ["JAX_PLANS"]).read_bytes())
WIDE = re.compile(r"cp\.async\.cg\.shared\.global|ld\.global\S*\.v4\.b32")


class Lowered(NamedTuple):
    """What a lowered module says of a call."""

    kernel: str
    grid: list[int]
    warps: int
    shared_bytes: int
    capability: int
    ptx: str
    arrays: int
    numbers: list[float]  # in the kernel's order, without those that are 1


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields (https://protobuf.dev/programming-guides/encoding)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        value = message[at : at + size]
        at += size
        yield number, struct.unpack("<f", value)[0] if kind == 5 else value


def decoded(opaque: bytes) -> Lowered:
    """A `TritonAnyKernelCall` of jaxlib."""
    [call] = [value for number, value in fields(zlib.decompress(opaque)) if number == 1]
    found = list(fields(call))
    kernel = {3: 0} | dict(fields(dict(found)[1]))  # zeros are left out
    parameters = [next(fields(value)) for number, value in found if number == 5]
    return Lowered(
        kernel=kernel[1].decode(),
        grid=[dict(found)[axis] for axis in (2, 3, 4)],
        warps=kernel[2],
        shared_bytes=kernel[3],
        capability=kernel[6],
        ptx=kernel[4].decode(),
        arrays=sum(number == 1 for number, _ in parameters),
        numbers=[value for number, value in parameters if number != 1],
    )


def specs(planned: Planned) -> list[Any]:
    return [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in planned.arrays]


def attend(planned: Planned, anywhere: bool = True) -> Callable[..., Any]:
    """The attention of q and pages, with rows that are known."""
    q, *_ = planned.arrays
    shapes = (
        planned.work.tables.shape,
        (len(q),),
        (len(planned.work.tables) + 1,),
        planned.work.tables.shape[:1],
    )
    requests = Requests(*(np.zeros(shape, np.int32) for shape in shapes))
    known = requests, planned.scoring, planned.work, planned.calls, anywhere
    return lambda q, k, v: attention._blend_attention(q, k, v, *known)


def lowered(function: Callable[..., Any], *arguments: Any) -> Any:
    with nvidia():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def calls(planned: Planned) -> list[Lowered]:
    found = []

    def keep(operation: ir.Operation) -> ir.WalkResult:
        if CALL in str(operation.attributes.get("call_target_name")):
            found.append(operation.attributes["mhlo.backend_config"]["opaque"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered(attend(planned), *specs(planned)).compiler_ir("stablehlo").operation.walk(keep)
    return [decoded(opaque) for opaque in found]


def check_call(found: Lowered, kernel: Any, call: jax_plan.KernelCall, arrays: int) -> None:
    """The kernel, its launch and its numbers are those of the plan, and its PTX is for an H100."""
    assert found.kernel == kernel.__name__
    assert found.grid == [*call.grid, 1, 1][:3]
    assert (found.warps, found.capability, found.arrays) == (call.warps, 90, arrays)
    given = dict(call.arguments)
    order = [p.name for p in kernel.params if not p.is_constexpr][arrays:]
    wanted = [given[name] for name in order if given[name] != 1]
    assert found.numbers == [pytest.approx(value, rel=1e-7) for value in wanted]
    assert ".version 8.7\n.target sm_90a" in found.ptx
    assert f".entry {kernel.__name__}(" in found.ptx


@pytest.mark.parametrize("name", CASES)
def test_the_calls_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    """And ptxas takes their code, which fetches K and V in pieces of 16 bytes, without spills."""
    planned = PLANS[name]
    first, *merging = calls(planned)
    check_call(first, jax_triton.attend_dense, planned.calls.attend, 10)
    assert len(merging) == (planned.calls.merge is not None)
    for call in merging:
        check_call(call, jax_triton.merge, planned.calls.merge, 5)
    assert "mma" in first.ptx
    assert len(WIDE.findall(first.ptx)) >= 8
    (tmp_path / "kernel.ptx").write_text(first.ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"
    if name != "latent":  # spills 64 bytes with torch, too
        assert " 0 bytes spill stores" in done.stderr


def test_results_of_merged_parts_stay_in_place() -> None:
    text = lowered(attend(PLANS["split"]), *specs(PLANS["split"])).as_text()
    [merging] = [line for line in text.splitlines() if CALL in line and "output_operand_aliases" in line]
    pairs = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", merging)
    assert pairs == [("0", "3"), ("1", "4")]


def test_other_platforms_get_what_they_had() -> None:
    """XLA on a CPU, Pallas on a TPU; alone, the kernels are refused where they cannot run."""
    planned = PLANS["split"]
    traced = jax.jit(attend(planned)).trace(*specs(planned))
    assert CALL not in traced.lower().as_text()
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    alone = attend(planned, anywhere=False)
    with pytest.raises(NotImplementedError, match=r"triton_kernel_call.* not found for platform cpu"):
        jax.jit(alone).trace(*specs(planned)).lower()
    assert lowered(alone, *specs(planned)).as_text().count(CALL) == 2


def test_transformations() -> None:
    """Several problems at once are left to XLA; loops and heads on several devices hold the kernels."""
    planned = PLANS["split"]
    q, k, v = specs(planned)
    function = attend(planned)
    several = jax.ShapeDtypeStruct((2, *q.shape), q.dtype)
    batched = lowered(jax.vmap(function, (0, None, None)), several, k, v).as_text()
    assert CALL not in batched

    def repeated(q: Any, k: Any, v: Any) -> Any:
        step = lambda x, _: (function(x, k, v)[0], None)  # noqa: E731
        return jax.lax.scan(step, q, None, length=3)[0]

    assert lowered(repeated, q, k, v).as_text().count(CALL) == 2
    with pytest.raises(NotImplementedError, match=r"^blend_attention has no gradient"):
        jax.grad(lambda q: function(q, k, v)[1].sum())(jnp.zeros(q.shape, q.dtype))
    mesh = AbstractMesh((2,), ("heads",), abstract_device=H100, axis_types=(AxisType.Auto,))
    heads = P(None, "heads")
    sharded = jax.shard_map(function, mesh=mesh, in_specs=(heads,) * 3, out_specs=(heads, heads))
    wide = [jax.ShapeDtypeStruct((x.shape[0], 2 * x.shape[1], *x.shape[2:]), x.dtype) for x in (q, k, v)]
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(sharded).trace(*wide).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 2
    assert f"tensor<{'x'.join(map(str, q.shape))}xbf16>" in text  # one device's heads


def test_export_names_the_call() -> None:
    planned = PLANS["split"]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(CALL)]
    export = partial(jax.export.export, jax.jit(attend(planned)), platforms=["cuda"])
    with nvidia():
        assert export(disabled_checks=allowed)(*specs(planned)).mlir_module().count(CALL) == 2
        with pytest.raises(ValueError, match=CALL):
            export()(*specs(planned))


def test_here_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for torch, which plans; and the folder of Triton's cache stays as it was."""
    reason = jax_choice.unusable.__wrapped__
    monkeypatch.setenv("TRITON_CACHE_DIR", "/folder")
    monkeypatch.delitem(jax_choice.LEAST, "torch")
    monkeypatch.setattr(jax_choice, "blind_torch", lambda: "")
    assert reason() == ""
    assert os.environ["TRITON_CACHE_DIR"] == "/folder"
    monkeypatch.setattr(jax_triton, "ARRAYS", {jax_triton.attend_dense: 9, jax_triton.merge: 5})
    assert re.match("jax-triton .* fails under jax .*: install versions", reason())
