"""The simulator counts the hits that the real cache has, and reports invalid settings."""

from __future__ import annotations

import json
import uuid
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ByteSize
from trace_replay import Real
from typer.testing import CliRunner, Result

from kvkit import cli
from kvkit.lab.simulate.config import SimulatedTier, SimulationConfig, load_simulation
from kvkit.lab.simulate.model import Simulator, simulate
from kvkit.lab.simulate.report import as_json, compare, parse_snapshots, parse_sweep, summary
from kvkit.lab.simulate.traces import GENERATORS, Request, Trace, mixed, read_trace, write_trace
from kvkit.settings import ConfigError
from kvkit.tiers import memory as tiers_memory
from kvkit.tiers import store_index
from kvkit.tiers.eviction.plugins import POLICIES
from kvkit.tiers.shm.file import pool_path
from kvkit.transfer.policy import Policy

CHUNK = 1000  # bytes of a simulated chunk: 10 tokens of 100 bytes


def request(
    chunks: str, answer: str = "", time_s: float = 0.0, session: str = "s", extra: int = 0
) -> Request:
    """A request whose chunks are letters, each named by what precedes it; `extra` tokens fill none."""
    names = tuple((chunks + answer)[: i + 1] for i in range(len(chunks + answer)))
    return Request(time_s * 1000, session, 10 * len(chunks) + extra, 10 * len(answer), names, len(chunks))


def config(**settings: Any) -> SimulationConfig:
    model = {"kv_bytes_per_token": 100, "prefill_tokens_per_s": 10.0}
    return SimulationConfig.model_validate({"model": model, **settings})


def trace(*requests: Request) -> Trace:
    return Trace(10, requests)


BOTH = ("memory", "disk")


class Clock:
    """In place of `time` for tiers: the time of the last request."""

    now_s = 0.0

    def at(self, request: Request) -> Request:
        self.now_s = request.timestamp_ms / 1000
        return request

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("eviction", "memory", "disk", "policy"),
    [
        *((eviction, 12, 60, Policy(BOTH, BOTH, ("memory",))) for eviction in POLICIES),
        *((eviction, 6, 25, Policy(BOTH, BOTH, ("memory",))) for eviction in POLICIES),
        ("lru", 20, None, Policy(BOTH, ("disk",), ("memory",))),
        ("arc", 20, 40, Policy(BOTH, BOTH)),
    ],
)
def test_hits_by_tier_are_those_of_the_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eviction: str,
    memory: int,
    disk: int | None,
    policy: Policy,
) -> None:
    """The cache's tiers have the trace's clock, from which one of the policies learns."""
    clock = Clock()
    for module in (tiers_memory, store_index):
        monkeypatch.setattr(module, "time", clock)
    requests = mixed(45, seed=3, block_tokens=2048).requests
    tiers = {
        "memory": SimulatedTier(capacity=ByteSize(memory * CHUNK), in_memory=True, eviction=eviction),
        "disk": SimulatedTier(capacity=None if disk is None else ByteSize(disk * CHUNK), eviction=eviction),
    }
    names = {
        "retrieve_from": policy.retrieve_from,
        "store_to": policy.store_to,
        "write_back_to": policy.write_back_to,
    }
    simulator = Simulator(config(tiers=tiers, policy=names), 10)
    real = Real(tmp_path, memory, disk, eviction, policy)
    with real.cache:
        simulated = [simulator.serve(r).by_tier() for r in requests]
        found = [real.serve(clock.at(r)) for r in requests]
        assert simulated == found
        evicted = simulator.finish().evicted_chunks
        assert {t: real.cache.tiers[t].evicted for t in tiers} == {t: evicted[t] for t in tiers}
    assert evicted["memory"]
    assert sum(hits.get("memory", 0) for hits in found)
    assert sum(hits.get("disk", 0) for hits in found)


