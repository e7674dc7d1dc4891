"""The Hopper attention equals the reference, whatever the order that its warpgroups run in.

Its source runs in `gluon_interpreter`; `test_compile_gate` compiles it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gluon_interpreter
import pytest
import torch
from run_sizes import examples, nightly
from test_attention import TOLERANCES, Problem, oracle
from test_attention_triton import check_surroundings, poisoned

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from kvkit.kernels.attention import hopper, triton
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning import tables
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket
from kvkit.kernels.tuning.tables import Tuned, TunedKey, build_of, forget_tables, write_table


def tiles(keys: int = 64, stages: int = 2) -> KernelConfig:
    return KernelConfig((("TILE_ROWS", 128), ("TILE_KEYS", keys), ("STAGES", stages)), 4, 1)


def whole(launches: tuple[Launch, ...], rows: Rows) -> tuple[Launch, ...]:
    """The attention of one head, no tile of it split."""
    work = rows.tiles(128).items
    changed = {**launches[0].arguments, "work": work, "SPLIT": False}
    return (replace(launches[0], grid=(len(work),), arguments=changed),)


def check(
    problem: Problem, config: KernelConfig | None = None, seed: int = 0, split: bool = True
) -> tuple[Launch, ...]:
    """Run it over poisoned outputs; everything around these is untouched. Returns the launches."""
    q, k, v = problem.tensors()
    rows = problem.plan()
    out, lse = poisoned(*q.shape[:2], problem.v_size, dtype=problem.dtype), poisoned(*q.shape[:2])
    found = triton.attention(q, k, v, rows, problem.scoring, out, lse, config or tiles())
    assert hopper.supports(found[0].arguments)
    if not split:
        found = whole(found, rows)
    first, *merges = hopper.with_kernel(found)
    gluon_interpreter.run(first, seed)
    for launch in merges:
        launch.run()
    check_surroundings(out)
    check_surroundings(lse)
    wanted, wanted_lse = oracle(problem, q, k, v, rows)
    tolerance = TOLERANCES[problem.dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4)
    return first, *merges


SMALL = Problem(
    rows=(((0, 3, 4, 17, 30, 31, 150), 160), ((20,), 21), ((), 4), ((-1, 2, 9), 5), ((-1,), 3)),
    heads=2,
    group=3,
    size=64,
    v_size=64,
    tokens=16,
    dtype=torch.bfloat16,
)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({}, tiles(64, 1)),
        ({}, tiles(128, 2)),
        ({"dtype": torch.float16}, tiles(64, 3)),
        ({"window": 7}, tiles()),
        ({"window": 70, "softcap": 2.0, "tokens": 20}, tiles()),
        ({"window": 1}, tiles(128)),
        ({"softcap": 2.0}, tiles()),
        ({"tokens": 5}, tiles()),
        ({"tokens": 8}, tiles(128)),
        ({"tokens": 48}, tiles()),
        ({"tokens": 128, "tokens_outermost": True}, tiles()),
        ({"tokens": 256}, tiles()),
        ({"size": 128, "v_size": 128, "heads": 1}, tiles(128)),
        ({"size": 128, "v_size": 128, "heads": 1, "tokens": 3}, tiles()),
        ({"size": 256, "v_size": 256, "heads": 1, "tokens": 32}, tiles()),
        ({"heads": 1, "group": 71}, tiles()),
        ({"heads": 3, "group": 1}, tiles()),
    ],
    ids=str,
)  # fmt: skip
def test_forms(change: dict[str, Any], config: KernelConfig) -> None:
    check(replace(SMALL, **change), config)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("keys", [64, 128])
def test_split_tiles(keys: int, window: int | None) -> None:
    """Parts of a tile, merged; parts that begin with tiles that all rows see, and that no row sees."""
    positions = (*range(0, 600, 7), 1000)
    problem = replace(SMALL, rows=((positions, 900), ((3,), 9)), heads=1, group=2, window=window)
    first, *others = check(problem, tiles(keys))
    assert first.arguments["SPLIT"]
    assert [launch.kernel.__name__ for launch in others] == ["merge"]


@pytest.mark.parametrize("window", [None, 10])
def test_items_without_keys(window: int | None) -> None:
    """Rows before the first key, in a request without keys, and beyond the end of a window."""
    rows = (((-3, -1), 90), ((0, 1, 2), 0), ((200,), 90))
    check(replace(SMALL, rows=rows[: 2 if window is None else 3], window=window))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 6, *nightly(4, 5, *range(7, 14))])
def test_any_order(count: int, stages: int) -> None:
    """An item of so many tiles: no order ends in a deadlock, or lets a product read another tile's keys."""
    length = 64 * count - 5
    problem = replace(SMALL, rows=(((length - 9, length - 1), length),), heads=1, group=1)
    for seed in range(examples(8)):
        check(problem, tiles(64, stages), seed, split=False)


