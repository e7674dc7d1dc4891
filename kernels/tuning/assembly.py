"""Properties of a compiled kernel, read from its assembly: PTX and SASS of NVIDIA, AMD's text."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkit.kernels.tuning.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Compiled:
    """Properties of a compiled launch."""

    registers: int  # registers of one thread; on AMD, vector registers
    spill_bytes: int  # spills of one thread: NVIDIA's stack frame, AMD's spilled vector registers
    shared_bytes: int  # shared memory of one block
    loads: int  # instructions that read global memory, copies into shared memory among them
    loads_16: int  # loads of 16 bytes or more per thread
    stores: int
    stores_16: int
    mma: int  # matrix instructions
    instructions: int  # of the loop with the largest share of `mma`; of the whole kernel if none has any
    waits: int  # barriers of that loop, and waits for copies and products (NVIDIA)
    in_flight: int  # most copies into shared memory in flight after a wait of the loop (NVIDIA)
    blocks_per_sm: int  # an estimate from registers, shared memory and warps
    digest: str = ""  # equal if all instructions are
    hazard: str = ""  # how its results may be wrong, see `overwritten`

    def rejection(self) -> str:
        """Return why this cannot run or would be wrong, "" if there is no reason."""
        return self.hazard or ("" if self.blocks_per_sm else "does not fit a multiprocessor")


@dataclass(frozen=True, slots=True)
class MachineInstruction:
    """One instruction of SASS or of AMD's assembly."""

    name: str  # with its modifiers
    operands: str = ""  # as written
    guard: str = ""  # the predicate under which it runs; "": always
    jump: int | None = None  # index of the instruction that it may jump to


_PTX_ACCESS = re.compile(
    r"\b(?:(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\s"
    r"|cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)[,;\s])"
)
_PTX_MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) )?(\S+)(.*?);", re.MULTILINE)
_WAIT = re.compile(r"BAR\.SYNC|(?:WARPGROUP\.)?DEPBAR|SYNCS\.PHASECHK")
_MMA = re.compile(r"(?:H|Q|I|D|O|UTC\w*)G?MMA\b|v_s?mfmac?_")


def read_nvidia(assembly: Mapping[str, Any], shared_bytes: int, warps: int, gpu: Gpu) -> Compiled:
    """Read loads and stores from PTX, and the result of ptxas from the binary.

    Args:
        assembly: assembly as Triton keeps it: "ptx", "cubin", "ttgir".
        shared_bytes, warps: shared memory and warps of one block.
        gpu: GPU that it was compiled for.

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
    sass = parse_sass(usage)
    loads, loads_16, stores, stores_16 = _counts(accesses)
    loop = main_loop(sass)
    return Compiled(
        registers=registers,
        spill_bytes=stack,
        shared_bytes=shared_bytes,
        loads=loads,
        loads_16=loads_16,
        stores=stores,
        stores_16=stores_16,
        mma=len(_PTX_MMA.findall(ptx)),
        instructions=len(loop),
        waits=sum(bool(_WAIT.match(one.name)) for one in loop) if loop is not sass else 0,
        in_flight=max(
            (int(n) for n in re.findall(r"async_wait .*num = (\d+)", assembly["ttgir"])), default=0
        ),
        blocks_per_sm=gpu.blocks_per_sm(registers, shared_bytes, warps),
        digest=_digest(sass),
        hazard=overwritten(sass),
    )


_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def read_amd(assembly: Mapping[str, Any], shared_bytes: int, warps: int, gpu: Gpu) -> Compiled:
    """Read the assembly text, "amdgcn", and its metadata; otherwise as `read_nvidia`."""
    text: str = assembly["amdgcn"]
    accesses = [(kind == "store", _AMD_BYTES.get(width, 2)) for kind, width in _AMD_ACCESS.findall(text)]
    registers = int(_field(r"\.vgpr_count:\s*(\d+)", text))  # accumulation registers included
    found = parse_amd(text)
    loads, loads_16, stores, stores_16 = _counts(accesses)
    return Compiled(
        registers=registers,
        spill_bytes=4 * int(_field(r"\.vgpr_spill_count:\s*(\d+)", text)),
        shared_bytes=shared_bytes,
        loads=loads,
        loads_16=loads_16,
        stores=stores,
        stores_16=stores_16,
        mma=sum(bool(_MMA.match(one.name)) for one in found),
        instructions=len(main_loop(found)),
        waits=0,
        in_flight=0,
        blocks_per_sm=gpu.blocks_per_sm(registers, shared_bytes, warps),
        digest=_digest(found),
    )


def reader_of(gpu: Gpu) -> Callable[..., Compiled]:
    """Return the function that reads a GPU's assembly."""
    return read_amd if gpu.backend == "hip" else read_nvidia


def parse_sass(text: str) -> tuple[MachineInstruction, ...]:
    """Parse the instructions of one kernel, as `cuobjdump --dump-sass` prints them."""
    matches = _SASS.findall(text)
    index_of = {int(address, 16): i for i, (address, *_) in enumerate(matches)}
    instructions = []
    for _, guard, name, operands in matches:
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        jump = index_of.get(int(target[1], 16)) if target else None
        instructions.append(MachineInstruction(name, operands.strip(), guard, jump))
    return tuple(instructions)


