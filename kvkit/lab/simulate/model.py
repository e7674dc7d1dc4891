"""Simulation of a trace on nodes and tiers, with the cache's own plans, policies and eviction.

Requests are served in order of arrival, without overlap: a request finds everything that earlier requests
stored. For each request

    1. a router picks the node and, with roles, also the decode node
    2. the node's tiers are searched in order for the leading run of the prompt's chunks (as `Cache.lookup`);
       with states, the run ends at a snapshot before the last token
    3. the run is loaded, tier after tier, and written back as the policy requires (as `Cache.load`);
       quantised tiers are searched last, and nothing from them is written back
    4. the rest of the prompt is computed, at least its last token
    5. prompt and answer are stored (as `Cache.store`), except chunks that depend on quantised KV. Snapshots
       that the policy keeps are stored too: the engine has the states at the end of each chunk that it
       computes. With roles, the prefill node stores the prompt and hands over the KV that the decode node's
       own tiers lack; the decode node stores prompt and answer. Neither node loads quantised KV

The time to the first token is the sum of loading, computing and handing over. A node serves one request at a
time until then; the wait for the node is reported separately.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.traces import Request, Trace
from kvkit.settings import ConfigError
from kvkit.tiers.eviction import state as eviction
from kvkit.transfer import plan as planning
from kvkit.transfer.plan import RetrievePlan, Segment
from kvkit.transfer.policy import Policy, Role, in_effect


@dataclass(slots=True)
class Report:
    """The results of a simulation. Counters, peaks and costs are by tier."""

    requests: int = 0
    prompt_tokens: int = 0
    chunk_lookups: int = 0  # chunks that prefill and decode nodes looked up
    hit_tokens: Counter[str] = field(default_factory=Counter)  # prompt tokens that prefill nodes loaded
    computed_tokens: int = 0  # of prompts
    decode_hit_tokens: Counter[str] = field(default_factory=Counter)  # of decode nodes, in their own tiers
    read_bytes: Counter[str] = field(default_factory=Counter)  # over the link to the tier
    written_bytes: Counter[str] = field(default_factory=Counter)  # over the same link, write-backs included
    write_back_bytes: Counter[str] = field(default_factory=Counter)
    handoff_bytes: int = 0  # from prefill to decode nodes
    evicted_chunks: Counter[str] = field(default_factory=Counter)  # and snapshots
    refused_chunks: Counter[str] = field(default_factory=Counter)  # for lack of room
    peak_bytes: dict[str, int] = field(default_factory=dict)  # the most bytes held, over all nodes
    ttft_s: list[float] = field(default_factory=list)  # per request, without the wait
    wait_s: list[float] = field(default_factory=list)  # per request
    cost_per_month: dict[str, float] = field(
        default_factory=dict
    )  # of the capacity; without a limit, the peak

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were hits, in any tier."""
        return self.hit_tokens.total() / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class Node:
    """One node, with its role's policy and its tiers; nodes that share a tier hold the same object."""

    policy: Policy
    tiers: dict[str, eviction.EvictionState]
    free_at_s: float = 0.0
    served: int = 0


class Simulator:
    """Nodes and tiers of `config`, with the contents that requests left; a chunk is `block_tokens` tokens."""

    def __init__(self, config: SimulationConfig, block_tokens: int) -> None:
        self.config = config
        self.report = Report()
        self._block_tokens = block_tokens
        self._chunk_bytes = {name: block_tokens * config.bytes_per_token(name) for name in config.tiers}
        self._state_bytes = dict.fromkeys(config.tiers, config.model.state_bytes)
        self._approximate = frozenset(n for n, tier in config.tiers.items() if tier.precision is not None)
        self._in_memory = [name for name, tier in config.tiers.items() if tier.in_memory]
        self._states: dict[
            tuple[str, int], eviction.EvictionState
        ] = {}  # by tier, and number of the node or host
        nodes = config.nodes
        self._entry_nodes = self._nodes("both", 0, nodes.both) or self._nodes("prefill", 0, nodes.prefill)
        self._decode_nodes = self._nodes("decode", nodes.prefill, nodes.decode)
        self._held_bytes: Counter[str] = Counter()  # bytes by tier, over all nodes
        self._now_s = 0.0  # arrival of the request that is being served

    @property
    def room(self) -> int | None:
        """Number of chunks that all tiers of all nodes can hold; None: a tier has no limit."""
        rooms = [(s.capacity_bytes, self._chunk_bytes[name]) for (name, _), s in self._states.items()]
        return None if None in dict(rooms) else sum((room or 0) // size for room, size in rooms)

    def serve(self, request: Request) -> RetrievePlan:
        """Serve one request; return the plan of its prompt's load. Mutates tiers and report."""
        report, config, size = self.report, self.config, self._block_tokens
        prompt = request.chunks[: request.prompt_chunks]
        if config.model.state_bytes:  # the state after the last token is of no use
            prompt = prompt[: (request.input_tokens - 1) // size]
        node = self._route(self._entry_nodes, request, prompt)
        self._now_s = arrival_s = request.timestamp_ms / 1000
        start_s = max(arrival_s, node.free_at_s)
        plan = self._plan_load(node, prompt)
        if self._decode_nodes:  # only exact KV is handed over
            plan = planning.clip(plan, plan.exact)
        time_s = self._load(node, plan, prompt)
        hit = min(plan.chunks * size, request.input_tokens - 1)  # the last token's logits are computed
        computed = request.input_tokens - hit
        time_s += computed / config.model.prefill_tokens_per_s
        node.free_at_s = start_s + time_s
        for segment in plan.segments:
            report.hit_tokens[segment.tier] += min(segment.stop * size, hit) - segment.start * size
        self._store(node, prompt if self._decode_nodes else request.chunks, plan, len(prompt))
        if self._decode_nodes:
            time_s += self._hand_over(request, prompt)
        for state in node.tiers.values():
            eviction.note_answer(state, request.chunks, request.tool_call)
        report.requests += 1
        report.prompt_tokens += request.input_tokens
        report.computed_tokens += computed
        report.ttft_s.append(time_s)
        report.wait_s.append(start_s - arrival_s)
        return plan

    def finish(self) -> Report:
        """Complete the report with costs, and return it. Mutates it.

        Raises:
            ConfigError: an eviction policy of another package failed.
        """
        failures = [state.policy.failure for state in self._states.values() if state.policy.failure]
        if failures:
            raise ConfigError(f"eviction policy {failures[0]}")
        report = self.report
        instances = Counter(name for name, _ in self._states)
        for name, tier in self.config.tiers.items():
            limit = tier.capacity
            size_bytes = report.peak_bytes.get(name, 0) if limit is None else int(limit) * instances[name]
            report.cost_per_month[name] = size_bytes / 1e9 * tier.price_per_gb_month
        return report

    def _nodes(self, role: Role, first: int, count: int) -> list[Node]:
        policy = in_effect(self.config.policy_of(role), self._in_memory)
        numbers = range(first, first + count)
        return [Node(policy, {n: self._tier(n, number) for n in self.config.tiers}) for number in numbers]

    def _tier(self, name: str, node: int) -> eviction.EvictionState:
        """Return a tier's state for the node with this number; nodes may share it."""
        tier = self.config.tiers[name]
        instance = {"node": node, "host": node // self.config.nodes.per_host, "shared": 0}[tier.scope]
        capacity = None if tier.capacity is None else int(tier.capacity)
        state = eviction.EvictionState(capacity, tier.eviction)
        return self._states.setdefault((name, instance), state)

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
            node = max(nodes, key=lambda node: (_longest_run(node, prompt), -node.free_at_s, -node.served))
        node.served += 1
        return node

    def _plan_load(self, node: Node, names: Sequence[str]) -> RetrievePlan:
        """Plan the load from the node's tiers; with states, up to a snapshot. Marks chunks as used."""
        self.report.chunk_lookups += len(names)
        plan = self._held_run(node, names)
        for state in node.tiers.values():
            eviction.note_request(state, names, self._now_s)
        if not self.config.model.state_bytes:
            return plan
        sought = planning.snapshots_sought(plan.chunks)
        found = (stop for stop in sought if self._held_run(node, _snapshot(names[stop - 1])).complete)
        return planning.clip(plan, next(found, 0))

    def _held_run(self, node: Node, names: Sequence[str]) -> RetrievePlan:
        """Return the leading run that the node's tiers hold. Marks chunks as used."""
        plan, before = RetrievePlan(len(names), approximate=self._approximate), -1
        while before < plan.chunks < len(names):
            before = plan.chunks
            for tier in planning.exact_first(node.policy.retrieve_from, self._approximate):
                run = eviction.use_run(node.tiers[tier], names[plan.chunks :], self._now_s)
                plan = planning.extend(plan, tier, run)
        return plan

    def _load(self, node: Node, plan: RetrievePlan, names: Sequence[str]) -> float:
        """Read the records of `plan` and its snapshot; return the seconds of reading."""
        time_s = self._read_run(node, plan, names, self._chunk_bytes)
        if self.config.model.state_bytes and plan.chunks:
            last = _snapshot(names[plan.chunks - 1])
            time_s += self._read_run(node, self._held_run(node, last), last, self._state_bytes)
        return time_s

    def _read_run(
        self, node: Node, plan: RetrievePlan, names: Sequence[str], sizes: Mapping[str, int]
    ) -> float:
        """Read records of `sizes` bytes, by tier, and write them back as the policy requires.

        Returns the seconds of reading.
        """
        time_s = 0.0
        for segment in plan.segments:
            tier = self.config.tiers[segment.tier]
            read_bytes = (segment.stop - segment.start) * sizes[segment.tier]
            self.report.read_bytes[segment.tier] += read_bytes
            time_s += tier.latency_ms / 1000 + read_bytes / tier.bandwidth
        write_back = planning.plan_write_back(plan, plan.chunks, node.policy, self._in_memory)
        for segment in write_back.segments:
            stored = self._put_run(node, segment, names, sizes)
            self.report.write_back_bytes[segment.tier] += stored * sizes[segment.tier]
        return time_s

    def _store(self, node: Node, names: Sequence[str], loaded: RetrievePlan, prompt: int) -> None:
        """Store chunks that depend on no approximate KV, and snapshots. `prompt`: chunks of the prompt."""
        names = names[: loaded.exact] if loaded.exact < loaded.chunks else names
        self._keep(node, names, self._chunk_bytes)
        model = self.config.model
        for stop in range(loaded.chunks + 1, len(names) + 1) if model.state_bytes else ():
            if planning.is_snapshot_kept(stop, model.snapshot_every, prompt):
                self._keep(node, _snapshot(names[stop - 1]), self._state_bytes)

    def _keep(self, node: Node, names: Sequence[str], sizes: Mapping[str, int]) -> None:
        resident = {
            tier: eviction.use_run(node.tiers[tier], names, self._now_s) for tier in node.policy.store_to
        }
        for segment in planning.plan_store(len(names), resident).segments:
            self._put_run(node, segment, names, sizes)

    def _put_run(self, node: Node, segment: Segment, names: Sequence[str], sizes: Mapping[str, int]) -> int:
        """Put records into a tier; return the number of new records that it took."""
        tier, start, stop = segment.tier, segment.start, segment.stop
        state, size, report = node.tiers[tier], sizes[tier], self.report
        before = len(state.entries)
        parent = names[start - 1] if start else None
        added, victims = eviction.add_run(state, names[start:stop], size, parent=parent, now=self._now_s)
        new_records = len(state.entries) - before + len(victims)
        report.evicted_chunks[tier] += len(victims)
        report.refused_chunks[tier] += stop - start - added
        report.written_bytes[tier] += new_records * size
        self._held_bytes[tier] += (len(state.entries) - before) * size
        report.peak_bytes[tier] = max(self._held_bytes[tier], report.peak_bytes.get(tier, 0))
        return new_records

    def _hand_over(self, request: Request, prompt: Sequence[str]) -> float:
        """Send a decode node the KV that its own tiers lack; return the seconds on the link."""
        node = self._route(self._decode_nodes, request, prompt)
        plan = self._plan_load(node, prompt)
        plan = planning.clip(plan, plan.exact)  # the prefill node hands over the rest as exact KV
        self._load(node, plan, prompt)  # while the prompt is computed elsewhere
        for tier, chunks in plan.by_tier().items():
            self.report.decode_hit_tokens[tier] += chunks * self._block_tokens
        missing_tokens = request.input_tokens - plan.chunks * self._block_tokens
        moved_bytes = missing_tokens * self.config.model.kv_bytes_per_token + self.config.model.state_bytes
        self.report.handoff_bytes += moved_bytes
        self._store(node, request.chunks, plan, len(prompt))
        link = self.config.handoff
        return link.latency_ms / 1000 + moved_bytes / link.bandwidth


def simulate(trace: Trace, config: SimulationConfig) -> Report:
    """Simulate every request of `trace` as `config` describes. Deterministic; mutates neither.

    Raises:
        ConfigError: an eviction policy of another package failed.
    """
    simulator = Simulator(config, trace.block_tokens)
    for request in trace.requests:
        simulator.serve(request)
    return simulator.finish()


def _snapshot(chunk: str) -> tuple[str, ...]:
    """Return the name of the snapshot at the end of a chunk."""
    return (f"after {chunk}",)


def _longest_run(node: Node, names: Sequence[str]) -> int:
    """Return the longest run that one of the node's tiers holds, without marking it as used."""
    held = (node.tiers[tier].entries for tier in node.policy.retrieve_from)
    return max((sum(1 for _ in takewhile(entries.__contains__, names)) for entries in held), default=0)
