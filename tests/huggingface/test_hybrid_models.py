"""Hugging Face models with states (Mamba, linear attention, convolutions) give the same text from a cache."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cached_models import config, prompt
from decoder_models import make
from test_growing_cache import generated

from kvkit.adapters.huggingface.blended import BlendedModel
from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.probe import check_fit, probe_layout
from kvkit.adapters.huggingface.states import FIRST_LAYER, Snapshots, states_of
from kvkit.adapters.huggingface.steps import extend, forward
from kvkit.blend.plan import BlendError
from kvkit.config import load_config
from kvkit.format.layout import LayoutError
from kvkit.format.names import METADATA
from kvkit.lab.testbed.engine_stub import POISON
from kvkit.settings import ConfigError

KINDS = ("lfm2", "falcon_h1", "inkling_text", "nemotron_h")
"""Of one convolution, of states beside K and V, of four of them, and with layers that keep nothing."""
CHUNK = 16


@functools.cache
def model(kind: str) -> Any:
    """Give one whose matrices are scaled, so that a wrong state shows in the logits."""
    found = make(kind)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.5)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_identical_over_turns_and_processes(kind: str, tmp_path: Path) -> None:
    """A turn goes on from where the one before ended, within what was generated; a new process from disk."""
    net = model(kind)
    plain = CachedModel(net, probe_layout(net, CHUNK), None)
    for again in range(2):
        tokens = prompt(40)
        with CachedModel.open(net, config(tmp_path)) as cached:
            for hit in (0, 64, 112) if not again else (32, 64, 112):
                found, want = (m.generate(tokens, 28, stop=()) for m in (cached, plain))
                assert found.tokens == want.tokens
                assert sum(found.hit_tokens.values()) == hit
                cached.flush()
                tokens = np.concatenate([tokens, np.array(found.tokens, np.int32), prompt(20, seed=hit)])


@pytest.mark.parametrize("kind", KINDS)
def test_states_come_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    net, tokens = model(kind), prompt(4 * CHUNK + 5)
    with CachedModel.open(net, config(tmp_path)) as cached:
        first = cached.prefill(tokens)
        cached.store(tokens, first.kv)
        cached.flush()
        assert cached.cache is not None
        loaded = GrowingCache(cached.layout, 128, cached.device)
        assert loaded.load(cached.cache, tokens[:-1]).tokens == 4 * CHUNK
        want = GrowingCache(cached.layout, 128, cached.device)
        with torch.no_grad():
            forward(net, tokens[: 4 * CHUNK], want)
        for a, b in zip(loaded.layers, want.layers, strict=True):
            for name in ("conv_states", "recurrent_states", "has_previous_state", "conv_kernel_size"):
                found, expected = (getattr(layer, name, {}) for layer in (a, b))
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value
        assert loaded.get_seq_length() == 4 * CHUNK
        with torch.no_grad():
            logits = extend(net, tokens[4 * CHUNK :], loaded)
    assert torch.equal(logits, first.logits)


def test_a_prompt_of_whole_chunks_is_found_by_itself_and_by_a_longer_one(tmp_path: Path) -> None:
    net, tokens = model("lfm2"), prompt(3 * CHUNK)
    with CachedModel.open(net, config(tmp_path)) as cached:
        cached.store(tokens, cached.prefill(tokens).kv)
        cached.flush()
        assert cached.prefill(tokens).hit_tokens == {"memory": 2 * CHUNK}
        assert cached.prefill(np.append(tokens, tokens[:1])).hit_tokens == {"memory": 3 * CHUNK}
        assert cached.prefill(np.append(tokens[: 2 * CHUNK - 1], tokens[:9])).hit_tokens == {}


def test_what_is_loaded_may_be_stored_again(tmp_path: Path) -> None:
    net, tokens = model("falcon_h1"), prompt(4 * CHUNK + 3)
    with (
        CachedModel.open(net, config(tmp_path / "a")) as first,
        CachedModel.open(net, config(tmp_path / "b")) as second,
    ):
        first.generate(tokens, 1)
        first.flush()
        again = first.prefill(tokens)
        assert again.hit_tokens == {"memory": 4 * CHUNK}
        second.store(tokens, again.kv)
        second.flush()
        found = second.prefill(tokens)
    assert found.hit_tokens == {"memory": 4 * CHUNK}
    assert torch.equal(found.logits, again.logits)


def test_a_damaged_snapshot_is_computed_again(tmp_path: Path) -> None:
    net, tokens = model("lfm2"), prompt(4 * CHUNK + 3)
    settings = load_config(chunk_tokens=CHUNK, staging="16MiB", tiers={"disk": {"url": f"file://{tmp_path}"}})
    with CachedModel.open(net, settings) as cached:
        want = cached.generate(tokens, 4, stop=())
        cached.flush()
    records = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != METADATA]
    (snapshot,) = (file for file in records if [f.parent for f in records].count(file.parent) == 1)
    data = bytearray(snapshot.read_bytes())
    data[len(data) // 2] ^= 1
    snapshot.write_bytes(data)
    with CachedModel.open(net, settings) as cached:
        found = cached.generate(tokens, 4, stop=())
    assert found.tokens == want.tokens
    assert found.hit_tokens == {}


@pytest.mark.parametrize("kind", KINDS)
def test_generate_of_transformers_goes_on(kind: str, tmp_path: Path) -> None:
    net, tokens = model(kind), prompt(80)
    ids = torch.from_numpy(tokens).long()[None]
    with CachedModel.open(net, config(tmp_path)) as cached:
        cached.generate(tokens, 1)
        cached.flush()
        prefill = cached.prefill(tokens[:-1])
    assert prefill.hit_tokens == {"memory": 64}
    assert generated(net, ids, prefill.kv, "greedy") == generated(net, ids, None, "greedy")


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1"])
def test_reset_leaves_nothing_and_crop_is_refused(kind: str) -> None:
    net, tokens = model(kind), prompt(40)
    kv = GrowingCache(probe_layout(net, CHUNK), 64, torch.device("cpu"))
    want = extend(net, tokens, kv)
    with pytest.raises(ValueError, match=r"crop\(-1\): layers have states"):
        kv.crop(-1)
    assert kv.length == 40
    kv.reset()
    assert kv.length == 0
    assert all((pages.blocks == -1).all() for pages in kv.sequence_pages(40) if pages.blocks is not None)
    assert torch.equal(extend(net, tokens, kv), want)


def test_layers_of_one_form_share_records_no_larger_than_those_of_tokens() -> None:
    layout = probe_layout(model("nemotron_h"), CHUNK)
    tokens, *states = layout.groups
    assert tokens.layers == (2,)
    assert [group.layers for group in states] == [(FIRST_LAYER,)]
    assert len(states_of(layout)[0]) == 2
    layout = probe_layout(model("lfm2"), 64)
    assert [group.layers for group in layout.groups] == [(1, 3), (FIRST_LAYER, FIRST_LAYER + 2)]
    most = layout.groups[0].chunk_bytes(64)
    assert all(group.chunk_bytes(64) <= most for group in layout.groups)


def test_snapshots_touch_no_others() -> None:
    net = model("falcon_h1")
    kv = GrowingCache(probe_layout(net, CHUNK), 128, torch.device("cpu"))
    snapshots = Snapshots(kv.layout, kv.layers, torch.device("cpu"))
    kept = []
    for chunk in range(1, 6):
        forward(net, prompt(CHUNK, seed=chunk), kv)
        snapshots.save(chunk)
        kept.append([layer.recurrent_states[0].clone() for layer in kv.layers])
        pages = snapshots.pages(6)[0]
        assert pages.blocks is not None
        assert pages.blocks.tolist() == [*range(chunk), *[-1] * (6 - chunk)]
    for chunk, want in enumerate(kept, 1):
        for layer in kv.layers:
            layer.recurrent_states[0].view(torch.uint8).fill_(POISON)
        snapshots.restore(chunk)
        assert all(torch.equal(a.recurrent_states[0], b) for a, b in zip(kv.layers, want, strict=True))


def test_states_of_16_bits() -> None:
    net = make("qwen3_next").bfloat16()
    layout = probe_layout(net, CHUNK)
    assert {tensor.dtype for tensors in states_of(layout).values() for tensor in tensors} == {
        "bfloat16",
        "float32",
    }
    check_fit(net, layout)


def test_what_models_with_states_cannot_do_is_named(tmp_path: Path) -> None:
    net = model("lfm2")
    with pytest.raises(ConfigError, match="opaque pages"):
        CachedModel.open(net, config(tmp_path).model_copy(update={"precision": "int8"}))
    with CachedModel.open(net, config(tmp_path)) as cached, pytest.raises(BlendError, match="type 'lfm2'"):
        BlendedModel(cached, unchecked=True)
    with pytest.raises(LayoutError, match="states computed in pieces"):
        check_fit(make("zamba"), probe_layout(make("zamba"), CHUNK))


def test_room_that_is_filled_cannot_be_set() -> None:
    kv = GrowingCache(probe_layout(model("lfm2"), CHUNK), 16, torch.device("cpu"))
    layer = next(layer for layer in kv.layers if isinstance(layer, transformers.cache_utils.DynamicLayer))
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match=f"{name}: a view"):
            setattr(layer, name, torch.zeros(1))
