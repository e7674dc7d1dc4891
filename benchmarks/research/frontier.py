"""How much of what LRU misses ideas of eviction get back, from nothing (0) to all that could be had (1).

python -m benchmarks.research.frontier [TRACE...] writes results/frontier.json: of generated traces, of
files of Mooncake's, of folders of agents' sessions (https://github.com/callanjfox/kv-cache-tester).

Beside the cache's own policies three that it does not have; all let a chain shrink from its end:

- tinylfu: LRU, but what has been asked for less often than its victim is not taken up (Einziger, Friedman and
  Manes, https://doi.org/10.1145/3149371); counts are exact, and halved after ten times the room.
- return: GreedyDual with the odds that a chunk returns, learnt on the way for each number of turns that its
  chain has had (as in KVCache Cache in the Wild, USENIX ATC 2025).
- told: LRU that is told of each chunk whether it will ever return, but not when.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.folders import RESULTS
from benchmarks.micro.bench_simulate import REQUESTS, distinct
from kvkit.lab.files import about
from kvkit.lab.simulate.optimum import most_hits
from kvkit.lab.simulate.traces import GENERATORS, Trace, read_trace
from kvkit.tiers.eviction import state as eviction

SHARES = (0.02, 0.05, 0.1, 0.2)
SEEDS = (0, 1)
DRAWS = (0, 1, 2)
SESSIONS = 60
"""Sessions of a draw from a folder."""
WRITTEN = RESULTS / "frontier.json"
_MOST_TURNS = 8


@dataclass(slots=True)
class Held:
    """A chunk that is held."""

    parent: str | None
    rank: tuple[float, float]
    turns: int
    followers: int = 0


class Idea:
    """LRU, as a rank that is given when a chunk is used; the lowest goes first."""

    def __init__(self, room: int, returning: set[tuple[int, str]]) -> None:
        self.room = room
        self.returning = returning

    def used(self, number: int, name: str, turns: int) -> tuple[float, float]:
        """The rank of a chunk that request `number` uses, in a chain that has had so many turns."""
        return 0.0, number

    def admits(self, name: str, victim: str) -> bool:
        """Whether `name` is worth more than `victim`."""
        return True

    def evicted(self, rank: tuple[float, float]) -> None:
        """Note what went."""


class Tinylfu(Idea):
    """See the module's text."""

    def __init__(self, room: int, returning: set[tuple[int, str]]) -> None:
        super().__init__(room, returning)
        self.asked: Counter[str] = Counter()
        self.total = 0

    def used(self, number: int, name: str, turns: int) -> tuple[float, float]:
        self.asked[name] += 1
        self.total += 1
        if self.total >= 10 * self.room:
            self.asked = Counter({name: count // 2 for name, count in self.asked.items() if count > 1})
            self.total //= 2
        return 0.0, number

    def admits(self, name: str, victim: str) -> bool:
        return self.asked[name] >= self.asked[victim]


class Return(Idea):
    """See the module's text."""

    def __init__(self, room: int, returning: set[tuple[int, str]]) -> None:
        super().__init__(room, returning)
        self.seen, self.returned = Counter[int](), Counter[int]()
        self.of: dict[str, int] = {}
        self.clock = 0.0

    def used(self, number: int, name: str, turns: int) -> tuple[float, float]:
        turns = min(turns, _MOST_TURNS)
        if name in self.of:
            self.returned[self.of[name]] += 1
        self.of[name] = turns
        self.seen[turns] += 1
        return self.clock + (self.returned[turns] + 1) / (self.seen[turns] + 1), number

    def evicted(self, rank: tuple[float, float]) -> None:
        self.clock = max(self.clock, rank[0])


class Told(Idea):
    """See the module's text."""

    def used(self, number: int, name: str, turns: int) -> tuple[float, float]:
        return float((number, name) in self.returning), number


POLICIES = ("lru", "lfu", "s3fifo", "arc", "sessions")
IDEAS: dict[str, type[Idea]] = {"tinylfu": Tinylfu, "return": Return, "told": Told}


def hits_of(trace: Trace, room: int, idea: Idea) -> int:
    """Chunks that are hits in a tier with room for so many, by an idea."""
    held: dict[str, Held] = {}
    leaves: list[tuple[tuple[float, float], str]] = []  # a heap, some out of date
    hits = 0
    for number, request in enumerate(trace.requests):
        parent: str | None = None
        turns, leading = 0, True
        for i, name in enumerate(request.chunks):
            chunk = held.get(name)
            leading = leading and chunk is not None
            hits += leading and i < request.prompt_chunks
            if chunk is None:
                before = held[parent] if parent is not None else None
                if before is not None:
                    turns = 1 if before.followers else before.turns  # what branches off begins anew
                    before.followers += 1
                rank = idea.used(number, name, max(turns, 1))
                while len(held) >= room and (victim := _next(held, leaves)) is not None:
                    if not idea.admits(name, victim):
                        heappush(leaves, (held[victim].rank, victim))
                        break
                    gone = held.pop(victim)
                    idea.evicted(gone.rank)
                    if gone.parent is not None:
                        held[gone.parent].followers -= 1
                        heappush(leaves, (held[gone.parent].rank, gone.parent))
                if len(held) >= room:
                    if before is not None:
                        before.followers -= 1
                    break
                held[name] = Held(parent, rank, max(turns, 1))
            else:
                chunk.turns += 1
                turns = chunk.turns
                chunk.rank = idea.used(number, name, turns)
                if not chunk.followers:
                    heappush(leaves, (chunk.rank, name))
            parent = name
        if parent is not None:
            heappush(leaves, (held[parent].rank, parent))
    return hits


def _next(held: dict[str, Held], leaves: list[tuple[tuple[float, float], str]]) -> str | None:
    """Take the leaf of the lowest rank from the heap."""
    while leaves:
        rank, name = heappop(leaves)
        if name in held and not held[name].followers and held[name].rank == rank:
            return name
    return None


def hits_of_policy(trace: Trace, room: int, policy: str) -> int:
    """The same by a policy of the cache."""
    state = eviction.EvictionState(room, policy)
    hits = 0
    for request in trace.requests:
        prompt, now = request.chunks[: request.prompt_chunks], request.timestamp_ms / 1000
        hits += eviction.use_run(state, prompt, now)
        eviction.note_request(state, prompt, now)
        run = eviction.use_run(state, request.chunks, now)
        parent = request.chunks[run - 1] if run else None
        eviction.add_run(state, request.chunks[run:], 1, parent=parent, now=now)
        eviction.note_answer(state, request.chunks, request.tool_call)
    return hits


def returning(trace: Trace) -> set[tuple[int, str]]:
    """(request, chunk) of every use that another prompt repeats."""
    coming: set[str] = set()
    found = set()
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        found |= {(number, name) for name in request.chunks if name in coming}
        coming.update(request.chunks[: request.prompt_chunks])
    return found


def drawn(folder: Path, seed: int) -> Trace:
    """The trace of `SESSIONS` sessions of a folder; of copies of a session, one is taken."""
    files = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(files)
    lengths = set[tuple[tuple[int, int], ...]]()
    with TemporaryDirectory() as chosen:
        for file in files:
            requests = [each for each in json.loads(file.read_bytes())["requests"] if "hash_ids" in each]
            beginning = tuple((each["in"], each["out"]) for each in requests[:5])
            if len(lengths) < SESSIONS and len(requests) > 2 and beginning not in lengths:
                lengths.add(beginning)
                (Path(chosen) / file.name).symlink_to(file.resolve())
        return read_trace(chosen, seed)


def traces(paths: list[str]) -> Iterator[tuple[str, int, Trace]]:
    """(name, seed, trace) of each generated trace and each path."""
    for name, make in GENERATORS.items():
        for seed in SEEDS:
            yield name, seed, make(REQUESTS, seed)
    for path in map(Path, paths):
        if path.is_dir():
            yield from (("Claude Code", seed, drawn(path, seed)) for seed in DRAWS)
        else:
            yield f"Mooncake, {path.stem.removesuffix('_trace')}", 0, read_trace(path)


def measure(name: str, seed: int, trace: Trace) -> Iterator[dict[str, Any]]:
    """For each capacity: chunks asked for, those that could be hits, and the hits of each way."""
    told = returning(trace)
    asked = sum(request.prompt_chunks for request in trace.requests)
    for share in SHARES:
        room = max(8, int(distinct(trace) * share))
        hits = {policy: hits_of_policy(trace, room, policy) for policy in POLICIES}
        hits |= {name: hits_of(trace, room, idea(room, told)) for name, idea in IDEAS.items()}
        yield {
            "trace": name,
            "seed": seed,
            "share": share,
            "asked": asked,
            "bound": most_hits(trace, room),
            "hits": hits,
        }


def main() -> None:
    """Write results/frontier.json."""
    runs = []
    for trace in traces(sys.argv[1:]):
        for run in measure(*trace):
            runs.append(run)
            print(run, flush=True)
    command = "python -m benchmarks.research.frontier conversation_trace.jsonl synthetic_trace.jsonl traces/"
    document = about(command, sorted({*SEEDS, *DRAWS})) | {"requests": REQUESTS, "runs": runs}
    WRITTEN.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
