"""Servers that a benchmark starts end with all their children, and failed starts are reported."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from kvkit.lab.files import BenchError
from kvkit.lab.serve import systems
from kvkit.lab.serve.systems import ended_by_sigterm, missing, serving

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether it runs: one that is dead and was not yet asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_ends_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    with serving(
        "it",
        [sys.executable, "-c", PARENT],
        os.environ,
        tmp_path,
        lambda: log.read_text().endswith("\n"),
    ):
        child = int(log.read_text())
        assert alive(child)
    while alive(child):  # SIGKILL is sent; its end is a matter of the kernel's, and of the test's deadline
        os.sched_yield()


def test_a_process_that_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(BenchError, match="it ended with 1:\nno such model"),
        serving("it", command, os.environ, tmp_path, lambda: False),
    ):
        pass


def test_what_was_wrong_first_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    """vLLM ends with 40 lines of what became of it, and `See root cause above`."""
    said = ["fine", "(EngineCore) ERROR 11-22: ValueError: no room", *(f"line {i}" for i in range(40))]
    command = [sys.executable, "-c", f"import sys; sys.exit({chr(10).join(said)!r})"]
    with (
        pytest.raises(BenchError, match=r"it ended with 1:\n.*ValueError: no room\nline 10\n(.|\n)*line 39$"),
        serving("it", command, os.environ, tmp_path, lambda: False),
    ):
        pass


def test_a_process_that_never_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "START_S", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(BenchError, match="it did not serve within"),
        serving("it", command, os.environ, tmp_path, lambda: False),
    ):
        pass


def test_lmcache_is_left_out_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("KVKIT_PEERS", str(tmp_path))
    assert missing("plain") is missing("kvkit") is None
    assert missing("lmcache") == "LMCache is neither installed nor in $KVKIT_PEERS/lmcache"
    (tmp_path / "lmcache").mkdir()
    assert missing("lmcache") is None


def test_nothing_is_started_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert {missing(system) for system in systems.SYSTEMS} == {"vLLM is not installed"}


@pytest.mark.parametrize(("blend", "chunk_tokens"), [(False, 256), (True, 128)])
def test_kvkits_servers_have_settings_that_can_be_opened(blend: bool, chunk_tokens: int) -> None:
    pytest.importorskip("vllm")
    from kvkit.adapters.vllm.settings import read_settings

    setup = systems.Setup("model", 1, None, (), Path())
    settings, config = read_settings(systems._kvkit(setup, blend)["kv_connector_extra_config"])
    assert (settings.blend is not None, config.chunk_tokens) == (blend, chunk_tokens)


def test_sigterm_ends_what_was_started(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    log = tmp_path / "it.log"
    command = [sys.executable, "-c", PARENT]
    with (
        pytest.raises(SystemExit, match="143"),
        ended_by_sigterm(),
        serving("it", command, os.environ, tmp_path, lambda: log.read_text().endswith("\n")),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    child = int(log.read_text())
    while alive(child):
        os.sched_yield()
