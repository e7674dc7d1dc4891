"""What is read from the assembly that compilers write, and how much of it fits a GPU."""

from __future__ import annotations

import pytest

from kvkit.kernels.tuning.assembly import _PTX_ACCESS
from kvkit.kernels.tuning.gpus import GPUS


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 2),
        ("ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 16),
        ("@%p3 ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd1 + 0 ];", 16),
        ("ld.global.nc.v8.f32 { %r1 }, [ %rd1 + 0 ];", 32),
        ("st.global.v2.b32 [ %rd2 + 0 ], { %r1, %r2 };", 8),
        ("cp.async.cg.shared.global [ %r32 + 0 ], [ %rd4 + 0 ], 0x10, %r33;", 16),
        ("cp.async.ca.shared.global [ %r32 + 0 ], [ %rd4 + 0 ], 0x4;", 4),
        ("cp.async.commit_group;", None),
        ("ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];", None),
        ("ld.param.b64 %rd1, [scale_kernel_param_0];", None),
    ],
)
def test_accesses_in_ptx(line: str, size: int | None) -> None:
    found = _PTX_ACCESS.findall(line)
    sizes = [int(c, 0) if c else int(vector or 1) * int(bits) // 8 for _, vector, bits, c in found]
    assert sizes == ([] if size is None else [size])


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "warps", "blocks"),
    [
        ("sm_90", 128, 0, 4, 4),  # 65,536 registers for 128 threads of 128 each
        ("sm_90", 255, 0, 4, 2),
        ("sm_90", 168, 0, 4, 3),  # 512 / 168: 3 warps of a scheduler, 12 in all
        ("sm_90", 32, 0, 4, 16),  # 64 warps
        ("sm_90", 16, 0, 1, 32),  # 32 blocks
        ("sm_90", 32, 100 << 10, 4, 2),
        ("sm_90", 32, 227 << 10, 4, 1),
        ("sm_90", 32, (227 << 10) + 1, 4, 0),
        ("sm_80", 32, 100 << 10, 4, 1),
        ("sm_80", 32, 164 << 10, 4, 0),
        ("sm_89", 32, 0, 4, 12),  # 48 warps
        ("gfx942", 128, 0, 4, 4),
        ("gfx942", 512, 0, 4, 1),
        ("gfx942", 64, 64 << 10, 4, 1),
        ("gfx942", 64, (64 << 10) + 1, 4, 0),
    ],
)
def test_blocks_per_multiprocessor(
    target: str, registers: int, shared_bytes: int, warps: int, blocks: int
) -> None:
    assert GPUS[target].blocks_per_sm(registers, shared_bytes, warps) == blocks
