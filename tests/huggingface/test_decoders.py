"""Every decoder of transformers gives the same tokens and logits from a cache, or is refused by name.

`python tests/huggingface/test_decoders.py` writes the table of docs/research/huggingface.md.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_models import KINDS, NotMade, make
from repository import ROOT

from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.steps import batch_of
from kvkit.config import load_config
from kvkit.format.layout import LayoutError
from kvkit.lab.files import about

RESULTS = ROOT / "benchmarks/results/decoders.json"
DAILY = ("llama", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3", "falcon_h1", "bert", "opt")
"""Kinds that CI has time for."""
CHUNK, PROMPT, NEW = 16, 75, 6
TOLERANCE = 1e-4
"""Of logits, relative to the largest."""


def measure(kind: str, folder: Path) -> dict[str, Any]:
    """What becomes of a prompt that is computed, and then loaded from memory and from disk.

    A model that is refused has `refused`; one that cannot be made here `absent`.
    """
    tokens = np.random.default_rng(0).integers(30, 290, PROMPT, np.int32)
    try:
        model = make(kind)
        want, logits = plain(model, tokens)
    except NotMade as error:
        return {"absent": _words(error)}
    config = load_config(
        chunk_tokens=CHUNK,
        staging="16MiB",
        tiers={"memory": {"capacity": "8MiB"}, "disk": {"url": f"file://{folder}"}},
    )
    found: dict[str, Any] = {"class": type(model).__name__, "loaded_tokens": {}, "difference": 0.0}
    try:
        for way in ("cold", "memory", "disk"):
            if way != "memory":  # the engine's own memory is gone
                cached = CachedModel.open(model, config)
            prefill = cached.prefill(tokens)
            found["loaded_tokens"][way] = sum(prefill.hit_tokens.values())
            difference = float((prefill.logits - logits).abs().max() / logits.abs().max())
            found["difference"] = max(found["difference"], difference)
            made = cached.generate(tokens, NEW, stop=())
            found["same_tokens"] = found.get("same_tokens", True) and made.tokens == want
            cached.flush()
            if way != "cold":
                cached.close()
    except LayoutError as error:
        words = re.split(", with which| by [0-9.]+ of", _words(error))[0]  # figures that depend on the CPU
        return {"class": type(model).__name__, "refused": words}
    return found


@torch.inference_mode()
def plain(model: Any, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a prompt, and the logits of the first, each computed without any cache.

    Raises:
        NotMade: it does not compute any.
    """
    ids, first = tokens, None
    for _ in range(NEW):
        try:
            logits = model(input_ids=batch_of(model, ids), use_cache=False).logits[0, -1]
        except Exception as error:
            raise NotMade(f"{type(error).__name__}: {error}") from error
        first = logits if first is None else first
        ids = np.append(ids, np.int32(logits.argmax()))
    assert first is not None
    return ids[len(tokens) :].tolist(), first


def check(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    """That nothing is wrong, and all is as the documentation says."""
    assert found.keys() == recorded.keys()
    if "same_tokens" in found:
        assert found["same_tokens"]
        assert found["difference"] < TOLERANCE
        assert found["loaded_tokens"] == {"cold": 0, "memory": 64, "disk": 64}
    assert found.get("refused") == recorded.get("refused")


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    """What the documentation says."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["decoders"]
    return found


@pytest.mark.parametrize(
    "kind", [kind if kind in DAILY else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_every_kind(kind: str, recorded: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    check(measure(kind, tmp_path), recorded[kind])


def _words(error: Exception) -> str:
    """The beginning of a message, in a line."""
    return re.sub(r"\s+", " ", str(error))[:160]


def main() -> None:
    """Measure every kind, and write what docs/research/huggingface.md shows."""
    found = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = measure(kind, Path(folder))
        print(kind, found[kind], flush=True)
    figures = about("python tests/huggingface/test_decoders.py", seed=0) | {"decoders": found}
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
