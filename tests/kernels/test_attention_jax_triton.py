"""Plans of attention for JAX arrays start the kernels that torch starts, with the same arguments."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_plans import CASES, Case, planned
from jax_reference import attention as plain_attention
from jax_reference import problem
from test_attention_triton import check_surroundings, poisoned, run

from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention import jax_choice, jax_plan, schedule, triton
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.attention.rows import RowsError
from kvkit.kernels.attention.triton_kernels import attend_dense, merge
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.tuning.configs import KernelConfig, Launch

STRIDES = ("q_row", "q_head", "k_block", "k_head", "v_block", "v_head")


def tensors(case: Case, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, K pages and V pages, dense as JAX has them."""
    random = torch.Generator().manual_seed(seed)
    arrays = case.arrays()
    return tuple(torch.randn(x.shape, generator=random).to(getattr(torch, x.dtype)) for x in arrays)


def outputs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v = case.arrays()
    dtype = getattr(torch, case.dtype)
    return poisoned(*q.shape[:2], v.shape[3], dtype=dtype), poisoned(*q.shape[:2])


def same_work(mine: Any, theirs: torch.Tensor, spare: Sequence[int]) -> None:
    """Torch's items, then spare ones, which are few."""
    wanted = theirs.numpy()
    np.testing.assert_array_equal(mine[: len(wanted)], wanted)
    assert (mine[len(wanted) :] == spare).all()
    assert len(mine) <= len(wanted) * 9 / 8


@pytest.mark.parametrize("name", CASES)
def test_the_arguments_are_those_of_torch(name: str) -> None:
    case = CASES[name]
    q, k, v = (x.to("meta") for x in tensors(case)) if case.lengths[0] > 1000 else tensors(case)
    rows = case.rows()
    plan = triton.plan_attention(q, k, v, rows, case.scoring)
    assert plan.attending is not None
    items = plan.attending.shared["work"]
    units = plan.grid[0] // len(items)
    _, _, work, (attend, merging, parts) = planned(case)
    np.testing.assert_array_equal(work.tables, rows.device_tables)
    np.testing.assert_array_equal(work.positions, rows.device_positions)
    same_work(work.items, items, jax_plan.SPARE_ITEM)
    calls = [(attend, plan.attending.config, plan.attending.shared, len(work.items) * units)]
    assert (merging is None) == (plan.merging is None)
    if merging is not None and plan.merging is not None:
        same_work(work.merges, plan.merging.shared["work"], jax_plan.SPARE_MERGE)
        calls.append((merging, plan.merging.config, plan.merging.shared, len(work.merges) * units))
        assert parts[0] >= plan.parts[0]
        assert parts[1:] == plan.parts[1:]
    for call, config, arguments, programs in calls:
        assert call.grid[0] == programs
        assert (call.warps, call.stages) == (config.warps, config.stages)
        numbers = {name: value for name, value in arguments.items() if name not in jax_plan.ARRAYS}
        assert dict(call.arguments) == {**numbers, **dict(config.tiles)}
        assert not any(isinstance(value, torch.Tensor) for value in numbers.values())
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert [dict(attend.arguments)[s] for s in STRIDES if s[0] == name] == list(tensor.stride()[:2])


