"""Memory limits of the vLLM servers that kvkit starts, and detection of kills by the kernel.

By default vLLM fills 92 % of the machine's or GPU's memory with blocks. It ignores other processes: a second
server or a cache needs memory beyond that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkit.config import Config
from kvkit.environment import gpu_name
from kvkit.lab.files import BenchError

PROCESS_BYTES = 3 << 29
"""Bytes of a server besides weights, blocks and tiers: libraries, compiled code, activations."""
LEAST_BYTES = 64 << 20
"""Minimum bytes of blocks: no request fits in less."""
_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_OF_A_GPU = 0.9
_WEIGHTS = ("*.safetensors", "*.bin")
_KILLED = re.compile(r"\(exit code: -9\)|Failed core proc\(s\): \{[^}]*: -9\b")
"""Messages of vLLM about a killed process of its own."""


class MemoryTooSmall(BenchError):
    """The servers do not fit; the message states the memory they need and the memory available."""


@dataclass(frozen=True, slots=True)
class Share:
    """Memory of each server."""

    block_bytes: int | None  # bytes of KV blocks; None: set by the user, or a share of a GPU
    options: tuple[str, ...]  # options of vLLM that set the memory
    description: str  # the memory in words


def split(available: int, servers: int, weights: int, tiers: int, most: int | None = None) -> int:
    """Return bytes of blocks for each of `servers` concurrent servers: half of the remaining memory. Pure.

    The other half is for memory that grows with the requests, and for the rest of the machine.

    Args:
        available: available bytes.
        weights: bytes of the weights of one server.
        tiers: bytes of all caches.
        most: upper limit in bytes for one server.

    Raises:
        MemoryTooSmall: less than `LEAST_BYTES` would remain for each server.
    """
    block_bytes = (available - tiers - servers * (weights + PROCESS_BYTES)) // 2 // servers
    if block_bytes < LEAST_BYTES:
        needs = (
            f"{servers} vLLM servers with {gib(weights)} of weights and {gib(PROCESS_BYTES)} of overhead each"
        )
        raise MemoryTooSmall(
            f"{needs}, {gib(tiers)} of tiers and {gib(LEAST_BYTES)} of blocks for each do not fit: "
            f"{gib(available)} are available; use a smaller model or fewer servers at a time, or set the "
            f"bytes of blocks with {_OPTIONS[0]}"
        )
    return block_bytes if most is None else min(block_bytes, most)


def share(
    model: str, *, servers: int = 1, tiers: int = 0, most: int | None = None, options: Sequence[str] = ()
) -> Share:
    """Return the memory for each of `servers` servers of one model, given the free memory now.

    Args:
        model: hub id or folder; weights of a hub id are unknown and count as 0 bytes.
        tiers, most: as in `split`.
        options: options of vLLM; those about memory take precedence.

    Raises:
        MemoryTooSmall: the servers do not fit.
    """
    option_names = [option.partition("=")[0].replace("_", "-") for option in options]
    if chosen := [name for name in _OPTIONS if name in option_names]:
        return Share(None, (), f"vLLM's memory: set by {chosen[0]}")
    if gpu_name() is not None:
        fraction = f"{_OF_A_GPU / servers:.2f}"
        description = f"vLLM's memory: {fraction} of the GPU" + (" each" if servers > 1 else "")
        return Share(None, (_OPTIONS[1], fraction), description)
    if os.environ.get(_VARIABLE):
        return Share(None, (), f"vLLM's memory: set by {_VARIABLE}")
    available = available_bytes()
    block_bytes = split(available, servers, weight_bytes(model), tiers, most)
    description = f"vLLM's blocks: {gib(block_bytes)}" + (f" for each of {servers}" if servers > 1 else "")
    tiers_note = f", {gib(tiers)} of them for tiers" if tiers else ""
    return Share(
        block_bytes,
        (_OPTIONS[0], str(block_bytes)),
        f"{description}; {gib(available)} are available{tiers_note}",
    )


def weight_bytes(model: str) -> int:
    """Return bytes of a model's weights in float32; 0 if the model is not a folder."""
    sizes = (file.stat().st_size for pattern in _WEIGHTS for file in Path(model).glob(pattern))
    return 2 * sum(sizes)  # the files are in 16 bits


def tier_bytes(config: Config) -> int:
    """Return bytes of host memory of a cache with this configuration: slots, memory tiers, handoff buffer."""
    capacities = [tier.capacity for tier in config.tiers.values() if tier.url is None and tier.kind is None]
    sizes = [size for size in capacities if isinstance(size, int)]
    return config.staging + sum(sizes) + (config.handoff.buffer or 0 if config.handoff else 0)


def available_bytes() -> int:
    """Return available bytes, by the machine's free memory and the limits of this process's cgroups."""
    free = _read_number(Path("/proc/meminfo"), "MemAvailable:")
    assert free is not None, "every Linux since 3.14 reports it"
    return min([free << 10, *_available_in_groups()])


def _read_number(file: Path, name: str) -> int | None:
    """Return the number after `name` in a kernel file; None if it has none."""
    with suppress(OSError):
        if found := re.search(rf"^{name} +(\d+)", file.read_text(), re.MULTILINE):
            return int(found[1])
    return None


_IN_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of limit and usage, and the droppable entry of memory.stat, by controller: cgroup v2 and v1."""


def _available_in_groups() -> Iterator[int]:
    """Yield bytes left in each memory cgroup above this process, v1 and v2; page cache counts as free."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers not in _IN_GROUPS:
            continue
        names, mount = _IN_GROUPS[controllers], Path("/sys/fs/cgroup") / controllers
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            available = _available_in_group(group, *names)
            if available is not None:
                yield available
            if group == mount:
                break


def _available_in_group(group: Path, limit: str, usage: str, dropped: str) -> int | None:
    """Return bytes left in a cgroup; None: it has no limit."""
    try:
        limit_text, used = (group / limit).read_text().strip(), int((group / usage).read_text())
    except OSError:
        return None
    return (
        None
        if limit_text == "max"
        else max(0, int(limit_text) - used + (_read_number(group / "memory.stat", dropped) or 0))
    )


def kills() -> int:
    """Return the number of processes killed by the kernel for lack of memory so far; 0 if unknown."""
    return _read_number(Path("/proc/vmstat"), "oom_kill") or 0


def killed(before: int | None, code: int | None = None, log: str = "") -> str | None:
    """Return a message if there is evidence that a server was killed for lack of memory, else None.

    Args:
        before: `kills()` when the server was started; None: ignore that count.
        code: exit status of the server, negative for a signal.
        log: output of the server.
    """
    if (before is not None and kills() > before) or code == -9 or _KILLED.search(log):
        return "killed, most likely for lack of memory"
    return None


def gib(size: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"
