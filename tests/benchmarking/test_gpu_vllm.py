"""vLLM runs from its Python files alone, with what is carried to a GPU machine, as far as a CPU shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from benchmarks.gpu import vllm_files
from benchmarks.gpu.packages import ROOT


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("vllm._C", True),
        ("vllm._moe_C_stable_libtorch", True),
        ("vllm.vllm_flash_attn._vllm_fa2_C", True),
        ("cv2.gapi", True),
        ("vllm._custom_ops", False),
        ("vllm.v1.engine", False),
        ("numpy", False),
    ],
)
def test_no_compiled_module_is_imported(name: str, hidden: bool) -> None:
    finder = vllm_files.WithoutCompiled(("cv2",))
    if hidden:
        with pytest.raises(ModuleNotFoundError, match=name):
            finder.find_spec(name)
    else:
        assert finder.find_spec(name) is None


def test_the_module_that_every_gpu_imports_is_empty() -> None:
    finder = vllm_files.WithoutCompiled()
    spec = finder.find_spec(vllm_files.EMPTY)
    assert spec is not None
    assert spec.loader is finder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stand_in_for_an_activation(dtype: torch.dtype) -> None:
    x, out = (
        torch.randn(5, 14, generator=torch.manual_seed(0)).to(dtype),
        torch.full((5, 7), torch.nan).to(dtype),
    )
    vllm_files.silu_and_mul(out, x)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, rtol=1e-2, atol=1e-2)


def test_what_is_carried_has_no_compiled_file(tmp_path: Path) -> None:
    path = tmp_path / vllm_files.ARCHIVE
    vllm_files.archive(path)
    assert path.stat().st_size < 12 << 20
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (about,) = (name for name in names if name.endswith("METADATA"))
        assert b"\nName: vllm\nVersion: 0." in wheel.read(about)
        assert b"cpu" not in wheel.read(about), "vLLM would take it for its build for CPUs"
    assert "vllm/v1/attention/backends/triton_attn.py" in names
    assert not [name for name in names if ".so" in name]


@pytest.mark.nightly
def test_it_computes_and_loads(tmp_path: Path) -> None:
    """In Triton's interpreter, the files as they are carried: from memory, and from disk after a restart."""
    site = tmp_path / "site"
    vllm_files.archive(tmp_path / vllm_files.ARCHIVE)
    with zipfile.ZipFile(tmp_path / vllm_files.ARCHIVE) as wheel:
        wheel.extractall(site)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "OUT": str(tmp_path),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.gpu.step", "vllm_engine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    every = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    lines = {line["what"]: line for line in every}
    for what in ("from memory", "from disk, restarted"):
        assert lines[what]["right"], lines[what]
        assert set(lines[what]["cached"]) == {lines[what]["wanted"]}
    assert "error" not in lines["handed over"], lines["handed over"]
    handed = [line for line in every if line["what"] == "handed over"]
    assert handed[0]["right"]
    assert {line["cached"] for line in handed} == {lines["computed"]["tokens"] - 1}
