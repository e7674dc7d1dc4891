"""Faults in the machine code of a kernel whose warpgroups overlap matrix products with exponentials.

A kernel can be right and free of spills, and yet wait for each product: ptxas moves waits, and inserts some.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence

from kvkit.kernels.tuning.assembly import MachineInstruction, parse_sass
from kvkit.kernels.tuning.compiling import compiling_for
from kvkit.kernels.tuning.configs import Launch


def sass_of(launch: Launch, target: str) -> tuple[MachineInstruction, ...]:
    """Return the SASS of a launch for an NVIDIA target; arguments and errors as of `compile_for`."""
    with compiling_for(launch, target), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        from triton import knobs

        file.write(launch.compile().asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-sass", file.name]
        return parse_sass(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def loops_with_products(sass: Sequence[MachineInstruction]) -> list[Sequence[MachineInstruction]]:
    """Return the innermost loops that have wgmma instructions.

    A jump back from a wait after the kernel's end is no loop.
    """
    loops = []
    for i, instruction in enumerate(sass):
        if instruction.jump is not None and instruction.jump <= i:
            loop = range(instruction.jump, i + 1)
            ends = any(sass[j].name == "EXIT" for j in loop)
            if not ends and any(_is(sass[j], "HGMMA") for j in loop):
                loops.append(loop)
    inner = (x for x in loops if not any(y is not x and y[0] in x and y[-1] in x for y in loops))
    return [sass[loop.start : loop.stop] for loop in inner]


def overlap_faults(sass: Sequence[MachineInstruction]) -> list[str]:
    """Return a line for each way in which a loop with wgmma does not do what its source says.

    All products are started, then a wait leaves the last ones in flight, then all exponentials follow, then
    a wait for the rest. Nothing is spilt, and no barrier has all warps of the program.
    """
    found = []
    for n, loop in enumerate(loops_with_products(sass)):
        waits = [i for i, one in enumerate(loop) if one.name == "WARPGROUP.DEPBAR.LE"]
        counts = [int(re.sub(r".*gsb0, 0x", "", loop[i].operands), 16) for i in waits]
        if counts != [1, 0]:
            found.append(f"loop {n}: waits leave {counts} products in flight, want [1, 0]")
        else:
            early = [one.name for one in loop[: waits[0]] if _is(one, "MUFU")]
            late = [one.name for one in loop[waits[1] :] if _is(one, "MUFU")]
            if early or late:
                found.append(f"loop {n}: {len(early + late)} exponentials without a product in flight")
            if any(_is(one, "HGMMA") for one in loop[waits[0] :]):
                found.append(f"loop {n}: a product is started after the first wait")
        spills = sum(_is(one, "LDL", "STL") for one in loop)
        if spills:
            found.append(f"loop {n}: {spills} accesses to spilt registers")
        if any(_is(one, "BAR") and not one.operands.endswith(", 0x80") for one in loop):
            found.append(f"loop {n}: a barrier has all warps")
    return found


def _is(instruction: MachineInstruction, *names: str) -> bool:
    return instruction.name.split(".")[0] in names
