"""`kvkit prove` finds every planted defect in real engines, and none in kvkit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from broken_connector import ANOTHERS, FAULTS, NOTHING
from rich.console import Console
from small_models import save_with_tokenizer
from vllm_engine import BLOCK, Settings, connector, on_disk
from vllm_server import Served

from kvkit.lab.prove.engines import PROBE
from kvkit.lab.prove.options import ProveOptions
from kvkit.lab.prove.preparation import prepared
from kvkit.lab.prove.run import run
from kvkit.lab.prove.verdict import ScenarioVerdict
from kvkit.lab.testbed.servers import together

FIRST = {
    "stale page": r"layers\.3\.\S+, block 0, head 0",
    "wrong rank": r"layers\.0\.\S+, block 0, head 0",
    "wrong layer": r"layers\.3\.\S+, block 0, head 0",
    "off by one block": r"layers\.0\.\S+, block 1, head 0",
    "missing rotation": r"layers\.0\.\S+, block 0, head 0",
    "truncated tail": r"layers\.0\.\S+, block 1, head 0",
    ANOTHERS: r"layers\.0\.\S+, block \d, head 0",
}
"""Which page differs first, by the defect."""
assert {*FIRST} == {*FAULTS, ANOTHERS}


class Probed(Served):
    """A server that can be looked into.

    Attributes:
        caching: whether it has vLLM's own prefix cache.
    """

    caching = False

    def environment(self) -> dict[str, str]:
        return super().environment() | {"VLLM_SERVER_DEV_MODE": "1"}

    def arguments(self) -> list[str]:
        more = ["--worker-extension-cls", PROBE, "--num-gpu-blocks-override", "13", "--max-model-len", "1024"]
        own = ["--enable-prefix-caching"] if self.caching else []
        return [*super().arguments(), *more, *own]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("prove") / "model")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Probed, Probed, Probed]]:
    """One without a connector, one whose connector has the defect that a file "fault" beside its log names,
    and one with kvkit."""
    plain, folder, clean = (tmp_path_factory.mktemp(name) for name in ("reference", "broken", "kvkit"))
    (folder / "fault").write_text("")
    transfer: Settings = {
        "kv_connector": "BrokenConnector",
        "kv_connector_module_path": "broken_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder / "kv"),
            "fault_file": str(folder / "fault"),
        },
    }
    reference, broken = Probed(plain, None, model), Probed(folder, transfer, model)
    kvkit = Probed(clean, connector(on_disk(clean / "kv")), model)
    kvkit.caching = True
    with together(reference, broken, kvkit):
        yield reference, broken, kvkit


@pytest.fixture(scope="module")
def reference(servers: tuple[Probed, Probed, Probed]) -> Probed:
    return servers[0]


@pytest.fixture(scope="module")
def kvkit(servers: tuple[Probed, Probed, Probed]) -> Probed:
    return servers[2]


@pytest.fixture(scope="module")
def stored(servers: tuple[Probed, Probed, Probed]) -> Probed:
    """It has several prompts to mistake for each other, and restores them right so far."""
    reference, broken, _ = servers
    outcomes = {one.outcome for one in of_servers(reference, broken, "one token,duplicates").values()}
    assert outcomes == {"proven"}
    return broken


def prove(options: ProveOptions) -> dict[str, ScenarioVerdict]:
    said: list[str] = []
    with prepared(options, Console(quiet=True)) as proof:
        return {one.scenario: one for one in run(proof, said.append)}


def of_servers(reference: Probed, engine: Probed, scenarios: str) -> dict[str, ScenarioVerdict]:
    """The verdicts on servers that run."""
    return prove(
        ProveOptions(
            url=engine.url,
            reference=reference.url,
            scenarios=scenarios,
            seed=1,
            chunk_tokens=BLOCK,
            dtype="float32",
        )
    )


@pytest.mark.nightly
def test_the_example_connector_restores_what_was_computed_but_for_whom(
    reference: Probed, stored: Probed
) -> None:
    (stored.folder / "fault").write_text("")
    found = of_servers(reference, stored, "warm,tenants,LoRA,restart")
    outcomes = {name: one.outcome for name, one in found.items()}
    assert outcomes == {"warm": "proven", "tenants": "differs", "LoRA": "not run", "restart": "not run"}
    assert "tokens of another's KV were loaded" in found["tenants"].why
    assert found["warm"].loaded == 2 * 2 * BLOCK  # asked twice
    assert found["warm"].pages == 2 * 2 * 6 * 2  # blocks, layers, heads


@pytest.mark.parametrize("fault", FIRST)
def test_every_planted_defect_is_found(fault: str, reference: Probed, stored: Probed) -> None:
    (stored.folder / "fault").write_text(fault)
    verdict = of_servers(reference, stored, "warm")["warm"]
    assert verdict.outcome == "differs"
    assert re.search("log-probabilities|among the likeliest", verdict.why), verdict.why
    assert re.search(FIRST[fault], verdict.why), verdict.why


def test_where_nothing_is_loaded_nothing_is_proven(
    reference: Probed, stored: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkit.lab.prove.run.ATTEMPTS_S", 0.0)
    (stored.folder / "fault").write_text(NOTHING)
    verdict = of_servers(reference, stored, "warm")["warm"]
    assert (verdict.outcome, verdict.why) == ("not proven", "nothing was loaded: all was computed")


def test_kvkit_is_clean(reference: Probed, kvkit: Probed) -> None:
    found = of_servers(reference, kvkit, "")
    why = {name: one.why for name, one in found.items() if one.outcome != "proven"}
    assert list(why) == ["LoRA", "restart", "engine killed", "weights changed", "store killed"]
    assert {found[name].outcome for name in why} == {"not run"}
    assert "--store-pid" in why["store killed"]
    assert all(one.pages for one in found.values() if one.outcome == "proven")
    assert all(one.loaded for name, one in found.items() if name not in ("cold", *why))
