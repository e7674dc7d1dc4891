"""The memory of a process that passes far more through its slots than they hold.

python -m benchmarks.serving.resident writes docs/pictures/resident.png and results/resident-<machine>.json.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.folders import RESULTS, ROOT
from benchmarks.two_tiers import BLOCK_TOKENS, CHUNK_TOKENS, group_of
from kvkit.cache import Cache, SequencePages
from kvkit.environment import slug
from kvkit.format.layout import KVLayout, Namespace
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import Pages
from kvkit.lab.files import about
from kvkit.staging import Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.transfer.policy import Policy

CHUNKS, SLOTS = 8, 16
"""Chunks of one sequence, and slots of staging."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of this process after so many bytes of KV were stored or loaded.

    Attributes:
        moved_bytes: stored or loaded so far.
        resident_bytes: all of the process's memory that is present (VmRSS): `anonymous_bytes`, the staging
            slots (`shared_bytes`) and mapped files.
    """

    moved_bytes: int
    resident_bytes: int
    anonymous_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences stored one after the other, then loaded one after the other.

    Attributes:
        stored_bytes: what the store holds at the end.
        staging_bytes: memory of all slots.
        samples: the first after one sequence was stored and loaded, so that code and connections are there.
    """

    stored_bytes: int
    staging_bytes: int
    samples: Sequence[Sample]

    @property
    def growth_bytes(self) -> int:
        """The most that was resident, beyond the first sample."""
        return max(s.resident_bytes for s in self.samples) - self.samples[0].resident_bytes


def measure(folder: Path, sequences: int) -> Run:
    """Store and load so many sequences of 8 chunks of 8 MiB, in `folder`, with `staging_only`.

    The memory tier is there, and the policy names it: `staging_only` is what keeps it empty.
    """
    group = group_of(large=True)
    layout = KVLayout((group,))
    space = Namespace("bench", layout.fingerprint(), "bfloat16", chunk_tokens=CHUNK_TOKENS)
    staging = Staging(RecordFormat.of(layout, 0, space).record_bytes, SLOTS)
    assert staging.ready.wait(60)
    memory = MemoryTier(staging, SLOTS // 2 * staging.slot_bytes)
    disk = ObjectTier(str(folder))
    policy = Policy(("memory", "disk"), ("memory", "disk"), ("memory",), staging_only=True)
    blocks = np.arange(CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS, dtype=np.int64)
    place = SequencePages(Pages.of(group, group.pages(len(blocks), fill_byte=1)), blocks=blocks)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50_000, CHUNKS * CHUNK_TOKENS, np.int32) for _ in range(sequences)]
    chunk_bytes = group.chunk_bytes(CHUNK_TOKENS)
    with Cache(layout, space, [memory, disk], staging=staging, policy=policy) as cache:

        def store(tokens: np.ndarray) -> None:
            assert cache.store(tokens, place).tokens == len(tokens)
            cache.flush()

        def load(tokens: np.ndarray) -> None:
            assert cache.load(cache.lookup(tokens), place).by_tier == {"disk": len(tokens)}

        store(prompts[0])
        load(prompts[0])
        samples = [_sample(0)]
        moves = [(store, tokens) for tokens in prompts[1:]] + [(load, tokens) for tokens in prompts]
        for count, (move, tokens) in enumerate(moves, 1):
            move(tokens)
            samples.append(_sample(count * CHUNKS * chunk_bytes))
        stored = sum(size for _, size in disk.scan())
    return Run(stored, SLOTS * staging.slot_bytes, samples)


def _sample(moved_bytes: int) -> Sample:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {fields[0]: int(fields[1]) * 1024 for fields in lines if fields[-1] == "kB"}
    return Sample(moved_bytes, sizes["VmRSS:"], sizes["RssAnon:"], sizes["RssShmem:"])


def draw(run: Run, path: Path) -> None:
    """Draw resident memory against the bytes moved, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 2.6), constrained_layout=True)
    moved = [sample.moved_bytes / 1e9 for sample in run.samples]
    axes.plot(moved, [s.resident_bytes / 1e6 for s in run.samples], color="#2e4057", label="resident")
    axes.plot(moved, [s.shared_bytes / 1e6 for s in run.samples], color="#66a182", label="of it, slots")
    half = moved[len(run.samples) // 2 - 1]
    axes.axvline(half, color="#8d96a3", linewidth=0.8, linestyle="--")
    axes.annotate("stores, then loads", (half, 0), (4, 4), textcoords="offset points", fontsize=8)
    stored_gb = run.stored_bytes / 1e9
    axes.set(xlabel=f"GB moved; the store comes to {stored_gb:.1f} GB", ylabel="MB", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Store and load 8.6 GB through 134 MB of slots."""
    (ROOT / ".benchmarks").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".benchmarks") as folder:
        run = measure(Path(folder), 128)
    document = about("python -m benchmarks.serving.resident", seed=0) | {
        **asdict(run),
        "growth_bytes": run.growth_bytes,
    }
    path = RESULTS / f"resident-{slug()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    draw(run, ROOT / "docs/pictures/resident.png")
    stored_gb, first_mb = run.stored_bytes / 1e9, run.samples[0].resident_bytes / 1e6
    print(f"{stored_gb:.1f} GB stored; {first_mb:.0f} MB resident, {run.growth_bytes / 1e6:.1f} MB more")


if __name__ == "__main__":
    main()
