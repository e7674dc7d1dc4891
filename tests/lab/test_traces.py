"""Traces of every format are read in bounded memory, and errors name the line."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from memory_limits import Measured
from page_blocks import ROOT
from run_sizes import nightly
from typer.testing import CliRunner

from kvkit import cli
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.trace_files import read_lines
from kvkit.lab.simulate.traces import read_trace, write_trace
from kvkit.settings import ConfigError


def test_the_example_is_a_trace() -> None:
    example = read_trace(ROOT / "benchmarks" / "traces" / "mixed.jsonl")
    assert len(example.requests) == 240
    assert simulate(example, SimulationConfig()).hit_rate > 0.5


def test_mooncake_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 7]}',
        '{"timestamp": 0, "input_length": 1024, "output_length": 52, "hash_ids": [0, 1]}',
        "",
        '{"timestamp": 4000, "input_length": 1100, "output_length": 5, "hash_ids": [9, 1]}',
    ]
    path.write_text("\n".join(lines))
    read = read_trace(path)
    assert read.block_tokens == 512
    first, second, third = read.requests
    assert first.timestamp_ms == 0
    assert first.chunks == second.chunks, "the last block of the second is not whole"
    assert not set(third.chunks) & set(second.chunks), "after another beginning it is another chunk"
    assert simulate(read, SimulationConfig()).hit_tokens == {"memory": 1024}


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_a_trace_of_alibaba_is_read(tmp_path: Path) -> None:
    chat = {"chat_id": 4, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 35, "output_length": 20}
    more = {"chat_id": 9, "parent_chat_id": 4, "timestamp": 75, "input_length": 64, "type": "text", "turn": 2}
    last = {"chat_id": 11, "parent_chat_id": 9, "timestamp": 80, "input_length": 16}
    other = {"chat_id": 12, "parent_chat_id": 2, "timestamp": 70, "input_length": 16}
    ids = [1, 2, 3], [1, 2, 4, 5], [6], [1]
    read = read_trace(
        lines(
            tmp_path / "a.jsonl",
            *({**c, "hash_ids": i} for c, i in zip((chat, more, last, other), ids, strict=True)),
        )
    )
    assert read.block_tokens == 16
    assert [(r.timestamp_ms, r.session) for r in read.requests] == [
        (61_500, "4"),
        (70_000, "2"),
        (75_000, "4"),
        (80_000, "4"),
    ]
    first, beside, second, third = (r.chunks for r in read.requests)
    assert first == second[:2]
    assert beside == first[:1]
    assert not set(third) & set(second)


def test_texts_are_read(tmp_path: Path) -> None:
    """What an agent sent, step by step, and conversations: equal beginnings are equal chunks."""
    system, task = ({"role": "user", "content": letter * 3000} for letter in "st")
    step = {"role": "assistant", "content": "a" * 1500, "tool_calls": [{"id": "1"}]}
    found = {"role": "tool", "content": "f" * 1500}
    path = lines(
        tmp_path / "agent.jsonl",
        {"block_tokens": 100},
        {"timestamp": 5, "session": "x", "messages": [system, task, step], "tools": []},
        {"timestamp": 9, "session": "x", "messages": [system, task, step, found]},
        {"timestamp": 7, "messages": [system, found]},
    )
    read = read_trace(path)
    assert [(r.session, r.tool_call) for r in read.requests] == [("x", True), ("4", False), ("x", False)]
    first, other, second = read.requests
    size = [-(-len(json.dumps(m)) // 4) for m in (system, task, step, found)]
    assert (first.input_tokens, first.output_tokens) == (sum(size[:2]), size[2])
    assert (second.input_tokens, second.output_tokens) == (sum(size), 0)
    assert second.chunks[: len(first.chunks)] == first.chunks
    assert len(second.chunks) == second.prompt_chunks == sum(size) // 100
    shared = size[0] // 100
    assert other.chunks[:shared] == first.chunks[:shared]
    assert not set(other.chunks[shared:]) & set(first.chunks)

    said = [
        {"from": who, "value": letter * 4096}
        for who, letter in zip(("human", "gpt") * 2, "abcd", strict=True)
    ]
    talks = [{"id": 1, "conversations": said}, {"id": 2, "conversations": [*said[:2], said[0]]}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(talks, indent=1))
    one = read_trace(path)
    assert one == read_trace(lines(tmp_path / "sharegpt.jsonl", *talks)), "a list, or lines"
    assert sorted((r.session, len(r.chunks), r.prompt_chunks) for r in one.requests) == [
        ("1", 8, 4),
        ("1", 16, 12),
        ("2", 8, 4),
    ]
    assert len({name for r in one.requests for name in r.chunks}) == 16
    torn = [{"from": "human", "value": "\ud800"}, {"from": "gpt", "value": "what?"}]
    (alone,) = read_trace(lines(path, {"conversations": torn})).requests
    assert (alone.input_tokens, alone.output_tokens) == (1, 2)


def agent_session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "one", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | more


def test_sessions_of_agents_are_read(tmp_path: Path) -> None:
    """One per line: a session's ids are its own, and its subagents' too."""
    first = {"t": 0.0, "in": 2 * 1024 + 70, "out": 9, "hash_ids": list(range(33)), "stop": "tool_use"}
    edited = {"t": 50.5, "in": 2 * 1024, "out": 9, "hash_ids": [*range(16), *range(50, 66)]}
    child = {"t": 1.0, "in": 1024, "out": 3, "hash_ids": list(range(16))}
    below = {"t": 10.0, "type": "subagent", "agent_id": "agent_001", "requests": [child]}
    path = lines(
        tmp_path / "agents.jsonl", agent_session(first, below, edited), agent_session(first, id="two")
    )
    trace = read_trace(path)
    assert trace.block_tokens == 1024
    by_session: dict[str, list[Any]] = {}
    for request in trace.requests:
        by_session.setdefault(request.session, []).append(request)
    (one, later), (two,), (sub,) = (by_session[name] for name in ("one", "two", "one/agent_001"))
    assert (one.input_tokens, one.output_tokens, len(one.chunks), one.prompt_chunks) == (2118, 9, 2, 2)
    assert later.timestamp_ms - one.timestamp_ms == pytest.approx(50_500)
    assert sub.timestamp_ms - one.timestamp_ms == pytest.approx(11_000)
    assert one.chunks[:1] == later.chunks[:1] == sub.chunks
    assert one.chunks[1] != later.chunks[1]
    assert (one.tool_call, later.tool_call) == (True, False)
    write_trace(trace, tmp_path / "own.jsonl")
    again = read_trace(tmp_path / "own.jsonl").requests
    assert [r.tool_call for r in again] == [r.tool_call for r in trace.requests]
    assert not set(one.chunks) & set(two.chunks)
    assert two.timestamp_ms > one.timestamp_ms > 0
    assert [r.timestamp_ms for r in read_trace(path, 1).requests] != [r.timestamp_ms for r in trace.requests]


def test_a_folder_of_sessions_is_a_trace(tmp_path: Path) -> None:
    """Each file is a session, however it is written, and the errors name it."""
    request = {"t": 0.0, "in": 1024, "out": 9, "hash_ids": list(range(16))}
    for name in "abc":
        (tmp_path / f"{name}.json").write_text(json.dumps(agent_session(request, id=name), indent=1))
    (tmp_path / "README").write_text("not of the trace")
    read = read_trace(tmp_path)
    assert sorted(r.session for r in read.requests) == ["a", "b", "c"]
    assert read == read_trace(tmp_path), "drawn from a seed"
    (tmp_path / "b.json").write_text(json.dumps(agent_session(request | {"hash_ids": [1]})))
    with pytest.raises(ConfigError, match=r"b\.json: hash_ids: 1 ids; 1024 tokens .* have at least 16"):
        read_trace(tmp_path)
    (tmp_path / "b.json").write_text(json.dumps(agent_session(request | {"in": 0})))
    with pytest.raises(ConfigError, match=r"b\.json: .*`\$\.requests\[0\]\.in`"):
        read_trace(tmp_path)
    for name in "abc":
        (tmp_path / f"{name}.json").unlink()
    with pytest.raises(ConfigError, match=r"a folder without \.json files"):
        read_trace(tmp_path)
    header = lines(tmp_path / "agents.jsonl", {"block_tokens": 100}, agent_session(request))
    with pytest.raises(ConfigError, match=r":2: block_tokens = 100: want a multiple of block_size, 64"):
        read_trace(header)


GOOD = '{"timestamp": 0, "input_length": 1100, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no requests",)),
        (GOOD + "{", (":2", "JSON")),
        (GOOD + "[]", (":2", "object")),
        ("[{]", ("malformed",)),
        ('[{"conversations": [{"value": "Hi"}]}]', (":1", "conversations.0.from", "required")),
        ('{"timestamp": 0, "messages": []}', (":1", "messages", "at least 1")),
        (
            '{"chat_id": 1, "timestamp": 0, "input_length": 40, "hash_ids": [1]}',
            (":1", "blocks of 16", "2 to 3"),
        ),
        ('{"chat_id": [], "timestamp": 0, "input_length": 4, "hash_ids": []}', (":1", "chat_id")),
        (GOOD.replace("1100", "-3"), (":1", "input_length = -3", "greater than or equal to 1")),
        (GOOD.replace("1100", "5000"), (":1", "hash_ids: 2 ids", "blocks of 512", "9 to 10")),
        (GOOD.replace('"hash_ids": [0, 1]', '"hash_ids": ["x"]'), (":1", "hash_ids.0 = 'x'", "integer")),
        (GOOD.replace('"timestamp": 0, ', ""), (":1", "timestamp", "required")),
        (GOOD.replace("hash_ids", "hashes"), (":1", "want hash_ids or blocks")),
        (GOOD.replace("hash_ids", "blocks"), (":1", '{"block_tokens": 256}')),
        ('{"block_tokens": 0}\n' + GOOD, (":1", "block_tokens = 0")),
        (
            '{"block_tokens": 256}\n' + GOOD.replace("hash_ids", "blocks"),
            (":2", "blocks: 2 ids", "256 have 4"),
        ),
    ],
)
def test_broken_traces(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    for word in ("broken.jsonl", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("source", ["docs/research/simulate.md", "kvkit/lab/simulate/traces.py"])
def test_the_examples_of_the_page_are_read(source: str, tmp_path: Path) -> None:
    """Each line of JSON that the page and the module show, with a first line where it needs one."""
    shown = (ROOT / source).read_text()
    examples = re.findall(r"^    (\{.*\})$|\| `(\{.*?\})` \|", shown, re.MULTILINE)
    found = [line for pair in examples for line in pair if line and "block_tokens" not in line]
    assert len(found) == 5
    for example in found:
        header = '{"block_tokens": 256}\n' if '"blocks"' in example else ""
        path = tmp_path / "trace.jsonl"
        path.write_text(header + example)
        assert read_trace(path).requests, example


ENDS = "\u2028\u2029\x85"


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """Other characters that some programs take for the end of a line stand within texts."""
    said = [
        {"timestamp": i, "messages": [{"role": "user", "content": f"a{end}b"}]} for i, end in enumerate(ENDS)
    ]
    path = tmp_path / "agent.jsonl"
    path.write_bytes("\r\n".join(json.dumps(one, ensure_ascii=False) for one in said).encode())
    assert len(read_trace(path).requests) == len(ENDS)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
@pytest.mark.parametrize("name", ["lines", "list", "csv"])
def test_files_as_people_have_them(name: str, mark: bytes, compressed: bool, tmp_path: Path) -> None:
    """With a byte order mark, compressed, or both, whatever the file's name."""
    talk = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    text = {
        "lines": GOOD,
        "list": json.dumps([talk]),
        "csv": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n",
    }[name]
    plain, path = tmp_path / "plain", tmp_path / "trace"
    plain.write_text(text)
    raw = mark + text.encode()
    path.write_bytes(gzip.compress(raw) if compressed else raw)
    assert read_trace(path) == read_trace(plain)


