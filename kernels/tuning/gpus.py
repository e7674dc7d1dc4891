"""GPUs to compile kernels for, and the resources of one of their multiprocessors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to compile for, and the resources of one of its multiprocessors (compute units).

    From NVIDIA's compute capabilities table (https://docs.nvidia.com/cuda/cuda-c-programming-guide) and AMD's
    CDNA 3 instruction set guide.
    """

    backend: str
    arch: int | str
    threads: int  # threads of a warp
    registers: int  # of 32 bits for one lane of one of its 4 schedulers
    step: int  # registers of a lane are allocated in multiples of this
    warps: int  # maximum number at a time
    blocks: int  # maximum number at a time
    shared_bytes: int
    block_shared_bytes: int  # maximum of one block
    reserved_bytes: int  # shared memory that each block takes besides its own
    most_registers: int  # maximum of a lane

    def blocks_per_sm(self, registers: int, shared_bytes: int, warps: int) -> int:
        """Return the number of blocks that fit a multiprocessor at a time; 0 if none does."""
        if registers > self.most_registers or shared_bytes > self.block_shared_bytes:
            return 0
        allocated = max(1, -(-registers // self.step)) * self.step
        by_registers = min(self.warps, self.registers // allocated * 4) // warps
        by_shared = self.shared_bytes // max(1, shared_bytes + self.reserved_bytes)
        return min(self.blocks, by_registers, by_shared)


def _nvidia(capability: int, warps: int, blocks: int, shared_kib: int) -> Gpu:
    shared = shared_kib << 10
    return Gpu("cuda", capability, 32, 512, 8, warps, blocks, shared, shared - 1024, 1024, 255)


GPUS: Mapping[str, Gpu] = {
    "sm_80": _nvidia(80, 64, 32, 164),
    "sm_86": _nvidia(86, 48, 16, 100),
    "sm_89": _nvidia(89, 48, 24, 100),
    "sm_90": _nvidia(90, 64, 32, 228),
    "sm_100": _nvidia(100, 64, 32, 228),
    "sm_120": _nvidia(120, 48, 24, 100),
    "gfx942": Gpu("hip", "gfx942", 64, 512, 8, 32, 32, 64 << 10, 64 << 10, 0, 512),
}
"""GPUs by name: A100; A10 and RTX 30; L4, L40 and RTX 40; H100 and H200; B200; RTX 50; MI300."""
