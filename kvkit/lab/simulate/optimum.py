"""Upper bound of the hits of any eviction policy: Belady's MIN, which knows the whole trace."""

from __future__ import annotations

from heapq import heappop, heappush

from kvkit.lab.simulate.traces import Trace


def most_hits(trace: Trace, room: int | None) -> int:
    """Return the maximum number of prompt chunks that can be hits if all requests are known in advance.

    Takes O(n log n) in chunks. Keeps the chunks with the soonest next use; if several have the same next use,
    the first of their chain. Other chunks are not stored at all (Belady,
    https://doi.org/10.1147/sj.52.0078, with bypassing).

    No policy has more hits. A chunk that is a hit was held since the last request that had it: an interval,
    which the hit ends. Between two requests all tiers and nodes together hold at most `room` chunks, so at
    most `room` of the hits' intervals overlap anywhere. From the first request on, wherever more would
    overlap, drop the interval that ends last. This keeps as many intervals as possible (Carlisle and Lloyd,
    On the k-coloring of intervals, 1995). Proof: take an optimal choice that agrees so far, but keeps the
    dropped interval. It lacks another interval that overlaps here. The other ends no later and had room until
    here, so the two can be exchanged.

    A single tier of one node can have as many hits, although a chunk is a hit only if all chunks before it
    are. A request that has a chunk also has its parent. So if the intervals of a chunk and of its parent end
    at the same hit, the parent's began no earlier, and is dropped later. The kept chunks of a prompt are
    therefore a leading run, and no chunk is held without its parent.

    Args:
        room: number of chunks that all tiers of all nodes can hold; None: no limit.
    """
    ends: list[list[int]] = []  # by request and chunk: number of the next request that hits it; 0: none
    next_use: dict[str, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        ends.append([next_use.get(name, 0) for name in request.chunks])
        for i, name in enumerate(request.chunks):
            # a chunk of the answer is stored without a lookup
            next_use[name] = number if i < request.prompt_chunks else 0
    hits = 0
    held: dict[str, int] = {}
    latest: list[tuple[int, int, str]] = []  # a heap of (-end, -index, name), some out of date
    for request, following in zip(trace.requests, reversed(ends), strict=True):
        for i, (name, end) in enumerate(zip(request.chunks, following, strict=True)):
            hits += held.pop(name, None) is not None
            if end:
                held[name] = end
                heappush(latest, (-end, -i, name))
        while room is not None and len(held) > room:
            end, _, name = heappop(latest)
            if held.get(name) == -end:
                del held[name]
    return hits
