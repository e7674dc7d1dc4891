"""How well requests are routed to simulated engines: by events, by asking, by sessions, or in turn.

python -m benchmarks.research.routing writes results/routing.json.

Traces go through `kvkit.lab.simulate`'s nodes; the router's own functions choose among them: `choose_decode`,
over what `BlockIndex` made of the nodes' events, which arrive late, or over what the nodes hold just then.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ByteSize

from benchmarks.folders import RESULTS
from kvkit.lab.files import about
from kvkit.lab.simulate.config import NodesConfig, SimulatedTier, SimulationConfig
from kvkit.lab.simulate.model import Node, Report, Simulator
from kvkit.lab.simulate.traces import GENERATORS, Request, Trace
from kvkit.router.index import BlockIndex, ClearedBlocks, KVEvent, RemovedBlocks, StoredBlocks
from kvkit.router.routing import Candidate, RoutingLimits, choose_decode

NODES, REQUESTS, SEEDS = 8, 4000, (0, 1, 2)
DELAYS_S = (0.05, 1.0, 10.0)
"""Between a change in a tier and the router's knowing of it."""
WRITTEN = RESULTS / "routing.json"


def config(route: str) -> SimulationConfig:
    """Nodes with little memory and a disk that a part of a trace fits."""
    tiers = {
        "memory": SimulatedTier(
            capacity=ByteSize(16 << 30), bandwidth=ByteSize(20_000_000_000), in_memory=True
        ),
        "disk": SimulatedTier(capacity=ByteSize(64 << 30), bandwidth=ByteSize(3_000_000_000), latency_ms=0.2),
    }
    nodes = NodesConfig.model_validate({"both": NODES, "route": route})
    return SimulationConfig(nodes=nodes, tiers=tiers)


class TellingEntries(dict[str, Any]):
    """What a tier holds, told as it changes."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell

    def __setitem__(self, name: str, entry: Any) -> None:
        super().__setitem__(name, entry)
        self._tell(name, True)

    def pop(self, name: str, *default: Any) -> Any:
        self._tell(name, False)
        return super().pop(name, *default)


class RoutedNodes(Simulator):
    """Nodes that the router chooses among; it hears of a change `delay_s` after it, or asks (None)."""

    def __init__(self, trace: Trace, route: str, delay_s: float | None) -> None:
        super().__init__(config("session"), trace.block_tokens)
        self._knows = route != "session"
        self._delay_s = delay_s
        self._limits = RoutingLimits()
        self._sessions: dict[str, str] = {}
        self._ends = [deque[float]() for _ in self._entry]
        self._now = 0.0
        self._told: deque[tuple[float, int, KVEvent]] = deque()
        self._indexes = [BlockIndex() for _ in self._entry]
        self._parents = {
            name: parent
            for request in trace.requests
            for parent, name in zip((None, *request.chunks), request.chunks, strict=False)
        }
        for number, node in enumerate(self._entry):
            self._indexes[number].apply(ClearedBlocks(complete=True))
            for tier, state in node.tiers.items():
                state.entries = TellingEntries(
                    lambda name, held, number=number, tier=tier: self._tell(number, tier, name, held)
                )

    def serve(self, request: Request) -> Any:
        self._now = request.timestamp_ms / 1000
        while self._told and self._told[0][0] <= self._now:
            _, number, event = self._told.popleft()
            self._indexes[number].apply(event)
        plan = super().serve(request)
        number = int(self._sessions[request.session])
        self._ends[number].append(self._entry[number].free_at_s)
        return plan

    def _route(self, nodes: list[Node], request: Request, prompt: Sequence[str]) -> Node:
        candidates = []
        for number in range(len(nodes)):
            ends = self._ends[number]
            while ends and ends[0] <= self._now:
                ends.popleft()
            candidates.append(Candidate(str(number), len(ends), 0, self._held_tokens(number, prompt)))
        session = request.session
        last = self._sessions.get(session)
        chosen = choose_decode(candidates, session=session, last_decode=last, limits=self._limits).name
        self._sessions[session] = chosen
        return nodes[int(chosen)]

    def _held_tokens(self, number: int, prompt: Sequence[str]) -> int | None:
        if not self._knows:
            return None
        if self._delay_s is not None:
            ids = [int(name) for name in prompt]
            held = self._indexes[number].held_tokens(ids, None, "", engine_cache=False)
        else:
            tiers, held = self._entry[number].tiers.values(), 0
            while held < len(prompt) and any(prompt[held] in tier.entries for tier in tiers):
                held += 1
        return held * self._block_tokens

    def _tell(self, number: int, tier: str, name: str, held: bool) -> None:
        if self._delay_s is None or not self._knows:
            return
        event: KVEvent = RemovedBlocks([int(name)], tier, ownership=tier)
        if held:
            parent = self._parents[name]
            event = StoredBlocks(
                [int(name)], None if parent is None else int(parent), [int(name)], 1, tier, ownership=tier
            )
        self._told.append((self._now + self._delay_s, number, event))


def run(trace: Trace, route: str, delay_s: float | None) -> Report:
    simulator = (
        Simulator(config(route), trace.block_tokens)
        if route == "round-robin"
        else RoutedNodes(trace, route, delay_s)
    )
    for request in trace.requests:
        simulator.serve(request)
    return simulator.finish()


def main() -> None:
    """Hit rates and times to the first token, the wait included, by trace and way."""
    ways = [
        ("round-robin", None),
        ("session", None),
        ("asking", None),
        *(("events", delay) for delay in DELAYS_S),
    ]
    runs = []
    for name in ("chat", "rag", "agents"):
        for seed in SEEDS:
            trace = GENERATORS[name](REQUESTS, seed)
            for route, delay_s in ways:
                report = run(trace, route, delay_s)
                times = np.array(report.ttft_s) + np.array(report.wait_s)
                runs.append(
                    {
                        "trace": name,
                        "seed": seed,
                        "route": route,
                        "delay_s": delay_s,
                        "hit_rate": round(report.hit_rate, 4),
                        "ttft_p50_s": round(float(np.percentile(times, 50)), 4),
                        "ttft_p99_s": round(float(np.percentile(times, 99)), 4),
                    }
                )
                print(*runs[-1].values(), flush=True)
    document = about("python -m benchmarks.research.routing", SEEDS) | {
        "nodes": NODES,
        "requests": REQUESTS,
        "config": config("session").model_dump(mode="json"),
        "runs": runs,
    }
    WRITTEN.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