def test_an_order_is_its_seeds() -> None:
    """Equal seeds give equal orders, others do not."""
    first = check(SMALL)[0]
    assert len({gluon_interpreter.run(first, seed) for seed in (0, 0, 0)}) == 1
    assert len({gluon_interpreter.run(first, seed) for seed in range(4)}) > 1


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes the table of this GPU, an H200: times of both kernels, by the numbers of rows."""
    monkeypatch.setattr(tables, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    forget_tables()

    def write(*times: tuple[int, float, float], config: KernelConfig, form: str) -> None:
        results = {}
        for count, own, other in times:
            for kernel, us in ((hopper.KERNEL, own), (triton.attend, other)):
                op = kernel.fn.__name__ if kernel is hopper.KERNEL else "attend"
                bucket = ProblemBucket(op, form, (count, SMALL.heads, 256))
                found = config if kernel is hopper.KERNEL else KernelConfig(())
                results[TunedKey(bucket, build_of(kernel, False))] = Tuned(found, us, None)
        write_table(tmp_path / "nvidia-h200.json", "NVIDIA H200", results)

    yield write
    forget_tables()


def chosen(problem: Problem) -> tuple[str, KernelConfig]:
    """The kernel that computes a problem, and its configuration."""
    planned = hopper.plan_attention(*problem.tensors(), problem.plan(), problem.scoring).attending
    assert planned is not None
    return planned.kernel.__name__, planned.config


def form_of(problem: Problem) -> str:
    q, k, v = problem.tensors()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    first = triton.attention(q, k, v, problem.plan(), problem.scoring, out, lse)[0]
    return triton.bucket(first).form


def test_it_is_chosen_where_it_was_measured_to_be_faster(table: Callable[..., None]) -> None:
    """Without a result of both kernels it never is; the nearest sizes of an equal form count."""
    few = replace(SMALL, rows=((tuple(range(0, 160, 10)), 160),))
    many = replace(SMALL, rows=((tuple(range(160)), 160),))
    assert chosen(few)[0] == chosen(many)[0] == "attend"
    table((16, 2.0, 3.0), (256, 30.0, 20.0), config=tiles(64, 3), form=form_of(few))
    assert chosen(few) == ("attend_hopper", tiles(64, 3))
    assert chosen(many)[0] == "attend"
    assert chosen(replace(few, softcap=2.0))[0] == "attend"
    table((16, 2.0, 3.0), config=tiles(16, 3), form=form_of(few))  # no configuration of the kernel any more
    assert chosen(few)[0] == "attend"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"size": 40, "v_size": 40},
        {"size": 64, "v_size": 128},
        {"size": 32, "v_size": 32},
    ],
    ids=str,
)
def test_what_it_does_not_compute_is_left_to_attend(
    change: dict[str, Any], table: Callable[..., None]
) -> None:
    problem = replace(SMALL, **change)
    table((8, 1.0, 2.0), config=tiles(), form=form_of(problem))
    assert chosen(problem)[0] == "attend"


def test_another_gpu_or_triton_has_attend(
    table: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    table((8, 1.0, 2.0), config=tiles(), form=form_of(SMALL))
    assert chosen(SMALL)[0] == "attend_hopper"
    monkeypatch.setattr(hopper, "available", lambda: False)
    assert chosen(SMALL)[0] == "attend"


def test_pages_that_are_not_aligned_are_left_to_attend() -> None:
    arguments = check(SMALL)[0].arguments | {"V_SIZE": 64, "VALUES": True, "LATENT": False}
    assert hopper.supports(arguments)
    for name in ("k", "v"):
        moved = torch.cat((arguments[name], arguments[name]), 3)
        assert not hopper.supports(arguments | {name: moved[..., 1:65]})
        assert not hopper.supports(arguments | {name: torch.cat((moved, moved[..., :8]), 3)[..., :64]})
    assert not hopper.supports(arguments | {"LATENT": True})
    assert not hopper.supports(arguments | {"VALUES": False})