@pytest.mark.parametrize(("memory", "disk"), [(12, 60), (25, None)])
def test_fewer_bits_are_those_of_the_cache(tmp_path: Path, memory: int, disk: int | None) -> None:
    """What lies on disk in int8 is neither written back nor built on, and takes as much less room."""
    requests = mixed(45, seed=3, block_tokens=2048).requests
    room = None if disk is None else disk * CHUNK // 2
    tiers = {
        "memory": {"capacity": memory * CHUNK, "in_memory": True},
        "disk": {"capacity": room, "precision": "int8"},
    }
    names = {"retrieve_from": ("disk", "memory"), "store_to": BOTH, "write_back_to": ("memory",)}
    model = {"kv_bytes_per_token": 100, "prefill_tokens_per_s": 10.0, "item_bytes": 4, "head_size": 4}
    settings = SimulationConfig.model_validate({"model": model, "tiers": tiers, "policy": names})
    assert settings.bytes_per_token("disk") == 50
    simulator = Simulator(settings, 10)
    real = Real(tmp_path, memory, disk, "lru", Policy(**names), precision="int8")
    with real.cache:
        simulated = [simulator.serve(r).by_tier() for r in requests]
        found = [real.serve(r) for r in requests]
        assert simulated == found
        report = simulator.finish()
        evicted = {t: real.cache.tiers[t].evicted for t in tiers}
    assert evicted == {t: report.evicted_chunks[t] for t in tiers}
    assert report.read_bytes["disk"] == CHUNK // 2 * sum(hits.get("disk", 0) for hits in found) > 0
    assert not report.write_back_bytes["memory"]


@pytest.mark.parametrize(("memory", "share"), [(12, 0), (40, 1)])
def test_engines_of_one_host_hit_what_the_others_stored(tmp_path: Path, memory: int, share: int) -> None:
    """Two caches of one pool and one folder. `share`: of so many requests, one goes to any of the two."""
    requests = mixed(30, seed=share, block_tokens=2048).requests
    moved = [replace(r, session=str(i)) if share and i % share == 0 else r for i, r in enumerate(requests)]
    tiers = {
        "memory": {"scope": "host", "capacity": memory * CHUNK, "in_memory": True},
        "disk": {"scope": "shared"},
    }
    simulator = Simulator(config(nodes={"both": 2, "per_host": 2}, tiers=tiers), 10)
    policy, url = Policy(BOTH, BOTH, ("memory",)), f"shm://test-{uuid.uuid4().hex}"
    with ExitStack() as stack:
        stack.callback(Path(pool_path(url)).unlink)
        reals = [Real(tmp_path, memory, None, "lru", policy, url) for _ in range(2)]
        for real in reals:
            stack.enter_context(real.cache)
        stored: dict[str, int] = {}
        theirs = 0
        for r in moved:
            number = zlib.crc32(r.session.encode()) % 2
            found = reals[number].serve(r)
            assert simulator.serve(r).by_tier() == found
            in_pool = r.chunks[: found.get("memory", 0)]
            theirs += sum(stored.get(name, number) != number for name in in_pool)
            stored |= {name: number for name in r.chunks if name not in stored}
        evicted = sum(real.cache.tiers["memory"].evicted for real in reals)
        assert evicted == simulator.finish().evicted_chunks["memory"] > 0
        assert theirs > 0, "one hit what the other stored"


def test_each_host_has_its_own_pool() -> None:
    tiers = {"pool": {"scope": "host", "capacity": 100 * CHUNK, "in_memory": True, "price_per_gb_month": 1e6}}
    nodes = {"both": 4, "per_host": 2, "route": "round-robin"}
    report = simulate(trace(*[request("ab")] * 4), config(nodes=nodes, tiers=tiers))
    assert report.hit_tokens == {"pool": 2 * 19}, "the second engine of each host"
    assert report.cost_per_month == {"pool": pytest.approx(2 * 100 * CHUNK / 1e9 * 1e6)}


