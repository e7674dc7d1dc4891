"""A blend that recomputes every token equals a full prefill, by layer loop and by Hugging Face adapter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from random_models import CONFIGS, HEADS, SIZES, random_model

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.blended import (
    BlendedModel,
    HuggingFaceDecoder,
    document_namespace,
    paged,
)
from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.blend import gate
from kvkit.blend.methods.method import NeedsDeviation, NeedsQuestion
from kvkit.blend.methods.registry import METHODS
from kvkit.blend.plan import (
    BlendError,
    BlendPlan,
    Selection,
    Span,
    count_of,
    counts_by_layer,
    plan_blend,
    split,
)
from kvkit.blend.run import PagedKV, blend
from kvkit.config import load_config
from kvkit.kernels.pages import reference

N = 96
DOCUMENTS = [(0, 32), (32, 64), (70, 90)]


def prompt(length: int = N, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(5, 290, length, np.int32)


@torch.inference_mode()
def computed(model: Any, tokens: npt.NDArray[np.int32], room: int = 0) -> tuple[GrowingCache, torch.Tensor]:
    """KV and last logits by the model's own forward."""
    kv = GrowingCache(probe_layout(model), room or len(tokens), torch.device("cpu"))
    logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], past_key_values=kv).logits
    return kv, logits[0, -1]


def as_found(model: Any, tokens: npt.NDArray[np.int32], spans: list[Span], rope: Any) -> GrowingCache:
    """NaN, but for the spans, whose tokens were computed alone and moved."""
    kv = GrowingCache(probe_layout(model), len(tokens), torch.device("cpu"))
    for layer in kv.layers:
        layer.room_k.fill_(torch.nan)
        layer.room_v.fill_(torch.nan)
    for span in spans:
        alone, _ = computed(model, tokens[span.start : span.stop])
        turns = torch.from_numpy(rope.delta_table(np.array([span.delta])))
        for target, source in zip(kv.layers, alone.layers, strict=True):
            k = reference.rotate(source.room_k, turns, rope)
            target.room_k[:, :, span.start : span.stop] = k
            target.room_v[:, :, span.start : span.stop] = source.room_v
    return kv


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return float((found - expected).norm() / expected.norm()) < tolerance


def by_position(tokens: npt.NDArray[np.int32], plan: BlendPlan) -> npt.NDArray[np.float32]:
    """In place of an auxiliary model."""
    return np.arange(len(tokens), dtype=np.float32)[None]


SPANS = [Span(0, 32, 0, exact=True), Span(32, 64), Span(70, 90)]


@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, "question_attention") for kind in CONFIGS), *(("gqa", method) for method in METHODS)],
)
def test_recomputing_everything_is_a_full_prefill(kind: str, method: str) -> None:
    model = random_model(kind)
    decoder = HuggingFaceDecoder(model)
    tokens = prompt()
    full, logits = computed(model, tokens)
    kv = as_found(model, tokens, SPANS, decoder.rope)
    plan, selection = plan_blend(N, 0, SPANS), Selection(method, 1.0)
    blended = blend(decoder, paged(kv), tokens, plan, selection, auxiliary=by_position)
    assert close(blended.logits, logits)
    for ours, theirs in zip(kv.layers, full.layers, strict=True):
        assert close(ours.room_k, theirs.room_k)
        assert close(ours.room_v, theirs.room_v)
    assert (
        blended.row_layers == (N - 32) * decoder.layers
    )  # nothing is chosen, so nothing is computed for the choice