SMALL = {
    "whole": Case((30, 9), (40, 21), "float32", 2, 3, (16, 16), 4),
    "split": Case((7, 1), (300, 9), "float16", 1, 2, (16, 24), 16, window=40),
    "one block": Case((5,), (20,), "float32", 1, 4, (8, 8), 32, softcap=2.0),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_results_have_the_bits_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: spare work and known strides change nothing, and nothing else is written."""
    case = SMALL[name]
    monkeypatch.setattr(jax_plan, "rounded_up", lambda count: count + 2)
    monkeypatch.setattr(schedule, "MERGE_S", 0)  # so few keys are split, too
    small = KernelConfig((("TILE_ROWS", 16), ("TILE_KEYS", 16)), 4, 2)
    monkeypatch.setattr(
        triton, "configs", lambda launch, target=None: (small,) if "q" in launch.arguments else ROWS
    )
    q, k, v = tensors(case)
    rows = case.rows()
    wanted, wanted_lse = outputs(case)
    run(triton.attention(q, k, v, rows, case.scoring, wanted, wanted_lse, small))
    work, calls = jax_plan.plan(rows, *case.arrays(), case.scoring)
    out, lse = outputs(case)
    part_lse = poisoned(*calls.parts)
    part_out = poisoned(*calls.parts, v.shape[3])
    results = {"part_out": part_out, "part_lse": part_lse, "out": out, "lse": lse}
    tables, positions, items, merges = (torch.from_numpy(np.array(x)) for x in work)
    inputs = {"q": q, "k": k, "v": v, "tables": tables, "positions": positions, "work": items}
    first = launch(attend_dense, calls.attend, inputs | results)
    run([first] if calls.merge is None else [first, launch(merge, calls.merge, {"work": merges} | results)])
    assert (calls.merge is not None) == (name == "split")
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    for tensor in results.values():
        check_surroundings(tensor)


ROWS = (KernelConfig((("ROWS", 16),), 4, 1),)


def launch(kernel: Any, call: jax_plan.KernelCall, arrays: dict[str, torch.Tensor]) -> Launch:
    return Launch(kernel, call.grid, arrays | dict(call.arguments), KernelConfig((), call.warps, call.stages))


def test_round_numbers_are_few_and_near() -> None:
    found = [jax_plan.rounded_up(n) for n in range(5000)]
    assert all(n <= m <= n * 9 / 8 for n, m in enumerate(found))
    assert found == sorted(found)
    assert len(set(found[1024:2049])) == 9


def test_a_plan_is_made_once() -> None:
    """For all layers; batches of similar sizes have equal calls, for which one function is compiled."""
    case = Case((900, 60), (4096, 900))
    rows, (q, k, v) = case.rows(), case.arrays()
    first = jax_plan.plan(rows, q, k, v, case.scoring)
    assert jax_plan.plan(rows, q, k, v, case.scoring) is first
    other = case._replace(counts=(890, 70), lengths=(4096, 800))
    assert hash(jax_plan.plan(other.rows(), q, k, v, case.scoring)[1]) == hash(first[1])


def test_rows_of_requests() -> None:
    """Rows of no request see no key; the others keep theirs."""
    given = problem(0, requests=2)
    rows = jax_plan.rows_of(given.requests, 4)
    tables, positions, starts, lengths = map(np.asarray, given.requests)
    assert rows.row_starts.tolist() == [*starts.tolist(), len(positions)]
    assert rows.lengths.tolist() == [*lengths.tolist(), 0]
    np.testing.assert_array_equal(rows.positions[: starts[-1]], positions[: starts[-1]])
    assert (rows.positions[starts[-1] :] == -1).all()
    for r, length in enumerate(lengths):
        blocks = -(-length // 4)
        np.testing.assert_array_equal(rows.tables[r, :blocks], tables[r, :blocks])
    with pytest.raises(RowsError, match="ascending within a request"):
        jax_plan.rows_of(given.requests._replace(positions=-positions), 4)


def test_rows_are_requests_elsewhere() -> None:
    """XLA computes the same of `Rows`."""
    given, scoring = problem(1, requests=2), Scoring(0.3, 7)
    rows = jax_plan.rows_of(given.requests, 4)
    o, lse = attention.blend_attention(given.q, given.k, given.v, rows, scoring)
    wanted = plain_attention(given, scoring)
    np.testing.assert_allclose(o, wanted[0], atol=2e-5)
    np.testing.assert_allclose(lse, wanted[1], atol=2e-5)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA device, and a jax-triton that fits it."""
    monkeypatch.setattr(jax_choice, "has_cuda", lambda: True)
    monkeypatch.setattr(jax_choice, "unusable", lambda: "")
    jax_choice.warn_once.cache_clear()
    return monkeypatch


def choose(backend: Any = None, requests: Any = None, size: int = 8) -> Any:
    given = problem(0, sizes=(size, 5))
    arrays = given.q, given.k, given.v
    return jax_choice.choose(arrays, requests or given.requests, Scoring(0.3), backend)


def test_triton_is_chosen_where_it_can_compute(on_cuda: pytest.MonkeyPatch) -> None:
    work, calls = choose()
    assert isinstance(work.items, jax.Array)
    assert calls == choose("triton")[1]
    assert calls == choose(requests=jax_plan.rows_of(problem(0).requests, 4))[1]
    assert choose("xla") is None
    on_cuda.setattr(jax_choice, "has_cuda", lambda: False)
    assert choose() is None
    assert choose("triton") is not None


def test_traced_requests_are_left_to_xla(on_cuda: pytest.MonkeyPatch) -> None:
    seen = []

    def traced(requests: Requests) -> jax.Array:
        seen.append(choose(requests=requests))
        with pytest.raises(
            LaunchError, match=r"^backend='triton': requests are traced, .* Choices: 'xla', or"
        ):
            choose("triton", requests)
        return jnp.zeros(1)

    jax.jit(traced)(problem(0).requests)
    assert seen == [None]


def test_large_heads_are_left_to_xla(on_cuda: pytest.MonkeyPatch) -> None:
    assert choose(size=257) is None
    with pytest.raises(LaunchError, match="heads of 257 channels, want at most 256"):
        choose("triton", size=257)


def test_rows_that_do_not_fit_are_refused(on_cuda: pytest.MonkeyPatch) -> None:
    given = problem(0)
    rows = jax_plan.rows_of(given.requests, 4)
    with pytest.raises(LaunchError, match=r"^rows: 13 on cpu, but q has 12"):
        jax_choice.choose((given.q[:12], given.k, given.v), rows, Scoring(0.3), None)
    with pytest.raises(LaunchError, match="out of range, the pages have 3"):
        jax_choice.choose((given.q, given.k[:3], given.v[:3]), rows, Scoring(0.3), None)


def test_what_is_missing_is_named_once(on_cuda: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on_cuda.setattr(jax_choice, "unusable", lambda: "jax-triton missing: pip install it")
    with caplog.at_level(logging.WARNING):
        assert choose() is None
        assert choose() is None
    [record] = caplog.records
    message = "blend_attention of JAX arrays runs in XLA, not in the Triton kernel: "
    assert record.getMessage() == message + "jax-triton missing: pip install it"
    with pytest.raises(LaunchError, match=r"^backend='triton': jax-triton missing.* Choices: 'xla', or None"):
        choose("triton")


def test_an_unknown_backend_is_refused() -> None:
    given = problem(0)
    with pytest.raises(LaunchError, match=r"^backend='cuda': want 'triton', 'xla', or None"):
        attention.blend_attention(*given, Scoring(0.3), "cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({}, ".*jax-triton missing; want .*jax-triton 0.4.1 or later: pip install 'kvkit-llm.jax-triton.'"),
        ({"jax-triton": "0.4.1", "triton": "3.6.0"}, ".*triton 3.6.0, jax-triton 0.4.1; want .*triton 3.7"),
        ({"jax-triton": "0.4.1", "triton": "3.10.0.dev1", "jax": "0.11.2"}, "torch .* sees no CUDA device"),
    ],
)
def test_why_it_is_not_usable(versions: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"torch": "2.11.0+cu130", "jax": "0.11.2", "triton": "3.6.0"} | versions
    monkeypatch.setattr(jax_choice, "version_of", present.get)
    monkeypatch.setattr(jax_choice.sys, "version_info", (3, 12))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.match(reason, jax_choice.unusable.__wrapped__())