def test_a_second_turn_by_hand() -> None:
    tiers = {
        "memory": SimulatedTier(capacity=ByteSize(2 * CHUNK), in_memory=True),
        "disk": SimulatedTier(bandwidth=ByteSize(500), latency_ms=250.0, price_per_gb_month=1e6),
    }
    report = simulate(trace(request("ab", "c"), request("abcd", time_s=1.0)), config(tiers=tiers))
    # ab, then c; memory keeps the beginning of what is too long for it
    assert report.requests == 2
    assert report.prompt_tokens == 60
    assert report.hit_tokens == {"memory": 20, "disk": 10}
    assert report.computed_tokens == 30
    assert report.hit_rate == 0.5
    assert report.read_bytes == {"memory": 2000, "disk": 1000}
    assert report.written_bytes == {"memory": 2000, "disk": 4000}
    assert report.write_back_bytes == {"memory": 0}, "no room"
    assert report.refused_chunks["memory"] == 4, "c and d; c again from disk; c and d again"
    assert report.peak_bytes == {"memory": 2000, "disk": 4000}
    memory_s = 2000 / tiers["memory"].bandwidth
    assert report.ttft_s == pytest.approx([2.0, memory_s + 0.25 + 1000 / 500 + 1.0])
    assert report.wait_s == pytest.approx([0.0, 1.0]), "the node was busy until 2 s"
    assert report.cost_per_month == {"memory": 0.0, "disk": pytest.approx(4000 / 1e9 * 1e6)}


def test_the_last_token_is_always_computed() -> None:
    report = simulate(trace(request("ab"), request("ab")), config())
    assert report.hit_tokens == {"memory": 19}
    assert report.computed_tokens == 21


def test_handed_over_is_what_the_decode_node_lacks() -> None:
    nodes = {"prefill": 1, "decode": 1}
    tiers = {"memory": SimulatedTier(capacity=ByteSize(100 * CHUNK), in_memory=True)}
    handoff = {"bandwidth": 1000, "latency_ms": 500}
    report = simulate(
        trace(request("ab", "c", extra=5), request("abcd", time_s=99)),
        config(nodes=nodes, tiers=tiers, handoff=handoff),
    )
    assert report.hit_tokens == {"memory": 20}, "the prefill node never saw the answer"
    assert report.decode_hit_tokens == {"memory": 30}, "the decode node made it"
    assert report.handoff_bytes == (25 + 10) * 100
    assert report.ttft_s == pytest.approx([2.5 + 0.5 + 2.5, 2.0 + 0.5 + 1.0], rel=1e-6)
    assert report.peak_bytes["memory"] == 8 * CHUNK, "abcd on both"


def test_roles_have_policies_of_their_own() -> None:
    tiers = {
        "memory": {"capacity": 100 * CHUNK, "in_memory": True},
        "store": {"scope": "shared"},
    }
    policy = {"prefill": {"store_to": ["memory"]}, "decode": {"store_to": ["store"], "write_back_to": []}}
    report = simulate(
        trace(request("ab", "c"), request("abcd")),
        config(nodes={"prefill": 2, "decode": 2, "route": "round-robin"}, tiers=tiers, policy=policy),
    )
    assert report.hit_tokens == {"store": 30}, "what one decode node stored, the other prefill node finds"
    assert report.write_back_bytes == {"memory": 3 * CHUNK}
    assert report.written_bytes == {"memory": (2 + 3 + 1) * CHUNK, "store": 4 * CHUNK}


@pytest.mark.parametrize(
    ("route", "hits"), [("session", 40), ("prefix", 40), ("round-robin", 0), ("least-busy", 0)]
)
def test_routes(route: str, hits: int) -> None:
    served = [request("ab", "cd", session="x"), request("abcde", session="x")]
    report = simulate(trace(*served), config(nodes={"both": 2, "route": route}))
    assert report.hit_tokens.total() == hits


