"""Triton attention equals the reference with the heads and groups of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_attention import ROPES, TOLERANCES, Problem, oracle
from test_attention_triton import DEVICE, check, check_surroundings, poisoned, run, tiles

from kvkit.kernels.attention import reference, triton
from kvkit.kernels.attention.api import blend_attention, query_scores, rope_scatter, token_deviation
from kvkit.kernels.attention.layer import RowRotations
from kvkit.kernels.attention.triton_kernels import main_channels, rest_channels
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.tuning.configs import Launch

ROWS = Problem(rows=(((0, 3, 17, 30, 31, 38), 40), ((20,), 21), ((-1, 2, 9), 5)), heads=2, group=3)


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (8, (16, 0)), (16, (16, 0)), (24, (32, 0)), (40, (32, 16)), (56, (64, 0)), (72, (64, 16)),
        (80, (64, 16)), (96, (64, 32)), (112, (128, 0)), (128, (128, 0)), (192, (128, 64)), (576, (512, 64)),
    ],
)  # fmt: skip
def test_a_head_is_cut_where_that_is_less_than_its_padding(size: int, parts: tuple[int, int]) -> None:
    assert (main_channels(size), rest_channels(size)) == parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "v_size"),
    [(576, 512), (512, 512), (192, 128), (96, 96), (80, 80), (72, 72), (128, 96), (64, 40), (40, 17)],
)
def test_heads(size: int, v_size: int, dtype: torch.dtype) -> None:
    if size > triton.MOST_CHANNELS[dtype.itemsize]:
        size, v_size = size // 4, v_size // 4
    check(replace(ROWS, size=size, v_size=v_size, dtype=dtype, tokens=32), tiles(16, 16))


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"group": 7, "heads": 2}, 16),
        ({"group": 48, "heads": 1}, 32),
        ({"group": 71, "heads": 1}, 64),
        ({"group": 71, "heads": 2, "tokens": 32}, 16),
        ({"group": 128, "heads": 1, "window": 20}, 16),
        ({"group": 33, "heads": 1, "size": 40, "v_size": 96, "softcap": 3.0}, 16),
    ],
    ids=str,
)
def test_groups(change: dict[str, Any], rows: int) -> None:
    """Query heads of a KV head are divided over programs, the last of which may have fewer."""
    (launch,) = check(replace(ROWS, **change), tiles(rows, 16))
    assert launch.arguments["PACK"] <= min(rows, change["group"])


@pytest.mark.parametrize(("group", "pack"), [(3, 4), (7, 8), (11, 16), (5, 2)])
def test_a_configuration_may_name_the_heads_of_a_program(group: int, pack: int) -> None:
    """More than the group has, or fewer: heads that are not there are left out."""
    config = tiles(16, 16)
    config = config._replace(tiles=(*config.tiles, ("PACK", pack)))
    (launch,) = check(replace(ROWS, heads=2, group=group), config)
    assert launch.arguments["PACK"] == pack


def test_spaces_have_heads_of_programs_and_limits_of_registers() -> None:
    """A power of two where the group is none; registers of two programs on a Hopper's multiprocessor."""
    for group, wider in ((7, {8}), (4, set()), (48, {64})):
        problem = Problem(((tuple(range(256)), 256),), 2, group, 128, v_size=128, dtype=torch.bfloat16)
        q, k, v = problem.tensors()
        plan = triton.plan_attention(q, k, v, problem.plan(), problem.scoring)
        assert plan.attending is not None
        arguments = {"q": q, "k": k, "v": v, **plan.attending.shared}
        launch = Launch(triton.attend, (), arguments, plan.attending.config)
        found = [dict(config.tiles) for config in triton.configs(launch, "sm_90")]
        assert {tiles["PACK"] for tiles in found if "PACK" in tiles} == wider
        assert {tiles["maxnreg"] for tiles in found if "maxnreg" in tiles} == {128}
        others = [dict(config.tiles) for config in triton.configs(launch, "sm_80")]
        assert not any("maxnreg" in tiles for tiles in others)


def test_groups_of_split_tiles() -> None:
    positions = (1, 30, 31, 200, 255, 256, 299)
    problem = Problem(
        rows=((positions, 300), ((5,), 9)), heads=2, group=11, size=40, v_size=24 + 16, tokens=16
    )
    first, merge = check(problem, tiles(16, 16))
    assert 1 < first.arguments["PACK"] < 11
    assert merge.kernel.__name__ == "merge"


def test_packed() -> None:
    """Tiles are mostly full, whatever the group, and no program takes more heads than a tile has rows."""
    for tile_rows in (16, 32, 64, 128):
        for group in range(1, 200):
            pack = triton.packed(group, tile_rows, 10**6)
            assert 1 <= pack <= min(group, tile_rows)
            programs = -(-group // pack)
            assert group * (tile_rows // pack) >= 0.85 * programs * tile_rows
    assert triton.packed(48, 64, 1) == 48  # a single row's heads are best together
    assert triton.packed(8, 128, 10**6) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "v_size"), [(40, 32), (576, 512)])
