"""`kvkit bench serve` on running servers gives figures, tables, a picture and clear errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import failed, plain_terminal, run  # noqa: F401 - a fixture
from completions_server import Completions
from rich.console import Console

from kvkit.lab.serve.client import Completion
from kvkit.lab.serve.report import Measured, overheads, summarise, tables
from kvkit.lab.serve.systems import DEFAULT
from kvkit.lab.serve.workloads import CONTROL, WORKLOADS


@pytest.fixture
def servers() -> Iterator[tuple[Completions, Completions]]:
    with Completions() as one, Completions() as other:
        yield one, other


def good(ttft_s: float, again: bool = True, **fields: Any) -> Completion:
    return Completion(again, "x", ttft_s, **{"prompt_tokens": 10, "output_tokens": 2, **fields})


def test_two_servers_side_by_side(servers: tuple[Completions, Completions], tmp_path: Path) -> None:
    telling, counting = servers
    json_path, png_path = tmp_path / "serve.json", tmp_path / "serve.png"
    result = run(
        *("bench", "serve", "--url", f"telling={telling.url('good')}"),
        *("--url", f"counting={counting.url('counting')}", "--requests", "6", "--words", "64"),
        *("--rounds", "3", "--rate", "500", "--max-tokens", "3", "--json", json_path, "--png", png_path),
    )
    assert result.exit_code == 0, result.output
    assert telling.prompts == counting.prompts, "both are sent the same, in the same order"
    figures = json.loads(json_path.read_text())
    rows = {(row["workload"], row["system"]): row for row in figures["results"]}
    assert list(rows) == [(name, system) for name in WORKLOADS for system in ("telling", "counting")]
    for name in WORKLOADS:
        one, other = rows[name, "telling"], rows[name, "counting"]
        assert one["requests"] == 18
        assert one["errors"] == other["errors"] == 0
        assert one["hit_tokens"] == other["hit_tokens"]
        assert one["prompt_tokens"] == other["prompt_tokens"]
        assert one["output_tokens"] == 18 * 3
        assert (one["hit_tokens"] < 18 * 8) == (name == CONTROL)
        assert (one["ttft_s"] is None) == (name == CONTROL)
        assert (one["judged_answers"] == other["judged_answers"] > 0) == (name == "rag")
    assert list(figures["overhead"]) == ["counting"]
    assert len(figures["requests"]) == 18 * 2 * len(WORKLOADS)
    assert figures["load"]["rate"] == 500
    assert {"machine", "versions"} <= set(figures)
    for system in ("telling", "counting"):
        lines = [line for line in result.output.splitlines() if line.startswith(f"│ {system} ")]
        for name, line in zip(WORKLOADS, lines, strict=False):
            assert f"{rows[name, system]['hit_tokens']:,} of {rows[name, system]['prompt_tokens']:,}" in line
    assert png_path.read_bytes().startswith(b"\x89PNG")


def test_a_round_has_text_of_its_own(servers: tuple[Completions, Completions], tmp_path: Path) -> None:
    for seed in ("0", "2"):
        result = run(
            *("bench", "serve", "--url", servers[0].url("good"), "--workloads", "random", "--rounds", "2"),
            *("--requests", "4", "--words", "64", "--seed", seed, "--json", tmp_path / f"{seed}.json"),
        )
        assert result.exit_code == 0, result.output
    warm = 2
    control = servers[0].prompts[warm : warm + 8] + servers[0].prompts[2 * warm + 8 :]
    assert len(set(control)) == 16


def test_what_fails_is_counted_and_said(servers: tuple[Completions, Completions], tmp_path: Path) -> None:
    """It answers as long as it warms up, and then no more."""
    server = servers[0]
    url = server.url("failing-later")
    path = tmp_path / "x.json"
    result = run(
        *("bench", "serve", "--url", f"s={url}", "--workloads", "random", "--requests", "2"),
        *("--words", "64", "--json", path),
    )
    failed(result, "random on s: ", "out of memory")
    (row,) = json.loads(path.read_text())["results"]
    assert (row["requests"], row["errors"]) == (2, 2)
    assert (row["first_ttft_s"], row["ttft_s"], row["gap_s"]) == (None, None, None)
    assert "s (2 failed)" in result.stdout


def test_a_system_that_does_not_start_costs_its_own_rows(
    servers: tuple[Completions, Completions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's server without a library that it needs, beside one that answers and one that does not."""
    pytest.importorskip("vllm")
    package = tmp_path / "lmcache" / "lmcache" / "v1" / "multiprocess"
    package.mkdir(parents=True)
    missing = "libibverbs.so.1: cannot open shared object file"
    (package / "server.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.setenv("KVKIT_PEERS", str(tmp_path))
    path = tmp_path / "x.json"
    url, hanging = (servers[0].url(way) for way in ("good", "hanging"))
    result = run(
        *("bench", "serve", "--systems", "lmcache", "--url", f"s={url}", "--url", f"late={hanging}"),
        *("--workloads", "random", "--requests", "2", "--words", "64", "--timeout-s", "2", "--json", path),
    )
    assert result.exit_code == 1
    for words in ("lmcache-server ended with 1", missing, "late: ", "not answered within 2 s"):
        assert words in result.stderr
    assert "│ s " in result.stdout
    written = json.loads(path.read_text())
    assert [(row["system"], row["errors"]) for row in written["results"]] == [("s", 0)]
    assert missing in written["left_out"]["lmcache"]
    assert "not answered within 2 s" in written["left_out"]["late"]


def test_a_server_that_does_not_answer(servers: tuple[Completions, Completions], tmp_path: Path) -> None:
    failed(
        run(
            *("bench", "serve", "--url", f"s={servers[0].url('hanging')}", "--timeout-s", "0.3"),
            *("--json", tmp_path / "x.json"),
        ),
        "s: http://127.0.0.1",
        "does not answer: not answered within 0.3 s",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workloads", "chat,chta"), ("workloads = 'chta'", "document-qa", "chat", "random")),
        (("--workloads", "chat,chat"), ("workloads = 'chat,chat'", "once")),
        (("--systems", "sglang"), ("systems = 'sglang'", "plain, prefix-caching, kvkit, kvkit-blend")),
        (("--url", "nowhere"), ("url = 'nowhere'", "want http://HOST:PORT")),
        (("--url", "a=http://127.0.0.1:1"), ("http://127.0.0.1:1: no OpenAI-compatible server", "refused")),
        (("--json", "/absent/x.json"), ("/absent/x.json", "no folder")),
        (("--png", "/absent/x.png"), ("/absent/x.png", "no folder")),
        (("--config", "/absent.toml"), ("/absent.toml", "No such file")),
        (("--vllm", "it's"), ('vllm = "it\'s"', "quotation")),
    ],
)
def test_wrong_settings(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    failed(run("bench", "serve", *arguments), *words)


def test_a_wrong_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kvkit.toml"
    path.write_text("chunk_token = 3")
    failed(run("bench", "serve", "--config", path), "chunk_token: unknown setting", "'chunk_tokens'")


def test_nothing_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = run("bench", "serve", "--json", tmp_path / "x.json")
    failed(result, "nothing to measure", "--url")
    for system in DEFAULT:
        assert f"{system}: left out, vLLM is not installed" in result.stdout


def test_two_servers_of_one_name(servers: tuple[Completions, Completions], tmp_path: Path) -> None:
    urls = [word for s in servers for word in ("--url", f"s={s.url('good')}")]
    failed(run("bench", "serve", *urls, "--json", tmp_path / "x.json"), "names are s, s", "NAME=URL")


@pytest.mark.parametrize("option", ["--requests", "--words", "--concurrency", "--rounds", "--rate"])
def test_impossible_numbers(option: str) -> None:
    result = run("bench", "serve", option, "0")
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_summary_is_of_good_answers_by_kind() -> None:
    answers = [good(float(i), gaps_s=(i / 100,)) for i in range(1, 101)]
    answers += [good(500.0, again=False), Completion(True, error="late", total_s=9.0)]
    found = summarise(Measured("s", "chat", tuple(answers), 10.0, 40))
    assert found["ttft_s"] == {"mean": 50.5, "p50": 50.0, "p99": 99.0}
    assert found["first_ttft_s"] == {"mean": 500.0, "p50": 500.0, "p99": 500.0}
    assert (found["gap_s"]["p50"], found["gap_s"]["p99"]) == (0.5, 0.99)
    assert (found["requests"], found["errors"], found["prompt_tokens"]) == (102, 1, 1010)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (10.1, 121.2)


def test_exact_answers_are_counted_where_they_are_known() -> None:
    judged = Measured("s", "rag", (good(1.0), good(1.0, exact=True), good(1.0, exact=False)), 1.0, 0)
    found = summarise(judged)
    assert (found["exact_answers"], found["judged_answers"]) == (1, 2)
    assert summarise(Measured("s", "chat", (good(1.0),), 1.0, 0))["exact_answers"] is None
    console = Console(record=True, width=200)
    console.print(tables([judged])[0])
    assert "1 of 2" in console.export_text()


def test_rounds_add_up_and_unknown_hits_stay_unknown() -> None:
    one = Measured("s", "chat", (good(1.0),), 2.0, 5)
    two = Measured("s", "chat", (good(2.0),), 3.0, 6)
    assert one + two == Measured("s", "chat", (good(1.0), good(2.0)), 5.0, 11)
    unknown = one + Measured("s", "chat", (), 0.0, None)
    assert unknown.hit_tokens is None
    console = Console(record=True, width=200)
    for table in tables([unknown]):
        console.print(table)
    assert "?" in console.export_text()


def test_overheads_are_ratios_request_by_request() -> None:
    def control(system: str, *ttft_s: float) -> Measured:
        return Measured(system, CONTROL, tuple(good(t, again=False) for t in ttft_s), 1.0, 0)

    plain = control("plain", 1.0, 2.0, 4.0, 8.0)
    failing = Measured("x", CONTROL, (Completion(False, error="e"), *plain.answers[1:]), 1.0, 0)
    chat = Measured("kvkit", "chat", (good(9.0),), 1.0, 0)
    found = overheads([chat, plain, control("kvkit", 1.1, 2.0, 6.0, 24.0), failing])
    assert found["kvkit"]["median"] == pytest.approx(1.3)
    assert (found["kvkit"]["p25"], found["kvkit"]["p75"]) == (pytest.approx(1.075), pytest.approx(1.875))
    assert found["x"] == {"median": 1.0, "p25": 1.0, "p75": 1.0}
    assert overheads([chat]) == overheads([plain]) == {}
