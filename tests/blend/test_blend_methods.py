"""Scores of blending methods equal plain numpy's, and the attention they see equals the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvkit.adapters.huggingface.auxiliary import AuxiliaryModel
from kvkit.adapters.huggingface.blended import BlendedModel, HuggingFaceDecoder, paged
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View
from kvkit.blend.methods.registry import METHODS, method_named, served
from kvkit.blend.plan import BlendError, BlendPlan, Selection, Span, choose, count_of, plan_blend
from kvkit.blend.run import PagedKV, _Run, blend
from kvkit.config import load_config

N, LAYERS = 96, 5
STARTS = [8, 50]
SPANS = [Span(8, 44), Span(50, 90)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}

Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model()


def random_model(**other: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | other, **HEADS, attn_implementation="eager")
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    return made.eval()


@pytest.fixture(scope="module")
def decoder(model: Any) -> HuggingFaceDecoder:
    return HuggingFaceDecoder(model)


TOKENS = np.random.default_rng(0).integers(5, 290, N, np.int32)


def view(seed: int = 0, layers: int = 3) -> View:
    rng = np.random.default_rng(seed)
    plan = plan_blend(N, 0, SPANS)
    return View(plan.starts, plan.reused, rng.random((layers, N), np.float32), 16)


def cacheclip_by_hand(seen: View) -> Floats:
    scores = np.zeros(N, np.float32)
    for span in SPANS:
        for start in range(span.start, span.stop, 8):
            window = slice(start, min(start + 8, span.stop))
            scores[window] = seen.seen.mean(0)[window].mean()
    return scores


def question_by_hand(seen: View) -> Floats:
    scores = np.zeros(N, np.float32)
    for j in range(STARTS[0], N):
        offset = j - max(start for start in STARTS if start <= j)
        scores[j] = sum(seen.seen[:, j]) * (N - j) ** 0.5 / (1 + offset / 16)
    return scores


BY_HAND: dict[str, Callable[[View], Any]] = {
    "question_attention": question_by_hand,
    "k_deviation": lambda seen: seen.seen[0],
    "v_deviation": lambda seen: seen.seen[1],
    "first_n": lambda seen: [-min((j - s for s in STARTS if s <= j), default=10**9) for j in range(N)],
    "cacheblend": lambda seen: seen.seen[0] + seen.seen[1],
    "infoflow": lambda seen: sum(seen.seen) / 2,
    "prophetkv": lambda seen: sum(seen.seen) / len(seen.seen),
    "qcfuse": lambda seen: sum(seen.seen) / 3,
    "sparsex": lambda seen: sum(seen.seen) / len(seen.seen),
    "cacheclip": cacheclip_by_hand,
    "random": lambda seen: METHODS["random"].scores(seen),  # equal ones for an equal view
    "oracle": lambda seen: sum(seen.seen[0]),
    "oracle_change": lambda seen: sum(a * b for a, b in zip(*seen.seen, strict=True)),
}


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_those_of_the_formula(name: str) -> None:
    rows = {"k_deviation": 2, "v_deviation": 2, "cacheblend": 2, "infoflow": 2, "cacheclip": 1}
    shown = view(1, rows.get(name, 3))
    if name.startswith("oracle"):
        shown = replace(shown, seen=np.stack([shown.seen, view(2).seen]))
    scores, expected = METHODS[name].scores(shown), np.asarray(BY_HAND[name](shown))
    np.testing.assert_allclose(scores[shown.free], expected[shown.free], rtol=1e-5)


def test_random_rows_differ_by_number_and_not_by_anything_else() -> None:
    plans = [plan_blend(N, 0, [Span(start, start + tokens)]) for start, tokens in ((3, 60), (9, 60), (3, 61))]
    first, moved, other = (choose(Selection("random", 0.3, 0), plan, LAYERS) for plan in plans)
    assert len(set(np.diff(first))) > 3
    assert np.array_equal(first + 6, moved)
    assert not np.array_equal(first[:18], other[:18])


# what methods are shown


def full(model: Any, tokens: npt.NDArray[np.int32]) -> tuple[GrowingCache, list[torch.Tensor]]:
    """KV of a full prefill, and the attention [H, N, N] of every layer."""
    kv = GrowingCache(probe_layout(model), len(tokens), torch.device("cpu"))
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    made = model(input_ids=ids, past_key_values=kv, output_attentions=True)
    return kv, [layer[0] for layer in made.attentions]


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("heads", ["max", "mean", "norm", "each"])
def test_the_questions_attention_is_that_of_the_model(
    heads: Any, value_norm: bool, model: Any, decoder: HuggingFaceDecoder
) -> None:
    """Over exact KV, where it can be asked for it."""
    kv, attentions = full(model, TOKENS)
    plan = plan_blend(N, 80)
    asked = NeedsQuestion(1.0, 3, heads, value_norm)
    run = _Run(decoder, paged(kv), TOKENS, plan, None)
    seen, _ = run.measure_attention(asked, LAYERS, plan.computed)
    for layer, shown in zip(range(LAYERS - 3, LAYERS), seen, strict=True):
        paid = attentions[layer][:, 80:]
        if value_norm:
            paid = paid * kv.layers[layer].room_v[0].norm(dim=-1).repeat_interleave(2, 0)[:, None]
        brought = {
            "max": paid.sum(1).amax(0),
            "mean": paid.sum(1).mean(0),
            "each": paid.sum(1),
            "norm": paid.mean(0).norm(dim=0),
        }
        np.testing.assert_allclose(shown, brought[heads], rtol=1e-4, atol=1e-6)


def stale(model: Any, plan: BlendPlan) -> PagedKV:
    """KV as of another text, but for what is exact."""
    exact, _ = full(model, TOKENS)
    other, _ = full(model, TOKENS[::-1].copy())
    reused = torch.from_numpy(np.flatnonzero(plan.reused))
    for layer, from_other in zip(exact.layers, other.layers, strict=True):
        layer.room_k[:, :, reused] = from_other.room_k[:, :, reused]
        layer.room_v[:, :, reused] = from_other.room_v[:, :, reused]
    return paged(exact)


def test_full_recompute_is_looked_at_in_other_pages(model: Any, decoder: HuggingFaceDecoder) -> None:
    plan = plan_blend(N, 0, SPANS)
    kv = stale(model, plan)
    before = [(k.clone(), v.clone()) for k, v in kv.layers]
    run = _Run(decoder, kv, TOKENS, plan, None)
    paid, changes = run.measure_recompute()
    exact, attentions = full(model, TOKENS)
    expected = [layer[:, plan.question_positions].sum(1).mean(0) for layer in attentions]
    np.testing.assert_allclose(paid, np.stack(expected), rtol=1e-3, atol=1e-6)
    for change, layer, (_, old) in zip(changes, exact.layers, before, strict=True):
        moved = (layer.room_v - old)[0].permute(1, 0, 2).flatten(1).norm(dim=-1).numpy()
        np.testing.assert_allclose(change, np.where(plan.reused, moved, 0), rtol=1e-3, atol=1e-5)
    assert run.row_layers == 0
    for ours, theirs in zip(kv.layers, before, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_anchors_that_are_all_tokens_hide_nothing(model: Any, decoder: HuggingFaceDecoder) -> None:
    plan = plan_blend(N, 0, SPANS)

    def shown(anchors: float) -> Floats:
        run = _Run(decoder, stale(model, plan), TOKENS, plan, None)
        needs = NeedsQuestion(1.0, anchors=anchors, value_norm=False)
        return run.measure_attention(needs, LAYERS, plan.computed)[0]

    all_seen, few = shown(1.0), shown(0.1)
    np.testing.assert_allclose(shown(0.9999), all_seen, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(few[0], all_seen[0], rtol=1e-4, atol=1e-6)  # layer 0 has not seen anything yet
    assert np.abs(few[-1] - all_seen[-1]).max() > 0.01


# runs


def test_each_layer_keeps_some_of_the_rows_of_the_one_before(model: Any, decoder: HuggingFaceDecoder) -> None:
    """Gradual filtering, by the pages that change: a layer's are those of the rows that the last one kept."""
    plan = plan_blend(N, 0, SPANS)
    kv = stale(model, plan)
    before = [(k.clone(), v.clone()) for k, v in kv.layers]
    selection = Selection("cacheblend", 0.6, 0, drift=0.0)
    blended = blend(decoder, kv, TOKENS, plan, selection)
    changed = [
        set(np.flatnonzero((k != old).any(-1).any(1).numpy()[0]).tolist()) & set(np.flatnonzero(plan.reused))
        for (k, _), (old, _) in zip(kv.layers, before, strict=True)
    ]
    sizes = [len(rows) for rows in changed]
    assert sizes[2] == len(blended.selected) > count_of(selection, plan, LAYERS)[0]
    assert sizes[2] > sizes[3] > sizes[4]
    assert changed[2] >= changed[3] >= changed[4]


