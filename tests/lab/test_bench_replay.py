"""Prompts made from a trace share the chunks that the trace's requests share, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import failed, plain_terminal, run  # noqa: F401 - a fixture
from completions_server import Completions, common
from msgspec.structs import replace

from kvkit.lab.serve.replay import prompts_alone, replayed
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.traces import Request, Trace, read_trace, trace_of, write_trace

BLOCK = 16


def request(at_ms: float, session: str, tokens: int, *chunks: str, answer: int = 0) -> Request:
    whole = tokens // BLOCK
    return Request(at_ms, session, tokens, answer, chunks, whole)


TRACE = Trace(
    BLOCK,
    (
        request(1000, "a", 40, "1", "2"),
        request(2000, "b", 16, "1"),
        request(3000, "a", 64, "1", "2", "3", "4", "5", answer=16),
        request(5000, "b", 70, "1", "2", "3", "6"),
        request(5500, "c", 9),
    ),
)


def test_prompts_share_what_chunks_share() -> None:
    for trace in (TRACE, trace_of("chat", 20)):
        sent = replayed(trace, 0, 20)
        assert [len(one.text.split()) for one in sent] == [one.input_tokens for one in trace.requests]
        for i, one in enumerate(trace.requests):
            for j, other in enumerate(trace.requests[:i]):
                mine, theirs = one.chunks[: one.prompt_chunks], other.chunks[: other.prompt_chunks]
                alike = next((n for n, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y), None)
                alike = min(len(mine), len(theirs)) if alike is None else alike
                assert common(sent[i].text, sent[j].text) // trace.block_tokens == alike
        assert [one.again for one in sent] == [
            any(one.chunks[:1] == e.chunks[:1] for e in trace.requests[:i]) and one.prompt_chunks > 0
            for i, one in enumerate(trace.requests)
        ]


def test_times_and_sessions() -> None:
    assert [one.arrival_s for one in replayed(TRACE, 0, 9, speed=2)] == [0, 0.5, 1, 2, 2.25]
    assert [one.arrival_s for one in replayed(TRACE, 0, 9)] == [0] * 5
    assert [one.session for one in replayed(TRACE, 0, 4)] == [0, 1, 0, 1]
    assert not any(one.follows for one in replayed(TRACE, 0, 9))
    assert replayed(TRACE, 0, 9) != replayed(TRACE, 1, 9)


def test_a_server_is_sent_the_trace(tmp_path: Path) -> None:
    """It is hit as the simulation says of a cache with room for all, but for what fills no chunk."""
    path = tmp_path / "trace.jsonl"
    write_trace(TRACE, path)
    with Completions() as server:
        result = run(
            *("bench", "serve", "--url", f"one={server.url('good')}", "--trace", path, "--max-tokens", "1"),
            *("--speed", "1000", "--json", tmp_path / "serve.json"),
        )
        assert result.exit_code == 0, result.output
        prompts = server.prompts[2:]  # after the warm-up
    assert prompts == [one.text for one in replayed(read_trace(path), 0, 9)]
    figures = json.loads((tmp_path / "serve.json").read_text())
    (row,) = figures["results"]
    assert (row["workload"], row["prompt_tokens"]) == ("trace", 40 + 16 + 64 + 70 + 9)
    report = simulate(prompts_alone(TRACE, 9), SimulationConfig())
    assert (
        row["hit_tokens"] == sum((0, 16, 32, 48, 0)) == report.hit_tokens.total() + 1
    )  # of b's 16, one less
    assert figures["command"].startswith(f"kvkit bench serve --trace {path} --speed 1000")


def test_answers_that_call_tools_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first, *rest = TRACE.requests
    write_trace(Trace(BLOCK, (replace(first, tool_call=True), *rest)), path)
    with Completions() as server:
        marked = ("--trace", path, "--speed", "1000", "--tool-call-token", "11")
        target = ("--url", f"one={server.url('good')}", "--json", tmp_path / "out.json")
        result = run("bench", "serve", *target, *marked)
        assert result.exit_code == 0, result.output
        biases = [body.get("logit_bias") for body in server.bodies[2:]]  # after the warm-up
    assert biases == [{"11": 100}, None, None, None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "chat", "--rate", "3"], "trace = 'chat': want no workloads and no rate"),
        (["--trace", "chat", "--workloads", "rag"], "trace = 'chat': want no workloads"),
        (["--speed", "3"], "speed = 3: it applies to a trace"),
        (["--tool-call-token", "3"], "tool_call_token = 3: it applies to a trace"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_does_not_go_together(options: list[str], message: str) -> None:
    failed(run("bench", "serve", "--url", "http://127.0.0.1:9", *options), message)
