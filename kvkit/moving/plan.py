"""What to move from where to where: frozen plans, made by pure functions and carried out by `kvkit.cache`.

A chunk of a model with G layer groups is G records, so residency is asked in records and planned in chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvkit.moving.policy import Policy

SOUGHT = 64
"""Places at which a lookup looks for a snapshot, from the end of the leading run on backwards: each may be a
question to a tier far away."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Chunks [start, stop) of a sequence, at `tier`."""

    tier: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RetrievePlan:
    """The leading run that is available: consecutive segments from chunk 0 on, out of `wanted` chunks.

    What comes from one of the `approximate` tiers is approximate, and so is what is computed behind it.
    """

    wanted: int
    segments: tuple[Segment, ...] = ()
    approximate: frozenset[str] = frozenset()

    @property
    def chunks(self) -> int:
        """Length of the leading run."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def exact(self) -> int:
        """How many of its chunks come before the first approximate one."""
        return next((s.start for s in self.segments if s.tier in self.approximate), self.chunks)

    @property
    def complete(self) -> bool:
        """Whether nothing more is wanted."""
        return self.chunks >= self.wanted

    def by_tier(self) -> dict[str, int]:
        """Chunks per tier, in the order of first use."""
        counts: Counter[str] = Counter()
        for segment in self.segments:
            counts[segment.tier] += segment.stop - segment.start
        return counts


def extend(plan: RetrievePlan, tier: str, run: int) -> RetrievePlan:
    """`plan` with the `run` chunks that `tier` holds from the plan's end on; never past what is wanted."""
    start = plan.chunks
    stop = min(start + run, plan.wanted)
    if stop <= start:
        return plan
    before = plan.segments
    if before and before[-1].tier == tier:
        before, start = before[:-1], before[-1].start
    return replace(plan, segments=(*before, Segment(tier, start, stop)))


def clip(plan: RetrievePlan, chunks: int) -> RetrievePlan:
    """The part of `plan` before chunk `chunks`."""
    kept = tuple(Segment(s.tier, s.start, min(s.stop, chunks)) for s in plan.segments if s.start < chunks)
    return replace(plan, segments=kept)


def cut(plan: RetrievePlan, start: int, stop: int) -> RetrievePlan:
    """Chunks [start, stop) of `plan` as a plan of their own: `start` becomes chunk 0."""
    kept = tuple(
        Segment(s.tier, max(s.start, start) - start, min(s.stop, stop) - start)
        for s in plan.segments
        if s.start < stop and s.stop > start
    )
    return replace(plan, wanted=stop - start, segments=kept)


def cheapest(plan: RetrievePlan, load_s: Mapping[str, float], compute_s: float) -> RetrievePlan:
    """The part of `plan` that is had soonest if the rest of it is computed.

    Tiers deliver side by side, so loading takes as long as the slowest of them; what is computed comes after.
    Within a segment that is a straight line until its tier becomes the slowest, and another one after it:
    the best end is beside one of these points, or the end of a segment.

    Args:
        load_s: seconds a chunk takes, by tier; a tier that is not in it takes none.
        compute_s: seconds the engine takes to compute a chunk.
    """
    taken: dict[str, float] = {}
    slowest, best, end = 0.0, 0.0, 0
    for segment in plan.segments:
        each, before = load_s.get(segment.tier, 0.0), taken.get(segment.tier, 0.0)
        count = segment.stop - segment.start
        hidden = int((slowest - before) / each) if each else count
        for chunks in sorted({min(hidden, count), min(hidden + 1, count), count}):
            stop = segment.start + chunks
            saved = stop * compute_s - max(slowest, before + chunks * each)
            if saved >= best:
                best, end = saved, stop
        taken[segment.tier] = before + count * each
        slowest = max(slowest, taken[segment.tier])
    return clip(plan, end)


def snapshots_sought(chunks: int) -> Sequence[int]:
    """Where to look for a snapshot within so many leading chunks: how many come before it, best first."""
    return range(chunks, max(0, chunks - SOUGHT), -1)


def is_snapshot_kept(stop: int, every: int, prompt: int) -> bool:
    """Whether the states after the first `stop` chunks are stored, where an engine has them.

    Args:
        every: chunks from one snapshot to the next; 0: none for their number.
        prompt: chunks that the prompt has. The next turn, or another try, goes on at its end.
    """
    return stop == prompt or (every > 0 and stop % every == 0)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Segments to put, per target tier in the policy's order."""

    segments: tuple[Segment, ...] = ()

    @property
    def start(self) -> int:
        """The first chunk that any tier needs."""
        return min((s.start for s in self.segments), default=0)

    @property
    def stop(self) -> int:
        """One past the last chunk that any tier needs."""
        return max((s.stop for s in self.segments), default=0)


def plan_store(chunks: int, policy: Policy, resident: Mapping[str, int]) -> StorePlan:
    """Put chunks [0, `chunks`) into every tier of `policy.store_to`, past the leading run it holds already.

    `resident` is that run, in chunks, by tier; a tier that is not in it holds nothing.
    """
    missing = (Segment(tier, resident.get(tier, 0), chunks) for tier in policy.store_to)
    return StorePlan(tuple(segment for segment in missing if segment.start < chunks))


def put_limit(slots: int, tiers: int, groups: int) -> int:
    """How many of `slots` the puts of each of `tiers` hold at most, if they never end: as many as loads keep.

    At least a chunk's `groups`: an arena of fewer than `tiers` + 1 chunks has nothing to keep for loads.
    """
    return max(groups, slots // (tiers + 1))


def exact_first(tiers: Sequence[str], approximate: Collection[str]) -> list[str]:
    """`tiers` in the order in which they are sought: an exact record is worth more than a near one."""
    return sorted(tiers, key=lambda tier: tier in approximate)


def plan_write_back(plan: RetrievePlan, validated: int, policy: Policy, near: Collection[str]) -> StorePlan:
    """Put what was loaded into every tier of `policy.write_back_to`.

    Only the `validated` leading run counts. A tier gets nothing that came from itself, and nothing is taken
    from `near` tiers: those whose records already are in this host's memory, or arrive there anyway. What is
    approximate is taken nowhere.
    """
    return StorePlan(
        tuple(
            Segment(target, s.start, min(s.stop, validated))
            for target in policy.write_back_to
            for s in plan.segments
            if s.tier not in (target, *near, *plan.approximate) and s.start < validated
        )
    )
