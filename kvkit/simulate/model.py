"""The simulator: a trace through nodes and tiers, by the plan, policy and eviction functions of the cache.

Requests are taken in the order of their arrival, each at once: what one stored, the next finds. Per request

    1. a router picks the node, and with roles also the one that decodes
    2. the node's tiers are asked in turn for the leading run of the prompt's chunks (as `Cache.lookup`)
    3. the run is loaded, tier after tier, and written back where the policy says (as `Cache.load`)
    4. the rest of the prompt is computed, at least its last token
    5. prompt and answer are stored (as `Cache.store`). With roles the prefill node stores the prompt, hands
       over the KV that the decode node's own tiers lack, and the decode node stores prompt and answer

The time to the first token is that of loading, computing and handing over, one after the other; a node serves
one request at a time up to there, and the wait for it is reported apart.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvkit.moving import plan as planning
from kvkit.moving.plan import RetrievePlan
from kvkit.moving.policy import Policy, Role, in_effect
from kvkit.simulate.config import SimulationConfig
from kvkit.simulate.traces import Request, Trace
from kvkit.tiers.eviction import state as eviction


@dataclass(slots=True)
class Report:
    """What a simulation found. Counters, peaks and costs are by tier."""

    requests: int = 0
    prompt_tokens: int = 0
    chunk_lookups: int = 0  # chunks that were asked for, by prefill and decode nodes
    hit_tokens: Counter[str] = field(default_factory=Counter)  # that prefill nodes had not to compute
    computed_tokens: int = 0  # of prompts
    decode_hit_tokens: Counter[str] = field(default_factory=Counter)  # of decode nodes, in their own tiers
    read_bytes: Counter[str] = field(default_factory=Counter)  # over the link to the tier
    written_bytes: Counter[str] = field(default_factory=Counter)  # the same; write-backs are among them
    write_back_bytes: Counter[str] = field(default_factory=Counter)
    handoff_bytes: int = 0  # from prefill to decode nodes
    evicted_chunks: Counter[str] = field(default_factory=Counter)
    refused_chunks: Counter[str] = field(default_factory=Counter)  # they found no room
    peak_bytes: dict[str, int] = field(default_factory=dict)  # the most that was held, over all nodes
    ttft_s: list[float] = field(default_factory=list)  # per request, without the wait
    wait_s: list[float] = field(default_factory=list)  # per request
    cost_per_month: dict[str, float] = field(
        default_factory=dict
    )  # of the capacity; without a limit, the peak

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were had from any tier."""
        return self.hit_tokens.total() / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class Node:
    """One node: its role's policy and its tiers; shared ones are the same object on every node."""

    policy: Policy
    tiers: dict[str, eviction.EvictionState]
    free_at_s: float = 0.0
    served: int = 0


