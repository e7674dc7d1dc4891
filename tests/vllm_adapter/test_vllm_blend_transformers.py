"""Blending in vLLM gives the rows and the distribution of the transformers layer loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

pytest.importorskip("vllm")

from document_prompts import DocumentPrompt, precompute
from test_vllm_blend_models import OPTIONS, retrieval
from vllm_engine import Engine, connector, on_disk

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.blended import HuggingFaceDecoder, paged
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.adapters.huggingface.steps import forward
from kvkit.blend.plan import Selection, Span, plan_blend
from kvkit.blend.run import Blended, blend
from kvkit.kernels.pages import reference

METHODS = ["question_attention", "kvkit.blend.methods.prophetkv:METHOD"]
"""The second by the name that methods of one's own have; it looks into every layer."""
COVERAGE = 0.3
"""Stops every choice before it has taken its ratio."""
CHUNK, MOST, TOLERANCE = OPTIONS["block_size"], 100, 1e-3


@torch.inference_mode()
def by_transformers(model: Any, asked: DocumentPrompt, selection: Selection) -> Blended:
    """A prompt whose documents were computed alone, as far as they fill chunks, and moved."""
    decoder, ids = HuggingFaceDecoder(model), np.array(asked.tokens, np.int32)

    def computed(tokens: NDArray[np.int32]) -> GrowingCache:
        kv = GrowingCache(probe_layout(model), len(tokens), torch.device("cpu"))
        forward(model, tokens, kv)
        return kv

    exact = asked.documents[0][1] // CHUNK * CHUNK
    sources, spans = [(computed(ids[:exact]), 0, 0, exact)], []
    for start, stop in asked.documents[1:]:
        alone = np.concatenate([ids[: asked.prefix], ids[start:stop]])
        whole = len(alone) // CHUNK * CHUNK
        spans.append(Span(start, start + whole - asked.prefix, asked.prefix))
        sources.append((computed(alone[:whole]), asked.prefix, start, spans[-1].stop))
    kv = GrowingCache(probe_layout(model), len(ids), torch.device("cpu"))
    for source, first, start, stop in sources:
        turns = torch.from_numpy(decoder.rope.delta_table(np.array([start - first])))
        for ours, theirs in zip(kv.layers, source.layers, strict=True):
            there = slice(first, first + stop - start)
            ours.room_k[:, :, start:stop] = reference.rotate(theirs.room_k[:, :, there], turns, decoder.rope)
            ours.room_v[:, :, start:stop] = theirs.room_v[:, :, there]
    return blend(decoder, paged(kv), ids, plan_blend(len(ids), exact, spans), selection)


@pytest.mark.nightly
def test_the_same_rows_and_the_same_distribution(tmp_path: Path) -> None:
    folder = smollm2.fetch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = retrieval(folder)
    with Engine() as engine:
        blending = {"unchecked": True, "methods": METHODS, "coverage": COVERAGE}
        settings = connector({"chunk_tokens": CHUNK} | on_disk(tmp_path), blend=blending)
        engine.open(settings, max_logprobs=MOST, enable_prefix_caching=True, **OPTIONS)
        precompute(engine, prompts)
        for asked, ratio, method in (
            (prompts[0], 0.15, METHODS[0]),
            (prompts[-1], 0.3, METHODS[0]),
            (prompts[0], 0.15, METHODS[1]),
        ):
            wants = [asked.blend(ratio, method=method)]
            (answer,) = engine.generate([asked.tokens], 1, wants, logprobs=MOST)
            expected = by_transformers(model, asked, Selection(method, ratio, coverage=COVERAGE))
            assert engine.do("selected") == expected.selected.tolist()
            logprobs = expected.logits.log_softmax(-1)
            wanted = {token: float(logprobs[int(token)]) for token in answer["likely"][0]}
            assert answer["likely"][0] == pytest.approx(wanted, abs=TOLERANCE)