def test_after_dense_layers_the_chosen_rows_go_on(model: Any, decoder: HuggingFaceDecoder) -> None:
    """In the dense layers all KV is a full prefill's, and so is the attention by which rows are chosen."""
    plan, selection = plan_blend(N, 0, SPANS), Selection("sparsex", 0.6, 0, drift=0.0)
    kv = stale(model, plan)
    before = [(k.clone(), v.clone()) for k, v in kv.layers]
    blended = blend(decoder, kv, TOKENS, plan, selection)
    count, dense = count_of(selection, plan, LAYERS)
    assert (dense, len(blended.selected)) == (1, count)
    exact, attentions = full(model, TOKENS)
    paid = sum(layer[:, plan.question_positions].sum(1).mean(0) for layer in attentions[:dense])
    assert isinstance(paid, torch.Tensor)
    free = np.flatnonzero(plan.reused)
    assert set(blended.selected.tolist()) == set(free[np.argsort(-paid.numpy()[free])[:count]].tolist())
    unchanged = np.setdiff1d(free, blended.selected)
    for layer, ((k, v), (old_k, old_v)) in enumerate(zip(kv.layers, before, strict=True)):
        if layer < dense:
            np.testing.assert_allclose(k, exact.layers[layer].room_k, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(v, exact.layers[layer].room_v, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(k[:, :, unchanged], old_k[:, :, unchanged])
            assert torch.equal(v[:, :, unchanged], old_v[:, :, unchanged])
            assert not torch.equal(k[:, :, blended.selected], old_k[:, :, blended.selected])


def test_methods_cost_the_same_and_the_oracle_covers_most(model: Any, decoder: HuggingFaceDecoder) -> None:
    """Most of the attention that the question pays once all is computed."""
    plan = plan_blend(N, 0, SPANS)
    paid = np.stack(
        [layer[:, plan.question_positions].sum(1).mean(0) for layer in full(model, TOKENS)[1]]
    ).sum(0)
    covered, costs = {}, {}
    for name in METHODS:
        selection, kv = Selection(name, 0.6, 0), stale(model, plan)
        blended = blend(decoder, kv, TOKENS, plan, selection, auxiliary=AuxiliaryModel(model))
        most = count_of(Selection("oracle", 0.6, 0), plan, LAYERS)[0]
        covered[name] = paid[blended.selected[:most]].sum()
        costs[name] = blended.row_layers
    budget = round(0.6 * int(plan.reused.sum())) * LAYERS + len(plan.computed) * LAYERS
    assert all(abs(cost - budget) <= LAYERS for cost in costs.values()), costs
    oracle = covered.pop("oracle")
    assert all(oracle > other for other in covered.values()), (oracle, covered)


def test_an_auxiliary_model_is_asked_what_its_last_layer_attends_to(model: Any) -> None:
    plan = plan_blend(N, 0, SPANS)
    shown = AuxiliaryModel(model)(TOKENS, plan)
    expected = full(model, TOKENS)[1][-1][:, plan.question_positions].mean((0, 1))
    np.testing.assert_allclose(shown, expected[None], rtol=1e-4, atol=1e-7)


def test_tokens_of_another_tokenizer_are_found_by_their_text(model: Any) -> None:
    """Of the blended model a token is a word of three letters, of the auxiliary a letter."""
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["".join(letters[(i * step) % 26] for step in (1, 5, 7)) for i in range(26)]
    theirs, own = (
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(dict(zip(vocabulary, range(26), strict=True)), "a"))
        )
        for vocabulary in (words, letters)
    )
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens = np.random.default_rng(3).integers(0, 26, 30, np.int32)
    plan, by_letter = plan_blend(30, 0, [Span(0, 25)]), plan_blend(90, 0, [Span(0, 75)])
    text = "".join(words[token] for token in tokens)
    alike = AuxiliaryModel(model)(np.array([letters.index(letter) for letter in text], np.int32), by_letter)
    shown = AuxiliaryModel(model, (theirs, own))(tokens, plan)
    np.testing.assert_allclose(shown[0], alike[0].reshape(30, 3).sum(1), rtol=1e-4, atol=1e-7)
    assert shown.sum() == pytest.approx(1, abs=1e-4)


# methods by name

LATE = BlendMethod(lambda seen: seen.seen[-1], NeedsQuestion(depth=0.5, heads="mean"))
FEW = BlendMethod(lambda seen: np.where(seen.offsets == 3, 1.0, -np.inf))
WRONG = BlendMethod(lambda seen: np.zeros(3))


def test_a_method_of_your_own_is_named_by_its_module(model: Any, decoder: HuggingFaceDecoder) -> None:
    plan = plan_blend(N, 0, SPANS)
    assert method_named(f"{__name__}:LATE") is LATE
    selection = Selection(f"{__name__}:LATE", 0.6, 0)
    blended = blend(decoder, stale(model, plan), TOKENS, plan, selection)
    assert len(blended.selected) == count_of(selection, plan, LAYERS)[0] > 0
    assert choose(Selection(f"{__name__}:FEW", 0.6, 0), plan, LAYERS).tolist() == [11, 53]  # -inf: not chosen
    assert choose(Selection(f"{__name__}:FEW", 0.6, 1), plan, LAYERS).tolist() == [8, 11, 50, 53]
    with pytest.raises(BlendError, match=r"scores: \(3,\), want \(96,\)"):
        choose(Selection(f"{__name__}:WRONG", 0.6), plan, LAYERS)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("attention", "want one of prophetkv, .*, or package.module:name"),
        ("nowhere.at_all:METHOD", "No module named 'nowhere'"),
        (f"{__name__}:NONE", "module .* has no attribute 'NONE'"),
        (f"{__name__}:N", "is a int, want a BlendMethod"),
        (":x", "want package.module:name"),
        (".nearby:x", "want package.module:name"),
    ],
)
def test_a_method_that_cannot_be_had_is_named(name: str, told: str) -> None:
    with pytest.raises(BlendError, match=f"method='{name}': {told}"):
        Selection(name)


