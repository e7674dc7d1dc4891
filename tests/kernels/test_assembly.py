"""Memory accesses, main loops and occupancy are read from the assembly that compilers write."""

from __future__ import annotations

import pytest

from kvkit.kernels.tuning.assembly import _PTX_ACCESS, main_loop, overwritten, parse_amd, parse_sass
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


def sass(*lines: str) -> str:
    """As cuobjdump prints it: an address for each instruction."""
    return "".join(
        f"        /*{16 * i:04x}*/                   {line} ;  /* 0x0 */\n" for i, line in enumerate(lines)
    )


QK = "HGMMA.64x32x16.F32.BF16 R88, gdesc[UR4], RZ, !UPT, gsb0"
PV = "HGMMA.64x128x16.F32.BF16 R24, R104, gdesc[UR4].tnspB, R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
ONE_LEFT = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
END = "EXIT"


@pytest.mark.parametrize(
    ("lines", "hit"),
    [
        ((PV, "FADD R104, R1, R2", WAIT, END), "R104"),
        ((PV, "FADD R103, R104, R107", "FADD R108, R1, R2", WAIT, "FADD R104, R1, R2", END), ""),
        ((PV, "LDS.128 R100, [R1]", WAIT, END), ""),
        ((PV, "LDS.128 R104, [R104]", WAIT, END), "R104"),
        ((PV, "IMAD.WIDE.U32 R106, R1, R2, RZ", WAIT, END), "R106"),
        ((PV, "IMAD.WIDE R102, R1, R2, RZ", WAIT, END), ""),
        ((PV, "SHFL.BFLY PT, R107, R1, 0x2, 0x1f", WAIT, END), "R107"),
        (
            (PV, "STS.128 [R104], R104", "LDGSTS.E.BYPASS.128 [R104+0x8000], desc[UR16][R106.64]", WAIT, END),
            "",
        ),
        ((PV, "ISETP.LT.AND P1, PT, R104, UR19, !P0", WAIT, END), ""),
        ((PV, "CS2R R106, SRZ", WAIT, END), "R106"),
        ((PV, "@P0 MOV R105, R1", WAIT, END), "R105"),  # it may run
        ((PV, "@!PT LDS R105, [RZ]", WAIT, END), ""),  # it never does
        ((PV, QK, ONE_LEFT, "MOV R105, R1", WAIT, END), ""),  # the older group is done
        ((PV, ONE_LEFT, "MOV R105, R1", WAIT, END), "R105"),  # it is the one that may be left
        (("MOV R105, R1", PV, "@!P1 BRA 0x0", WAIT, END), "R105"),  # by the loop's next turn
        (("FADD R88, R1, R2", WAIT, "MOV R105, R1", PV, "@!P1 BRA 0x0", WAIT, END), ""),
        ((PV, "@P0 BRA 0x30", WAIT, "MOV R105, R1", END), "R105"),  # a way around the wait
        ((PV, "BRA 0x30", "MOV R105, R1", WAIT, END), ""),  # nothing leads there
        ((QK, "FADD R104, R1, R2", WAIT, END), ""),  # its A is in shared memory
    ],
)
def test_a_register_that_a_wgmma_may_still_read(lines: tuple[str, ...], hit: str) -> None:
    found = overwritten(parse_sass(sass(*lines)))
    assert found.startswith(f"{hit}, which instruction") if hit else not found
    if hit:
        assert "HGMMA.64x128x16" in found


def test_the_main_loop_has_the_largest_share_of_products() -> None:
    masked, plain = ("NOP", PV, "NOP", "NOP", WAIT, "@P0 BRA 0x10"), (PV, WAIT, "NOP", "@P0 BRA.U UP0, 0x70")
    found = parse_sass(sass("NOP", *masked, *plain, END, "BRA 0xc0"))
    assert [one.name for one in main_loop(found)] == [
        "HGMMA.64x128x16.F32.BF16",
        "WARPGROUP.DEPBAR.LE",
        "NOP",
        "BRA.U",
    ]
    assert main_loop(found[1:2]) == found[1:2]


def test_the_main_loop_of_amd() -> None:
    text = "kernel:\n\ts_load_dword s0, s[0:1], 0x0\n.LBB0_1:                ; %loop\n"
    text += "\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]\n"
    text += "\ts_cbranch_scc1 .LBB0_1\n\ts_endpgm\n"
    assert [one.name for one in main_loop(parse_amd(text))] == [
        "v_mfma_f32_32x32x8_bf16_1k",
        "s_cbranch_scc1",
    ]