def test_staging_only_leaves_memory_out() -> None:
    report = simulate(trace(request("ab"), request("abc")), config(policy={"staging_only": True}))
    assert report.hit_tokens == {"disk": 20}
    assert set(report.peak_bytes) == {"disk"}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators(name: str) -> None:
    made = GENERATORS[name](120, 7)
    assert made == GENERATORS[name](120, 7)
    assert made != GENERATORS[name](120, 8)
    assert len(made.requests) == 120
    times = [r.timestamp_ms for r in made.requests]
    assert times == sorted(times)
    parents: dict[str, str | None] = {}
    for r in made.requests:
        assert r.prompt_chunks == r.input_tokens // made.block_tokens
        assert len(r.chunks) == (r.input_tokens + r.output_tokens) // made.block_tokens
        for before, chunk in zip((None, *r.chunks), r.chunks, strict=False):
            assert parents.setdefault(chunk, before) == before, "a name has one past"
    report = simulate(made, SimulationConfig())
    assert report.hit_rate > 0.1
    assert report.hit_tokens.total() + report.computed_tokens == report.prompt_tokens


def test_more_capacity_never_hurts_lru() -> None:
    runs = compare(mixed(120), SimulationConfig(), ["lru"], ("disk", [2**33, 2**34, 2**36]))
    rates = [run.report.hit_rate for run in runs]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    made = mixed(90, seed=1)
    write_trace(made, tmp_path / "trace.jsonl")
    read = read_trace(tmp_path / "trace.jsonl")
    assert [(r.timestamp_ms, r.session, r.input_tokens, r.output_tokens) for r in read.requests] == [
        (r.timestamp_ms, r.session, r.input_tokens, r.output_tokens) for r in made.requests
    ]
    settings = SimulationConfig().with_tiers({"memory": {"capacity": 2**31}, "disk": {"capacity": 2**33}})
    assert as_json(compare(read, settings)[0]) == as_json(compare(made, settings)[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tiers.memory]\ncapcity = 3", ("tiers.memory.capcity", "did you mean 'capacity'", "bandwidth")),
        ('[tiers.memory]\ncapacity = "4 apples"', ("tiers.memory.capacity = '4 apples'", "4GiB")),
        (
            '[tiers.memory]\neviction = "mru"',
            ("tiers.memory.eviction = 'mru'", "lru, fifo", ":Class"),
        ),
        ("[nodes]\nprefill = 2", ("prefill = 2, decode = 0",)),
        ("[nodes]\nboth = 1\nprefill = 1\ndecode = 1", ("both = N, or prefill = N",)),
        ('[nodes]\nroute = "random"', ("nodes.route = 'random'", "'session'", "'prefix'")),
        ('[policy]\nstore_to = ["dsk"]', ("store_to='dsk'", "memory, disk")),
        ('[policy.decode]\nstore_to = ["dsk"]', ("store_to='dsk'", "memory, disk")),
        ("[policy.decode]\nstore = 1", ("policy.decode.store", "did you mean 'store_to'")),
        ("[model]\nprefill_tokens_per_s = 0", ("model.prefill_tokens_per_s = 0", "greater than 0")),
        ("speed = 1", ("speed: unknown setting", "model, nodes, handoff, tiers, policy")),
        ("tiers = {}", ("tiers", "at least 1")),
        ('model.state_bytes = 1\ntiers.disk.precision = "fp8"', ("tiers.disk.precision", "state_bytes")),
        ("[model", ("sim.toml",)),
    ],
)
def test_broken_configurations(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "sim.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_simulation(path)
    for word in ("sim.toml", *words):
        assert word in str(caught.value)


def test_the_configuration_of_the_module_text_is_read(tmp_path: Path) -> None:
    import kvkit.lab.simulate.config as module

    text = "\n".join(line[4:] for line in str(module.__doc__).splitlines() if line.startswith("    "))
    path = tmp_path / "sim.toml"
    path.write_text(text)
    read = load_simulation(path)
    assert list(read.tiers) == ["memory", "store"]
    assert read.policy_of("decode").store_to == ("store",)
    assert read.policy_of("decode").write_back_to == ("memory",)
    assert read.policy_of("prefill").store_to == ("memory", "store")


def test_summary_is_the_nearest_rank() -> None:
    assert summary([float(i) for i in range(1, 101)]) == {"mean": 50.5, "p50": 50.0, "p99": 99.0}
    assert summary([]) == {"mean": 0.0, "p50": 0.0, "p99": 0.0}


def test_sweeps() -> None:
    assert parse_sweep("disk=1GiB, 1000") == ("disk", [2**30, 1000])
    for text in ("disk", "disk=", "disk=0", "disk=many"):
        with pytest.raises(ConfigError, match="TIER=SIZE"):
            parse_sweep(text)
    with pytest.raises(ConfigError, match="'dsk': no such tier; the tiers are memory, disk"):
        compare(mixed(3), SimulationConfig(), (), ("dsk", [1]))
    with pytest.raises(ConfigError, match="compare = 'mru': want one of lru"):
        compare(mixed(3), SimulationConfig(), ["mru"])


def test_snapshots_side_by_side() -> None:
    """Fewer of them take less, and are hit less; the next turn finds that of its prompt's end."""
    conversation = trace(request("ab", "cd", extra=5), request("abcdef", time_s=1.0, extra=5))
    states = config(model={"kv_bytes_per_token": 100, "state_bytes": 5000}, tiers={"disk": {}})
    runs = compare(conversation, states, snapshots=[1, 3, 0])
    assert [run.report.hit_tokens["disk"] for run in runs] == [40, 30, 20]
    assert [run.report.written_bytes["disk"] for run in runs] == [6000 + n * 5000 for n in (6, 3, 2)]
    assert [run.report.read_bytes["disk"] for run in runs] == [5000 + n * 1000 for n in (4, 3, 2)]
    last = compare(trace(request("ab"), request("ab")), states, snapshots=[0])[0].report
    assert last.hit_tokens["disk"] == 10, "the state after the last token is of no use"
    with pytest.raises(ConfigError, match="snapshots: the model has no states"):
        compare(conversation, SimulationConfig(), snapshots=[1])
    with pytest.raises(ConfigError, match="snapshots = '1,x': want whole numbers"):
        parse_snapshots("1,x")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(
        cli.app, ["simulate", *map(str, arguments)], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    )


def test_the_command_compares_and_writes(tmp_path: Path) -> None:
    out, png, saved = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "trace.jsonl"
    options = ("--requests", "60", "--compare", "lru,s3fifo", "--sweep", "memory=1GiB,4GiB")
    result = run("agents", *options, "--json", out, "--png", png, "--save", saved)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [(r["policy"], r["capacity_bytes"] >> 30) for r in document["runs"]] == [
        ("lru", 1),
        ("lru", 4),
        ("s3fifo", 1),
        ("s3fifo", 4),
    ]
    for found in document["runs"]:
        assert f"{found['hit_rate']:.1%}" in result.output
        assert f"{found['share_of_bound']:.1%}" in result.output
        assert found["hit_rate"] < found["hit_rate_bound"] * 1.001 < 1
        assert found["share_of_bound"] == found["hit_rate"] / found["hit_rate_bound"]
    assert png.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.json"
    assert run(saved, *options[2:], "--json", again).exit_code == 0
    assert json.loads(again.read_text())["runs"] == document["runs"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing.jsonl",), ("nothing.jsonl", "No such file")),
        (("chat", "--config", "nothing.toml"), ("nothing.toml", "No such file")),
        (("chat", "--compare", "best"), ("compare = 'best'", "lru")),
        (("chat", "--sweep", "memory"), ("TIER=SIZE",)),
        (("chat", "--requests", "5", "--json", "/nowhere/out.json"), ("/nowhere/out.json",)),
        (("chat", "--requests", "5", "--png", "/nowhere/out.png"), ("/nowhere/out.png",)),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr
