"""States at the ends of chunks are found in vLLM's pages, and unsupported layouts are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from scheduler_engine import scheduler_of
from test_vllm_pages import BLOCKS, CHUNK, FULL, config, views
from test_vllm_scheduler import CHUNK as STEPS_CHUNK
from test_vllm_scheduler import Request, request, step
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_rank import IDS, OTHER, TABLE, Rank

from kvkit.adapters.engine.lookup_request import LookupAnswer, Sequence
from kvkit.adapters.vllm.pages import (
    add_states,
    check_chunks,
    group_pages,
    has_windows,
    layer_specs,
    rank_heads,
    table_specs,
)
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.states import align_states
from kvkit.adapters.vllm.step import LoadTask, SaveTask, StepMetadata, Tables, WorkerReport
from kvkit.settings import ConfigError

STATE = MambaSpec(
    block_size=CHUNK,
    shapes=((3, 5), (4, 8)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
)
RUNNING = replace(STATE, block_size=4096, mamba_cache_mode="none")


@dataclass
class Engine:
    """A request in an engine, as vLLM's block manager keeps its states.

    Args:
        runs: it has one, which goes on.
        lag: steps until what was sampled is known.
    """

    request: Request
    runs: bool
    lag: int
    holds: dict[int, int] = field(default_factory=dict)  # tokens whose state a block holds
    table: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    blocks: Iterator[int] = field(default_factory=lambda: count(1000))

    def clip(self, tokens: int) -> int:
        """As vLLM ends steps where states are kept at the ends of blocks."""
        start, end, size = self.request.num_computed_tokens, 0, STEPS_CHUNK
        end, last = start + tokens, self.request.num_tokens - 1
        if self.runs or start >= last:
            return tokens
        if end < last and end // size * size > start:
            end = end // size * size
        stops = (start // size * size + size if start % size else 0, last // size * size)
        return min((stop for stop in stops if start < stop < end), default=end) - start

    def run(self, tokens: int) -> Tables:
        """The tables of a step, and what the blocks hold once it is done."""
        size, end = STEPS_CHUNK, self.request.num_computed_tokens + tokens
        if self.runs:
            self.table = self.table or [next(self.blocks)]
        else:
            at = (end - 1) // size
            self.table += [0] * (at - len(self.table))
            if at == len(self.table):
                self.table.append(next(self.blocks))
            processed = self.request.num_computed_tokens - len(self.in_flight)
            for i in range(min(max(0, (processed - 1) // size), len(self.table))):
                self.holds.pop(self.table[i], None)
                self.table[i] = 0
        self.holds[self.table[-1]] = end
        return list(range(1, 400)), list(self.table)

    def settle(self) -> None:
        while len(self.in_flight) > self.lag:
            self.request.tokens += [len(self.request.tokens)] * self.in_flight.pop(0)


def new_scheduler(runs: bool, every: int = 1, ranks: int = 1) -> Scheduler:
    settings: Any = {"windows": True, "states": {1: runs}, "snapshot_every": every, "ranks": ranks}
    return scheduler_of(STEPS_CHUNK, (4, STEPS_CHUNK), **settings)


@given(
    runs=st.booleans(),
    prompt=st.integers(1, 60),
    lag=st.integers(0, 2),
    every=st.integers(0, 3),
    moves=st.lists(st.one_of(st.integers(1, 30), st.just("preempt")), max_size=30),
)
def test_what_is_stored_is_the_state_at_its_place(
    runs: bool, prompt: int, lag: int, every: int, moves: list[int | str]
) -> None:
    """However prefill is cut, whenever a request is preempted; where a step ends with a chunk, it is kept."""
    scheduler, a = new_scheduler(runs, every), request(prompt)
    engine = Engine(a, runs, lag)
    scheduler.get_num_new_matched_tokens(a, 0)
    for move in moves:
        if move == "preempt":
            engine.lag, lag = 0, engine.lag
            engine.settle()
            engine.lag = lag
            a.num_computed_tokens = 0
            engine.table, engine.holds = [], {}
            scheduler.update_state_after_alloc(a, ([], []), 0)
            continue
        left = a.num_tokens + sum(engine.in_flight) - a.num_computed_tokens
        tokens = engine.clip(min(int(move), max(1, left)))
        planned = step(scheduler, {"a": tokens}, engine.run(tokens))
        end = a.num_computed_tokens + tokens
        check(planned, engine, every, (prompt - 1) // STEPS_CHUNK)
        ends_chunk = end % STEPS_CHUNK == 0 and end <= a.num_tokens
        if ends_chunk and (every == 1 or end // STEPS_CHUNK == (prompt - 1) // STEPS_CHUNK):
            assert planned.saves[-1].blocks[1][-1] > 0
        a.num_computed_tokens = end
        if end >= a.num_tokens + sum(engine.in_flight):
            engine.in_flight.append(1)
        engine.settle()
    scheduler.request_finished(a, (list(range(1, 400)), list(engine.table)))
    check(step(scheduler), engine, every, (prompt - 1) // STEPS_CHUNK)


def check(planned: StepMetadata, engine: Engine, every: int, prompt: int) -> None:
    """Whatever is stored of states is what it is stored as, and wanted."""
    for save in planned.saves:
        for stop, block in enumerate(save.blocks[1], save.first + 1):
            if block >= 0:
                assert engine.holds[block] == stop * STEPS_CHUNK
                assert stop == prompt or (every and stop % every == 0)


@pytest.mark.parametrize(("runs", "table"), [(False, [0, 0, 9]), (True, [9])])
def test_a_snapshot_is_loaded_to_where_the_next_step_looks(runs: bool, table: list[int]) -> None:
    scheduler, a = new_scheduler(runs), request(3 * STEPS_CHUNK + 1)
    assert scheduler.get_num_new_matched_tokens(a, STEPS_CHUNK) == (None, False)
    (ask,) = step(scheduler).lookups
    found = (("disk", 3 * STEPS_CHUNK),)
    scheduler.update_from_workers(WorkerReport([LookupAnswer("a", ask.number, 0, 3 * STEPS_CHUNK, found)]))
    assert scheduler.get_num_new_matched_tokens(a, STEPS_CHUNK) == (2 * STEPS_CHUNK, True)
    scheduler.update_state_after_alloc(a, ([1, 2, 3, 4, 5, 6], table), 2 * STEPS_CHUNK)
    (load,) = step(scheduler).loads
    assert load.blocks == ([3, 4, 5, 6], [-1, 9])


@pytest.mark.parametrize(("other", "hit"), [(3, 3), (2, 0)])
def test_ranks_hit_the_same_snapshot_or_none(other: int, hit: int) -> None:
    scheduler, a = new_scheduler(False, ranks=2), request(3 * STEPS_CHUNK + 1)
    scheduler.get_num_new_matched_tokens(a, 0)
    (ask,) = step(scheduler).lookups
    for rank, chunks in ((0, 3), (1, other)):
        tokens = chunks * STEPS_CHUNK
        scheduler.update_from_workers(
            WorkerReport([LookupAnswer("a", ask.number, rank, tokens, (("disk", tokens),))])
        )
    assert scheduler.get_num_new_matched_tokens(a, 0) == (hit * STEPS_CHUNK, hit > 0)


def test_running_states_are_at_one_place_or_at_none() -> None:
    tables = [5, 6], [9], [0, 7]
    running = {1: True, 2: False}
    assert align_states(tables, running, 16, 8) == ([5, 6], [0, 9], [0, 7])
    assert align_states(tables, running, 8, 8) == ([5, 6], [9], [0, 7])
    assert align_states(tables, running, 12, 8) == align_states(tables, running, 0, 8) == ([5, 6], [], [0, 7])


@pytest.mark.parametrize("state", [STATE, RUNNING], ids=["align", "none"])
def test_states_are_groups_of_records_no_larger_than_those_of_tokens(state: MambaSpec) -> None:
    """Or each slot would be as large as all of a model's states."""
    some = [f"layers.{i}.mixer" for i in range(1, 40)]
    made = config((state, some), (FULL, ["layers.0.attn"]))
    specs, tables = layer_specs(made, cpu=False), table_specs(made)
    assert has_windows(tables)
    assert check_chunks(CHUNK, tables) == (CHUNK, 32)
    tensors = views(state, some, "LBNHC") | views(FULL, ["layers.0.attn"], "LBNHC")
    layout, groups = add_states(*group_pages(specs, tensors, BLOCKS, False), specs, tensors, CHUNK)
    assert layout.token_groups == 1
    assert [group.table for group in groups] == [1] + [0] * (len(groups) - 1)
    assert [name for group in groups[1:] for name in group.names] == some
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(40))
    tokens, *states = layout.groups
    assert {group.block_bytes for group in states} == {2 * 3 * 5 + 4 * 4 * 8}
    assert all(group.chunk_bytes(CHUNK) <= tokens.chunk_bytes(CHUNK) for group in states)
    assert {group.state for group in states} == {"MAMBA2:bfloat16[3, 5],float32[4, 8]"}


