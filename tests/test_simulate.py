"""The simulator against the cache it simulates, against arithmetic, and its errors."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Engine, small_layout, small_namespace
from pydantic import ByteSize
from typer.testing import CliRunner, Result

from kvkit import cli
from kvkit.cache import Cache
from kvkit.format.record import RecordFormat
from kvkit.moving.policy import Policy
from kvkit.settings import ConfigError
from kvkit.simulate.config import SimulatedTier, SimulationConfig, load_simulation
from kvkit.simulate.model import Simulator, simulate
from kvkit.simulate.report import as_json, compare, parse_sweep, summary
from kvkit.simulate.traces import GENERATORS, Request, Trace, mixed, read_trace, write_trace
from kvkit.staging import Staging
from kvkit.tiers.eviction.policies import POLICIES
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig

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


class Real:
    """The requests of a trace through the real cache: memory and a folder, one thread."""

    def __init__(self, folder: Path, memory: int, disk: int | None, eviction: str, policy: Policy):
        layout = small_layout()
        space = small_namespace(layout)
        record = RecordFormat.of(layout, 0, space).record_bytes
        self.engine = Engine(layout, space, blocks=256)
        staging = Staging(record, memory + 64)
        self.cache = Cache(
            layout,
            space,
            [
                MemoryTier(staging, memory * record, policy=eviction),
                ObjectTier(
                    TierConfig(
                        url=str(folder),
                        capacity=None if disk is None else disk * record,
                        threads=1,
                        eviction=eviction,
                    )
                ),
            ],
            staging=staging,
            policy=policy,
        )

    def serve(self, request: Request) -> dict[str, int]:
        """Chunks loaded, by tier; and they are the right ones."""
        prompt, whole = (self.tokens(request.chunks[:n]) for n in (request.prompt_chunks, None))
        table = self.engine.table(len(whole))
        places = self.engine.places(table)
        hit = self.cache.lookup(prompt)
        self.engine.wipe()
        loaded = self.cache.load(hit, places)
        assert loaded.by_tier == hit.by_tier
        self.engine.assert_loaded(prompt, table, loaded.tokens // 8)
        self.cache.flush()
        self.engine.compute(whole, table)
        self.cache.store(whole, places)
        self.cache.flush()
        return {tier: tokens // 8 for tier, tokens in loaded.by_tier.items()}

    @staticmethod
    def tokens(names: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Eight tokens that stand for a chunk's name."""
        parts = [
            np.random.default_rng(zlib.crc32(name.encode())).integers(0, 2**31, 8, np.int32) for name in names
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


BOTH = ("memory", "disk")


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
    tmp_path: Path, eviction: str, memory: int, disk: int | None, policy: Policy
) -> None:
    requests = mixed(45, seed=3, block_tokens=2048).requests
    tiers = {
        "memory": SimulatedTier(capacity=ByteSize(memory * CHUNK), near=True, eviction=eviction),
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
        found = [real.serve(r) for r in requests]
        assert simulated == found
        evicted = simulator.finish().evicted_chunks
        assert {t: real.cache.tiers[t].evicted for t in tiers} == {t: evicted[t] for t in tiers}
    assert evicted["memory"]
    assert sum(hits.get("memory", 0) for hits in found)
    assert sum(hits.get("disk", 0) for hits in found)


def test_a_second_turn_by_hand() -> None:
    tiers = {
        "memory": SimulatedTier(capacity=ByteSize(2 * CHUNK), near=True),
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
    tiers = {"memory": SimulatedTier(capacity=ByteSize(100 * CHUNK), near=True)}
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
        "memory": {"capacity": 100 * CHUNK, "near": True},
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


def test_the_example_is_a_trace() -> None:
    example = read_trace(Path(__file__).parent.parent / "benchmarks" / "traces" / "mixed.jsonl")
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


GOOD = '{"timestamp": 0, "input_length": 1100, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no requests",)),
        (GOOD + "{", (":2", "JSON")),
        (GOOD + "[]", (":2", "object")),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tiers.memory]\ncapcity = 3", ("tiers.memory.capcity", "did you mean 'capacity'", "bandwidth")),
        ('[tiers.memory]\ncapacity = "4 apples"', ("tiers.memory.capacity = '4 apples'", "4GiB")),
        ('[tiers.memory]\neviction = "mru"', ("tiers.memory.eviction = 'mru'", "'lru'", "'s3fifo'")),
        ("[nodes]\nprefill = 2", ("prefill = 2, decode = 0",)),
        ("[nodes]\nboth = 1\nprefill = 1\ndecode = 1", ("both = N, or prefill = N",)),
        ('[nodes]\nroute = "random"', ("nodes.route = 'random'", "'session'", "'prefix'")),
        ('[policy]\nstore_to = ["dsk"]', ("store_to='dsk'", "memory, disk")),
        ('[policy.decode]\nstore_to = ["dsk"]', ("store_to='dsk'", "memory, disk")),
        ("[policy.decode]\nstore = 1", ("policy.decode.store", "did you mean 'store_to'")),
        ("[model]\nprefill_tokens_per_s = 0", ("model.prefill_tokens_per_s = 0", "greater than 0")),
        ("speed = 1", ("speed: unknown setting", "model, nodes, handoff, tiers, policy")),
        ("tiers = {}", ("tiers", "at least 1")),
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
    import kvkit.simulate.config as module

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
    with pytest.raises(ConfigError, match="compare = 'mru': want some of lru"):
        compare(mixed(3), SimulationConfig(), ["mru"])


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(
        cli.app, ["simulate", *map(str, arguments)], env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}
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