class Simulator:
    """Nodes and tiers of `config`, and what happened to them so far; a chunk is `block_tokens` tokens."""

    def __init__(self, config: SimulationConfig, block_tokens: int) -> None:
        self.config = config
        self.report = Report()
        self._block_tokens = block_tokens
        self._chunk_bytes = block_tokens * config.model.kv_bytes_per_token
        self._near = [name for name, tier in config.tiers.items() if tier.near]
        shared = {n: self._tier(n) for n, tier in config.tiers.items() if tier.scope == "shared"}
        nodes = config.nodes
        self._entry = self._nodes("both", nodes.both, shared) or self._nodes("prefill", nodes.prefill, shared)
        self._decoders = self._nodes("decode", nodes.decode, shared)
        self._held: Counter[str] = Counter()  # bytes by tier, over all nodes

    def serve(self, request: Request) -> RetrievePlan:
        """Take one request through; returns what was loaded for its prompt. Mutates tiers and report."""
        report, config, size = self.report, self.config, self._block_tokens
        prompt = request.chunks[: request.prompt_chunks]
        node = self._route(self._entry, request, prompt)
        arrival_s = request.timestamp_ms / 1000
        start_s = max(arrival_s, node.free_at_s)
        plan = self._find(node, prompt)
        time_s = self._load(node, plan, prompt)
        hit = min(plan.chunks * size, request.input_tokens - 1)  # the last token's logits are computed
        computed = request.input_tokens - hit
        time_s += computed / config.model.prefill_tokens_per_s
        node.free_at_s = start_s + time_s
        for segment in plan.segments:
            report.hit_tokens[segment.tier] += min(segment.stop * size, hit) - segment.start * size
        self._store(node, prompt if self._decoders else request.chunks)
        if self._decoders:
            time_s += self._hand_over(request, prompt)
        report.requests += 1
        report.prompt_tokens += request.input_tokens
        report.computed_tokens += computed
        report.ttft_s.append(time_s)
        report.wait_s.append(start_s - arrival_s)
        return plan

    def finish(self) -> Report:
        """The report, with peaks and costs. Mutates it."""
        report = self.report
        nodes = len(self._entry) + len(self._decoders)
        for name, tier in self.config.tiers.items():
            copies = nodes if tier.scope == "node" else 1
            held = report.peak_bytes.get(name, 0) if tier.capacity is None else int(tier.capacity) * copies
            report.cost_per_month[name] = held / 1e9 * tier.price_per_gb_month
        return report

    def _nodes(self, role: Role, count: int, shared: dict[str, eviction.EvictionState]) -> list[Node]:
        policy = in_effect(self.config.policy_of(role), self._near)
        return [
            Node(policy, {n: shared[n] if n in shared else self._tier(n) for n in self.config.tiers})
            for _ in range(count)
        ]

    def _tier(self, name: str) -> eviction.EvictionState:
        tier = self.config.tiers[name]
        return eviction.EvictionState(None if tier.capacity is None else int(tier.capacity), tier.eviction)

    def _route(self, nodes: list[Node], request: Request, prompt: Sequence[str]) -> Node:
        route = self.config.nodes.route
        if len(nodes) == 1:
            node = nodes[0]
        elif route == "session":
            node = nodes[zlib.crc32(request.session.encode()) % len(nodes)]
        elif route == "round-robin":
            node = min(nodes, key=lambda node: node.served)
        elif route == "least-busy":
            node = min(nodes, key=lambda node: (node.free_at_s, node.served))
        else:
            node = max(nodes, key=lambda node: (_longest(node, prompt), -node.free_at_s, -node.served))
        node.served += 1
        return node

    def _find(self, node: Node, names: Sequence[str]) -> RetrievePlan:
        """The leading run that the node's tiers hold. Mutates their order of use."""
        self.report.chunk_lookups += len(names)
        plan, before = RetrievePlan(len(names)), -1
        while before < plan.chunks < len(names):
            before = plan.chunks
            for tier in node.policy.retrieve_from:
                run = eviction.use_run(node.tiers[tier], names[plan.chunks :])
                plan = planning.extend(plan, tier, run)
        return plan

    def _load(self, node: Node, plan: RetrievePlan, names: Sequence[str]) -> float:
        """Read what `plan` says, write it back where the policy says; returns the seconds of reading."""
        time_s = 0.0
        for segment in plan.segments:
            tier = self.config.tiers[segment.tier]
            read = (segment.stop - segment.start) * self._chunk_bytes
            self.report.read_bytes[segment.tier] += read
            time_s += tier.latency_ms / 1000 + read / tier.bandwidth
        back = planning.plan_write_back(plan, plan.chunks, node.policy, self._near)
        for segment in back.segments:
            stored = self._put(node, segment.tier, names, segment.start, segment.stop)
            self.report.write_back_bytes[segment.tier] += stored * self._chunk_bytes
        return time_s

    def _store(self, node: Node, names: Sequence[str]) -> None:
        resident = {tier: eviction.use_run(node.tiers[tier], names) for tier in node.policy.store_to}
        for segment in planning.plan_store(len(names), node.policy, resident).segments:
            self._put(node, segment.tier, names, segment.start, segment.stop)

    def _put(self, node: Node, tier: str, names: Sequence[str], start: int, stop: int) -> int:
        """Put chunks into a tier; how many it took that it did not hold."""
        state, size, report = node.tiers[tier], self._chunk_bytes, self.report
        before = len(state.entries)
        parent = names[start - 1] if start else None
        added, victims = eviction.add_run(state, names[start:stop], size, parent=parent)
        taken = len(state.entries) - before + len(victims)
        report.evicted_chunks[tier] += len(victims)
        report.refused_chunks[tier] += stop - start - added
        report.written_bytes[tier] += taken * size
        self._held[tier] += (len(state.entries) - before) * size
        report.peak_bytes[tier] = max(self._held[tier], report.peak_bytes.get(tier, 0))
        return taken

    def _hand_over(self, request: Request, prompt: Sequence[str]) -> float:
        """From the prefill node to a decode node, which has what its own tiers hold; seconds on the link."""
        node = self._route(self._decoders, request, prompt)
        plan = self._find(node, prompt)
        self._load(node, plan, prompt)  # while the prompt is computed elsewhere
        for tier, chunks in plan.by_tier().items():
            self.report.decode_hit_tokens[tier] += chunks * self._block_tokens
        missing = request.input_tokens - plan.chunks * self._block_tokens
        moved = missing * self.config.model.kv_bytes_per_token
        self.report.handoff_bytes += moved
        self._store(node, request.chunks)
        link = self.config.handoff
        return link.latency_ms / 1000 + moved / link.bandwidth


def simulate(trace: Trace, config: SimulationConfig) -> Report:
    """Take every request of `trace` through what `config` describes. Deterministic; mutates neither."""
    simulator = Simulator(config, trace.block_tokens)
    for request in trace.requests:
        simulator.serve(request)
    return simulator.finish()


def _longest(node: Node, names: Sequence[str]) -> int:
    """The longest run that the node's own tiers hold, without using it."""
    held = (node.tiers[tier].entries for tier in node.policy.retrieve_from)
    return max((sum(1 for _ in takewhile(entries.__contains__, names)) for entries in held), default=0)
