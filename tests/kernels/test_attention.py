"""Sparse attention on a CPU equals the reference, by position, whatever the pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkit.format.rope import Rope
from kvkit.kernels.attention import checks, reference, torch_cpu
from kvkit.kernels.attention.api import blend_attention, query_scores, rope_scatter, token_deviation
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows, RowsError
from kvkit.kernels.checks import LaunchError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# what an output may differ by: float32's sums, or half a unit in the last place of each part and of the whole
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """More only wait for one another on problems this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Problem:
    """Rows of a few requests, and pages in which everything that must not be read is NaN."""

    rows: tuple[tuple[tuple[int, ...], int], ...]  # of each request: positions and length
    heads: int = 2
    group: int = 3
    size: int = 16
    v_size: int = 16
    tokens: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    tokens_outermost: bool = False  # N before H in memory, as vLLM keeps it, and K and V side by side
    in_order: bool = False  # each request's blocks follow one another
    seed: int = 0

    def plan(self, device: str = "cpu") -> Rows:
        """The rows, their blocks strewn over a pool of twice as many."""
        counts = [-(-length // self.tokens) for _, length in self.rows]
        order = np.random.default_rng(self.seed).permutation(self.blocks)
        if self.in_order:
            order = np.arange(self.blocks)
        tables = np.full((len(self.rows), max(counts) + 1), 10**6)
        for r, count in enumerate(counts):
            tables[r, :count] = order[sum(counts[:r]) : sum(counts[: r + 1])]
        starts = np.cumsum([0, *(len(positions) for positions, _ in self.rows)])
        positions = np.array([p for positions, _ in self.rows for p in positions], np.int64)
        lengths = np.array([length for _, length in self.rows])
        return Rows.of(positions, starts, lengths, tables, self.tokens, device)

    @property
    def blocks(self) -> int:
        return 2 * sum(-(-length // self.tokens) for _, length in self.rows) + 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, K pages and V pages."""
        random = torch.Generator().manual_seed(self.seed)
        rows = self.plan()
        shape = (self.blocks, self.heads, self.tokens, self.size + self.v_size)
        pages = torch.randn(shape, generator=random)
        held = torch.zeros(self.blocks, self.tokens, dtype=torch.bool)
        for table, length in zip(rows.tables, rows.lengths.tolist(), strict=True):
            for j in range(length):
                held[table[j // self.tokens], j % self.tokens] = True
        pages.masked_fill_(~held[:, None, :, None], math.nan)
        pages = pages.to(self.dtype)
        if self.tokens_outermost:
            pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
        k, v = pages.split([self.size, self.v_size], -1)
        if not self.tokens_outermost:
            k, v = k.contiguous(), v.contiguous()
        fused = torch.randn(rows.count, self.heads * self.group * self.size + 5, generator=random)
        q = fused.to(self.dtype)[:, 5:].unflatten(1, (self.heads * self.group, self.size))
        return q, k, v

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.size**-0.5, self.window, self.softcap)


def oracle(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.blend_attention`, to be compared before it is rounded to the dtype."""
    return reference.blend_attention(q.double(), k, v, rows, problem.scoring)


def check(problem: Problem) -> None:
    """The attention, its logsumexp and the scores of every request, against float64."""
    q, k, v = problem.tensors()
    rows = problem.plan()
    o, lse = blend_attention(q, k, v, rows, problem.scoring)
    wanted, wanted_lse = oracle(problem, q, k, v, rows)
    assert o.dtype == problem.dtype
    tolerance = TOLERANCES[problem.dtype]
    torch.testing.assert_close(o.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4)


def test_it_goes_where_it_is_told() -> None:
    """Into memory that was given, and not a row beyond."""
    problem = Problem(rows=(((0, 3, 17), 20), ((5,), 9)))
    q, k, v = problem.tensors()
    rows = problem.plan()
    wanted, wanted_lse = blend_attention(q, k, v, rows, problem.scoring)
    room = torch.full((len(q) + 2, *wanted.shape[1:]), torch.nan)
    o, lse = blend_attention(q, k, v, rows, problem.scoring, room[1:-1])
    assert o.data_ptr() == room[1:-1].data_ptr()
    assert torch.equal(room[1:-1], wanted)
    assert torch.equal(lse, wanted_lse)
    assert room[0].isnan().all()
    assert room[-1].isnan().all()


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 90))
        positions = draw(st.lists(st.integers(-1, length + 3), max_size=70))
        rows.append((tuple(sorted(positions)), length))
    size = draw(st.sampled_from([8, 16, 40, 64]))
    return Problem(
        rows=tuple(rows),
        heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 8])),
        size=size,
        v_size=draw(st.sampled_from([size, size, 24])),
        tokens=draw(st.sampled_from([1, 3, 16, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.sampled_from([1.0, 30.0])),
        tokens_outermost=draw(st.booleans()),
        in_order=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@settings(max_examples=100)
@given(problems())
@example(Problem(rows=(((0,), 1),)))
@example(Problem(rows=(((), 5), ((4,), 5))))
@example(Problem(rows=(((3, 3, 4), 0),)))
def test_attention(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("size", [40, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_requests(dtype: torch.dtype, size: int) -> None:
    """Several tiles and pieces, masked and not."""
    random = np.random.default_rng(size)
    positions = tuple(np.sort(random.choice(700, 120, replace=False)).tolist())
    problem = Problem(rows=((positions, 700), ((599,), 600)), size=size, v_size=size, tokens=16, dtype=dtype)
    check(problem)
    check(replace(problem, softcap=20.0))
    check(replace(problem, window=200, tokens_outermost=True))


def test_all_rows_are_causal_attention() -> None:
    problem = Problem(rows=((tuple(range(77)), 77),), tokens=16)
    q, k, v = problem.tensors()
    rows = problem.plan()
    o, _ = blend_attention(q, k, v, rows, problem.scoring)
    keys, values = (reference.gather(x, rows, 0).transpose(0, 1) for x in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(o, wanted[0].transpose(0, 1))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_later_keys_change_nothing(softcap: float | None) -> None:
    """Bit for bit, also where a later key is in the same tile, and where it is enormous."""
    positions = (0, 3, 9, 17, 18, 40)
    problem = Problem(rows=((positions, 60),), softcap=softcap)
    q, k, v = problem.tensors()
    rows = problem.plan()
    before, lse = blend_attention(q, k, v, rows, problem.scoring)
    for i, p in enumerate(positions):
        other_k, other_v = k.clone(), v.clone()
        for j in range(p + 1, 60):
            block, n = rows.tables[0, j // 4], j % 4
            other_k[block, :, n] = 1e4 * (j % 3 - 1)
            other_v[block, :, n] = -1e4
        after, other_lse = blend_attention(q, other_k, other_v, rows, problem.scoring)
        assert torch.equal(before[: i + 1], after[: i + 1])
        assert torch.equal(lse[: i + 1], other_lse[: i + 1])


def test_a_key_within_the_position_changes_its_rows() -> None:
    problem = Problem(rows=(((5, 6, 30), 40),))
    q, k, v = problem.tensors()
    rows = problem.plan()
    before, _ = blend_attention(q, k, v, rows, problem.scoring)
    v[rows.tables[0, 6 // 4], :, 6 % 4] += 1
    after, _ = blend_attention(q, k, v, rows, problem.scoring)
    assert torch.equal(before[0], after[0])
    assert (before[1:] != after[1:]).any(2).all()


@settings(max_examples=60)
@given(problems(), st.booleans(), st.booleans())
def test_scores(problem: Problem, by_values: bool, lse_known: bool) -> None:
    problem = replace(problem, rows=problem.rows[:1])
    q, k, v = problem.tensors()
    rows = problem.plan()
    lse = blend_attention(q, k, v, rows, problem.scoring)[1] if lse_known else None
    values = v if by_values else None
    got = query_scores(q, k, values, rows, problem.scoring, lse)
    wanted = reference.query_scores(q, k, values, rows, problem.scoring)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)
    if not by_values and problem.window is None:
        seeing = int((rows.positions >= 0).sum()) if rows.lengths[0] else 0
        paid = torch.full((q.shape[1],), float(seeing))
        torch.testing.assert_close(got.sum(1), paid, atol=0, rtol=1e-3)


ROPES = {
    "half": Rope((1.0, 0.3, 0.1, 0.01)),
    "interleaved": Rope((1.0, 0.3, 0.1, 0.01), interleaved=True),
    "in the middle": Rope((1.0, 0.2), first=3, scale=1.5),
    "in the middle, interleaved": Rope((1.0, 0.2), first=3, interleaved=True),
}


@pytest.mark.parametrize("with_deviation", [True, False])
@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_scatter(rope: Rope, dtype: torch.dtype, skipped: bool, with_deviation: bool) -> None:
    """The right slots get the right keys; every other bit of the pages stays."""
    m, heads, group, size, v_size, tokens = 7, 2, 3, 8, 6, 4
    random = torch.Generator().manual_seed(1)
    k_pages = torch.randn(5, tokens, heads, size, generator=random).to(dtype).transpose(1, 2)
    v_pages = torch.randn(5, heads, tokens, v_size, generator=random).to(dtype)
    fused = torch.randn(m, heads * (group * size + size + v_size), generator=random).to(dtype)
    q, k, v = fused.split([heads * group * size, heads * size, heads * v_size], 1)
    q, k, v = (
        q.unflatten(1, (heads * group, size)),
        k.unflatten(1, (heads, size)),
        v.unflatten(1, (heads, v_size)),
    )
    slots = torch.tensor([3, 19, -1, 0, 7, -9, 12] if skipped else [3, 19, 2, 0, 7, 8, 12])
    turns = RowRotations(rope, torch.from_numpy(rope.table(np.array([0, 1, 5, 100, 101, 4000, 131071]))))
    wanted_k, wanted_v = k_pages.clone(), v_pages.clone()
    wanted_deviation, deviation = torch.full((m,), math.nan), torch.full((m,), math.nan)
    wanted_q = reference.rope_scatter(
        q, k, v, turns, slots, wanted_k, wanted_v, wanted_deviation if with_deviation else None
    )
    before = k_pages.clone(), v_pages.clone(), fused.clone()
    got_q = rope_scatter(q, k, v, turns, slots, k_pages, v_pages, deviation if with_deviation else None)
    close = {"atol": 1e-6, "rtol": torch.finfo(dtype).eps}
    torch.testing.assert_close(got_q, wanted_q, **close)
    torch.testing.assert_close(k_pages, wanted_k, **close)
    assert torch.equal(v_pages, wanted_v)
    assert torch.equal(fused, before[2])
    written = torch.zeros(5 * tokens, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    for pages, old in zip((k_pages, v_pages), before, strict=False):
        same = (pages == old).all(3).all(1).flatten()  # [B * N]
        assert torch.equal(same, ~written)
    if with_deviation:
        torch.testing.assert_close(deviation, wanted_deviation, atol=1e-5, rtol=4 * torch.finfo(dtype).eps)
        assert (deviation[slots < 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_deviation(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    new, old = (torch.randn(2, 9, 33, generator=random).to(dtype).transpose(0, 1) for _ in range(2))
    torch.testing.assert_close(token_deviation(new, old), reference.token_deviation(new, old))
    assert (token_deviation(new, new) == 0).all()
    assert len(token_deviation(new[:0], old[:0])) == 0


def test_one_run_of_blocks_is_not_copied() -> None:
    pages = torch.randn(6, 2, 4, 8).transpose(1, 2).contiguous().transpose(1, 2)
    keys = torch_cpu.gather(pages, np.array([2, 3, 4]), 10)
    assert keys.data_ptr() == pages[2].data_ptr()
    rows = Rows.of(ids(), ids(0, 0), ids(10), ids(2, 3, 4)[None], 4)
    assert torch.equal(keys.transpose(0, 1), reference.gather(pages, rows, 0))
    one = torch.randn(1, 2, 40, 8)
    assert torch_cpu.gather(one, np.array([0]), 33).data_ptr() == one.data_ptr()


@given(problems(), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_tiles_cover_what_rows_see_once(problem: Problem, per_tile: int, split_keys: int | None) -> None:
    """Every key that a row sees is in one of its items; what an item calls full is seen by all its rows."""
    rows, window = problem.plan(), problem.window
    plan = rows.tiles(per_tile, split_keys, window)
    assert plan is rows.tiles(per_tile, split_keys, window)
    covered: list[list[int]] = [[] for _ in range(rows.count)]
    for request, first, after, begin, full_begin, full_end, end, _ in plan.items.tolist():
        assert begin <= full_begin <= full_end <= end <= rows.lengths[request]
        assert 0 < after - first <= per_tile
        for i in range(first, after):
            covered[i] += range(begin, end)
            p = int(rows.positions[i])
            low = -1 if window is None else p - window
            assert all(low < j <= p for j in range(full_begin, full_end))
    for request, (first, after) in enumerate(zip(rows.row_starts[:-1], rows.row_starts[1:], strict=True)):
        for i in range(int(first), int(after)):
            p, length = int(rows.positions[i]), int(rows.lengths[request])
            low = 0 if window is None else max(0, p - window + 1)
            assert set(range(low, min(p + 1, length))) <= set(covered[i])
            assert len(set(covered[i])) == len(covered[i])
    costs = (plan.items[:, 6] - plan.items[:, 3]).tolist()
    assert costs == sorted(costs, reverse=True)
    assert plan.keys == sum(costs)
    merged = [first + i for _, _, first, parts in plan.merges.tolist() for i in range(parts)]
    assert sorted(merged) == list(range(plan.parts)) == sorted(p for p in plan.items[:, 7].tolist() if p >= 0)


def test_rows_know_their_slots() -> None:
    rows = Rows.of(
        np.array([-1, 0, 5, 9, 2]),
        np.array([0, 4, 5]),
        np.array([8, 3]),
        np.array([[4, 2, -7], [1, 9, 9]]),
        4,
    )
    assert rows.slots.tolist() == [-1, 16, 9, -1, 6]
    assert rows.last_block == 4
    assert rows.tables.tolist() == [[4, 2, -1], [1, -1, -1]]


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


GOOD: dict[str, Any] = {
    "positions": ids(1, 4),
    "row_starts": ids(0, 2),
    "lengths": ids(5),
    "tables": ids(3, 0)[None],
    "block_tokens": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": ids(4, 1)}, "positions: row 0 at 4, then 1"),
        ({"positions": [1, 4]}, "positions: list, want a numpy array of integers"),
        ({"positions": np.array([1.0, 4.0])}, "positions: float64"),
        ({"positions": ids(1, 2**31)}, "positions: from 1 to 2147483648"),
        ({"row_starts": ids(0, 1)}, "row_starts: .* to 2"),
        ({"row_starts": ids(1, 2)}, "row_starts: .* from 0"),
        ({"row_starts": ids(0, 1, 2)}, "row_starts .*want"),
        ({"row_starts": ids()}, "row_starts .*want"),
        (
            {"row_starts": ids(0, 2, 1, 2), "lengths": ids(1, 1, 1), "tables": ids(0, 0, 0)[:, None]},
            "row_starts",
        ),
        ({"lengths": ids(-1)}, "lengths: -1"),
        ({"lengths": ids(9)}, "tables: 2 blocks of 4 tokens, but lengths has 9"),
        ({"tables": ids(3, -1)[None]}, "tables: block -1 within"),
        ({"tables": ids(3, 0)}, "tables: int64 .* 2 axes"),
        ({"tables": ids(3, 0)[None].repeat(2, 0)}, "tables"),
        ({"block_tokens": 0}, "block_tokens=0"),
    ],
)
def test_rows_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RowsError, match=message):
        Rows.of(**(GOOD | change))


def test_attention_that_cannot_be() -> None:
    problem = Problem(rows=(((1, 4), 5),), heads=2, group=2, size=8, v_size=8)
    q, k, v = problem.tensors()
    rows = problem.plan()
    good = {"q": q, "k_pages": k, "v_pages": v, "rows": rows, "scoring": Scoring(1.0)}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": q[:, 0]}, "q: "),
        ({"q": q.double()}, "q: .*float64.* want float32"),
        ({"q": q[:1]}, "rows: 2 on cpu, but q has 1"),
        ({"q": q[:, :3]}, "q: .*want a multiple of 2 heads"),
        ({"q": q[..., :7]}, "q: .*of 8 channels"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: strides"),
        ({"k_pages": k.half()}, "k_pages: .*want float32"),
        ({"k_pages": k.to("meta")}, "k_pages: .* on meta"),
        ({"v_pages": v[:, :1]}, "v_pages: "),
        ({"v_pages": v[..., :0]}, "v_pages: "),
        ({"k_pages": k[:, :, :2], "v_pages": v[:, :, :2]}, "rows: block_tokens=4, but the pages have 2"),
        ({"k_pages": k[:1], "v_pages": v[:1]}, r"rows: block \d+ is out of range"),
    ]
    for change, message in changes:
        for function in (blend_attention, query_scores):
            function(**good)  # of a layer before: what is known of these rows lets nothing else through
            with pytest.raises(LaunchError, match=message):
                function(**(good | change))
    for out, message in (
        (torch.zeros(2, 4, 7), "out: .*want "),
        (torch.zeros(2, 4, 8).double(), "out: .*float64.*want"),
        (torch.zeros(4, 2, 8).transpose(0, 1), "out: strides"),
        (torch.zeros(2, 4, 8, requires_grad=True), "out: requires_grad"),
    ):
        blend_attention(**good, out=torch.zeros(2, 4, 8))
        with pytest.raises(LaunchError, match=message):
            blend_attention(**good, out=out)
    with pytest.raises(LaunchError, match="lse: "):
        query_scores(**good, lse=torch.zeros(2, 3))
    two = Problem(rows=(((1,), 5), ((4,), 5)), heads=2, group=2, size=8, v_size=8)
    with pytest.raises(LaunchError, match="rows: of 2 requests, want one"):
        query_scores(q, *two.tensors()[1:], two.plan(), Scoring(1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": math.inf}, "scale=inf"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": -0.5}, "scale=-0.5: want a finite number, 0 or above"),
        ({"window": 0}, "window=0"),
        ({"softcap": 0.0}, r"softcap=0\.0"),
        ({"softcap": math.nan}, "softcap=nan"),
        ({"softcap": math.inf}, "softcap=inf"),
    ],
)
def test_scoring_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Scoring(**({"scale": 1.0} | change))


def test_scatter_that_cannot_be() -> None:
    rope = Rope((1.0, 0.1))
    good = {
        "q": torch.zeros(2, 4, 8),
        "k": torch.zeros(2, 2, 8),
        "v": torch.zeros(2, 2, 6),
        "rotations": RowRotations(rope, torch.zeros(2, 4)),
        "slots": torch.tensor([0, 11]),
        "k_pages": torch.full((3, 2, 4, 8), 7.0),
        "v_pages": torch.full((3, 2, 4, 6), 7.0),
    }
    changes: list[tuple[dict[str, Any], str]] = [
        ({"k": torch.zeros(2, 1, 8)}, "k: .*want"),
        ({"v": torch.zeros(2, 2, 8)}, "v: .*want"),
        ({"v": torch.zeros(1, 2, 6)}, "v: .*want"),
        ({"k": torch.zeros(2, 2, 8).half()}, "k: .*want float32"),
        ({"rotations": RowRotations(rope, torch.zeros(2, 6))}, r"cos_sin: .*want \(2, 4\)"),
        ({"rotations": RowRotations(rope, torch.zeros(2, 4).double())}, "cos_sin: .*float32"),
        ({"rotations": RowRotations(rope, torch.zeros(4, 2).T)}, "cos_sin: strides"),
        ({"slots": torch.tensor([0, 12])}, "slots: 12 is out of range, the pages have 12"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots: .*int64"),
        (
            {"rotations": RowRotations(Rope((1.0, 0.1), first=5), torch.zeros(2, 4))},
            "rope: channels 5 to 9, but a head of K has 8",
        ),
        ({"deviation": torch.zeros(3)}, "deviation: "),
        ({"k_pages": torch.full((1, 2, 4, 8), 7.0).expand(3, 2, 4, 8)}, "k_pages: .*overlap"),
    ]
    for change, message in changes:
        with pytest.raises(LaunchError, match=message):
            rope_scatter(**(good | change))
    assert (good["k_pages"] == 7).all()
    assert (good["v_pages"] == 7).all()


def test_layers_of_one_form_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention's by their rows, the scatter's by their rotations; values of slots in each layer."""
    checked: list[str] = []
    for name in ("check_rows", "check_scatter"):
        check = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda *given, n=name, c=check: (checked.append(n), c(*given)))
    batch = Rows.of(np.array([3, 9]), np.array([0, 2]), np.array([12]), np.arange(3)[None], 4)
    rotations = RowRotations(Rope((1.0, 0.1)), torch.zeros(2, 4))
    k_pages, v_pages = torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 6)

    def layer(slots: torch.Tensor, **changes: torch.Tensor) -> None:
        given = {"q": torch.zeros(2, 4, 8), "k": torch.zeros(2, 2, 8), "v": torch.zeros(2, 2, 6)} | changes
        q = rope_scatter(**given, rotations=rotations, slots=slots, k_pages=k_pages, v_pages=v_pages)
        blend_attention(q, k_pages, v_pages, batch, Scoring(1.0))

    layer(batch.slots)
    layer(batch.slots.clone())
    assert checked == ["check_scatter", "check_rows"]
    with pytest.raises(LaunchError, match="slots: 12 is out of range"):
        layer(torch.tensor([0, 12]))
    for change in ({"v": torch.zeros(2, 2, 8)}, {"k": torch.zeros(2, 2, 8).half()}):
        for _ in range(2):  # a form that was refused is refused again
            with pytest.raises(LaunchError):
                layer(batch.slots, **change)
    with pytest.raises(LaunchError, match="k: strides"):
        layer(batch.slots, k=torch.zeros(2, 8, 2).transpose(1, 2))


def test_deviation_that_cannot_be() -> None:
    new = torch.zeros(3, 2, 4)
    for old, message in ((new[:2], "old: "), (new.half(), "old: .*float32"), (new[0], "old: ")):
        with pytest.raises(LaunchError, match=message):
            token_deviation(new, old)
    with pytest.raises(LaunchError, match="new: "):
        token_deviation(new.long(), new.long())