def test_engines_provide_for_the_questions_attention_alone() -> None:
    fine = [f"{__name__}:LATE", "question_attention", "prophetkv", "first_n", "random"]
    assert [served(name) for name in fine] == fine
    want = "want one of prophetkv, question_attention, first_n, random"
    for name, needs in {
        "k_deviation": "deviations of a layer's K and V",
        "infoflow": "the question's attention with heads='norm'",
        "qcfuse": "the question's attention with anchors",
        "sparsex": "the question's attention with dense layers",
        "cacheclip": "an auxiliary model",
        "oracle": "full recompute",
    }.items():
        with pytest.raises(ValueError, match=f"method='{name}': needs {needs}, {want}"):
            served(name)


def test_a_model_that_blends_has_what_its_method_needs(tmp_path: Path) -> None:
    config = load_config(chunk_tokens=8, staging="64MiB", tiers={"memory": {"capacity": "32MiB"}})
    with pytest.raises(BlendError, match="'oracle': needs full recompute: for `kvkit bench blend` alone"):
        BlendedModel.open(random_model(), config, Selection("oracle"), unchecked=True)
    clip = Selection("cacheclip", 0.5, 0)
    with BlendedModel.open(random_model(), config, clip, unchecked=True) as blended:
        blended.precompute(TOKENS[8:40])
        blended.flush()
        with pytest.raises(BlendError, match="'cacheclip': needs an auxiliary model: want `auxiliary`"):
            blended.prefill(TOKENS, [(8, 40)])
        blended.auxiliary = AuxiliaryModel(random_model(num_hidden_layers=1))
        assert blended.prefill(TOKENS, [(8, 40)]).selected_tokens == 16
