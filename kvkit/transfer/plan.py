"""Frozen plans of moves between tiers, made by pure functions and carried out by `kvkit.cache`.

A chunk of a model with G layer groups is G records: tiers are asked about records, plans are in chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvkit.transfer.policy import Policy

SOUGHT = 64
"""Chunk ends, from the end of the leading run backwards, where a lookup looks for a snapshot. Each may cost a
request to a remote tier."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Chunks [start, stop) of a sequence, in `tier`."""

    tier: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RetrievePlan:
    """The available leading run of `wanted` chunks: consecutive segments from chunk 0 on.

    Chunks from `approximate` tiers are approximate, and so is KV computed after them.
    """

    wanted: int
    segments: tuple[Segment, ...] = ()
    approximate: frozenset[str] = frozenset()

    @property
    def chunks(self) -> int:
        """Length of the leading run, in chunks."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def exact(self) -> int:
        """Number of chunks before the first approximate one."""
        return next((s.start for s in self.segments if s.tier in self.approximate), self.chunks)

    @property
    def complete(self) -> bool:
        """True if all wanted chunks are available."""
        return self.chunks >= self.wanted

    def by_tier(self) -> dict[str, int]:
        """Return the chunks per tier, in the order of first use."""
        counts: Counter[str] = Counter()
        for segment in self.segments:
            counts[segment.tier] += segment.stop - segment.start
        return counts


def extend(plan: RetrievePlan, tier: str, run: int) -> RetrievePlan:
    """Return `plan` extended by the `run` chunks that `tier` holds from its end on, up to `plan.wanted`."""
    start = plan.chunks
    stop = min(start + run, plan.wanted)
    if stop <= start:
        return plan
    before = plan.segments
    if before and before[-1].tier == tier:
        before, start = before[:-1], before[-1].start
    return replace(plan, segments=(*before, Segment(tier, start, stop)))


def clip(plan: RetrievePlan, chunks: int) -> RetrievePlan:
    """Return the part of `plan` before chunk `chunks`."""
    kept = tuple(Segment(s.tier, s.start, min(s.stop, chunks)) for s in plan.segments if s.start < chunks)
    return replace(plan, segments=kept)


def cut(plan: RetrievePlan, start: int, stop: int) -> RetrievePlan:
    """Return chunks [start, stop) of `plan` as a separate plan, where `start` becomes chunk 0."""
    kept = tuple(
        Segment(s.tier, max(s.start, start) - start, min(s.stop, stop) - start)
        for s in plan.segments
        if s.start < stop and s.stop > start
    )
    return replace(plan, wanted=stop - start, segments=kept)


def cheapest(plan: RetrievePlan, load_s: Mapping[str, float], compute_s: float) -> RetrievePlan:
    """Return the part of `plan` to load for the earliest finish, if the engine computes the rest.

    Tiers deliver in parallel, so loading takes as long as the slowest tier; computing follows. Within a
    segment, the time saved is linear in the chunks until its tier becomes the slowest, and linear again after
    that. The optimum is therefore next to such a point or at the end of a segment.

    Args:
        load_s: seconds to load a chunk, by tier; tiers not in it take none.
        compute_s: seconds the engine needs to compute a chunk.
    """
    busy_s: dict[str, float] = {}
    slowest, best, end = 0.0, 0.0, 0
    for segment in plan.segments:
        chunk_s, before = load_s.get(segment.tier, 0.0), busy_s.get(segment.tier, 0.0)
        count = segment.stop - segment.start
        hidden = int((slowest - before) / chunk_s) if chunk_s else count
        for chunks in sorted({min(hidden, count), min(hidden + 1, count), count}):
            stop = segment.start + chunks
            saved = stop * compute_s - max(slowest, before + chunks * chunk_s)
            if saved >= best:
                best, end = saved, stop
        busy_s[segment.tier] = before + count * chunk_s
        slowest = max(slowest, busy_s[segment.tier])
    return clip(plan, end)


def snapshots_sought(chunks: int) -> Sequence[int]:
    """Return the positions to look for a snapshot, as counts of the chunks before it, best first."""
    return range(chunks, max(0, chunks - SOUGHT), -1)


def is_snapshot_kept(stop: int, every: int, prompt: int) -> bool:
    """Return whether to store the states after the first `stop` chunks, if the engine has them.

    Args:
        every: chunks between snapshots; 0: no regular snapshots.
        prompt: chunks of the prompt. A retry, or the conversation's next turn, continues at its end.
    """
    return stop == prompt or (every > 0 and stop % every == 0)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Segments to put into each target tier."""

    segments: tuple[Segment, ...] = ()

    @property
    def start(self) -> int:
        """First chunk that any tier needs."""
        return min((s.start for s in self.segments), default=0)

    @property
    def stop(self) -> int:
        """End of the last chunk that any tier needs (exclusive)."""
        return max((s.stop for s in self.segments), default=0)


def plan_store(chunks: int, resident: Mapping[str, int]) -> StorePlan:
    """Plan to put chunks [0, `chunks`) into each tier of `resident`, after the run of chunks it holds."""
    return StorePlan(tuple(Segment(tier, run, chunks) for tier, run in resident.items() if run < chunks))


def write_limit(slots: int, tiers: int, groups: int) -> int:
    """Return how many of `slots` writes into each of `tiers` may hold: an equal share, as loads have.

    At least a chunk's `groups`: an arena of fewer than `tiers` + 1 chunks has no slots to keep for loads.
    """
    return max(groups, slots // (tiers + 1))


def exact_first(tiers: Sequence[str], approximate: Collection[str]) -> list[str]:
    """Sort `tiers` for lookups, exact ones first: an exact record is worth more than an approximate one."""
    return sorted(tiers, key=lambda tier: tier in approximate)


def plan_write_back(
    plan: RetrievePlan, validated: int, policy: Policy, in_memory: Collection[str]
) -> StorePlan:
    """Plan to put loaded chunks into each tier of `policy.write_back_to`.

    Covers the `validated` leading run only. Chunks are not put into the tier they came from. Chunks from
    `in_memory` tiers, with records in host memory now or soon, and approximate chunks are put nowhere.
    """
    return StorePlan(
        tuple(
            Segment(target, s.start, min(s.stop, validated))
            for target in policy.write_back_to
            for s in plan.segments
            if s.tier not in (target, *in_memory, *plan.approximate) and s.start < validated
        )
    )