@pytest.mark.parametrize("method", METHODS)
def test_only_chosen_tokens_change(method: str) -> None:
    model = random_model("gqa")
    decoder = HuggingFaceDecoder(model)
    tokens = prompt()
    plan = plan_blend(N, 0, SPANS)
    kv = as_found(model, tokens, SPANS, decoder.rope)
    before = [(layer.room_k.clone(), layer.room_v.clone()) for layer in kv.layers]
    selection = Selection(method, 0.6, first_n=2, drift=0.0)
    count, looked = count_of(selection, plan, 4)
    blended = blend(decoder, paged(kv), tokens, plan, selection, auxiliary=by_position)
    needs = METHODS[method].needs
    gradual = isinstance(needs, NeedsDeviation) and needs.gradual
    assert len(blended.selected) == (counts_by_layer(selection, plan, 4)[0] if gradual else count)
    assert {32, 33, 70, 71} <= set(blended.selected.tolist())
    rows = np.union1d(plan.computed, blended.selected)
    kept = np.setdiff1d(np.arange(N), rows)
    deviation = isinstance(needs, NeedsDeviation)
    dense_layers = 1 if deviation else looked * (isinstance(needs, NeedsQuestion) and needs.dense)
    for i, (layer, (k, v)) in enumerate(zip(kv.layers, before, strict=True)):
        assert layer.room_k[:, :, rows].isfinite().all()
        compared = np.flatnonzero(plan.exact) if i < dense_layers + deviation else kept
        assert torch.equal(layer.room_k[:, :, compared], k[:, :, compared])
        assert torch.equal(layer.room_v[:, :, compared], v[:, :, compared])
    extra = len(plan.computed) * looked if isinstance(needs, NeedsQuestion) else 0
    if dense_layers:
        extra = dense_layers * (N - 32 - len(plan.computed) - count)
    assert blended.row_layers == (len(plan.computed) + count) * 4 + extra
    assert blended.logits.isfinite().all()


def test_each_method_chooses_by_what_it_says() -> None:
    model = random_model("gqa")
    decoder = HuggingFaceDecoder(model)
    tokens = prompt()
    chosen = {}
    for method in METHODS:
        kv = as_found(model, tokens, SPANS, decoder.rope)
        plan = plan_blend(N, 0, SPANS)
        selection = Selection(method, 0.6, 0)
        blended = blend(decoder, paged(kv), tokens, plan, selection, auxiliary=by_position)
        chosen[method] = blended.selected.tolist()
    assert len({tuple(c) for c in chosen.values()}) == len(METHODS)
    # the oracle of K deviation: layer 1 of a full prefill against what was found
    full, _ = computed(model, tokens)
    kv = as_found(model, tokens, SPANS, decoder.rope)
    for method, room in (("k_deviation", "room_k"), ("v_deviation", "room_v")):
        moved = (getattr(full.layers[1], room) - getattr(kv.layers[1], room)).square().sum((0, 1, 3))
        moved[~torch.from_numpy(plan.reused)] = -1
        assert chosen[method] == sorted(moved.topk(len(chosen[method])).indices.tolist())


def test_pages_of_an_engine_are_blended_in_place() -> None:
    """The same through a block table, blocks shuffled, and poisoned pages beside them."""
    model = random_model("gqa")
    decoder = HuggingFaceDecoder(model)
    tokens = prompt()
    plan = plan_blend(N, 0, SPANS)
    kv = as_found(model, tokens, SPANS, decoder.rope)
    table = np.array([9, 2, 7, 0, 4, 5], np.int64)
    pages = []
    for layer in kv.layers:
        pair = []
        for room in (layer.room_k, layer.room_v):
            blocks = torch.full((11, room.shape[1], 16, room.shape[3]), torch.nan)
            blocks[torch.from_numpy(table)] = room[0].unflatten(1, (6, 16)).transpose(0, 1)
            pair.append(blocks)
        pages.append((pair[0], pair[1]))
    ours = blend(decoder, PagedKV(pages, table), tokens, plan)
    theirs = blend(decoder, paged(kv), tokens, plan)
    assert np.array_equal(ours.selected, theirs.selected)
    assert close(ours.logits, theirs.logits, 1e-5)
    unused = np.setdiff1d(np.arange(11), table)
    assert all(page[unused].isnan().all() for pair in pages for page in pair)


def test_a_plan_of_another_length_is_an_error() -> None:
    model = random_model("gqa")
    kv, _ = computed(model, prompt())
    with pytest.raises(BlendError, match="tokens: 96, want 95, as in the plan"):
        blend(HuggingFaceDecoder(model), paged(kv), prompt(), plan_blend(95))


# the Hugging Face adapter


@pytest.fixture
def blended(tmp_path: Path) -> Iterator[BlendedModel]:
    config = load_config(chunk_tokens=8, staging="64MiB", tiers={"memory": {"capacity": "32MiB"}})
    with BlendedModel.open(random_model("gqa"), config, unchecked=True) as model:
        yield model


