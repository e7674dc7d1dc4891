"""Eviction policies of other packages are found by name, or refused with the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from page_blocks import blocks, check_printed, on_page, run_shell
from repository import ROOT

from kvkit.config import load_config
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.report import compare
from kvkit.lab.simulate.traces import mixed
from kvkit.settings import ConfigError
from kvkit.staging import Staging
from kvkit.tiers.eviction.state import EvictionState, add_run, use_run
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, put, record_names

BASE = "from kvkit.tiers.eviction.policies import MAIN, SMALL, EvictionPolicy\n"
PAGE = "docs/research/own-policy.md"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that Python finds; nothing remembers it after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "own_policy.py"
    sys.modules.pop("own_policy", None)


def evicted(policy: str) -> list[str]:
    """What leaves for a last record, where the oldest alone was used again."""
    state = EvictionState(6, policy)
    assert add_run(state, ("a",), 2) == (1, [])
    assert [use_run(state, ("a",)) for _ in range(2)] == [1, 1]
    for name, size in {"b": 3, "c": 1}.items():
        assert add_run(state, (name,), size) == (1, [])
    return add_run(state, ("d",), 2)[1]


def test_the_policy_of_the_page_evicts_what_lru_keeps(module: Path) -> None:
    module.write_text(on_page("docs/research/own-policy.md", "from kvkit.tiers.eviction.policies"))
    assert evicted("lru") == ["a"]
    assert evicted("own_policy:Reused") == ["b"]


def test_the_command_of_the_page_finds_it_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "reused.py").write_text(
        on_page("docs/research/own-policy.md", "from kvkit.tiers.eviction.policies")
    )
    (tmp_path / "memory.toml").write_text(blocks(PAGE, "toml")[0].text)
    done = run_shell(on_page("docs/research/own-policy.md", "kvkit simulate agents"), tmp_path)
    check_printed(PAGE, "kvkit simulate agents", done.stdout)
    lru, _, reused = json.loads((tmp_path / "reused.json").read_text())["runs"]
    assert (lru["policy"], reused["policy"]) == ("lru", "reused:Reused")
    assert reused["hit_rate"] > lru["hit_rate"]


def test_memory_that_takes_what_returns_has_as_many_hits_as_the_page_says(tmp_path: Path) -> None:
    settings = blocks(PAGE, "toml")[2].text
    shares = []
    for text in (settings, settings.partition("[policy]")[0]):
        (tmp_path / "admit.toml").write_text(text)
        done = run_shell(on_page("docs/research/own-policy.md", "kvkit simulate rag"), tmp_path)
        (run,) = json.loads((tmp_path / "admit.json").read_text())["runs"]
        shares.append(run["hit_tokens"]["memory"] / run["prompt_tokens"])
        check_printed(PAGE, "kvkit simulate rag", done.stdout)
    page = " ".join((ROOT / PAGE).read_text().split())
    assert (
        "It prints {:.1f} % of hits from memory, where the same file without `[policy]` has {:.1f} %".format(
            *(100 * share for share in shares)
        )
        in page
    )


@pytest.mark.nightly
def test_commands_that_read_a_configuration_find_it_there(tmp_path: Path) -> None:
    (tmp_path / "reused.py").write_text(
        on_page("docs/research/own-policy.md", "from kvkit.tiers.eviction.policies")
    )
    tier = {"url": str(tmp_path / "kv"), "capacity": "1MiB", "eviction": "reused:Reused"}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in tier.items())
    (tmp_path / "kvkit.toml").write_text(f"[tiers.disk]\n{lines}\n")
    (tmp_path / "kv").mkdir()
    command = "kvkit doctor kvkit.toml --verbose; "
    command += "kvkit inspect disk --config kvkit.toml; kvkit report --config kvkit.toml"
    assert "reused:Reused" in run_shell(command, tmp_path).stdout


def test_settings_of_the_cache_and_the_simulator_name_it(module: Path) -> None:
    module.write_text(on_page("docs/research/own-policy.md", "from kvkit.tiers.eviction.policies"))
    tier = {"capacity": "1MiB", "eviction": "own_policy:Reused"}
    assert load_config(tiers={"memory": tier}).tiers["memory"].eviction == "own_policy:Reused"
    simulated = SimulationConfig.model_validate({"tiers": {"memory": tier}})
    assert simulated.tiers["memory"].eviction == "own_policy:Reused"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_policy", "want one of lru, fifo, lfu, s3fifo, arc, sessions or package.module:Class"),
        ("own_policy:", "want package.module:name"),
        (".own_policy:Whole", "want package.module:name"),
        ("no_such_module:X", "No module named 'no_such_module'"),
        ("own_policy:Nothing", "has no attribute 'Nothing'"),
        ("own_policy:number", "is 3, want a subclass of kvkit.tiers.eviction.policies.EvictionPolicy"),
        ("own_policy:Other", "want a subclass"),
        ("own_policy:Partial", "lacks rank"),
        ("own_policy:Asking", "cannot be made without arguments"),
        ("broken_policy:X", "ZeroDivisionError"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(name: str, words: str, module: Path) -> None:
    classes = """
        number = 3
        class Other: ...
        class Partial(EvictionPolicy): ...
        class Asking(EvictionPolicy):
            def __init__(self, share): ...
            def rank(self, entry): return 0
    """
    module.write_text(BASE + dedent(classes))
    module.with_name("broken_policy.py").write_text("1 / 0")
    with pytest.raises(ConfigError) as caught:
        load_config(tiers={"memory": {"capacity": "1MiB", "eviction": name}})
    assert f"tiers.memory.eviction = {name!r}: " in str(caught.value)
    assert words in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        compare(mixed(3), SimulationConfig(), [name])
    assert f"compare = {name!r}: " in str(caught.value)
    assert words in str(caught.value)


FAILING = {
    "rank": "def rank(self, entry): return 1 / 0",
    "rank: no integer": "def rank(self, entry): return 0.5",
    "queue_of": "queued = True; rank = lambda self, entry: 0; queue_of = lambda *_: 7",
    "is_long": "queued = True; rank = lambda self, entry: 0; is_long = None\n"
    "    def queue_of(self, name, size, room): return MAIN if '/c.1.' in name else SMALL",
    "spares": "queued = True; rank = lambda self, entry: 0; spares = None",
    "evicted": "queued = True; rank = lambda self, entry: 0; evicted = None",
}


@pytest.mark.parametrize("fault", FAILING)
def test_a_policy_that_fails_leaves_a_cache_at_work(
    fault: str, module: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every put ends, and the log says why, once for each tier."""
    module.write_text(f"{BASE}class Own(EvictionPolicy):\n    {FAILING[fault]}\n")
    staging, names = Staging(SLOT_BYTES, SLOTS), record_names(6)
    own, capacity = "own_policy:Own", 3 * SLOT_BYTES
    tiers = [
        MemoryTier(staging, capacity, policy=own),
        ObjectTier(TierConfig(url=str(tmp_path / "kv"), capacity=capacity, eviction=own, threads=1)),
    ]
    for tier in tiers:
        assert [put(tier, staging, [name]) for name in names] == [[None]] * len(names)
        assert sum(tier.size(name) is not None for name in names) == 3
        assert tier.size(names[-1]) is not None
        tier.close()
    (first, second) = [r.getMessage() for r in caplog.records if "eviction policy" in r.getMessage()]
    assert first == second
    assert first.startswith(f"eviction policy own_policy:Own: {fault.partition(':')[0]}: ")


def test_a_policy_that_fails_ends_a_simulation(module: Path) -> None:
    module.write_text(f"{BASE}class Own(EvictionPolicy):\n    {FAILING['rank']}\n")
    with pytest.raises(ConfigError, match="eviction policy own_policy:Own: rank: ZeroDivisionError"):
        compare(mixed(60), SimulationConfig().with_tiers({"memory": {"capacity": 2**30}}), ["own_policy:Own"])


@pytest.mark.parametrize(
    "body",
    [
        "calls = 0\n    def rank(self, entry):\n        Own.calls += 1\n        return Own.calls",
        "queued = True; rank = lambda self, entry: 0\n    spares = lambda self, entry: True",
    ],
    ids=["a rank that always rises", "spares all"],
)
def test_a_policy_that_never_decides_ends_a_search(body: str, module: Path) -> None:
    module.write_text(f"{BASE}class Own(EvictionPolicy):\n    {body}\n")
    state = EvictionState(4, "own_policy:Own")
    for number in range(20):
        added, victims = add_run(state, (str(number),), 1)
        assert (added, len(victims)) == (1, number >= 4)