def test_a_trace_is_read_from_a_pipe(tmp_path: Path) -> None:
    """What cannot be read twice, such as a program's output, compressed or not."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for raw in (GOOD.encode(), gzip.compress(GOOD.encode())):
        writer = threading.Thread(target=path.write_bytes, args=(raw,))
        writer.start()
        assert len(read_trace(path).requests) == 1
        writer.join()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (gzip.compress(GOOD.encode() * 100, mtime=0)[:-20], ("ended",)),
        (b"\x1f\x8b" + GOOD.encode(), ("compression method",)),
        (GOOD.encode("utf-16"), ("UTF-16", "want UTF-8")),
        (GOOD.encode() + b'{"timestamp": "\xff"}', (":2", "JSON")),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff,1,1\n", (":2", "utf-8")),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", ("no requests",)),
        (b"\n\nhello\n", (":3", "JSON lines", "'hello'")),
        (
            b"time,prompt,answer\n1,2,3\n",
            (
                ":1",
                "'time, prompt, answer'",
                "TIMESTAMP, ContextTokens, GeneratedTokens",
                "Request tokens",
                "BurstGPT",
            ),
        ),
    ],
    ids=["cut", "no gzip", "utf-16", "bytes", "csv of bytes", "header", "text", "columns"],
)
def test_files_that_are_no_traces(raw: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    for word in ("trace.csv", *words):
        assert word in str(caught.value)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:02.5+00:00,600,200
2024-05-10 02:00:01+02:00,255,0
"""
BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,1.5,ChatGPT,472,18,490,API log
45,7,2.5,GPT-4,1087,230,1317,Conversation log
46,,0,GPT-4,0,0,0,Conversation log
118.5,7,2.5,"GPT-4, later",417,276,693,Conversation log
"""


def test_csv_traces_are_read(tmp_path: Path) -> None:
    """Azure's and BurstGPT's have lengths alone: what is stored is known, and nothing is a hit."""
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    azure = read_trace(path)
    early, late = azure.requests
    assert (late.timestamp_ms - early.timestamp_ms, azure.prefixes_known) == (1500, False)
    assert (early.input_tokens, early.output_tokens, early.chunks) == (255, 0, ())
    assert (late.input_tokens, late.output_tokens, late.prompt_chunks, len(late.chunks)) == (600, 200, 2, 3)

    path.write_text(AZURE.replace("02:00:01+02:00", "00:00:01").replace("+00:00", ""))
    assert read_trace(path) == azure, "UTC where no zone is named"

    path.write_text(BURST)
    burst = read_trace(path)
    assert (burst.failed, [r.session for r in burst.requests]) == (1, ["1", "7", "7"])
    assert [r.timestamp_ms for r in burst.requests] == [5000, 45_000, 118_500]
    assert burst.requests[2].input_tokens == 417
    chunks = [name for r in burst.requests for name in r.chunks]
    assert (
        len(set(chunks))
        == len(chunks)
        == sum((r.input_tokens + r.output_tokens) // 256 for r in burst.requests)
    )
    report = simulate(burst, SimulationConfig())
    assert report.hit_rate == 0
    assert report.written_bytes["disk"] == len(chunks) * 256 * 131_072

    write_trace(burst, tmp_path / "trace.jsonl")
    assert not read_trace(tmp_path / "trace.jsonl").prefixes_known


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",600,", ",-1,", (":2", "ContextTokens = '-1'", "from 1 to")),
        (",600,", ",many,", (":2", "ContextTokens = 'many'")),
        (",200\n", ",2.5\n", (":2", "GeneratedTokens = '2.5'", "from 0 to")),
        ("2024-05-10 02", "yesterday 02", (":3", "TIMESTAMP = 'yesterday 02:00:01+02:00'", "date and time")),
        ("2024-05-10 02", "0001-01-01 00", (":3", "TIMESTAMP", "since 1970")),
        (",255,0", ",255", (":3", "2 values, want 3: TIMESTAMP, ContextTokens")),
        (",255,0", ',255,"0', (":3", "end of data")),
    ],
)
def test_broken_rows(old: str, new: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(AZURE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    for word in ("broken.csv", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("time", ["nan", "inf", "-1", "", "noon"])
def test_seconds_that_are_none(time: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(BURST.replace("118.5", time))
    with pytest.raises(ConfigError, match=rf"broken\.csv:5: Timestamp = '{time}': want seconds"):
        read_trace(path)


def test_the_command_says_what_a_csv_does_not_tell(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURST)
    out = tmp_path / "out.json"
    terminal = {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    done = CliRunner().invoke(cli.app, ["simulate", str(path), "--json", str(out)], env=terminal)
    assert done.exit_code == 0, done.output
    assert "no request is known to share a prefix" in done.output
    assert "no hits possible" in done.output
    assert "1 requests of" in done.output
    document = json.loads(out.read_text())
    assert (document["prefixes_known"], document["failed_requests"]) == (False, 1)
    done = CliRunner().invoke(cli.app, ["simulate", "chat", "--requests", "9"], env=terminal)
    assert "share a prefix" not in done.output


def test_lines_are_given_as_they_are_read(tmp_path: Path) -> None:
    """The first line of a file comes before the second is there: memory holds no whole file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    opened = threading.Thread(target=lambda: ends.append(os.open(path, os.O_WRONLY)))
    ends: list[int] = []
    opened.start()
    with path.open("rb", buffering=0) as pipe:
        opened.join()
        os.write(ends[0], b"one\n")
        lines = read_lines(f"/proc/self/fd/{pipe.fileno()}")
        assert next(lines) == b"one\n"
        os.write(ends[0], b"two\n")
        assert next(lines) == b"two\n"
        os.close(ends[0])
        assert list(lines) == []


