"""The benchmark of prefill and decode engines runs its conversation on engines of a toy model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from completions_server import Completions
from rich.console import Console
from typer.testing import CliRunner

from kvkit.cli import app
from kvkit.config import load_config
from kvkit.lab.demo import pd
from kvkit.lab.demo.pd import FLOWS, TURNS, PdTurn
from kvkit.lab.files import BenchError
from kvkit.lab.serve.client import connect, loaded_tokens
from kvkit.lab.serve.systems import routed
from kvkit.lab.testbed.openai_engine import OpenAIEngine


@pytest.fixture
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[OpenAIEngine]:
    return [OpenAIEngine(tmp_path_factory.mktemp(role)) for role in ("prefill", "decode")]


def test_a_conversation_goes_over_both_engines(engines: list[OpenAIEngine], tmp_path: Path) -> None:
    prefill, decode = engines
    said: list[str] = []
    with prefill, decode:
        alone = pd.converse(connect("alone", decode.url), [], said.append)
        seen = len(decode.seen())
        with routed(prefill.url, decode.url, tmp_path, "unix:///nowhere") as url:
            both = pd.converse(connect("router", url), [], said.append)
        assert [answer.text for answer, _ in both] == [answer.text for answer, _ in alone]
        assert len(prefill.seen()) == len(decode.seen()) - seen == TURNS
        given = [request["body"]["kv_transfer_params"]["handoff"] for request in prefill.seen()]
        assert given == ["unix:///nowhere"] * TURNS
        asked = [request["body"]["prompt"] for request in decode.seen()[seen:]]
    assert said == [f"{name}: turn {n + 1} of {TURNS}" for name in ("alone", "router") for n in range(TURNS)]
    for earlier, later, (answer, _) in zip(asked, asked[1:], both, strict=False):
        assert later.startswith(earlier + answer.text)


def test_a_turn_that_fails_ends_it(engines: list[OpenAIEngine], tmp_path: Path) -> None:
    decode = engines[1]
    with decode:
        decode.set(status=500)
        with pytest.raises(BenchError, match="turn 1 of alone: HTTPException: HTTP 500"):
            pd.converse(connect("alone", decode.url), [], print)


def test_what_an_engine_loaded_is_read_from_its_metrics() -> None:
    with Completions() as served:
        assert loaded_tokens(connect("s", served.url("counting"))) == {"disk": 7}
        with pytest.raises(BenchError, match="/mute/metrics: "):
            loaded_tokens(connect("s", served.url("mute")))


@pytest.mark.parametrize(
    ("cores", "halves"), [([0], ((), ())), ([2, 5], ((2,), (5,))), ([0, 1, 2], ((0,), (1, 2)))]
)
def test_each_engine_has_cores_of_its_own(cores: list[int], halves: tuple[tuple[int, ...], ...]) -> None:
    assert pd._halves(cores) == halves


def test_the_table() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(pd.table([PdTurn(900, {}, {"shared": 768, "memory": 1}, 0.5, 1.25, True)]))
    (row,) = (line for line in captured.get().splitlines() if "900 tokens" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "1",
        "900 tokens",
        "nothing",
        "768 from shared, 1 from memory",
        "0.50 s",
        "1.25 s",
        "yes",
    ]


def test_the_picture(tmp_path: Path) -> None:
    turns = [
        PdTurn(900, {}, {"handoff": 768}, 0.5, 1.25, True),
        PdTurn(
            1200, {"pool": 768, "decode": 128}, {"memory": 896, "handoff": 256, "pool": 1}, 0.5, 1.25, True
        ),
    ]
    assert pd._outside_loads(turns[0]) == [("D", "handoff", 768)]
    assert pd._outside_loads(turns[1]) == [
        ("P", "pool", 768),
        ("P", "decode", 128),
        ("D", "handoff", 256),
        ("D", "pool", 1),
    ]
    path = tmp_path / "pd.png"
    pd.draw(turns, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flow", FLOWS)
def test_the_settings_of_a_flow_are_valid_and_name_what_it_needs(flow: str, tmp_path: Path) -> None:
    texts = pd.settings(flow, "unix:///d/socket", tmp_path)
    loaded = {}
    for role, text in texts.items():
        path = tmp_path / f"{role}.toml"
        path.write_text(text)
        loaded[role] = load_config(path)
    prefill, decode = (loaded[role].resolved_policy() for role in ("prefill", "decode"))
    sought = {"handoff": (), "pool": ("pool",), "pull": ("decode",), "both": ("pool", "decode")}
    kept = {"handoff": (), "pool": ("pool",), "pull": ("memory",), "both": ("memory", "pool")}
    assert (prefill.retrieve_from, prefill.store_to) == (sought[flow], ("handoff",))
    assert (decode.retrieve_from, decode.store_to) == (("handoff", *kept[flow]), kept[flow])


def test_an_unknown_flow_is_refused() -> None:
    done = CliRunner().invoke(app, ["demo", "--pd", "--flow", "up"])
    assert done.exit_code == 1
    assert "flow = 'up': want one of handoff, pool, pull, both" in done.output


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = CliRunner().invoke(app, ["demo", "--pd"])
    assert done.exit_code == 1
    assert "demo --pd: vLLM is not installed" in done.output
