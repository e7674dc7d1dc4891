"""The most hits that any eviction could have: Belady's MIN, told of the whole trace."""

from __future__ import annotations

from heapq import heappop, heappush

from kvkit.simulate.traces import Trace


def most_hits(trace: Trace, room: int | None) -> int:
    """Chunks of prompts that are hits at most, with all requests known from the start; O(n log n) in chunks.

    It keeps what is used next soonest, of what is used at once what stands first in its chain, and takes up
    nothing that is not among these (Belady, https://doi.org/10.1147/sj.52.0078, with bypassing).

    No policy has more. A chunk that is a hit was held ever since the last request that had it: an interval,
    which the hit ends. Between two requests at most `room` are held, over whatever tiers and nodes, so no
    more than `room` of the hits' intervals overlap anywhere. Where more would, from the first request on,
    drop the one that ends last: that keeps as many as can be (Carlisle and Lloyd, On the k-coloring of
    intervals, 1995). For take a best choice that agrees so far, but keeps the dropped one: it lacks another
    that overlaps here, and may have that instead, which ends no later and had room until here.

    One tier of one node can have as many, though a chunk is a hit only with all before it. A request that has
    a chunk has its parent, so of two intervals that one hit of a prompt ends, that of the parent began no
    earlier, and is dropped later: what is kept of a prompt is a leading run, and no chunk is held without
    its parent.

    Args:
        room: chunks that all tiers of all nodes hold together; None: no limit.
    """
    ends: list[list[int]] = []  # by request and chunk: the request that hits it next; 0: none does
    coming: dict[str, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        ends.append([coming.get(name, 0) for name in request.chunks])
        for i, name in enumerate(request.chunks):
            coming[name] = number if i < request.prompt_chunks else 0  # an answer's is stored anew, unasked
    hits = 0
    held: dict[str, int] = {}
    last: list[tuple[int, int, str]] = []  # a heap of (-end, -place, name), some out of date
    for request, following in zip(trace.requests, reversed(ends), strict=True):
        for i, (name, end) in enumerate(zip(request.chunks, following, strict=True)):
            hits += held.pop(name, None) is not None
            if end:
                held[name] = end
                heappush(last, (-end, -i, name))
        while room is not None and len(held) > room:
            end, _, name = heappop(last)
            if held.get(name) == -end:
                del held[name]
    return hits
