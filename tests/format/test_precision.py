"""Caches that quantise their records load the values that the reference computes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_model
from typer.testing import CliRunner

from kvkit import cli
from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.cache import Cache
from kvkit.config import load_config, open_cache
from kvkit.format import record as records
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.lab.testbed.engine_stub import POISON, Engine, small_layout, small_namespace
from kvkit.observe.inspect import list_store
from kvkit.settings import ConfigError
from kvkit.tiers.shm.file import pool_path
from kvkit.transfer import precision as gate
from kvkit.transfer.sequence import Chunks

TOKENS = np.arange(30, dtype=np.int32)  # three chunks, and six more
TABLE = [9, 2, 5, 1, 7, 3, 8, 4]


def engine_of(precision: Any, groups: int = 2) -> Engine:
    """Pages full of numbers, K and V of odd sizes in the second group."""
    first, *others = small_layout(groups, "bfloat16").groups
    odd = [replace(group, k_size=7, v_size=0, kv_heads=3, dtype="float32") for group in others]
    layout = load_config(precision=precision).layout(KVLayout((first, *odd)))
    engine = Engine(layout, small_namespace(layout), blocks=12)
    for i, pool in enumerate(engine.pools):
        for j, tensor in enumerate(pool):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(10 * i + j)))
    return engine


def opened(engine: Engine, tiers: dict[str, Any]) -> Cache:
    precision = engine.layout.groups[0].precision
    config = load_config(chunk_tokens=8, staging="1MiB", precision=precision, tiers=tiers)
    return open_cache(config, engine.layout, engine.namespace)


def rounded(values: torch.Tensor, group: LayerGroup, rotation: Rotation | None = None) -> torch.Tensor:
    """Pages [B, H, N, C] as they come back from records."""
    assert group.precision is not None
    rows = reference.quantise(values, group.k_size, group.precision)
    wide = reference.dequantise(rows, group.k_size, group.v_size, group.precision)
    if rotation is not None:
        turns = torch.from_numpy(rotation.rope.delta_table(rotation.delta[:1]))
        wide = reference.rotate(wide, turns, rotation.rope)
    return wide.to(values.dtype)


def assert_loaded(engine: Engine, before: list[list[torch.Tensor]], table: list[int]) -> None:
    """The blocks of `table` that are there have what records keep of `before`, all others are poisoned."""
    filled = [block for block in table if block >= 0]
    for group, pool, old in zip(engine.layout.groups, engine.pools, before, strict=True):
        for tensor, was in zip(pool, old, strict=True):
            expected = torch.full_like(tensor.view(torch.uint8), POISON).view(tensor.dtype)
            expected[filled] = rounded(was, group)[filled]
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture
def pool() -> Iterator[str]:
    url = f"shm://test-{uuid.uuid4().hex}"
    yield url
    with suppress(FileNotFoundError):
        os.unlink(pool_path(url))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("where", ["memory", "disk", "compressed", "pool"])
def test_kv_comes_back_as_the_reference_has_it(where: str, precision: Any, tmp_path: Path, pool: str) -> None:
    """From every kind of tier, whole and layer by layer, where a block is left out, too."""
    tier = {
        "memory": {"capacity": "1MiB"},
        "disk": {"url": f"file://{tmp_path}"},
        "compressed": {"url": f"file://{tmp_path}", "codec": "bitshuffle-zstd"},
        "pool": {"url": pool, "capacity": "1MiB"},
    }[where]
    engine = engine_of(precision)
    before = [[tensor.clone() for tensor in pages] for pages in engine.pools]
    with opened(engine, {where: tier}) as cache:
        cache.store(TOKENS, engine.places(TABLE))
        cache.flush()
        hit = cache.lookup(TOKENS)
        assert hit.tokens == 24
        assert cache.counts().approximate_tokens == {where: 24}
        engine.wipe()
        cache.load(hit, engine.places(TABLE))
        assert_loaded(engine, before, TABLE[:6])
        engine.wipe()
        list(cache.load_layers(hit, engine.places(TABLE)))
        assert_loaded(engine, before, TABLE[:6])
        engine.wipe()
        gaps = [9, 2, -1, 1, 7, 3]
        cache.load(hit, engine.places(gaps))
        assert_loaded(engine, before, gaps)


def test_keys_turn_on_the_way_from_the_codes() -> None:
    """In float32 from the codes on, rounded once."""
    engine = engine_of("int8", groups=1)
    group, before = engine.layout.groups[0], [tensor.clone() for tensor in engine.pools[0]]
    rotation = Rotation(Rope((0.5, 0.1)), np.array([7, 7, 7]))
    with opened(engine, {"memory": {"capacity": "1MiB"}}) as cache:
        cache.store(TOKENS, engine.places(TABLE))
        engine.wipe()
        cache.load(cache.lookup(TOKENS), engine.places(TABLE), rotation)
    for tensor, was in zip(engine.pools[0], before, strict=True):
        wanted = rounded(was, group, rotation)[TABLE[:6]].float()
        # a product and a sum may be rounded as one
        torch.testing.assert_close(tensor[TABLE[:6]].float(), wanted, rtol=2**-7, atol=1e-6)


def test_stores_of_other_precisions_hold_nothing_of_each_others(tmp_path: Path) -> None:
    """One folder, and each cache finds its own records; what they are can be seen in it."""
    tiers = {"disk": {"url": f"file://{tmp_path}"}}
    forms: list[Any] = [None, "fp8", "int8"]
    for done, precision in enumerate(forms):
        engine = engine_of(precision)
        with opened(engine, tiers) as cache:
            assert cache.lookup(TOKENS).tokens == 0
            cache.store(TOKENS, engine.places(TABLE))
            cache.flush()
            assert cache.lookup(TOKENS).tokens == 24
        found = [listing for listing, is_last in list_store(f"file://{tmp_path}") if is_last]
        assert len(found) == 2 * (done + 1)
        assert not any(listing.damaged for listing in found)
    layouts = {listing.namespace["layout"].partition("-")[2]: listing.bytes for listing in found}
    assert set(layouts) == {"", "fp8", "int8"}
    shown = CliRunner().invoke(cli.app, ["inspect", f"file://{tmp_path}"], env={"COLUMNS": None}).output
    assert all(shown.count(model) == 2 for model in ("test float32 fp8 ", "test float32 int8 "))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_stranger_s_codes_and_scales_spoil_their_own_rows_alone(precision: Any, tmp_path: Path) -> None:
    """Right in every checksum: NaNs among the codes, scales that are none; the rows beside them are whole."""
    engine = engine_of(precision, groups=1)
    group = engine.layout.groups[0]
    with opened(engine, {"disk": {"url": f"file://{tmp_path}"}}) as cache:
        cache.store(TOKENS, engine.places(TABLE))
        cache.flush()
        chunks = Chunks.of(TOKENS, engine.layout, engine.namespace)
        form, path = chunks.formats[0], tmp_path / chunks.names[1]
        data = np.fromfile(path, np.uint8)
        payload = records.payload(form, data)
        rows = payload.reshape(*form.shape)
        rows[0, 0, 3, :8] = 0x7F  # fp8: NaN
        rows[0, 1, 5, 12:16] = np.array([np.nan], np.float32).view(np.uint8)
        rows[1, 0, 0, 16:20] = np.array([np.inf], np.float32).view(np.uint8)
        rows[1, 1, 7, 12:20] = 0xFF
        records.seal(form, data, *chunks.identity(1))
        data.tofile(path)
        hit = cache.lookup(TOKENS)
        engine.wipe()
        wanted = [tensor.clone() for tensor in engine.pools[0]]
        payloads = [records.payload(form, np.fromfile(tmp_path / name, np.uint8)) for name in chunks.names]
        slots = engine._slots(0, TABLE, 3)
        reference.unpack(group, Pages.of(group, wanted).parts, payloads, slots)
        assert cache.load(hit, engine.places(TABLE)).tokens == 24
    spoilt = 0
    for tensor, expected in zip(engine.pools[0], wanted, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
        spoilt += int((~expected[TABLE[:6]].isfinite()).any(-1).sum())
    assert spoilt == 4 if precision == "fp8" else spoilt == 3  # int8 has no NaN among its codes


def test_settings_and_layouts_that_do_not_go_together_are_named() -> None:
    exact, tiers = engine_of(None), {"memory": {"capacity": "1MiB"}}
    config = load_config(chunk_tokens=8, precision="fp8", tiers=tiers)
    with pytest.raises(ConfigError, match=r"precision = 'fp8': the layout's is None; want .*Config\.layout"):
        open_cache(config, exact.layout, exact.namespace)
    coded = engine_of("int8")
    with pytest.raises(ConfigError, match="precision = None: the layout's is 'int8'"):
        open_cache(load_config(chunk_tokens=8, tiers=tiers), coded.layout, coded.namespace)
    with pytest.raises(ConfigError, match=r"precision='fp8': layers 0-1 hold uint8; want .*bfloat16"):
        config.layout(small_layout(1, "uint8"))
    with pytest.raises(ConfigError, match=r"precision = 'int4'.*'fp8' or 'int8'"):
        load_config(precision="int4")


def test_a_model_s_kv_is_held_in_fewer_bits_once_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, sizes = random_model("gqa"), {"chunk_tokens": 8, "staging": "4MiB"}
    config = load_config(precision="int8", tiers={"memory": {"capacity": "4MiB"}}, **sizes)
    with pytest.raises(ConfigError, match=r"int8.*not been measured.*unchecked_precision = true"):
        CachedModel.open(model, config)
    CachedModel.open(model, config.model_copy(update={"unchecked_precision": True})).close()
    gate.keep([model_fingerprint(model)], "int8", {"passed": True})
    with CachedModel.open(model, config) as cached:
        cold = cached.prefill(TOKENS)
        cached.store(TOKENS, cold.kv)
        warm = cached.prefill(TOKENS)
        assert warm.hit_tokens == {"memory": 24}
        assert not torch.equal(warm.logits, cold.logits)
        assert torch.cosine_similarity(warm.logits, cold.logits, 0) > 0.99


HEADS, BLOCK, K, V, BLOCKS = 2, 4, 6, 5, 5


@pytest.mark.parametrize("precision", [None, "fp8", "int8"])
@pytest.mark.parametrize("by", ["blocks", "slots"])
def test_pages_of_an_order_of_their_own_move_as_dense_ones_do(precision: Any, by: str) -> None:
    """The same records, and the same elements from them, keys turned; nothing beside them is written."""
    group = LayerGroup((0, 1), HEADS, K, V, "bfloat16", BLOCK, precision=precision)
    count = HEADS * BLOCK * (K + V)
    places = np.random.default_rng(0).permutation(count + 3)[:count]
    order = torch.from_numpy(places).view(HEADS, BLOCK, K + V)
    tensors = [torch.randn(BLOCKS, count + 3).bfloat16() for _ in group.layers]
    dense = [tensor[:, order] for tensor in tensors]
    ids = np.array([[4, -1], [0, 2]]) if by == "blocks" else np.array([[17, 3, -1, 8], [0, 1, 19, 5]])
    sizes = [group.chunk_bytes(ids.shape[1] * (BLOCK if by == "blocks" else 1))] * 2
    found, wanted = ([np.full(size, POISON, np.uint8) for size in sizes] for _ in range(2))
    pack(Pages.of(group, tensors, order), found, **{by: ids})
    pack(Pages.of(group, dense), wanted, **{by: ids})
    np.testing.assert_array_equal(found, wanted)
    rotation = Rotation(Rope((0.5, 0.1)), np.array([3, -4]))
    other = [torch.randn(BLOCKS, count + 3).bfloat16() for _ in group.layers]
    expected = [tensor.clone() for tensor in other]
    filled = [tensor[:, order] for tensor in other]
    unpack(Pages.of(group, other, order), found, rotate=rotation, **{by: ids})
    unpack(Pages.of(group, filled), found, rotate=rotation, **{by: ids})
    for tensor, want, values in zip(other, expected, filled, strict=True):
        want[:, order] = values
        assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8))


def test_an_order_that_does_not_fit_is_named() -> None:
    group = LayerGroup((0,), HEADS, K, V, "float32", BLOCK)
    order = torch.arange(HEADS * BLOCK * (K + V)).view(HEADS, BLOCK, K + V)
    for tensors, bad, message in (
        ([torch.zeros(3, 88)], order[:1], r"order: \(1, 4, 11\) torch.int64, want \(2, 4, 11\)"),
        ([torch.zeros(3, 87)], order, r"tensors\[0\]: .* want blocks of more than 87 float32 on a CPU"),
        ([torch.zeros(3, 88).half()], order, r"tensors\[0\]: .* float16 on cpu"),
    ):
        with pytest.raises(LaunchError, match=message):
            Pages.of(group, tensors, bad)
