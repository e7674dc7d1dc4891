"""How much memory a vLLM that kvkit starts may take, and whether the kernel killed one for taking too much.

vLLM fills 92 % of the machine with blocks, or of the GPU, and counts nobody else: a second server, or a cache
beside it, comes on top.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkit.bench.files import BenchError
from kvkit.config import Config
from kvkit.environment import gpu_name

PROCESS_BYTES = 3 << 29
"""What a server takes besides weights, blocks and tiers: libraries, compiled code, activations."""
LEAST_BYTES = 64 << 20
"""Of blocks: with fewer no request fits."""
_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_OF_A_GPU = 0.9
_WEIGHTS = ("*.safetensors", "*.bin")
_KILLED = re.compile(r"\(exit code: -9\)|Failed core proc\(s\): \{[^}]*: -9\b")
"""How vLLM names a process of its own that was killed."""


class MemoryTooSmall(BenchError):
    """What is to be started does not fit. The message says what it takes and what there is."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each of some servers is given."""

    block_bytes: int | None  # of KV blocks; None: as the user chose, or a share of a GPU
    options: tuple[str, ...]  # of vLLM's command line, that say so
    words: str  # the same for people


def split(available: int, servers: int, weights: int, tiers: int, most: int | None = None) -> int:
    """Bytes of blocks for each of `servers` that run at a time: half of what all else leaves. Pure.

    The other half is for what grows with the requests, and for the rest of the machine.

    Args:
        available: bytes that may be taken.
        weights: bytes of one server's.
        tiers: bytes of all caches beside them.
        most: bytes that are of use to a server.

    Raises:
        MemoryTooSmall: less than `LEAST_BYTES` are left for each.
    """
    each = (available - tiers - servers * (weights + PROCESS_BYTES)) // 2 // servers
    if each < LEAST_BYTES:
        took = f"{servers} of vLLM with {gib(weights)} of weights and {gib(PROCESS_BYTES)} of its own"
        raise MemoryTooSmall(
            f"{took}, {gib(tiers)} of tiers and {gib(LEAST_BYTES)} of blocks for each do not fit: "
            f"{gib(available)} are available; take a smaller model or fewer at a time, or say how much "
            f"with {_OPTIONS[0]}"
        )
    return each if most is None else min(each, most)


def share(
    model: str, *, servers: int = 1, tiers: int = 0, most: int | None = None, options: Sequence[str] = ()
) -> Share:
    """What each of `servers` of one model is given on this machine, as it is now.

    Args:
        model: hub id or folder. The weights of one on the hub are not known and count as none.
        tiers, most: as in `split`.
        options: of vLLM's command line; what they say of memory stands.

    Raises:
        MemoryTooSmall: they do not fit.
    """
    given = [word.partition("=")[0].replace("_", "-") for word in options]
    if chosen := [name for name in _OPTIONS if name in given]:
        return Share(None, (), f"vLLM's memory: as {chosen[0]} says")
    if gpu_name() is not None:
        fraction = f"{_OF_A_GPU / servers:.2f}"
        words = f"vLLM's memory: {fraction} of the GPU" + (" each" if servers > 1 else "")
        return Share(None, (_OPTIONS[1], fraction), words)
    if os.environ.get(_VARIABLE):
        return Share(None, (), f"vLLM's memory: as {_VARIABLE} says")
    available = available_bytes()
    each = split(available, servers, weight_bytes(model), tiers, most)
    words = f"vLLM's blocks: {gib(each)}" + (f" for each of {servers}" if servers > 1 else "")
    beside = f", {gib(tiers)} of them for tiers" if tiers else ""
    return Share(each, (_OPTIONS[0], str(each)), f"{words}; {gib(available)} are available{beside}")


def weight_bytes(model: str) -> int:
    """Bytes of a model's weights in float32; 0 where it is no folder."""
    sizes = (file.stat().st_size for pattern in _WEIGHTS for file in Path(model).glob(pattern))
    return 2 * sum(sizes)  # they are stored in 16 bits


def tier_bytes(config: Config) -> int:
    """Bytes of host memory that a cache of this configuration takes: slots, memory tiers, a buffer."""
    kept = [tier.capacity for tier in config.tiers.values() if tier.url is None and tier.kind is None]
    sizes = [size for size in kept if isinstance(size, int)]
    return config.staging + sum(sizes) + (config.handoff.buffer or 0 if config.handoff else 0)


def available_bytes() -> int:
    """Bytes that may be taken: of the machine's memory, and of what this process's control groups allow."""
    free = _number(Path("/proc/meminfo"), "MemAvailable:")
    assert free is not None, "every Linux since 3.14 says it"
    return min([free << 10, *_left_in_groups()])


def _number(file: Path, name: str) -> int | None:
    """What stands after `name` in a file of the kernel's; None where it does not tell."""
    with suppress(OSError):
        if found := re.search(rf"^{name} +(\d+)", file.read_text(), re.MULTILINE):
            return int(found[1])
    return None


_IN_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of limit and usage, and what of that can be dropped, by the controller: version 2 and 1."""


def _left_in_groups() -> Iterator[int]:
    """What every memory limit above this process leaves, of version 1 and 2; page cache can be dropped."""
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
            left = _left(group, *names)
            if left is not None:
                yield left
            if group == mount:
                break


def _left(group: Path, limit: str, usage: str, dropped: str) -> int | None:
    """Bytes that a group has left; None: it has no limit."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
    except OSError:
        return None
    return (
        None if most == "max" else max(0, int(most) - used + (_number(group / "memory.stat", dropped) or 0))
    )


def kills() -> int:
    """Processes that this host's kernel has killed so far for want of memory; 0 where it does not tell."""
    return _number(Path("/proc/vmstat"), "oom_kill") or 0


def killed(before: int | None, code: int | None = None, log: str = "") -> str | None:
    """That a server was killed, for memory most likely, in words; None if nothing says so.

    Args:
        before: `kills()` when it was started; None: that number says nothing of it.
        code: its exit status, negative for a signal.
        log: what it wrote.
    """
    if (before is not None and kills() > before) or code == -9 or _KILLED.search(log):
        return "killed, for memory most likely"
    return None


def gib(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.1f} GiB"