def parse_amd(text: str) -> tuple[MachineInstruction, ...]:
    """Parse the instructions of one kernel, as LLVM prints them for AMD."""
    matches = re.findall(r"^(?:(\.\w+):|\t([a-z]+_\w+)([^;\n]*))", text, re.MULTILINE)
    index_of: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for label, name, operands in matches:
        if label:
            index_of[label] = len(lines)
        else:
            lines.append((name, operands.strip()))
    return tuple(
        MachineInstruction(name, operands, jump=index_of.get(operands) if name.startswith("s_") else None)
        for name, operands in lines
    )


def main_loop(instructions: Sequence[MachineInstruction]) -> Sequence[MachineInstruction]:
    """Return the loop with the largest share of matrix products, else the whole kernel.

    A jump back from waits after the kernel's end looks like a loop too, but has a small share of products.
    """
    products = [0]
    for instruction in instructions:
        products.append(products[-1] + bool(_MMA.match(instruction.name)))
    best, loop = 0.0, instructions
    for i, instruction in enumerate(instructions):
        first = i + 1 if instruction.jump is None else instruction.jump
        if first <= i and (share := (products[i + 1] - products[first]) / (i + 1 - first)) > best:
            best, loop = share, instructions[first : i + 1]
    return loop


_WGMMA = re.compile(r"[A-Z]GMMA\b")
_A_REGISTERS = 4  # per thread, for any dtype: 64 rows of 32 bytes over 128 threads


def overwritten(sass: Sequence[MachineInstruction]) -> str:
    """Find the first wgmma with A registers that are written to before a wait for it; "" if none.

    A wgmma reads its registers while the instructions after it run, until a `WARPGROUP.DEPBAR.LE gsb0, N`
    leaves no more than the N latest groups in flight; a wgmma with `gsb0` ends its group. ptxas of CUDA 12.9
    may reuse them too early (https://github.com/triton-lang/triton/pull/11781). Every path of control from
    each wgmma is followed, repeated loops included. Writes of later wgmmas are allowed: they run in order.
    """
    for i, instruction in enumerate(sass):
        a = re.match(r"R\d+, R(\d+),", instruction.operands) if _WGMMA.match(instruction.name) else None
        if a is None:
            continue
        a_registers = range(int(a[1]), int(a[1]) + _A_REGISTERS)
        pending, seen = [(i, 0)], set[tuple[int, int]]()  # index, groups ended since
        while pending:
            index, groups = pending.pop()
            if index >= len(sass) or (index, groups) in seen:
                continue
            seen.add((index, groups))
            step = sass[index]
            waited = re.match(r"gsb0, 0x([0-9a-f]+)", step.operands) if "DEPBAR" in step.name else None
            if (waited and groups > int(waited[1], 16)) or (step.name == "EXIT" and not step.guard):
                continue
            hit = sorted(set(a_registers) & set(_written(step)))
            if hit:
                return (
                    f"R{hit[0]}, which instruction {i} ({instruction.name}) may still read, is overwritten "
                    f"by instruction {index} ({step.name} {step.operands})"
                )
            if _WGMMA.match(step.name) and "gsb0" in step.operands:
                groups = min(groups + 1, 8)
            if step.jump is not None:
                pending.append((step.jump, groups))
            if not step.name.startswith("BRA") or step.guard or "," in step.operands:  # may fall through
                pending.append((index + 1, groups))
    return ""


def _written(instruction: MachineInstruction) -> range:
    """Return the vector registers that a SASS instruction writes; none for a wgmma or if it never runs."""
    name, operands = instruction.name, instruction.operands
    if instruction.guard == "!PT" or _WGMMA.match(name):
        return range(0)
    if name.startswith(("SHFL", "ATOM")):
        operands = re.sub(r"^U?P\w+, ", "", operands)
    target = re.match(r"R(\d+)\b", operands)
    if target is None:
        return range(0)
    op, *modifiers = name.split(".")
    size = 1
    if "128" in modifiers or (op == "LDSM" and modifiers[-1] == "4") or op in ("HMMA", "IMMA"):
        size = 4
    elif (
        {"64", "WIDE", "F64"} & set(modifiers)
        or op in ("DADD", "DMUL", "DFMA")
        or (op == "LDSM" and modifiers[-1] == "2")
        or (op == "CS2R" and "32" not in modifiers)
    ):
        size = 2
    return range(int(target[1]), int(target[1]) + size)


def _digest(instructions: Sequence[MachineInstruction]) -> str:
    return hashlib.sha256(repr(instructions).encode()).hexdigest()[:16]


def _counts(accesses: list[tuple[bool, int]]) -> tuple[int, int, int, int]:
    """Count loads, loads of 16 bytes, stores and stores of 16 bytes, among (is a store, bytes)."""
    loads, stores = ([size for store, size in accesses if store == is_store] for is_store in (False, True))
    return len(loads), sum(n >= 16 for n in loads), len(stores), sum(n >= 16 for n in stores)


def _field(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's report has no {pattern}: {text[:200]}")
    return match[1]
