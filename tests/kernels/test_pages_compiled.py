"""The Triton kernels of pages compile to hardware conversions, and not anew for other lengths."""

from __future__ import annotations

import json
from pathlib import Path

from test_compile_gate import in_compiling_process

MADE = """
import json, os, pathlib
import numpy as np, torch
from triton.backends.compiler import GPUTarget
from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import triton as kernels
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.tuning.compiling import StandInDriver, driver_for

def made(chunks=1, length=2, layers=2, precision=None, **more):
    group = LayerGroup(tuple(range(layers)), 2, 64, 64, "bfloat16", block_tokens=16, precision=precision)
    pages = Pages.of(group, group.pages(2))
    ids = np.zeros((chunks, length), np.int64)
    return kernels.move(pages, range(4096, 4096 * (1 + chunks), 4096), ids, **more)

def compiled(launch, backend, arch, threads):
    with driver_for(StandInDriver(GPUTarget(backend, arch, threads))):
        return launch.compile().asm
"""


def test_fp8_is_converted_by_hardware_where_there_is_some() -> None:
    script = """
found = {}
for backend, arch, threads in (("cuda", 80, 32), ("cuda", 89, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)):
    for to_records in (True, False):
        asm = compiled(made(to_records=to_records, precision="fp8"), backend, arch, threads)
        text = asm["ptx" if backend == "cuda" else "amdgcn"]
        words = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2", "_fp8"
        found[f"{arch}, {to_records=}"] = [word for word in words if word in text]
print(json.dumps(found))
"""
    found = json.loads(in_compiling_process(MADE + script))
    for arch in (80, 89, 90, "gfx942"):
        hardware = arch in (89, 90)
        assert found[f"{arch}, to_records=True"] == ["cvt.rn.satfinite.e4m3x2.f32"] * hardware
        assert found[f"{arch}, to_records=False"] == ["cvt.rn.f16x2.e4m3x2"] * hardware


def test_nothing_is_compiled_anew_for_another_length(tmp_path: Path) -> None:
    """Of an engine's pages each way is compiled once, however many tokens, chunks, layers and programs."""
    script = """
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
target, found = ("cuda", 90, 32), []
for way in ({}, {"slots": True}, {"programs": 16}):
    for more in (
        {"length": 1}, {"length": 17}, {"length": 31}, {"length": 512},
        {"chunks": 16}, {"chunks": 1}, {"layers": 1}, {"layers": 16},
    ):
        compiled(made(to_records=False, **more, **way), *target)
    found.append(len(list(cache.rglob("*.cubin"))))
compiled(made(to_records=False, programs=32), *target)
found.append(len(list(cache.rglob("*.cubin"))))
print(json.dumps(found))
"""
    assert json.loads(in_compiling_process(MADE + script, TRITON_CACHE_DIR=str(tmp_path))) == [1, 2, 3, 3]


def test_few_programs_for_all_tiles_take_no_more_from_the_compiler() -> None:
    """Loads and stores of 16 bytes as in the other form, and no spills."""
    script = """
from kvkit.kernels.tuning.compiling import compile_for
found = []
for target in ("sm_80", "sm_90"):
    each, few = (compile_for(made(to_records=False, programs=n), target) for n in (0, 16))
    found.append((few.spill_bytes, few.loads_16 - each.loads_16, few.stores_16 - each.stores_16))
print(json.dumps(found))
"""
    assert json.loads(in_compiling_process(MADE + script)) == [[0, 0, 0]] * 2
