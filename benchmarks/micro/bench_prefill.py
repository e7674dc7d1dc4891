"""A prompt of known documents, blended at 15 %, against a full prefill of the same prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.timing import interleaved, ratio
from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.blended import BlendedModel
from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.blend.plan import Selection
from kvkit.config import load_config
from kvkit.lab.quality.tasks.registry import samples
from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS

CHUNK_TOKENS = 64


def load(full_size: bool) -> Any:
    """SmolLM2-135M in float32, or a tiny model of the same kind."""
    if full_size:
        return transformers.AutoModelForCausalLM.from_pretrained(smollm2.fetch(), dtype=torch.float32).eval()
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def prompt(documents: int, full_size: bool) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
    """Texts, a question about one of them, and where the texts stand; the first token is another one."""
    if full_size:
        tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.fetch())
        encode = partial(tokenizer.encode, add_special_tokens=False)
        (sample,) = samples("documents", encode, 1, documents * DOCUMENT_TOKENS)
        ids, spans = sample.prompt, sample.documents
    else:
        size = CHUNK_TOKENS
        ids = np.random.default_rng(0).integers(5, 512, documents * size + size, np.int32)
        spans = tuple((start, start + size) for start in range(0, documents * size, size))
    return np.concatenate([ids[-1:], ids]), [(start + 1, stop + 1) for start, stop in spans]


@pytest.mark.parametrize("documents", [4, 16], ids=["1k", "4k"])
def test_blended_prefill(benchmark: Any, documents: int) -> None:
    """Documents come from memory, in a prompt whose first token is another one; the blended prefill includes
    looking them up, verifying, moving and unpacking them."""
    model = load(benchmark.enabled)
    tokens, spans = prompt(documents, benchmark.enabled)
    config = load_config(
        chunk_tokens=CHUNK_TOKENS, staging="256MiB", tiers={"memory": {"capacity": "768MiB"}}
    )
    with BlendedModel.open(model, config, unchecked=True) as blended:
        for start, stop in spans:
            blended.precompute(tokens[start:stop])
        blended.flush()
        plain = CachedModel(model, blended.cached.layout, None)
        done = blended.prefill(tokens, spans)
        assert done.reused_tokens == sum(stop - start for start, stop in spans)
        naive = Selection("first_n", 0.0, 0)
        chosen = blended.selection

        def prefill(selection: Selection) -> None:
            blended.selection = selection
            blended.prefill(tokens, spans)

        benchmark.pedantic(lambda: prefill(chosen), rounds=3 if benchmark.enabled else 1)
        times = interleaved(
            {
                "full": lambda: plain.prefill(tokens),
                "blended": lambda: prefill(chosen),
                "naive": lambda: prefill(naive),
            },
            5 if benchmark.enabled else 1,
            warmup=1 if benchmark.enabled else 0,
        )
    found = ratio(times, "blended", "full")
    benchmark.extra_info.update(ratio_min=found["min"], ratio_median=found["median"])
    benchmark.extra_info.update(
        tokens=len(tokens), rows=done.row_layers / (len(tokens) * blended.decoder.layers)
    )
    benchmark.extra_info["recomputing nothing"] = ratio(times, "naive", "full")
    benchmark.extra_info["against"] = "the model's own prefill of the whole prompt"