def flushed(model: BlendedModel, *documents: Any, prefix: Any = ()) -> None:
    for document in documents:
        model.precompute(document, prefix)
    model.flush()


def test_documents_are_found_anywhere_and_gaps_are_computed(blended: BlendedModel) -> None:
    tokens = prompt()
    flushed(blended, tokens[32:64], tokens[70:90])
    blended.selection = replace(blended.selection, ratio=1.0)
    done = blended.prefill(tokens, DOCUMENTS)
    # of the third document two whole chunks; the first was never computed
    assert done.plan.spans == (Span(32, 64), Span(70, 86))
    assert done.reused_tokens == 48
    assert done.computed_tokens == N - 48
    assert done.selected_tokens == 48
    full, logits = computed(blended.cached.model, tokens)
    assert close(done.logits, logits)
    for ours, theirs in zip(done.kv.layers, full.layers, strict=True):
        assert close(ours.room_k[:, :, :N], theirs.room_k)
    plain = CachedModel(blended.cached.model, blended.cached.layout, None)
    assert blended.decode(done, 8) == plain.generate(tokens, 8).tokens


def test_what_blending_takes_is_counted(blended: BlendedModel) -> None:
    tokens = prompt()
    flushed(blended, tokens[32:64])
    blended.selection = replace(blended.selection, ratio=0.5)
    done = [blended.prefill(tokens, DOCUMENTS) for _ in range(2)]
    counts = blended.cache.counts()
    assert counts.blend_reused_tokens == sum(prefill.reused_tokens for prefill in done) == 64
    assert counts.blend_selected_tokens == sum(prefill.selected_tokens for prefill in done) > 0
    assert counts.blend_computed_tokens == sum(prefill.computed_tokens for prefill in done) == 2 * (N - 32)


def test_naive_reuse_moves_keys_and_changes_nothing_else(blended: BlendedModel) -> None:
    tokens = prompt()
    flushed(blended, tokens[32:64])
    blended.selection = Selection("first_n", 0.0, 0)
    done = blended.prefill(tokens, DOCUMENTS)
    expected = as_found(blended.cached.model, tokens, [Span(32, 64)], blended.decoder.rope)
    for ours, theirs in zip(done.kv.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.room_k[:, :, 32:64], theirs.room_k[:, :, 32:64])
        torch.testing.assert_close(ours.room_v[:, :, 32:64], theirs.room_v[:, :, 32:64])


def test_the_true_prefix_is_exact(blended: BlendedModel) -> None:
    tokens = prompt()
    answer = blended.cached.generate(tokens[:40], 1)
    assert answer.stored is not None
    flushed(blended, tokens[32:64])
    done = blended.prefill(tokens, [(32, 64)])
    assert done.prefix_tokens == 40
    assert done.plan.exact[:40].all()
    assert done.plan.spans == (Span(40, 64, 8),)
    only_prefix = blended.prefill(tokens, [])
    _, logits = computed(blended.cached.model, tokens)
    assert only_prefix.selected_tokens == 0
    assert only_prefix.row_layers == (N - 40) * 4
    assert close(only_prefix.logits, logits)


def test_a_document_at_its_own_place_is_exact(blended: BlendedModel) -> None:
    tokens = prompt()
    flushed(blended, tokens[:64])
    done = blended.prefill(tokens, [(0, 64)])
    assert done.plan.spans == (Span(0, 64, 0, exact=True),)
    assert done.selected_tokens == 0
    assert close(done.logits, computed(blended.cached.model, tokens)[1])


def test_documents_behind_a_shared_prefix(blended: BlendedModel) -> None:
    tokens, system = prompt(), prompt(13, 5)
    flushed(blended, tokens[32:64], prefix=system)
    assert not blended.prefill(tokens, [(32, 64)]).plan.spans
    # 45 tokens were computed, whose last whole chunk ends with the document's 27th
    done = blended.prefill(tokens, [(32, 64)], prefix=system)
    assert done.plan.spans == (Span(32, 59, 13),)
    blended.selection = replace(blended.selection, ratio=1.0)
    assert close(
        blended.prefill(tokens, [(32, 64)], prefix=system).logits, computed(blended.cached.model, tokens)[1]
    )
    # behind the same tokens at the same place the document is exact
    whole = np.concatenate([system, tokens[32:64], prompt(9, 6)])
    blended.selection = Selection()
    exact = blended.prefill(whole, [(13, 45)], prefix=system)
    assert exact.plan.spans == (Span(13, 40, 13, exact=True),)
    assert close(exact.logits, computed(blended.cached.model, whole)[1])


