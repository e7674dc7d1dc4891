"""The notebooks in examples/ run from top to bottom, and are committed small."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from repository import ROOT

from kvkit.adapters.huggingface import smollm2

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
CELL_TIMEOUT_S = 120
OUTPUT_BYTES = 100_000


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels are registered."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def read(path: Path) -> Any:
    return nbformat.read(path, nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]


def execute(notebook: Any, folder: Path) -> None:
    """Run every cell with `folder` as the current one. Mutates `notebook`: outputs are filled in."""
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=60,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute()
    except CellTimeoutError as error:
        pytest.fail(f"a cell took more than {CELL_TIMEOUT_S} s: {error}")
    except CellExecutionError as error:
        pytest.fail(str(error))


def printed(notebook: Any) -> str:
    """What the cells wrote to stdout."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.nightly
def test_reuse(tmp_path: Path) -> None:
    smollm2.fetch()  # not on a cell's time
    notebook = read(EXAMPLES / "01_reuse.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own asserts compare the texts; here, that a reader sees what its words say
    assert "hits: none, computed:" in text
    assert "hits: {'memory': " in text
    assert "hits: {'disk': " in text
    assert "hits: {'disk': 192}" in text, "three of the chunks, before the flipped bit"
    assert "damaged: ['layer']" in text
    assert text.count("damaged: []") == 2, "before the flip and after the repair"
    assert any("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", ()))
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_kernels(tmp_path: Path) -> None:
    """Its compile step works although tests interpret kernels: it compiles in a process of its own."""
    smollm2.fetch()
    notebook = read(EXAMPLES / "02_kernels.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own asserts compare with references; here, that a reader sees what its words say
    assert "blocks [9, 1, 4, 3] hold what was packed" in text
    assert "largest difference to keys computed at the new positions" in text
    assert "of the bound" in text
    assert "largest difference to torch's attention with a mask" in text
    assert "spilled bytes: 0" in text
    assert re.search(r"naive +352 reused, 0 of them computed again", text)
    assert re.search(r"all +352 reused, 352 of them computed again; 100% of the work; KL 0\.0000", text)
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_vllm(tmp_path: Path) -> None:
    """Every turn but the first loads what came before; documents are blended in an order they never had."""
    pytest.importorskip("vllm")
    smollm2.fetch()
    notebook = read(EXAMPLES / "03_vllm.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own asserts compare answers; here, that a reader sees what its words say
    turns = re.findall(r"prompt: (\d+) tokens, loaded: (\d+), first token: \d+ ms", text)
    assert len(turns) == 3
    assert turns[0][1] == "0"
    for (before, _), (_, loaded) in pairwise(turns):
        assert int(loaded) >= int(before) // 32 * 32
    counts = {
        name: json.loads(found.replace("'", '"')) for name, found in re.findall(r"(\w+) +(\{.*\})", text)
    }
    assert counts["naive"]["recomputed"] == counts["row"]["blended"] == 0
    assert 0 < counts["blended"]["recomputed"] < counts["blended"]["blended"]
    assert re.search(r"every row +\d+ ms, probabilities off by 0\.000", text)
    (exact,) = re.findall(r"(\d+) of \d+ tokens were exact hits", text)
    assert int(exact) == counts["naive"]["exact"], "the first document, and nothing that was blended"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_own_kernel(tmp_path: Path) -> None:
    """Tunes on the CPU, or on the GPU where there is one; compiles in a process that imports its module."""
    notebook = read(EXAMPLES / "04_own_kernel.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own asserts compare with the reference; here, that a reader sees what its words say
    assert re.search(r"forgetful, tile=1000: bounds: \d+ of \d+ numbers are off", text)
    assert text.count("right") == 11
    assert re.search(r"bounds_(host|gpu): tuned; [\d.]+ µs", text)
    assert "best" in text
    replayed = re.findall(r"(nearest|random|halving) +seed (\d): +(?:\d+% *)+$", text, re.MULTILINE)
    assert replayed == [(name, seed) for name in ("nearest", "random", "halving") for seed in "01"]
    assert text.count("0 bytes spilled") == 2
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_own_tier(tmp_path: Path) -> None:
    """The contract finds what is wrong with the first tier, and nothing with the second."""
    notebook = read(EXAMPLES / "05_own_tier.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # how much more fails is chance: threads are in each other's way
    failed = re.findall(r"^  (test_\w+)$", text, re.MULTILINE)
    assert {"test_a_missing_object_completes_with_an_error", "test_an_object_is_written_once"} <= set(failed)
    assert re.search(r"\d+ passed, 0 failed\n", text)
    assert "found: {'log': 512} - loaded: 512" in text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_eviction(tmp_path: Path) -> None:
    notebook = read(EXAMPLES / "06_eviction.ipynb")
    execute(notebook, tmp_path)
    # equal traces and settings give equal reports, so what is committed is what is printed
    assert printed(notebook) == printed(read(EXAMPLES / "06_eviction.ipynb"))
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_prefill_decode(tmp_path: Path) -> None:
    """A router and engines in processes of their own; P dies and comes back."""
    notebook = read(EXAMPLES / "07_prefill_decode.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    assert re.search(r"kvkit_router_answers_total {'status': '200'} \d+", text)
    assert "P was gone from" in text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_fewer_bits(tmp_path: Path) -> None:
    smollm2.fetch()
    notebook = read(EXAMPLES / "09_fewer_bits.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own asserts hold the divergences against the gate's limit
    assert re.search(r"fp8 +53% of the bytes", text)
    assert "found: {'memory': 192} - exact: 192" in text
    assert "found: {'disk': 192} - exact: 0" in text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_own_method(tmp_path: Path) -> None:
    smollm2.fetch()
    notebook = read(EXAMPLES / "08_own_method.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own assert compares its method with the one that it came from
    assert re.search(r"beside:NEARBY \.15, alone +rows +17%", text)
    assert "('beside:NEARBY', 'question_attention')" in text
    assert "method='cacheblend': needs deviations of a layer's K and V" in text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_jax(tmp_path: Path) -> None:
    """The engine's answers are those of transformers, computed and from tiers."""
    smollm2.fetch()
    notebook = read(EXAMPLES / "10_jax.ipynb")
    execute(notebook, tmp_path)
    text = printed(notebook)
    # the notebook's own asserts compare answers; here, that a reader sees what its words say
    assert len(re.findall(r"hits: none, computed: 942", text)) == 2
    assert re.search(r"hits: \{'disk': 896\}, computed: 46", text)
    assert "Loaded(tokens=64, by_tier={'memory': 64}" in text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where it runs"


@pytest.mark.nightly
def test_a_failing_cell_fails_the_test(tmp_path: Path) -> None:
    source = "import sys\nassert sys.executable == 'nowhere', sys.executable"
    notebook = read(EXAMPLES / "01_reuse.ipynb")
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:1]
    notebook.cells[0].source = source
    with pytest.raises(pytest.fail.Exception, match="AssertionError") as caught:
        execute(notebook, tmp_path)
    assert sys.executable in str(caught.value)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_committed_of_a_notebook_is_small_and_valid(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert len(json.dumps(outputs)) <= OUTPUT_BYTES
    assert not [output for output in outputs if output.output_type == "error"]
    for folder in (Path.home(), EXAMPLES.parent, Path(sys.prefix)):
        assert str(folder) not in path.read_text(), "no path of the machine that it ran on"


def test_the_notebooks_are_found() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "01_reuse.ipynb",
        "02_kernels.ipynb",
        "03_vllm.ipynb",
        "04_own_kernel.ipynb",
        "05_own_tier.ipynb",
        "06_eviction.ipynb",
        "07_prefill_decode.ipynb",
        "08_own_method.ipynb",
        "09_fewer_bits.ipynb",
        "10_jax.ipynb",
    ]