@pytest.mark.parametrize("replicated", [False, True])
def test_states_are_of_one_rank(replicated: bool) -> None:
    """Also where each rank has as many KV heads as a state is said to have, or all have the same one."""
    state = replace(STATE, tp_replicated=replicated)
    parallel = SimpleNamespace(tensor_parallel_size=2, world_size=2, rank=1)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2)
    engine = SimpleNamespace(model_config=model, parallel_config=parallel)
    attention = {"a": replace(FULL, num_kv_heads=1)}
    assert rank_heads(engine, [attention], None) is not None
    assert rank_heads(engine, [attention, {"b": state}], None) is None
    with pytest.raises(ConfigError, match="record_ranks = 2: layer b has a state; want none"):
        rank_heads(engine, [attention, {"b": state}], 2)


@pytest.mark.parametrize("replicated", [False, True])
def test_each_rank_stores_and_loads_what_it_has_of_states(replicated: bool, tmp_path: Path) -> None:
    """A part, or the same as the others: in a store that the ranks share, through real pages."""
    state = replace(STATE, tp_replicated=replicated)
    ranks = [Rank(tmp_path, "async", ranks=(number, 2), state=state) for number in range(2)]
    saved = []
    for number, rank in enumerate(ranks):
        chance = torch.Generator().manual_seed(0 if replicated else number)
        for pages in rank.pages.values():
            pages.random_(0, 200, generator=chance)
        saved.append({name: pages.clone() for name, pages in rank.pages.items()})
        rank.step(saves=[SaveTask("a", Sequence(IDS), 0, (TABLE, [-1, 3, 2]))])
        rank.worker.end_saves()
        rank.worker.cache.flush()
        rank.worker.cache.clear("memory")
        rank.fill(0)
    for rank, before in zip(ranks, saved, strict=True):
        assert rank.found() == len(IDS)
        assert rank.load(LoadTask("a", 1, 0, len(IDS), (OTHER, [-1, -1, 5])))
        for name, pages in rank.pages.items():
            expected, to, come = torch.zeros_like(pages), *(([5], [2]) if "mixer" in name else (OTHER, TABLE))
            expected[to] = before[name][come]
            assert torch.equal(pages, expected), name
        rank.worker.close()


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (replace(STATE, num_speculative_blocks=2), "layer b: a request has 2 more states, for drafts"),
        (replace(STATE, block_size=32), "chunk_tokens = 64: .* blocks of 32 tokens; want 32"),
        (replace(STATE, num_prefill_checkpoint_blocks=1), "layer b: its prefix cache counts in 16 tokens"),
    ],
)
def test_what_is_not_known_to_be_at_a_chunks_end_is_refused(spec: MambaSpec, error: str) -> None:
    told: Any = config((FULL, ["a"]), (spec, ["b"]))
    told.hash_block_size = 16
    with pytest.raises(ConfigError, match=error):
        check_chunks(CHUNK, layer_specs(told, cpu=False) and table_specs(told))


def test_a_model_of_states_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layer keeps K and V"):
        layer_specs(config((STATE, ["a"])), cpu=False)