def test_without_documents_the_prompt_is_split_by_content(blended: BlendedModel) -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(5, 290, 600, np.int32)
    cuts = split(text).tolist()
    assert len(cuts) > 3
    flushed(blended, *(text[a:b] for a, b in itertools.pairwise(cuts)))
    moved = np.concatenate([rng.integers(5, 290, 77, np.int32), text, rng.integers(5, 290, 80, np.int32)])
    done = blended.prefill(moved)
    assert done.reused_tokens > 300
    assert done.logits.isfinite().all()


def test_a_changed_token_is_no_match(blended: BlendedModel) -> None:
    tokens = prompt()
    flushed(blended, tokens[32:64])
    tokens[50] += 1
    done = blended.prefill(tokens, [(32, 64)])
    assert done.plan.spans == (Span(32, 48),)  # the chunks before the change


def test_a_colliding_key_is_no_match(blended: BlendedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt()
    flushed(blended, tokens[32:40])
    same = lambda ids, size, *_: [bytes(16)] * (len(ids) // size)  # noqa: E731
    monkeypatch.setattr("kvkit.transfer.sequence.chunk_keys", same)
    flushed(blended, tokens[32:40])
    assert blended.prefill(tokens, [(32, 40)]).reused_tokens == 8
    assert blended.prefill(tokens, [(70, 78)]).reused_tokens == 0  # the same key, other tokens


def test_blended_kv_is_never_stored(blended: BlendedModel) -> None:
    tokens = prompt()
    flushed(blended, tokens[32:64])
    before = blended.cache.counts().stored_records
    done = blended.prefill(tokens, [(32, 64)], room=4)
    blended.decode(done, 4)
    blended.flush()
    assert blended.cache.counts().stored_records == before
    assert blended.cache.lookup(tokens).tokens == 0
    assert document_namespace(blended.cache.namespace) != blended.cache.namespace
    assert blended.cache.lookup(tokens[32:64]).tokens == 0  # documents are apart from prompts


def test_precomputing_again_stores_nothing_new(blended: BlendedModel) -> None:
    tokens = prompt()
    assert blended.precompute(tokens[:40]).new_tokens == 40
    blended.flush()
    assert blended.precompute(tokens[:40]).new_tokens == 0
    assert blended.precompute(tokens[:60]).new_tokens == 16


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda m: m.prefill([]), "the prompt is empty"),
        (lambda m: m.precompute([]), "document: it has no tokens"),
        (lambda m: m.prefill(prompt(), [(0, 97)]), "stop=97"),
        (lambda m: m.prefill(prompt(), [(8, 32), (16, 40)]), "start=16"),
        (lambda m: m.decode(m.prefill(prompt()), 0), "max_new_tokens=0"),
    ],
)
def test_impossible_calls_are_errors(blended: BlendedModel, call: Any, word: str) -> None:
    with pytest.raises(BlendError, match=word):
        call(blended)


def test_bfloat16_is_blended() -> None:
    tokens = prompt()
    _, exact = computed(random_model("gqa"), tokens)
    model = random_model("gqa").to(torch.bfloat16)
    decoder = HuggingFaceDecoder(model)
    _, logits = computed(model, tokens)
    kv = as_found(model, tokens, SPANS, decoder.rope)
    blended = blend(decoder, paged(kv), tokens, plan_blend(N, 0, SPANS), Selection(ratio=1.0))
    # as near to float32 as the model's own bfloat16 is
    assert (blended.logits - exact).norm() < 2 * (logits - exact).norm()


