"""What a compiler made of a kernel, read from its assembly: PTX and SASS of NVIDIA, AMD's text."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkit.kernels.tuning.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler made of a launch."""

    registers: int  # of one thread; on AMD vector registers
    spill_bytes: int  # of one thread: NVIDIA's stack frame, AMD's spilled vector registers
    shared_bytes: int  # of one block
    loads: int  # instructions that read global memory, copies into shared memory among them
    loads_16: int  # those of 16 bytes or more per thread
    stores: int
    stores_16: int
    mma: int  # matrix instructions
    instructions: int  # of the loop with the largest share of these; of the whole kernel where none has any
    in_flight: int  # copies into shared memory that a wait of the loop leaves under way, at most (NVIDIA)
    blocks_per_sm: int  # an estimate from registers, shared memory and warps

    def flaw(self) -> str:
        """Why this cannot or should not run, "" if nothing speaks against it."""
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes"
        return "" if self.blocks_per_sm else "does not fit a multiprocessor"


_PTX_ACCESS = re.compile(
    r"\b(?:(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\s"
    r"|cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)[,;\s])"
)
_PTX_MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


def read_nvidia(assembly: Mapping[str, Any], shared_bytes: int, warps: int, gpu: Gpu) -> Compiled:
    """From PTX what it loads and stores, from the binary what ptxas made of it.

    Args:
        assembly: as Triton keeps it: "ptx", "cubin", "ttgir".
        shared_bytes, warps: of one block.
        gpu: that it was compiled for.

    Raises:
        ValueError: the binary's report lacks something.
    """
    from triton import knobs

    ptx: str = assembly["ptx"]
    accesses = [
        (kind == "st", int(copied, 0) if copied else int(vector or 1) * int(bits) // 8)
        for kind, vector, bits, copied in _PTX_ACCESS.findall(ptx)
    ]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(_field(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    return Compiled(
        registers=registers,
        spill_bytes=stack,
        shared_bytes=shared_bytes,
        **_counts(accesses),
        mma=len(_PTX_MMA.findall(ptx)),
        instructions=_main_loop(usage),
        in_flight=max(
            (int(n) for n in re.findall(r"async_wait .*num = (\d+)", assembly["ttgir"])), default=0
        ),
        blocks_per_sm=gpu.blocks_per_sm(registers, shared_bytes, warps),
    )


_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def read_amd(assembly: Mapping[str, Any], shared_bytes: int, warps: int, gpu: Gpu) -> Compiled:
    """From the assembly text, "amdgcn", whose metadata says the rest; otherwise as `read_nvidia`."""
    text: str = assembly["amdgcn"]
    accesses = [(kind == "store", _AMD_BYTES.get(width, 2)) for kind, width in _AMD_ACCESS.findall(text)]
    registers = int(_field(r"\.vgpr_count:\s*(\d+)", text))  # accumulation registers included
    return Compiled(
        registers=registers,
        spill_bytes=4 * int(_field(r"\.vgpr_spill_count:\s*(\d+)", text)),
        shared_bytes=shared_bytes,
        **_counts(accesses),
        mma=len(re.findall(r"\bv_s?mfmac?_", text)),
        instructions=len(re.findall(r"^\t[a-z]+_\w+", text, re.MULTILINE)),
        in_flight=0,
        blocks_per_sm=gpu.blocks_per_sm(registers, shared_bytes, warps),
    )


_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+)(.*?);", re.MULTILINE)
_SASS_MMA = re.compile(r"(?:H|Q|I|D|O|UTC\w*)G?MMA\b")


def _main_loop(sass: str) -> int:
    """Instructions of the loop with the largest share of matrix products, else of the whole kernel.

    A jump back from waits that stand after the kernel's end looks like a loop, too, of few products.
    """
    found = [(int(at, 16), name, rest) for at, name, rest in _SASS.findall(sass)]
    lines = {at: i for i, (at, _, _) in enumerate(found)}
    products = [0]
    for _, name, _ in found:
        products.append(products[-1] + bool(_SASS_MMA.match(name)))
    best = 0.0, len(found)
    for i, (_, name, rest) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        first = lines.get(int(target[1], 16), i + 1) if target else i + 1
        if first <= i:
            best = max(best, ((products[i + 1] - products[first]) / (i + 1 - first), i + 1 - first))
    return best[1]


def _counts(accesses: list[tuple[bool, int]]) -> dict[str, int]:
    """Loads and stores, and those of 16 bytes, among (is a store, bytes)."""
    found: dict[str, int] = {}
    for name, stores in (("loads", False), ("stores", True)):
        sizes = [size for store, size in accesses if store == stores]
        found |= {name: len(sizes), f"{name}_16": sum(size >= 16 for size in sizes)}
    return found


def _field(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's report has no {pattern}: {text[:200]}")
    return found[1]
