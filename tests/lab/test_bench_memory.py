"""vLLM's memory fits the machine, and processes killed for memory are reported as such."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.config import load_config
from kvkit.lab.files import BenchError
from kvkit.lab.serve import memory
from kvkit.lab.serve.memory import LEAST_BYTES, PROCESS_BYTES, MemoryTooSmall, share, split
from kvkit.lab.serve.systems import serving
from kvkit.lab.testbed.waiting import wait_for

GIB = 1 << 30
SIZES = st.integers(0, 1 << 40)
LIMIT = 96 << 20


@given(st.integers(2 * LEAST_BYTES, 1 << 40), st.integers(1, 8), SIZES, SIZES)
def test_all_that_is_started_fits_with_as_much_again_as_the_blocks(
    left: int, servers: int, weights: int, tiers: int
) -> None:
    beside = tiers + servers * (weights + PROCESS_BYTES)
    available = beside + servers * left
    each = split(available, servers, weights, tiers)
    assert each >= LEAST_BYTES
    assert beside + 2 * servers * each <= available
    assert split(available, servers, weights, tiers, most=GIB) == min(each, GIB)


def test_24_gib_are_enough_for_the_benchmark_as_it_is_typed() -> None:
    """A model of 0.5 GiB in float32, and tiers of 1.25 GiB: vLLM's own rule would take 22 of 22 GiB."""
    each = split(22 * GIB, 1, GIB // 2, 5 << 28)
    assert 4 * GIB < each < 12 * GIB


def test_what_does_not_fit_says_what_it_takes() -> None:
    with pytest.raises(
        MemoryTooSmall, match=r"2 vLLM servers with 3\.0 GiB of weights .* 4\.0 GiB are available"
    ):
        split(4 * GIB, 2, 3 * GIB, 0)


def test_what_the_user_says_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("--kv-cache-memory-bytes=5", "--kv_cache_memory_bytes", "--gpu-memory-utilization=0.3"):
        assert share(str(tmp_path), options=[option]).options == ()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert share(str(tmp_path)).options == ()


def test_a_share_of_this_machine_names_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(memory, "gpu_name", lambda: None)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert memory.weight_bytes(str(tmp_path)) == 2000
    found = share(str(tmp_path), most=GIB)
    assert found.options == ("--kv-cache-memory-bytes", str(found.block_bytes))
    assert found.block_bytes is not None
    assert memory.gib(found.block_bytes) in found.description


def test_servers_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_name", lambda: "a GPU")
    found = share(str(tmp_path), servers=3)
    assert (found.block_bytes, found.options) == (None, ("--gpu-memory-utilization", "0.30"))


def test_the_host_memory_of_a_configuration(tmp_path: Path) -> None:
    tiers = {"memory": {"capacity": "2GiB"}, "disk": {"url": f"file://{tmp_path}", "capacity": "9GiB"}}
    handoff = {"role": "decode", "listen": [f"unix://{tmp_path}/socket"], "buffer": "1GiB"}
    config = load_config(staging="1GiB", tiers=tiers, handoff=handoff)
    assert memory.tier_bytes(config) == 4 * GIB


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group of its own with `LIMIT` bytes of memory. It takes root."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root) / f"kvkit-tests-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            (folder / limit).write_text(str(LIMIT))
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group can be made here: it takes root and a writable /sys/fs/cgroup")


def joining(group: Path) -> str:
    """The statement by which a Python program joins the group; what it had before counts elsewhere."""
    return f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"


def test_the_limit_of_a_control_group_counts(group: Path) -> None:
    program = (
        f"from kvkit.lab.serve.memory import available_bytes\n{joining(group)}\nprint(available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0 <= int(done.stdout) <= LIMIT < memory.available_bytes()


def test_a_server_whose_child_the_kernel_kills_for_memory_is_said_so(group: Path, tmp_path: Path) -> None:
    """As vLLM's: the worker is killed, and the server ends with words that tell nothing of it."""
    worker = [sys.executable, "-c", f"{joining(group)}\nbytearray(1 << 30)"]
    server = f"import subprocess, sys\nsubprocess.run({worker!r})\nsys.exit('RuntimeError: cancelled')"
    with (
        pytest.raises(
            BenchError, match=r"it ended with 1, killed, most likely for lack of memory \(4\.0 GiB\)"
        ),
        serving("it", [sys.executable, "-c", server], os.environ, tmp_path, lambda: False, "4.0 GiB"),
    ):
        pass


def test_a_server_that_is_killed_is_said_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with (
        pytest.raises(BenchError, match="it ended with -9, killed, most likely for lack of memory:"),
        serving("it", command, os.environ, tmp_path, lambda: False),
    ):
        pass


def test_a_server_that_is_killed_while_it_serves_is_said_so(tmp_path: Path) -> None:
    """Another one, beside it, is not."""
    log = tmp_path / "it.log"

    def serves() -> bool:
        return log.exists() and log.read_text().endswith("\n")

    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]

    def converse() -> None:
        with serving("it", command, os.environ, tmp_path, serves, "1 GiB"):
            pid = int(log.read_text())
            with serving("other", [*command, "other"], os.environ, tmp_path, lambda: True):
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
                raise ValueError("turn 1: RuntimeError: cancelled")

    with pytest.raises(
        BenchError, match=r"it stopped serving, killed, most likely for lack of memory \(1 GiB\)"
    ) as caught:
        converse()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}",
    ],
)
def test_what_vllm_says_of_a_process_that_was_killed(line: str) -> None:
    assert memory.killed(memory.kills(), 1, line) == "killed, most likely for lack of memory"
    assert memory.killed(memory.kills(), 1, line.replace("-9", "1")) is None