def test_values_within_keys(size: int, v_size: int, dtype: torch.dtype) -> None:
    """Latent attention: V is K's first channels, and is not read again."""
    if size > triton.MOST_CHANNELS[dtype.itemsize]:
        size, v_size = 144, 128
    problem = replace(ROWS, heads=1, group=16, size=size, v_size=v_size, dtype=dtype, tokens=32)
    q, k, _ = (x.to(DEVICE) for x in problem.tensors())
    v, rows = k[..., :v_size], problem.plan(DEVICE)
    out, lse = poisoned(*q.shape[:2], v_size, dtype=dtype), poisoned(*q.shape[:2])
    launches = triton.attention(q, k, v, rows, problem.scoring, out, lse, tiles(32, 16))
    assert launches[0].arguments["LATENT"]
    run(launches)
    check_surroundings(out)
    check_surroundings(lse)
    wanted, wanted_lse = oracle(problem, q.cpu(), k.cpu(), v.cpu(), problem.plan())
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=1e-4, rtol=1e-4)


def test_values_elsewhere_are_read() -> None:
    """Another start, or other channels than the keys' main part, are no latent attention."""
    q, k, _ = (x.to(DEVICE) for x in replace(ROWS, size=40).tensors())
    rows, lse = ROWS.plan(DEVICE), poisoned(*q.shape[:2])
    for v in (k[..., 8:40], k[..., :16], k.clone()[..., :32]):
        out = poisoned(*q.shape[:2], v.shape[3])
        (launch,) = triton.attention(q, k, v, rows, ROWS.scoring, out, lse, tiles(16, 16))
        assert not launch.arguments["LATENT"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 9, "tokens": 50},
        {"size": 72, "v_size": 40, "softcap": 2.0},
        {"group": 7, "heads": 1, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_scores_of_groups(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many query heads a program takes, and tiles of rows: the same numbers, bit for bit."""
    rows = ((tuple(range(-1, 40, 2)), 45),)
    problem = replace(ROWS, **{"rows": rows, "group": 5, "tokens": 16, **change})
    q, k, v = (x.to(DEVICE) for x in problem.tensors())
    plan = problem.plan(DEVICE)
    _, lse = reference.blend_attention(q, k, v, plan, problem.scoring)
    found = []
    for programs in (1, 5, 1000):
        monkeypatch.setattr(triton, "PROGRAMS_PER_MULTIPROCESSOR", programs)
        monkeypatch.setattr(triton, "_resources", lambda device: triton._Resources(1, 1))
        out = poisoned(q.shape[1], 45)
        (launch,) = triton.scores(q, k, v, plan, problem.scoring, lse, out, tiles(16, 32))
        launch.run()
        check_surroundings(out)
        found.append((launch.arguments["pack"], out))
    assert [pack for pack, _ in found][::2] == [q.shape[1] // k.shape[1], 1]
    wanted = reference.query_scores(q, k, v, plan, problem.scoring)
    torch.testing.assert_close(found[0][1], wanted, atol=1e-4, rtol=1e-3)
    for _, out in found[1:]:
        assert torch.equal(out, found[0][1])


@pytest.mark.parametrize(("dtype", "size", "most"), [(torch.float32, 264, 256), (torch.float16, 640, 576)])
def test_heads_that_are_too_large(dtype: torch.dtype, size: int, most: int) -> None:
    q, k, v = (x.to(DEVICE) for x in replace(ROWS, size=size, dtype=dtype).tensors())
    out, lse = poisoned(*q.shape[:2], 16, dtype=dtype), poisoned(*q.shape[:2])
    with pytest.raises(
        LaunchError, match=f"k_pages: heads of {size} channels of {dtype}, want at most {most}"
    ):
        triton.attention(q, k, v, ROWS.plan(DEVICE), ROWS.scoring, out, lse)
    with pytest.raises(LaunchError, match=f"v_pages: heads of {size} .* want at most {most}"):
        triton.attention(q[..., :16], k[..., :16], k, ROWS.plan(DEVICE), ROWS.scoring, out, lse)


def test_gradients_are_refused() -> None:
    problem = replace(ROWS, rows=ROWS.rows[:1])
    q, k, v = problem.tensors()
    rows = problem.plan()
    turns = RowRotations(ROPES["half"], torch.zeros(rows.count, ROPES["half"].channels))
    fresh = torch.zeros(rows.count, 2, 16)
    q.requires_grad_()
    calls = {
        "q": lambda: blend_attention(q, k, v, rows, problem.scoring),
        "q:": lambda: query_scores(q, k, None, rows, problem.scoring),
        "old": lambda: token_deviation(fresh, fresh.clone().requires_grad_()),
        "k_pages": lambda: rope_scatter(
            q.detach(), fresh, fresh, turns, rows.slots, k.clone().requires_grad_(), v
        ),
    }
    for name, call in calls.items():
        with pytest.raises(LaunchError, match=f"{name}.*requires_grad=True, want it detached"):
            call()
    with torch.no_grad():
        blend_attention(q, k, v, rows, problem.scoring)
