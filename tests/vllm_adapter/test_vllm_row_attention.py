"""kvkit's attention computes blended rows on vLLM's pages, where it supports and tuning prefers it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("vllm")

from test_vllm_pages import FORMS, FULL, SLIDING, views
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention

from kvkit.adapters.vllm import compat, worker
from kvkit.adapters.vllm.blending.attention import KvkitAttention, KvkitLayer, RowSizes, scoring, tuned_entry
from kvkit.adapters.vllm.blending.blender import QuestionAttention
from kvkit.adapters.vllm.blending.cpu_speeds import CpuSpeeds, spread_rows
from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.adapters.vllm.blending.row_problems import PromptRows, problems, row_problem
from kvkit.adapters.vllm.blending.rows import AttentionLayer, RequestRows
from kvkit.adapters.vllm.blending.warm_up import warm_up_attention
from kvkit.blend.methods.method import NeedsQuestion
from kvkit.blend.plan import Span, plan_blend
from kvkit.environment import slug_of
from kvkit.kernels.attention import reference, triton
from kvkit.kernels.attention.rows import Rows, RowsError
from kvkit.kernels.attention.triton_kernels import attend
from kvkit.kernels.tuning import tables
from kvkit.kernels.tuning.configs import Launch
from kvkit.kernels.tuning.tables import Tuned, TunedKey, build_of, forget_tables, write_table

HEADS, GROUP, SIZE = FULL.num_kv_heads, 3, FULL.head_size
WINDOW = SLIDING.sliding_window
CPU = torch.device("cpu")


def module(kind: type[Attention] = Attention, **more: Any) -> Any:
    """One of vLLM's attention layers."""
    config = VllmConfig()
    model = {"dtype": torch.float32, "is_mm_prefix_lm": False, "rswa_window": None, "use_mla": False}
    config.model_config = SimpleNamespace(**model)  # type: ignore[assignment]
    with set_current_vllm_config(config):
        return kind(HEADS * GROUP, SIZE, SIZE**-0.5, num_kv_heads=HEADS, prefix="model.layers.0.attn", **more)


def layer(layout: str = "LBHNC", kernel: int | None = None, table: int = 0, **more: Any) -> AttentionLayer:
    """The same with pages, of random numbers, as vLLM's own code makes them for a GPU."""
    made = module(**more)
    spec = SLIDING if made.sliding_window else FULL
    (pages,) = views(spec, ["one"], layout, kernel).values()
    pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(table)))
    made.kv_cache = pages
    return AttentionLayer(0, "one", made, table, spec.block_size)


class PagesAsTheyAre(LayerPages):
    """Of layers whose pages are not opaque, as on a GPU."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self.layers, self.orders = layers, [None] * len(layers)


def attention_of(*layers: AttentionLayer, ranks: int = 1) -> KvkitAttention | None:
    return KvkitAttention.of(PagesAsTheyAre(list(layers)), ranks)


@dataclass(frozen=True)
class Request:
    """Rows at some positions, and vLLM's blocks of the request in each of two tables."""

    positions: tuple[int, ...]
    blocks: tuple[list[int], list[int]]

    @property
    def rows(self) -> RequestRows:
        at = np.array(self.positions)
        return RequestRows(np.zeros(len(at), np.int32), at, self.blocks)


REQUESTS = (
    Request((0, 3, 4, 5, 31, 32, 70), ([4, 1, 5], [2, 0, 3])),
    Request((80, 94, 95), ([0, 2, 3], [-1, 1, 5])),  # its window has left the first block
)


