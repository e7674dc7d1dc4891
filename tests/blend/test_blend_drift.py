"""Blending subtracts the mean drift of recomputed tokens from those that it does not recompute."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from random_models import CONFIGS, random_model
from test_blend_run import SPANS, N, close, computed, prompt

from kvkit.adapters.huggingface.blended import HuggingFaceDecoder, paged
from kvkit.blend import drift
from kvkit.blend.drift import missed_context
from kvkit.blend.plan import BlendError, Selection, Span, plan_blend
from kvkit.blend.run import Blended, blend
from kvkit.kernels.pages import reference


def lost() -> list[float]:
    """What each reused token lost, in their order."""
    of = [(p, span.delta) for span in SPANS if not span.exact for p in range(span.start, span.stop)]
    return [math.log((p + 1) / (p + 1 - delta)) for p, delta in of]


@torch.inference_mode()
def blended(
    kind: str, selection: Selection, lacks_k: float = 1.0
) -> tuple[Blended, list[torch.Tensor], list[torch.Tensor]]:
    """A prompt whose reused tokens lack the same, before their rope, times what each lost; K and V."""
    model = random_model(kind)
    decoder, tokens, plan = HuggingFaceDecoder(model), prompt(), plan_blend(N, 0, SPANS)
    kv, _ = computed(model, tokens)
    reused = np.flatnonzero(plan.reused)
    turns, share = torch.from_numpy(decoder.rope.delta_table(reused)), torch.tensor(lost())[:, None]
    torch.manual_seed(1)
    for layer in kv.layers:
        lack_k, lack_v = (share * torch.randn_like(room[0, :, :1]) for room in (layer.room_k, layer.room_v))
        layer.room_k[0][:, reused] -= lacks_k * reference.rotate(lack_k, turns, decoder.rope)
        layer.room_v[0][:, reused] -= lack_v
    before = [room.clone() for layer in kv.layers for room in (layer.room_k, layer.room_v)]
    done = blend(decoder, paged(kv), tokens, plan, selection)
    return done, before, [room for layer in kv.layers for room in (layer.room_k, layer.room_v)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_tokens_lack_by_what_they_lost_is_found_by_a_few(kind: str) -> None:
    """Of V, of which all is added."""
    model = random_model(kind)
    full, logits = computed(model, prompt())
    rooms = [room for layer in full.layers for room in (layer.room_k, layer.room_v)]
    done, _, after = blended(kind, Selection("first_n", 0.2, first_n=0, drift=1.0), lacks_k=0)
    assert 0 < len(done.selected) < 20
    assert close(done.logits, logits)
    assert all(close(ours, theirs) for ours, theirs in zip(after, rooms, strict=True))
    without, _, _ = blended(kind, Selection("first_n", 0.2, first_n=0), lacks_k=0)
    assert not close(without.logits, logits, 0.01)


def test_a_share_of_it_is_added() -> None:
    """Of the first layer, whose rows are exact."""
    full, _ = computed(random_model("gqa"), prompt())
    rooms = full.layers[0].room_k, full.layers[0].room_v
    done, before, after = blended(
        "gqa", Selection("question_attention", 0.4, first_n=2, layers=1, drift=0.25)
    )
    plan = plan_blend(N, 0, SPANS)
    kept = np.setdiff1d(np.flatnonzero(plan.reused), done.selected)
    assert len(kept)
    for left, was, ours, theirs in zip((0.875, 0.75), before[:2], after[:2], rooms, strict=True):
        lacked, lacks = (theirs - was)[0, :, kept], (theirs - ours)[0, :, kept]
        assert close(lacks, left * lacked)
        exact = np.flatnonzero(plan.exact)
        assert torch.equal(was[0, :, exact], ours[0, :, exact])


def test_tokens_are_corrected_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = Selection("first_n", 0.2, first_n=0, drift=1.0)
    _, before, whole = blended("gqa", selection)
    monkeypatch.setattr(drift, "_PIECE_TOKENS", 7)
    _, _, in_pieces = blended("gqa", selection)
    assert not torch.equal(before[0], whole[0])
    assert all(close(ours, theirs) for ours, theirs in zip(in_pieces, whole, strict=True))


def test_a_token_that_saw_its_prefix_lost_less() -> None:
    """And one that is exact, or computed where the prompt stands, nothing."""
    spans = [Span(4, 8, 1), Span(8, 10, 8, exact=True), Span(10, 12, 11)]
    found = missed_context(plan_blend(16, 2, spans))
    expected = [math.log(a / b) for a, b in zip((5, 6, 7, 8), (2, 3, 4, 5), strict=True)]
    np.testing.assert_allclose(found[4:8], expected, rtol=1e-6)
    assert not np.delete(found, np.arange(4, 8)).any()  # the last span was computed further on


def test_the_first_of_every_span_have_no_say() -> None:
    """These alone are computed again: nobody is told anything."""
    done, before, after = blended("gqa", Selection("first_n", 0.15, first_n=8, drift=1.0))
    kept = np.setdiff1d(np.arange(N), np.union1d(done.selected, plan_blend(N, 0, SPANS).computed))
    assert all(torch.equal(was[:, :, kept], now[:, :, kept]) for was, now in zip(before, after, strict=True))


@pytest.mark.parametrize("drift", [-0.1, 1.1])
def test_a_share_is_one(drift: float) -> None:
    with pytest.raises(BlendError, match=f"drift={drift}: want 0 to 1"):
        Selection(drift=drift)