def write_turns(path: Path, requests: int, note: str = "") -> None:
    """Conversations of three turns in Mooncake's format: five blocks on average, of which two are known."""
    with path.open("w") as file:
        for number in range(requests):
            talk, turn = divmod(number, 3)
            ids = [talk * 9 + i for i in range(2 + 3 * turn)]
            line = {"timestamp": number, "input_length": 512 * len(ids), "hash_ids": ids, "note": note}
            file.write(json.dumps(line) + "\n")


def test_memory_holds_no_text(tmp_path: Path) -> None:
    write_turns(path := tmp_path / "trace.jsonl", 400, "x" * 100_000)
    with Measured() as process:
        assert process.peak_bytes(read_trace, path, prepare=read_trace) < path.stat().st_size / 4


@pytest.mark.parametrize("requests", [30_000, *nightly(1_000_000)])
def test_the_memory_of_many_requests(requests: int, tmp_path: Path) -> None:
    """What the requests take, and the names of their chunks; `bench_simulate.py` measures time."""
    write_turns(few := tmp_path / "few.jsonl", 1)
    write_turns(many := tmp_path / "many.jsonl", requests)
    with Measured() as process:
        process.peak_bytes(read_trace, few)
        assert process.peak_bytes(read_trace, many) < 1200 * requests
