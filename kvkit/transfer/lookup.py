"""Lookups: find the leading run of chunks that a tier set holds, and plan where to load it from."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from kvkit.transfer import plan as planning
from kvkit.transfer.plan import RetrievePlan
from kvkit.transfer.policy import for_request
from kvkit.transfer.sequence import Chunks, Hit
from kvkit.transfer.tier_set import TierSet

log = logging.getLogger(__name__)


def find(
    tiers: TierSet,
    chunks: Chunks,
    plan: RetrievePlan,
    bad: Collection[tuple[str, int]] = (),
    sought: Sequence[str] | None = None,
    exact: int = 0,
) -> RetrievePlan:
    """Extend `plan` with what the tiers `sought` (None: the policy's) hold, except (tier, chunk) in `bad`.

    The first `exact` chunks are not looked up in tiers with fewer bits.
    """
    if sought is None:
        sought = for_request(tiers.policy, chunks.policy).retrieve_from
    previous, plan = -1, replace(plan, approximate=tiers.approximate)
    while previous < plan.chunks < plan.wanted:
        previous = plan.chunks
        for tier in planning.exact_first(sought, tiers.approximate):
            start = plan.chunks
            stop = min((c for t, c in bad if t == tier and c >= start), default=plan.wanted)
            if start < exact and tier in tiers.approximate:
                break
            if start < stop and tiers.usable(tier):
                run = tiers.ask(tier, chunks.records(start, stop)) // chunks.groups
                plan = planning.extend(plan, tier, run)
    return plan


def find_with_pending(
    tiers: TierSet, chunks: Chunks, wait_s: float, sought: Sequence[str] | None = None
) -> RetrievePlan:
    """Plan a load of what the tiers hold of `chunks`; if the model has states, up to a snapshot.

    Waits up to `wait_s` seconds for pending stores of the rest.
    """
    until = time.monotonic() + wait_s
    pending = tiers.pending_stores.among(chunks.names)  # first: what ends meanwhile is found in a tier
    plan = find(tiers, chunks, RetrievePlan(len(chunks)), sought=sought)
    while not plan.complete and pending:
        gap = pending.intersection(chunks.records(plan.chunks, plan.chunks + 1))
        if not gap or not tiers.pending_stores.wait(gap, until - time.monotonic()):
            break
        pending -= gap
        plan = find(tiers, chunks, plan, sought=sought)
    return with_states(tiers, chunks, plan, until - time.monotonic(), sought)


def with_states(
    tiers: TierSet, chunks: Chunks, plan: RetrievePlan, wait_s: float, sought: Sequence[str] | None = None
) -> RetrievePlan:
    """Return `plan` up to the last chunk with a snapshot at its end; all of it if the model has no states.

    Waits up to `wait_s` seconds for pending stores of snapshots.
    """
    if not chunks.states:
        return plan
    until = time.monotonic() + wait_s
    for stop in planning.snapshots_sought(plan.chunks):
        snapshot = chunks.snapshot(stop - 1)
        if find_with_pending(tiers, snapshot, until - time.monotonic(), sought).complete:
            return planning.clip(plan, stop)
    return planning.clip(plan, 0)


def look_up(
    tiers: TierSet,
    chunks: Chunks,
    wait_s: float,
    first: int,
    prefill_tokens_per_s: float | None,
    sought: Sequence[str] | None,
) -> Hit:
    """Look up chunks for a load, and count the lookup. Arguments as in `kvkit.cache.Cache.lookup`."""
    found = find_with_pending(tiers, chunks, wait_s, sought)
    return _counted_hit(tiers, chunks, found, first, prefill_tokens_per_s, sought)


def look_up_in_memory(
    tiers: TierSet, chunks: Chunks, first: int, prefill_tokens_per_s: float | None
) -> Hit | None:
    """Look up chunks for a load in host memory alone, without a wait; None if it does not hold all of them.

    None counts as no lookup. Arguments as in `kvkit.cache.Cache.lookup`, but that the limit of the chunks'
    policy on tokens is not applied.
    """
    sought = [n for n in for_request(tiers.policy, chunks.policy).retrieve_from if tiers.tiers[n].in_memory]
    last = chunks.records(len(chunks) - 1, len(chunks)) if len(chunks) else []
    try:  # asked first, as it is no use that eviction would count
        holds_last = bool(last) and any(tiers.tiers[name].size(last[0]) for name in sought)
    except Exception:  # of a tier of the user's own; the lookup that waits counts it
        return None
    if not holds_last:
        return None
    found = find(tiers, chunks, RetrievePlan(len(chunks)), sought=sought)
    found = with_states(tiers, chunks, found, 0.0, sought)
    if not found.complete:
        return None
    return _counted_hit(tiers, chunks, found, first, prefill_tokens_per_s, sought)


def _counted_hit(
    tiers: TierSet,
    chunks: Chunks,
    found: RetrievePlan,
    first: int,
    prefill_tokens_per_s: float | None,
    sought: Sequence[str] | None,
) -> Hit:
    """Return what is to be loaded of what was found, and count the lookup."""
    plan = found
    declined: Counter[str] = Counter()
    if prefill_tokens_per_s is not None:
        compute_s = chunks.chunk_tokens / prefill_tokens_per_s
        plan = trim_by_cost(tiers, found, chunks.groups, first, compute_s)
        plan = found if plan == found else with_states(tiers, chunks, plan, 0.0, sought)
        declined = Counter(Hit(chunks, found).by_tier) - Counter(Hit(chunks, plan).by_tier)
    hit = Hit(chunks, plan)
    tiers.note_request(chunks.names)
    if declined:
        log.info("lookup: tokens left to compute, because loading them is slower: %s", dict(declined))
    with tiers.counting() as counts:
        counts.lookups += 1
        counts.lookup_tokens += len(chunks.tokens)
        counts.hit_tokens.update(hit.by_tier)
        counts.approximate_tokens.update(hit.approximate)
        counts.declined_tokens.update(declined)
    return hit


def nearest(tiers: TierSet, chunks: Chunks, plan: RetrievePlan) -> RetrievePlan:
    """Return `plan` with chunks that are in host memory by now taken from there. Asks no other tier."""
    sought = for_request(tiers.policy, chunks.policy).retrieve_from
    in_memory = [name for name in sought if tiers.tiers[name].in_memory and not tiers.circuit_open(name)]
    found = RetrievePlan(plan.chunks, approximate=tiers.approximate)
    for segment in plan.segments:
        if not in_memory or tiers.tiers[segment.tier].in_memory:
            found = planning.extend(found, segment.tier, segment.stop - segment.start)
            continue
        for chunk in range(segment.start, segment.stop):
            names = chunks.records(chunk, chunk + 1)
            tier = next((name for name in in_memory if tiers.ask(name, names) == len(names)), segment.tier)
            found = planning.extend(found, tier, 1)
    return found


def trim_by_cost(
    tiers: TierSet, plan: RetrievePlan, groups: int, first: int, compute_s: float
) -> RetrievePlan:
    """Return the part of `plan` that is faster to load than to compute, at the tiers' recent speeds.

    The engine has `first` chunks and needs `compute_s` seconds per chunk of `groups` records. A tier without
    recent reads counts as free of cost, so that it is tried again.
    """
    now = time.monotonic()
    record_s = {tier: tiers.health[tier].record_s(now) for tier in plan.by_tier()}
    load_s = {tier: seconds * groups for tier, seconds in record_s.items() if seconds is not None}
    kept = planning.cheapest(planning.cut(plan, first, plan.chunks), load_s, compute_s).chunks
    return plan if first >= plan.chunks else planning.clip(plan, first + kept)
