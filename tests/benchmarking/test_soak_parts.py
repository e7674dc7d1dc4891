"""The soaks of handoff, router and shared memory, and the command that runs them all, pass within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from benchmarks.soak import __main__ as soak
from kvkit.environment import describe

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # beside others


def quick(name: str, folder: Path) -> dict[str, Any]:
    """What `python -m benchmarks.<name> --quick` finds; nothing is wrong, and nothing grew."""
    path = folder / "found.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["wrong"] == []
    assert {"machine", "versions", "command", "seconds", "done", "faults"} <= found.keys()
    for flat in found["flat"].values():
        assert flat["not_flat"] == []
        assert len(flat["rests"]) == 4
    return found


def test_handoff(tmp_path: Path) -> None:
    found = quick("soak.handoff", tmp_path)
    assert found["done"]["requests"] >= 120
    assert found["outcomes"]["done"] > 0
    assert found["done"]["of them used where it is checked"] > 0
    assert found["killed"]["senders"] > 0


def test_router(tmp_path: Path) -> None:
    found = quick("soak.router", tmp_path)
    done = found["done"]
    assert done["requests"] >= 80
    assert done["requests"] == done["right"] + done["errors"] + done["clients that left"]
    assert done["right"] > 40
    assert done["compared"] == 4 * 3 * 2
    assert sum(found["spoiled"].values()) == found["faults"]["answers"] > 0
    assert sum(found["ways"].values()) > 0, "the router noticed none"


def test_shared_memory(tmp_path: Path) -> None:
    found = quick("soak.shm", tmp_path)
    assert min(found["calls"]["store"], found["calls"]["load"]) > 0
    assert found["done"]["calls"] >= 300
    assert found["done"]["chunks loaded and compared"] > found["done"]["of them when all rested"] > 0
    assert found["faults"]["processes killed"] >= 12
    assert found["faults"]["processes stopped"] > 0


# one command


def part(**more: Any) -> dict[str, Any]:
    """What a soak reports."""
    rests = [[90.0 * n, 100.0, 20, 5] for n in range(8)]
    flat = {"mib_per_minute": 0.01, "most_mib_per_minute": 0.5, "not_flat": [], "rests": rests}
    plain = {"seconds": 7.5, "done": {"requests": 1200}, "faults": {"kill": 3}, "wrong": []}
    return plain | {"flat": {"it": flat}} | more


SAYS = """
import json, signal, sys, time
print("some words")
_, _, minutes, _, path = sys.argv[1:]
"""
"""How the part of a test begins."""


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, programs: dict[str, str], at_once: int
) -> dict[str, Any]:
    """What `Parts` makes of programs in place of soaks."""
    popen = subprocess.Popen

    def start(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        name = command[2].removeprefix("benchmarks.soak.")
        if name not in programs:  # git, which is asked for the commit
            return popen(command, **more)
        return popen([command[0], "-c", SAYS.replace("_, _, ", "_, ") + programs[name], *command[3:]], **more)

    monkeypatch.setattr(subprocess, "Popen", start)
    return soak.Parts([*programs], 0.5, at_once, folder / "soak.json").run(folder)


def writes(found: dict[str, Any]) -> str:
    return f"open(path, 'w').write({json.dumps(json.dumps(describe() | found))})"


@pytest.mark.parametrize("at_once", [1, 4])
def test_what_is_found_is_written_by_part(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = part()
    grown["flat"]["it"]["not_flat"] = ["threads: 7 in the second half, 5 in the first"]
    programs = {
        "shm": writes(part()),
        "router": writes(part(wrong=["it is not right"])),
        "vllm": "sys.exit('no such model')",
        "handoff": writes(grown),
    }
    found = run(monkeypatch, tmp_path, programs, at_once)
    assert {name for name in found if soak.is_well(found[name])} == {"shm"}
    assert "no such model" in found["vllm"]["wrong"][0]
    document = json.loads((tmp_path / "soak.json").read_text())
    assert [*document["parts"]] == [*soak.PARTS]
    assert document["parts"] == found
    assert document["command"] == f"python -m benchmarks.soak --minutes 2 --at-once {at_once}"
    assert document["machine"] == describe()["machine"]
    head, *table = soak.rows(document)
    assert [len(row) for row in table if row[0] != "vLLM"] == [len(head)] * 3
    assert table[-1] == [
        *(
            "shared memory",
            "8",
            "requests 1,200",
            "kill 3",
            "0",
            "+0.01, at most 0.5",
            "20, then 20",
            "5, then 5",
        )
    ]


def test_what_is_run_alone_leaves_the_others_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "soak.json"
    before = {"command": "python -m benchmarks.soak", "parts": {"vllm": part(), "shm": part(wrong=["it"])}}
    path.write_text(json.dumps(before))
    run(monkeypatch, tmp_path, {"shm": writes(part(seconds=9.0))}, 1)
    after = json.loads(path.read_text())
    assert after["parts"] == {"vllm": part(), "shm": part(seconds=9.0)}
    assert after["command"] == before["command"]


def test_what_was_done_before_a_signal_is_kept(tmp_path: Path) -> None:
    """Those under way are told, and no other begins."""
    program = f"""
import json, pathlib, signal, sys
from benchmarks.soak import __main__ as soak
folder = pathlib.Path({str(tmp_path)!r})
popen = soak.subprocess.Popen
says = '''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait([signal.SIGTERM])
open(sys.argv[-1], "w").write(sys.argv[1])
'''
found = {json.dumps(part())!r}
python = [sys.executable, "-c", says, found]

def instead(command, **more):
    is_soak = command[2].startswith("benchmarks.soak.")
    return popen([*python, *command[3:]] if is_soak else command, **more)

soak.subprocess.Popen = instead
sys.argv[1:] = ["--at-once", "1", "--json", str(folder / "soak.json")]
sys.exit(soak.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["parts"] == {"vllm": part()}, done.stderr
    assert "vLLM | 8 | requests 1,200" in done.stdout
