"""Attention of JAX arrays equals the reference, and compiles once for equal shapes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_arrays import (
    FLOATS,
    NUMPY,
    ROPES,
    SMALL,
    as_jax,
    bits,
    close,
    int32,
    maybe_jit,
    pools,
    random_slots,
    spec,
    to_jax,
    to_torch,
)
from run_sizes import nightly

from kvkit.format.rope import Rope
from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention import reference as meaning
from kvkit.kernels.attention.layer import Requests, RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import jax as kernels

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of attention to keys of unit variance


def paged(
    requests: int, heads: int, n: int, sizes: tuple[int, int], dtype: str, per: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V pages and tables [requests, per] of blocks that are nobody else's."""
    torch.manual_seed(seed)
    blocks = requests * per + 2
    k, v = (torch.randn(blocks, heads, n, size).to(getattr(torch, dtype)) for size in sizes)
    return k, v, torch.randperm(blocks)[: requests * per].reshape(requests, per)


def spoil(k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """NaN in every slot that is no request's key, and nonsense in the tables beyond their lengths."""
    n = k.shape[2]
    owned = torch.zeros(k.shape[0], n, dtype=torch.bool)
    tables = tables.clone()
    for r, length in enumerate(lengths.tolist()):
        j = torch.arange(length)
        owned[tables[r, j // n], j % n] = True
        beyond = tables[r, -(-length // n) :]
        beyond[:] = torch.tensor([-1, 2**31 - 1, -(2**31)]).repeat(len(beyond))[: len(beyond)]
    for pages in (k, v):
        pages.swapaxes(1, 2)[~owned] = torch.nan
    return tables


def random_rows(
    random: np.random.Generator, requests: int, m: int, capacity: int
) -> tuple[torch.Tensor, ...]:
    """Lengths, row starts (the last may be below m) and ascending positions, some beyond their lengths."""
    lengths = torch.from_numpy(random.integers(0, capacity + 1, requests))
    starts = torch.from_numpy(np.sort(random.integers(0, m + 1, requests + 1)))
    starts[0] = 0
    positions = torch.from_numpy(random.integers(0, capacity, m))
    for first, last in itertools.pairwise(starts.tolist()):
        positions[first:last] = positions[first:last].sort().values
    return lengths, starts, positions


def plan_of(
    tables: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, n: int
) -> Rows:
    """The same rows for the reference, which takes none that belong to no request."""
    return Rows.of(positions[: starts[-1]].numpy(), starts.numpy(), lengths.numpy(), tables.numpy(), n)


def attention_case(
    seed: int,
    dtype: str,
    window: int | None,
    softcap: float | None,
    shape: tuple[int, int, int, int, int, int, int, int] = (3, 2, 3, 8, 6, 4, 11, 37),
) -> None:
    requests, heads, group, size, v_size, n, per, m = shape
    k, v, tables = paged(requests, heads, n, (size, v_size), dtype, per, seed)
    lengths, starts, positions = random_rows(np.random.default_rng(seed), requests, m, per * n)
    q = torch.randn(m, heads * group, size).to(k.dtype)
    rows, scoring = int(starts[-1]), Scoring(size**-0.5, window, softcap)
    plan = plan_of(tables, positions, starts, lengths, n)
    wanted, sums = meaning.blend_attention(q[:rows], k, v, plan, scoring)
    tables = spoil(k, v, tables, lengths)
    request = Requests(*map(int32, (tables, positions, starts, lengths)))
    o, lse = attention.blend_attention(*map(to_jax, (q, k, v)), request, scoring)
    assert o.dtype == NUMPY[dtype]
    torch.testing.assert_close(to_torch(o)[:rows], wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(to_torch(lse)[:rows], sums, atol=1e-4, rtol=1e-5)
    assert not np.asarray(o[rows:], np.float32).any()
    assert (np.asarray(lse[rows:]) == -np.inf).all()


@contextmanager
def tiles(rows: int, keys: int) -> Iterator[None]:
    """Small problems of many tiles."""
    compiled = attention._blend_attention, attention._query_scores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ROW_TILE", rows)
        patch.setattr(attention, "KEY_TILE", keys)
        for function in compiled:
            function.clear_cache()
        yield
    for function in compiled:
        function.clear_cache()


@pytest.mark.parametrize("dtype", ["float32", *nightly("float16", "bfloat16")])
@pytest.mark.parametrize(("window", "softcap"), [(9, 2.0), *nightly((None, None), (1, None))])
def test_attention(dtype: str, window: int | None, softcap: float | None) -> None:
    """Rows, lengths, positions and tables are data: 12 problems, compiled once."""
    with tiles(8, 12):
        for seed in range(12):
            attention_case(seed, dtype, window, softcap)


@settings(max_examples=4, deadline=None)
@given(
    requests=st.integers(1, 4),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    size=st.sampled_from([1, 5, 64]),
    v_size=st.sampled_from([1, 7, 64]),
    n=st.sampled_from([1, 3, 16, 50]),
    per=st.integers(1, 5),
    m=st.integers(1, 150),
    seed=st.integers(0, 2**32),
)
def test_attention_of_any_shape(
    requests: int,
    heads: int,
    group: int,
    size: int,
    v_size: int,
    n: int,
    per: int,
    m: int,
    seed: int,
) -> None:
    attention_case(seed, "float32", None, None, (requests, heads, group, size, v_size, n, per, m))


def test_ids_of_64_bits() -> None:
    with jax.enable_x64(True):
        attention_case(0, "float32", 9, 2.0)
        check_scores(0, None, None, True)


def test_keys_beyond_a_row_do_not_change_it() -> None:
    k, v, tables = paged(1, 1, 4, (8, 8), "float32", 6, 0)
    q, positions = torch.randn(3, 2, 8), torch.tensor([0, 5, 11])
    attend = partial(attention.blend_attention, to_jax(q))
    request = Requests(int32(tables), int32(positions), jnp.array([0, 3]), jnp.array([24]))
    before = attend(to_jax(k), to_jax(v), request, Scoring(0.3))
    j = torch.arange(12, 24)
    for pages in (k, v):
        pages[tables[0, j // 4], :, j % 4] = 1e6
    after = attend(to_jax(k), to_jax(v), request, Scoring(0.3))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(before[0][0, 0], to_torch(to_jax(v))[tables[0, 0], 0, 0], rtol=1e-6)  # p = 0


def check_scores(seed: int, window: int | None, softcap: float | None, with_v: bool) -> None:
    k, v, tables = paged(1, 2, 4, (8, 6), "float32", 11, seed)
    lengths, starts, positions = random_rows(np.random.default_rng(seed), 1, 19, 44)
    q, length, rows = torch.randn(19, 6, 8), int(lengths[0]), int(starts[-1])
    scoring = Scoring(0.35, window, softcap)
    plan = plan_of(tables, positions, starts, lengths, 4)
    wanted = meaning.query_scores(q[:rows], k, v if with_v else None, plan, scoring)
    tables = spoil(k, v, tables, lengths)
    jq, jk, jv = map(to_jax, (q, k, v))
    request = Requests(*map(int32, (tables, positions, starts, lengths)))
    found = attention.query_scores(jq, jk, jv if with_v else None, request, scoring)
    assert found.shape == (6, 44)
    torch.testing.assert_close(to_torch(found)[:, :length], wanted, atol=1e-5, rtol=1e-5)
    assert not np.asarray(found)[:, length:].any()
    _, lse = attention.blend_attention(jq, jk, jv, request, scoring)
    again = attention.query_scores(jq, jk, jv if with_v else None, request, scoring, lse)
    np.testing.assert_allclose(found, again, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap", "with_v"), [(None, None, False), (9, 2.0, True)])
def test_query_scores(window: int | None, softcap: float | None, with_v: bool) -> None:
    with tiles(8, 12):
        for seed in range(6):
            check_scores(seed, window, softcap, with_v)


def test_every_row_pays_one_per_head() -> None:
    """At the tiles' own sizes: the scores add up to the rows that see a key times the heads."""
    k, _, tables = paged(1, 2, 16, (16, 16), "bfloat16", 70, 0)
    q, positions = torch.randn(150, 4, 16).bfloat16(), torch.arange(150) * 7
    request = Requests(int32(tables), int32(positions), jnp.array([0, 150]), jnp.array([1000]))
    found = attention.query_scores(to_jax(q), to_jax(k), None, request, Scoring(0.25))
    np.testing.assert_allclose(found.sum(1), [150] * 4, rtol=1e-4)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("dtype", "compiled"), [("float32", False), ("float16", True), ("bfloat16", True)])
def test_rope_scatter(name: str, dtype: str, compiled: bool) -> None:
    rope = ROPES[name]
    torch.manual_seed(0)
    m, kind = 13, getattr(torch, dtype)
    q, k, v = (torch.randn(m, heads, size).to(kind) for heads, size in ((6, 8), (2, 8), (2, 6)))
    k_pages, v_pages = (torch.randn(5, 2, 4, size).to(kind) for size in (8, 6))
    slots = torch.randperm(20)[:m]
    slots[[2, 7]] = torch.tensor([-1, -9])
    cos_sin = rope.table(np.arange(m) * 31 + 1)
    scatter = maybe_jit(lambda *x: attention.rope_scatter(*x, True), compiled)
    made = scatter(
        *map(to_jax, (q, k, v)), RowRotations(rope, cos_sin), int32(slots), to_jax(k_pages), to_jax(v_pages)
    )
    deviation = torch.full((m,), torch.nan)
    k_wanted, v_wanted = k_pages.clone(), v_pages.clone()
    turns = RowRotations(rope, torch.from_numpy(cos_sin))
    turned = meaning.rope_scatter(q, k, v, turns, slots, k_wanted, v_wanted, deviation)
    close(made.q, turned, q, rope)
    np.testing.assert_array_equal(bits(made.v_pages), bits(v_wanted))
    got = to_torch(made.k_pages)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, n = divmod(slot, 4)
            close(to_jax(got[block, :, n]), k_wanted[block, :, n], k[row], rope)
            got[block, :, n] = k_wanted[block, :, n]
    np.testing.assert_array_equal(bits(got), bits(k_wanted))
    torch.testing.assert_close(to_torch(made.deviation), deviation, rtol=TOLERANCE[dtype], atol=1e-6)
    assert (np.asarray(made.deviation)[[2, 7]] == 0).all()


def test_rope_scatter_without_deviation() -> None:
    pages = jnp.zeros((1, 1, 4, 8))
    row = jnp.ones((2, 1, 8))
    rope = ROPES["half"]
    turns = RowRotations(rope, rope.table(np.arange(2)))
    made = attention.rope_scatter(row, row, row, turns, np.array([0, 2]), pages, pages)
    assert made.deviation is None
    np.testing.assert_array_equal(made.k_pages[0, 0, 0], row[0, 0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_token_deviation(dtype: str) -> None:
    new, old = (torch.randn(9, 3, 5).to(getattr(torch, dtype)) for _ in range(2))
    found = attention.token_deviation(to_jax(new), to_jax(old))
    torch.testing.assert_close(to_torch(found), meaning.token_deviation(new, old), rtol=1e-5, atol=0)


@contextmanager
def traces() -> Iterator[list[str]]:
    """The functions that JAX traces meanwhile."""
    seen: list[str] = []

    def note(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            seen.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def all_calls(seed: int) -> None:
    """Every operation, on arrays whose values and not whose shapes follow the seed."""
    random = np.random.default_rng(seed)
    rope = ROPES["half"]
    pages = as_jax(pools(SMALL, 8, False, seed))
    slots = random_slots(32, 2, 5, seed, False)
    packed = kernels.pack(SMALL, pages, slots=slots)
    delta = random.integers(-9, 9, (2, 5))
    kernels.unpack(
        SMALL,
        pages,
        packed,
        slots=slots,
        rope=rope,
        cos_sin=rope.delta_table(delta.ravel()).reshape(2, 5, -1),
    )
    k, v, tables = paged(2, 2, 4, (8, 6), "float32", 3, seed)
    lengths, starts, positions = random_rows(random, 2, 7, 12)
    q = to_jax(torch.randn(7, 4, 8))
    rows = Requests(*map(int32, (tables, positions, starts, lengths)))
    attention.blend_attention(q, to_jax(k), to_jax(v), rows, Scoring(0.3))
    one = Requests(*map(int32, (tables[:1], positions, starts[:2], lengths[:1])))
    attention.query_scores(q, to_jax(k), None, one, Scoring(0.3))
    new, old = (to_jax(x) for x in torch.randn(2, 7, 2, 8))
    attention.token_deviation(new, old)
    to = random.permutation(20)[:7]
    turns = RowRotations(rope, rope.table(positions.numpy()))
    attention.rope_scatter(q, new, new, turns, to, to_jax(k), to_jax(k), True)


def test_equal_shapes_are_traced_once() -> None:
    all_calls(0)
    with traces() as seen:
        all_calls(1)
    assert seen == []
    with traces() as seen:
        attention.token_deviation(jnp.zeros((77, 1, 1)), jnp.zeros((77, 1, 1)))
    assert "_token_deviation" in seen  # the counter counts


def attention_specs(m: int, heads: int, kv_heads: int, blocks: int, n: int, dtype: str) -> tuple[Any, ...]:
    pages = spec((blocks, kv_heads, n, 64), dtype)
    rows = Requests(*(spec(shape, "int32") for shape in ((1, blocks), (m,), (2,), (1,))))
    return spec((m, heads, 64), dtype), pages, pages, rows


def test_attention_needs_no_matrix_of_scores() -> None:
    """4,096 rows and 32,768 keys: working memory below a hundredth of it."""
    specs = attention_specs(4096, 8, 2, 2048, 16, "float32")
    matrix_bytes = 4 * 8 * 4096 * 32768
    for function in (attention.blend_attention, attention.query_scores):
        compiled = jax.jit(partial(function, scoring=Scoring(0.125))).lower(*specs).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < matrix_bytes / 100


def test_without_values_or_rows() -> None:
    """Without values, as `query_scores` asks for the logsumexp alone: callers may not."""
    k, v, tables = paged(1, 2, 4, (8, 6), "float32", 6, 0)
    q, jk, jv, scoring = to_jax(torch.randn(3, 4, 8)), to_jax(k), to_jax(v), Scoring(0.3)
    rows = Requests(int32(tables), jnp.array([0, 5, 11]), jnp.array([0, 3]), jnp.array([24]))
    nothing, lse = attention._blend_attention(q, jk, jv[..., :0], rows, scoring)
    assert nothing.shape == (3, 4, 0)
    np.testing.assert_array_equal(lse, attention.blend_attention(q, jk, jv, rows, scoring)[1])
    none = Requests(rows.tables, rows.positions[:0], jnp.array([0, 0]), rows.lengths)
    o, lse = attention.blend_attention(q[:0], jk, jv, none, scoring)
    assert (o.shape, o.dtype) == ((0, 4, 6), jnp.float32)
    assert (lse.shape, lse.dtype) == ((0, 4), jnp.float32)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_lowers_for(platform: str) -> None:
    """Every operation has StableHLO for a platform that is not at hand; attention a kernel on a TPU."""
    lower = partial(jax.export.export, platforms=[platform])
    rope, group = Rope(tuple(0.1 for _ in range(32))), replace(SMALL, k_size=64, v_size=64, dtype="bfloat16")
    coded = replace(group, precision="fp8")
    pages = [spec((64, 2, 4, 128), "bfloat16")] * 2
    slots, turns = spec((2, 8), "int32"), spec((2, 8, 64), "float32")
    specs = attention_specs(96, 8, 2, 64, 16, "bfloat16")
    q, k, v, requests = specs
    row, given = spec((96, 2, 64), "bfloat16"), RowRotations(rope, spec((96, 64), "float32"))

    def move(p: kernels.JaxPages, s: jax.Array, t: jax.Array) -> kernels.JaxPages:
        packed = kernels.pack(coded, p, slots=s)
        return kernels.unpack(coded, p, packed, slots=s, rope=rope, cos_sin=t)

    for function, arguments, attends in (
        (move, (pages, slots, turns), False),
        (partial(attention.blend_attention, scoring=Scoring(0.125, 77, 30.0)), specs, True),
        (partial(attention.query_scores, scoring=Scoring(0.125)), specs, False),
        (
            partial(attention.rope_scatter, deviation=True),
            (q, row, row, given, requests.positions, k, v),
            False,
        ),
    ):
        exported = lower(jax.jit(function))(*arguments)
        assert exported.platforms == (platform,)
        assert ("tpu_custom_call" in exported.mlir_module()) == (attends and platform == "tpu")


def test_one_function_serves_all_platforms() -> None:
    """Lowered for a TPU it holds the kernel; called here it runs, also under `jax.vmap`."""
    k, v, tables = paged(1, 2, 4, (8, 8), "float32", 6, 0)
    rows = Requests(int32(tables), jnp.array([0, 5, 11]), jnp.array([0, 3]), jnp.array([24]))
    attend = jax.jit(partial(attention.blend_attention, scoring=Scoring(0.3)))
    q = to_jax(torch.randn(2, 3, 4, 8))
    arguments = q[0], to_jax(k), to_jax(v), rows
    assert "tpu_custom_call" in attend.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    every, _ = jax.vmap(lambda x: attend(x, *arguments[1:]))(q)
    for o, x in zip(every, q, strict=True):
        np.testing.assert_allclose(o, attend(x, *arguments[1:])[0], atol=1e-6)


def test_nothing_else_imports_jax() -> None:
    code = (
        "import sys, kvkit.cache, kvkit.kernels.attention.api, kvkit.kernels.pages.numba;"
        "print('jax' in sys.modules);"
        "import kvkit.kernels.attention.jax, jax; print('site-packages' in jax.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


Q, K = jnp.zeros((5, 4, 8)), jnp.zeros((3, 2, 4, 8))
FIELDS = ("tables", "positions", "row_starts", "lengths")


def zeros(*shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: jnp.zeros(shape, jnp.int32) for name, shape in zip(FIELDS, shapes, strict=True)}


ROWS, ONE = zeros((2, 3), (5,), (3,), (2,)), zeros((1, 3), (5,), (2,), (1,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: \(4, 8\)"),
        ({"q": Q.astype(jnp.int32)}, r"q: .* int32"),
        ({"q": Q[:, :3]}, r"q: \(5, 3, 8\), want a multiple of 2 heads"),
        ({"k_pages": K[0]}, r"k_pages: \(2, 4, 8\)"),
        ({"k_pages": K[..., :7]}, r"q: .* of 7 channels"),
        ({"k_pages": K.astype(jnp.float16)}, r"k_pages: .* float16"),
        ({"v_pages": K[:2]}, r"v_pages: \(2, 2, 4, 8\)"),
        ({"v_pages": K[0]}, r"v_pages: \(2, 4, 8\)"),
        ({"requests": ROWS | {"tables": ROWS["tables"][0]}}, r"tables: \(3,\)"),
        ({"requests": ROWS | {"tables": ROWS["tables"] * 1.0}}, r"tables: float32"),
        ({"requests": ROWS | {"positions": ROWS["positions"][:4]}}, r"positions: \(4,\), want \(5,\)"),
        ({"requests": ROWS | {"row_starts": ROWS["row_starts"][:2]}}, r"row_starts: \(2,\), want \(3,\)"),
        ({"requests": ROWS | {"lengths": ROWS["lengths"][:1]}}, r"lengths: \(1,\), want \(2,\)"),
        ({"k_pages": K[:0], "v_pages": K[:0]}, r"k_pages: .* at least one block"),
        ({"v_pages": K[..., :0]}, r"v_pages: .* none but the first empty"),
    ],
)
def test_attention_refuses(change: dict[str, Any], message: str) -> None:
    given = {"q": Q, "k_pages": K, "v_pages": K, "requests": ROWS, "scoring": Scoring(1.0)} | change
    with pytest.raises(LaunchError, match=message):
        attention.blend_attention(**given | {"requests": Requests(**given["requests"])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": ROWS}, r"rows: of 2 requests, want one"),
        ({"requests": ONE | {"positions": ONE["positions"][:4]}}, r"positions: \(4,\), want \(5,\)"),
        ({"requests": ONE | {"lengths": 1.5}}, r"lengths: float"),
        ({"lse": Q[:, :3, 0]}, r"lse: \(5, 3\) float32, want \(5, 4\)"),
        ({"v_pages": K[:2]}, r"v_pages: \(2, 2, 4, 8\)"),
    ],
)
def test_query_scores_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {"q": Q, "k_pages": K, "v_pages": None, "requests": ONE, "scoring": Scoring(1.0)}
    given = arguments | change
    with pytest.raises(LaunchError, match=message):
        attention.query_scores(**given | {"requests": Requests(**given["requests"])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[..., :7]}, r"q: \(5, 4, 7\), want .* of 8 channels"),
        ({"k": Q[:4, :2]}, r"k: \(4, 2, 8\), want \(5, 2, 8\)"),
        ({"k": Q[:, :2].astype(jnp.int8)}, r"k: .* int8, want float32"),
        ({"v": Q[:, :1]}, r"v: \(5, 1, 8\), want \(5, 2, 8\)"),
        ({"k_pages": K[:, :1]}, r"v_pages: .* want .* \(3, 1, 4\) as k_pages"),
        ({"k_pages": K[:0], "v_pages": K[:0]}, r"k_pages: .* at least one block"),
        ({"k": Q[:, :2].astype(jnp.float16)}, r"k: .* float16, want float32"),
        ({"v_pages": K.astype(jnp.float16)}, r"v_pages: .* float16"),
        (
            {"rotations": RowRotations(ROPES["half"], jnp.zeros((5, 6)))},
            r"cos_sin: \(5, 6\) float32, want \(5, 8\)",
        ),
        ({"slots": np.full(5, 12)}, r"slots: 12 is out of range"),
        ({"slots": np.zeros(4, int)}, r"slots: \(4,\), want \(5,\)"),
        (
            {"rotations": RowRotations(Rope((1.0,) * 5), jnp.zeros((5, 10)))},
            r"rope: channels 0 to 10, but a head of K has 8",
        ),
    ],
)
def test_rope_scatter_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": Q,
        "k": Q[:, :2],
        "v": Q[:, :2],
        "rotations": RowRotations(ROPES["half"], jnp.zeros((5, 8))),
        "slots": np.arange(5),
        "k_pages": K,
        "v_pages": K,
    }
    with pytest.raises(LaunchError, match=message):
        attention.rope_scatter(**arguments | change)