REFUSED = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=4,
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **HEADS, head_dim=16),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**SIZES, **HEADS, head_dim=16),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, **HEADS, pad_token_id=None),
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, **HEADS, rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_of_another_kind_are_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(REFUSED[kind](), dtype=torch.float32).eval()
    with pytest.raises(BlendError, match=f"model type '{kind}'"):
        HuggingFaceDecoder(model)


# the gate


def test_a_model_is_blended_only_after_it_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = random_model("gqa")
    weights = model_fingerprint(model)
    config = load_config(chunk_tokens=8, staging="8MiB", tiers={"memory": {"capacity": "4MiB"}})

    def opens() -> None:
        BlendedModel.open(model, config).close()

    with pytest.raises(BlendError, match=r"has not been measured.*kvkit doctor --blend"):
        opens()
    gate.keep([weights], Selection(), "prefix", {"passed": False, "kl": 1.0})
    with pytest.raises(BlendError, match="too much"):
        opens()
    gate.keep([weights], Selection(ratio=0.9), "prefix", {"passed": True})
    with pytest.raises(BlendError, match=r"measured with.*0\.9"):
        opens()
    gate.path_of(weights).write_text("[]")
    with pytest.raises(BlendError, match="has not been measured"):
        opens()
    gate.keep([weights], Selection(), "prefix", {"passed": True, "kl": 0.01})
    opens()
    assert gate.path_of(model_fingerprint(random_model("gqa", 1))) != gate.path_of(weights)


def test_a_cache_is_needed() -> None:
    model = random_model("gqa")
    with pytest.raises(BlendError, match="has no cache"):
        BlendedModel(CachedModel(model, probe_layout(model), None), unchecked=True)


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer loop on the Triton sources, in their interpreter, instead of the CPU's own kernels."""
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here: test_gpu runs the loop on them")
    from kvkit.kernels.attention import torch_cpu
    from kvkit.kernels.attention import triton as kernels

    def attention(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full((*q.shape[:2], v.shape[3]), torch.nan), torch.full(q.shape[:2], torch.nan)
        for launch in kernels.attention(q, k, v, *rest, out, lse):
            launch.run()
        return out, lse

    def scatter(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        out = torch.full_like(q, torch.nan).contiguous()
        for launch in kernels.scatter((q, k, v), *rest, out):
            launch.run()
        return out

    monkeypatch.setattr(torch_cpu, "attention", attention)
    monkeypatch.setattr(torch_cpu, "scatter", scatter)


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("kind", ["gqa", "sliding window"])
def test_recomputing_everything_through_triton_is_a_full_prefill(kind: str) -> None:
    model = random_model(kind)
    decoder = HuggingFaceDecoder(model)
    tokens = prompt()
    full, logits = computed(model, tokens)
    kv = as_found(model, tokens, SPANS, decoder.rope)
    blended = blend(decoder, paged(kv), tokens, plan_blend(N, 0, SPANS), Selection("first_n", 1.0))
    assert close(blended.logits, logits)
    for ours, theirs in zip(kv.layers, full.layers, strict=True):
        assert close(ours.room_k, theirs.room_k)
        assert close(ours.room_v, theirs.room_v)


@pytest.mark.nightly
def test_recomputing_everything_is_a_full_prefill_of_smollm2() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.fetch(), dtype=torch.float32).eval()
    decoder = HuggingFaceDecoder(model)
    tokens = np.random.default_rng(0).integers(5, 40_000, 330, np.int32)
    spans = [Span(0, 100, 0, exact=True), Span(100, 200), Span(203, 300)]
    full, logits = computed(model, tokens)
    kv = as_found(model, tokens, spans, decoder.rope)
    naive = blend(decoder, paged(kv), tokens, plan_blend(330, 0, spans), Selection("first_n", 0.0, 0))
    assert (naive.logits - logits).abs().max() > 0.1, "nothing is lost by reuse: this would prove nothing"
    blended = blend(decoder, paged(kv), tokens, plan_blend(330, 0, spans), Selection(ratio=1.0))
    torch.testing.assert_close(blended.logits, logits, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(kv.layers, full.layers, strict=True):
        torch.testing.assert_close(ours.room_k[:, :, :330], theirs.room_k[:, :, :330], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.room_v[:, :, :330], theirs.room_v[:, :, :330], rtol=1e-3, atol=1e-3)