def by_position(given: AttentionLayer, request: Request, q: torch.Tensor, softcap: float = 0) -> torch.Tensor:
    """What rows see, a row and a key at a time, in float64."""
    pages, window = given.module.kv_cache.double(), given.module.sliding_window or 10**6
    tokens = pages.shape[2]
    ratio = given.block_tokens // tokens
    out = []
    for p, row in zip(request.positions, q.double(), strict=True):
        seen = range(max(0, p - window + 1), p + 1)
        ids = [request.blocks[given.table][j // given.block_tokens] * ratio for j in seen]
        places = zip(ids, (j % given.block_tokens for j in seen), strict=True)
        at = [pages[block + n // tokens, :, n % tokens] for block, n in places]
        k, v = torch.stack(at, 1).repeat_interleave(GROUP, 0).split(SIZE, -1)
        scores = (k @ row[..., None])[..., 0] * SIZE**-0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        out.append((scores.softmax(-1)[:, None] @ v)[:, 0])
    return torch.stack(out)


def queries() -> torch.Tensor:
    """Of `REQUESTS`' rows and two rows of padding."""
    count = sum(len(request.positions) for request in REQUESTS) + 2
    return torch.randn(count, HEADS * GROUP, SIZE, generator=torch.Generator().manual_seed(9))


def expected(given: AttentionLayer, q: torch.Tensor, softcap: float = 0) -> torch.Tensor:
    parts = q[:-2].split([len(request.positions) for request in REQUESTS])
    return torch.cat([by_position(given, r, x, softcap) for r, x in zip(REQUESTS, parts, strict=True)])


@pytest.mark.parametrize(("layout", "kernel"), FORMS)
def test_rows_see_what_is_before_them_in_vllms_pages(layout: str, kernel: int | None) -> None:
    """Several requests, with a block table for full attention and one for a window; padding stays."""
    full, sliding = layer(layout, kernel), layer(layout, kernel, 1, per_layer_sliding_window=WINDOW)
    own = attention_of(full, sliding)
    assert own is not None
    plan, q = own.plan_rows([request.rows for request in REQUESTS], CPU), queries()
    for i, given in enumerate((full, sliding)):
        out = torch.full_like(q, math.nan)
        plan.attend(i, q, given.module.kv_cache, out)
        torch.testing.assert_close(out[:-2].double(), expected(given, q), atol=3e-5, rtol=3e-5)
        assert out[-2:].isnan().all()


def test_a_soft_cap_is_the_layers() -> None:
    capped = layer(logits_soft_cap=1.5)
    own = attention_of(capped)
    assert own is not None
    q = queries()
    out = torch.empty_like(q)
    own.plan_rows([request.rows for request in REQUESTS], CPU).attend(0, q, capped.module.kv_cache, out)
    torch.testing.assert_close(out[:-2].double(), expected(capped, q, 1.5), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kernel", [None, 16])
def test_the_kernel_reads_vllms_pages_as_they_are(kernel: int | None) -> None:
    """In Triton's interpreter: tokens outermost, K and V side by side, blocks of the kernel's own size."""
    given = layer("LBNHC", kernel)
    own, q = attention_of(given), queries()
    assert own is not None
    rows = own.plan_rows([request.rows for request in REQUESTS], CPU).rows[own.layers[0]]
    k, v = given.module.kv_cache.split(SIZE, -1)
    out, lse = torch.full_like(q[:-2], math.nan), torch.empty(q[:-2].shape[:2])
    for launch in triton.attention(q[:-2], k, v, rows, own.layers[0].scoring, out, lse):
        launch.run()
    torch.testing.assert_close(out.double(), expected(given, q), atol=3e-5, rtol=3e-5)


def test_a_block_that_is_missed_is_an_error() -> None:
    """A window has left it: nobody looks. Full attention would read another's tokens."""
    own = attention_of(layer(table=1))
    assert own is not None
    with pytest.raises(RowsError, match="block -1"):
        own.plan_rows([REQUESTS[1].rows], CPU)


def biased() -> Any:
    return module(alibi_slopes=[0.1] * HEADS * GROUP)


def chunked() -> Any:
    return module(ChunkedLocalAttention, attention_chunk_size=16)


def with_sinks() -> Any:
    return module(sinks=torch.zeros(HEADS * GROUP))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(biased, "ALiBi"), (with_sinks, "sinks"), (chunked, "ChunkedLocalAttention")],
)
def test_what_kvkit_does_not_compute_is_the_engines(
    make: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = layer()
    other = make()
    other.kv_cache = given.module.kv_cache
    with caplog.at_level("INFO"):
        assert attention_of(given, replace(given, module=other)) is None
    assert "engine's attention: model.layers.0.attn: " in caplog.text
    assert reason in caplog.text


def test_quantised_pages_are_the_engines() -> None:
    given = layer()
    given.module.kv_cache = given.module.kv_cache.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        KvkitLayer.of(given)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The table of a GPU that this machine seems to have."""
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    monkeypatch.setattr(tables, "gpu_name", lambda: "Imaginary 9")
    forget_tables()
    yield tmp_path / f"{slug_of('Imaginary 9')}.json"
    forget_tables()


def form(rows: int, runs: int, context: int = 8192) -> RowSizes:
    return RowSizes(rows, runs, context, 4, 128, "bfloat16")


@pytest.mark.parametrize(
    ("rows", "runs", "tiles", "wins"),
    [
        (1, 1, (1, 1), False),
        (64, 1, (2, 2), False),
        (2048, 1, (64, 64), False),
        (2048, 60, (120, 64), False),
        (64, 3, (3, 2), False),
        (64, 64, (64, 2), True),
        (1292, 1100, (1100, 41), True),
    ],
)
def test_many_short_runs_are_kvkits(rows: int, runs: int, tiles: tuple[int, int], wins: bool) -> None:
    given = form(rows, runs)
    assert (given.tiles(together=False), given.tiles(together=True)) == tiles
    assert given.is_kvkit_expected_faster == wins


def positions(count: int, step: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * step


@pytest.mark.parametrize(
    ("at", "wins"),
    [
        (np.arange(960, 1024), False),  # a run of 64: 2 us a row
        (np.arange(0, 1024, 16), True),  # none of them sees all: 64 * 5 us, against 64 * 3 + 10
        (np.arange(0, 1024, 256), False),  # 4 rows of one tile
        (np.array([1023]), False),
        (np.array([1021, 1023]), True),  # 2 * 10 against 2 * 3 + 10
        (np.arange(0, 4096, 2), True),  # many tiles
        (np.arange(4096), False),
    ],
)
def test_a_cpu_chooses_by_what_it_measured(at: NDArray[np.int64], wins: bool) -> None:
    """It knows what rows see: kvkit's tile has the keys of its last row, the engine's of each run's."""
    per_pair = 1e-6 / 1024
    speeds = CpuSpeeds((10 * per_pair, 4 * per_pair, 2 * per_pair), 3 * per_pair, copy=10 * per_pair)
    rows = RequestRows(np.zeros(len(at), np.int32), at, ([], []))
    tiles = [at[first : first + 64] for first in range(0, len(at), 64)]
    own_s = sum(len(tile) * (tile[-1] + 1) for tile in tiles) * 3 * per_pair + (at[-1] + 1) * 10 * per_pair
    lengths = np.diff(rows.runs)
    assert len(set(lengths)) == 1
    engine_s = (at + 1).sum() * {1: 10, 64: 2}.get(int(lengths[0]), 2) * per_pair
    assert speeds.is_kvkit_faster([rows]) == (own_s < engine_s) == wins


@pytest.mark.parametrize(
    ("count", "length", "context"), [(64, 1, 1024), (64, 8, 1024), (64, 64, 1024), (50, 8, 50)]
)
def test_measured_rows_are_spread(count: int, length: int, context: int) -> None:
    rows = spread_rows(count, length, context, ([],))
    assert len(rows.positions) == count // length * length
    assert (np.diff(rows.positions) > 0).all()
    assert rows.positions[0] >= 0
    assert rows.positions[-1] == context - 1
    assert len(rows.runs) - 1 <= count // length


def test_what_was_tuned_decides_where_one_rank_runs_the_model(gpu: Path) -> None:
    given = layer()
    own, several = attention_of(given), attention_of(given, ranks=2)
    assert own is not None
    assert several is not None
    consecutive, strewn = (RequestRows(np.zeros(64, np.int32), positions(64, s), ([], [])) for s in (1, 2))
    assert [own.is_faster([rows], 256) for rows in (consecutive, strewn)] == [False, True]
    tuned = RowSizes(64, 64, 127, *own.head_sizes)
    key = TunedKey(tuned.bucket, build_of(attend, False))
    write_table(gpu, "Imaginary 9", {key: Tuned(tuned_entry(False), 1.0, 2.0)})
    assert not own.is_faster([strewn], 256)
    assert several.is_faster([strewn], 256), "ranks that chose otherwise would cut rows otherwise"
    assert own.is_faster([strewn], 63), "the engine would run the model twice"


@pytest.mark.parametrize(
    "asked",
    [
        NeedsQuestion(value_norm=True),
        NeedsQuestion(value_norm=False),
        NeedsQuestion(value_norm=False, heads="mean"),
        NeedsQuestion(value_norm=True, last=1),
    ],
)
@pytest.mark.parametrize("kernel", [None, 8])
def test_the_question_is_seen_over_vllms_pages(
    kernel: int | None, asked: NeedsQuestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layer the head that pays most, or their mean; a part of the question after another."""
    alone = SimpleNamespace(world_size=1)
    monkeypatch.setattr(compat, "find", lambda name: lambda: alone)
    tokens, question = 96, np.arange(91, 96)
    layers = [layer(kernel=kernel), layer(kernel=kernel, table=1, per_layer_sliding_window=WINDOW)]
    layers = [replace(one, number=i) for i, one in enumerate(layers)]
    plan = plan_blend(tokens, 4, [Span(4, 90, 1)])
    assert plan.question_positions.tolist() == [90, *question]
    blocks = REQUESTS[1].blocks
    asking = QuestionAttention(PagesAsTheyAre(layers), 2, plan, blocks, asked)
    at, q = np.array([90, *question]), queries()[:6]
    for part in (slice(0, 2), slice(2, 6)):
        for i in range(2):
            asking.add_queries(i, q[part], at[part])
    want = []
    for one in layers[-(asked.last or 2) :]:
        table = np.maximum(blocks[one.table], 0)
        held = one.module.kv_cache.unflatten(0, (-1, one.block_tokens // one.module.kv_cache.shape[2]))[table]
        k, v = held.transpose(2, 3).flatten(0, 2)[:, None].transpose(0, 2).split(SIZE, -1)
        rows = Rows.of(at, np.array([0, 6]), np.array([tokens]), np.zeros((1, 1), np.int64), tokens)
        values = v.transpose(0, 1) if asked.value_norm else None
        scores = reference.query_scores(q, k.transpose(0, 1), values, rows, scoring(one.module))
        want.append((scores.amax(0) if asked.heads == "max" else scores.mean(0)).numpy())
    asking.start_combining()
    np.testing.assert_allclose(asking.wait_for_scores(), np.stack(want), rtol=1e-4, atol=1e-6)


def forms(launches: Iterable[Launch]) -> set[Any]:
    """What kernels are compiled for, of one dtype."""
    return {
        (
            launch.kernel.fn.__name__,
            launch.config,
            *((name, value) for name, value in launch.arguments.items() if name.isupper()),
        )
        for launch in launches
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches that were run, as on a GPU; none is."""
    found = list[Launch]()
    monkeypatch.setattr(Launch, "run", lambda launch: found.append(launch))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("layout", "kernel"), FORMS)
def test_a_started_engine_has_the_kernels_of_blends(
    layout: str, kernel: int | None, own: bool, ran: list[Launch]
) -> None:
    """Those of kvkit's attention, where it is used, and of the question's, in all layers' pages."""
    layers = [layer(layout, kernel), layer(layout, kernel, 1, per_layer_sliding_window=WINDOW)]
    attention = attention_of(*layers)
    assert attention is not None
    model: Any = SimpleNamespace(
        device=torch.device("cuda", 1),
        layers=layers,
        max_rows=64,
        max_runs=8,
        config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=96)),
        kvkit_attention=attention if own else None,
    )
    warm_up_attention(model)
    warm, q, needed = forms(ran), queries()[:-2], list[Launch]()
    plan = attention.plan_rows([request.rows for request in REQUESTS], CPU)
    for given, described in zip(layers, attention.layers, strict=True):
        k, v = given.module.kv_cache.split(SIZE, -1)
        rows, lse = plan.rows[described], torch.empty(q.shape[:2])
        if own:
            needed += triton.attention(q, k, v, rows, described.scoring, torch.empty_like(q), lse)
        table = given.kernel_blocks(REQUESTS[0].blocks[given.table])[None]
        for at in (np.arange(3), np.arange(40, 70)):
            tokens, ends = k.shape[2], np.array([0, len(at)])
            one = Rows.of(at, ends, at[-1:] + 1, table, tokens)
            asked, out = q.new_empty(len(at), *q.shape[1:]), torch.empty(q.shape[1], at[-1] + 1)
            for values in (v, None):
                needed += triton.scores(asked, k, values, one, described.scoring, None, out)
    assert forms(needed) <= warm
    outputs = {launch.arguments["VALUES"] for launch in ran if "SPLIT" in launch.arguments}
    assert outputs == ({False, True} if own else {False})


def test_an_engine_on_a_cpu_compiles_none(ran: list[Launch]) -> None:
    model: Any = SimpleNamespace(device=CPU)
    warm_up_attention(model)
    assert not ran


def test_kernels_are_compiled_before_the_first_blend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows = list[Any](), object()
    monkeypatch.setattr(worker, "open_row_runner", lambda runner: (rows, object(), ()))
    monkeypatch.setattr(worker, "warm_up_attention", lambda of: calls.append(("warm up", of)))
    for name in ("DocumentPages", "Blender", "formats_of"):
        monkeypatch.setattr(worker, name, MagicMock())
    here = MagicMock(add_blending=lambda *given: calls.append("blend"), cache=MagicMock(server=None))
    worker.Worker.open_blending(here, object())
    assert calls == [("warm up", rows), "blend"]


def test_a_problem_is_right_with_kvkits_and_with_nothing_else() -> None:
    problem = row_problem(PromptRows(256, 0.2, heads=2, group=2, size=16))
    assert problem.space == (tuned_entry(True), tuned_entry(False))
    case = problem.make(CPU, True)
    case.poison()
    assert case.fault()
    case.run(tuned_entry(True))
    assert case.fault() == ""
    (launch,) = case.launches(None)
    assert launch.config == tuned_entry(True)  # type: ignore[attr-defined]
    case.outputs[0][0, 0, 0] += 1
    assert case.fault()


def test_every_problem_is_for_a_choice_of_its_own() -> None:
    every = list(problems())
    assert (
        len({problem.name for problem in every}) == len({problem.bucket for problem in every}) == len(every)
    )
    assert {problem.space for problem in every} == {
        (tuned_entry(x), tuned_entry(not x)) for x in (False, True)
    }
