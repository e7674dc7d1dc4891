"""Eight stand-ins for engines on two hosts over one shared store: throughput, waits, and a store that dies.

    python -m benchmarks.serving.two_hosts --json benchmarks/results/two-hosts-MACHINE.json

Hosts are network namespaces, each behind a link of 1 Gbit/s to that of the stores; root and iproute2 make
them. A stand-in is a process with a cache of its own: memory, then the store. It serves its sessions of the
trace `mixed`, one request at a time: looks up, loads, sleeps as long as a GPU would compute, and stores. So
loads, stores, links and servers are real, and only computing is not. `kvkit simulate` gets the same trace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.link import Link, NoLink, link, run
from benchmarks.research.fleet import traffic
from kvkit.config import load_config, open_cache
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.pages.api import Pages
from kvkit.lab.files import about
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.traces import Request, Trace
from kvkit.lab.testbed.mooncake import Giver, Master, library_path
from kvkit.lab.testbed.redis_clusters import Cluster
from kvkit.lab.testbed.servers import Process, S3Server
from kvkit.transfer.sequence import SequencePages

ENGINES, PER_HOST, MEGABITS = 8, 4, 1000
CHUNK_TOKENS, TOKENS_PER_S = 256, 8000
GROUP = LayerGroup(
    (0, 1, 2, 3), kv_heads=4, k_size=64, v_size=64, dtype="bfloat16", block_tokens=CHUNK_TOKENS
)
LAYOUT = KVLayout((GROUP,))
CHUNK_BYTES = GROUP.chunk_bytes(CHUNK_TOKENS)
MEMORY_CHUNKS, STAGING_CHUNKS, LONGEST = 96, 64, 128
"""Limits of an engine's memory, of its other slots, and of prompts, in chunks."""
ADDRESS = "10.200.0.1"
"""Address of the stores, in their own namespace."""
STORES = "redis cluster", "S3", "Mooncake"
SPEEDS = 0.5, 1.0, 2.0
KILL_S, RETURN_S = 12.0, 22.0
LIMIT_S = 300.0


@dataclass(frozen=True)
class Store:
    """A store that runs: the settings of its tier, and the server that is killed."""

    tier: dict[str, Any]
    victim: Process


def tokens_of(request: Request) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the tokens of a request's whole chunks, prompt and answer: equal ones for equal chunks."""
    return np.concatenate([np.zeros(0, np.int32), *map(_chunk, request.chunks)])


@cache
def _chunk(name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 1 << 17, CHUNK_TOKENS, np.int32)


def serve(number: int, settings: Mapping[str, Any], speed: float) -> None:
    """Serve one engine's requests: say "ready", wait for a line with the time, print a row for each."""
    mine = [request for request in traffic(ENGINES).requests if engine_of(request) == number]
    prompts = [tokens_of(request) for request in mine]
    config = load_config(
        chunk_tokens=CHUNK_TOKENS,
        staging=(MEMORY_CHUNKS + STAGING_CHUNKS) * (CHUNK_BYTES + 8192),
        tiers={"memory": {"capacity": MEMORY_CHUNKS * (CHUNK_BYTES + 4096)}, "store": settings},
    )
    namespace = config.namespace(LAYOUT, model="a stand-in", dtype=GROUP.dtype)
    pool = Pages.of(GROUP, [tensor.normal_() for tensor in GROUP.pages(LONGEST)])
    pages = SequencePages(pool, blocks=np.arange(LONGEST))
    rows = []
    with open_cache(config, LAYOUT, namespace) as cache:
        print("ready", flush=True)
        began = float(sys.stdin.readline())
        for request, prompt in zip(mine, prompts, strict=True):
            arrival = request.timestamp_ms / 1000 / speed
            time.sleep(max(0.0, began + arrival - time.time()))
            start = time.time()
            hit = cache.lookup(prompt[: request.prompt_chunks * CHUNK_TOKENS])
            loaded = cache.load(hit, pages)
            computed = request.input_tokens - min(loaded.tokens, request.input_tokens - 1)
            load_s = time.time() - start
            time.sleep(computed / TOKENS_PER_S)
            rows.append(
                {
                    "at": start - began,
                    "wait": start - began - arrival,
                    "load_s": load_s,
                    "ttft": time.time() - start,
                    "tokens": request.input_tokens,
                    "computed": computed,
                    "hits": dict(loaded.by_tier),
                }
            )
            cache.store_async(prompt, pages)
        cache.flush()
        done = time.time() - began
        damaged = sum(cache.counts().damaged.values())
    print(json.dumps({"rows": rows, "done": done, "damaged": damaged}), flush=True)


def engine_of(request: Request) -> int:
    """Return the engine that serves a request's session, as in `kvkit.lab.simulate.model`."""
    return zlib.crc32(request.session.encode()) % ENGINES


@contextmanager
def store(kind: str, folder: Path, hosts: Sequence[Link]) -> Iterator[Store]:
    """Run an empty store in this namespace; Mooncake's memory is on the hosts."""
    shared = {"scope": "shared", "timeout_s": 5.0}
    with ExitStack() as stack:
        if kind == "S3":
            server = stack.enter_context(S3Server(folder, ADDRESS))
            tier = {"url": f"s3://{server.BUCKET}/kv", "options": server.options} | shared
            yield Store(tier, server)
        elif kind == "redis cluster":
            cluster = stack.enter_context(Cluster(folder, "valkey", "protected-mode no", address=ADDRESS))
            yield Store({"url": cluster.url} | shared, cluster.servers[1])
        else:
            (folder / "master").mkdir()
            master = stack.enter_context(Master(folder / "master", ADDRESS))
            givers = []
            for i, host in enumerate(hosts):
                (folder / str(i)).mkdir()
                giver = Giver(folder / str(i), master, 4 << 30, host.address, host.within)
                givers.append(stack.enter_context(giver))
            options = {"metrics_port": master.metrics_port, "global_segment_size": 0}
            yield Store({"url": master.url, "options": options} | shared, givers[1])


@contextmanager
def two_hosts() -> Iterator[list[Link]]:
    """Make two hosts, which reach this namespace and, through it, each other."""
    for line in (f"ip addr add {ADDRESS}/32 dev lo", "ip link set lo up"):
        run(*line.split())
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with link(MEGABITS) as first, link(MEGABITS) as second:
        for host in (first, second):
            run(*host.within, "ip", "route", "add", "default", "via", host.near)
        yield [first, second]


def _bytes(hosts: Sequence[Link], way: str) -> list[int]:
    """Return the bytes that went to ("tx") or came from ("rx") each host so far."""
    files = [Path(f"/sys/class/net/{host.device}/statistics/{way}_bytes") for host in hosts]
    return [int(file.read_text()) for file in files]


def measure(kind: str, speed: float, kill: bool, hosts: Sequence[Link]) -> dict[str, Any]:
    """Serve the trace over a new store at so many times its speed; with `kill`, a server of it dies."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, store(kind, Path(folder), hosts) as running:
        engines = []
        for number in range(ENGINES):
            host = hosts[number // PER_HOST]
            command = [*host.within, sys.executable, "-m", "benchmarks.serving.two_hosts", "--engine"]
            spec = json.dumps([number, running.tier, speed])
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL  # what a dead store makes them log
            engine = subprocess.Popen([*command, spec], stdin=pipe, stdout=pipe, stderr=nothing, text=True)
            engines.append(engine)
        try:
            for engine in engines:
                assert engine.stdout.readline() == "ready\n"
            before = [_bytes(hosts, way) for way in ("tx", "rx")]
            peaks: list[list[float]] = []
            ended = threading.Event()
            watch = threading.Thread(target=_watch, args=(hosts, peaks, ended))
            watch.start()
            began = time.time() + 0.2
            for engine in engines:
                engine.stdin.write(f"{began}\n")
                engine.stdin.flush()
            if kill:
                time.sleep(began + KILL_S - time.time())
                running.victim.kill()
                time.sleep(began + RETURN_S - time.time())
                running.victim.start()
            said = [json.loads(engine.communicate(timeout=LIMIT_S)[0]) for engine in engines]
            ended.set()
            watch.join()
        finally:
            for engine in engines:
                engine.kill()
                engine.wait()
        moved = [
            sum(a) - sum(b) for a, b in zip([_bytes(hosts, w) for w in ("tx", "rx")], before, strict=True)
        ]
    rows = sorted((row for one in said for row in one["rows"]), key=lambda row: row["at"])
    seconds = max(one["done"] for one in said)
    busiest = max((max(second) for second in peaks), default=0.0)
    result = {"store": kind, "speed": speed, "killed": kill, "seconds": seconds, **summary(rows)}
    result["damaged"] = sum(one["damaged"] for one in said)
    result |= {"to_hosts_bytes": moved[0], "from_hosts_bytes": moved[1], "busiest_link": busiest}
    if kill:
        spans = {"before": (0, KILL_S), "while": (KILL_S, RETURN_S), "after": (RETURN_S, seconds)}
        parts = {n: [row for row in rows if a <= row["at"] < b] for n, (a, b) in spans.items()}
        result["spans"] = {name: summary(part) for name, part in parts.items() if part}
    return result


def _watch(hosts: Sequence[Link], peaks: list[list[float]], ended: threading.Event) -> None:
    """Note, each second, the share of its link that a host took, the fuller way."""
    last, at = [_bytes(hosts, way) for way in ("tx", "rx")], time.monotonic()
    while not ended.wait(1.0):
        now, moment = [_bytes(hosts, way) for way in ("tx", "rx")], time.monotonic()
        rate = [max(n - o for n, o in pairs) / (moment - at) for pairs in _pairs(now, last)]
        peaks.append([share * 8 / (MEGABITS * 1e6) for share in rate])
        last, at = now, moment


def _pairs(now: list[list[int]], last: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return, by host, (now, before) of both ways."""
    return [[(now[way][host], last[way][host]) for way in (0, 1)] for host in range(len(now[0]))]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a client sees: hits, time to the first token, waits."""
    tokens = sum(row["tokens"] for row in rows)
    hits: dict[str, int] = {}
    for row in rows:
        for tier, count in row["hits"].items():
            hits[tier] = hits.get(tier, 0) + count
    ttft = [row["ttft"] for row in rows]
    return {
        "requests": len(rows),
        "hit_rate": 1 - sum(row["computed"] for row in rows) / tokens,
        "hits": {tier: count / tokens for tier, count in hits.items()},
        "ttft_mean_s": fmean(ttft),
        "ttft_p99_s": quantiles(ttft, n=100, method="inclusive")[98] if len(ttft) > 1 else ttft[0],
        "load_mean_s": fmean(row["load_s"] for row in rows),
        "wait_mean_s": fmean(row["wait"] for row in rows),
        "wait_p99_s": quantiles([row["wait"] for row in rows], n=100, method="inclusive")[98],
    }


def simulated(engines: int, speed: float, bandwidth: float) -> dict[str, Any]:
    """Return the same by `kvkit simulate`, whose store, of this bandwidth, and links have no queues."""
    trace = traffic(engines)
    requests = [_sooner(request, speed) for request in trace.requests]
    record = CHUNK_BYTES
    config = SimulationConfig.model_validate(
        {
            "model": {"kv_bytes_per_token": record // CHUNK_TOKENS, "prefill_tokens_per_s": TOKENS_PER_S},
            "nodes": {"both": engines, "per_host": PER_HOST},
            "tiers": {
                "memory": {"capacity": MEMORY_CHUNKS * record, "in_memory": True, "bandwidth": "4GB"},
                "store": {"scope": "shared", "bandwidth": int(bandwidth)},
            },
        }
    )
    report = simulate(Trace(trace.block_tokens, tuple(requests)), config)
    seconds = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000
    return {
        "engines": engines,
        "hit_rate": report.hit_rate,
        "hits": {tier: report.hit_tokens[tier] / report.prompt_tokens for tier in config.tiers},
        "ttft_mean_s": fmean(report.ttft_s),
        "ttft_p99_s": quantiles(report.ttft_s, n=100, method="inclusive")[98],
        "wait_mean_s": fmean(report.wait_s),
        "store_bytes_per_s": (report.read_bytes["store"] + report.written_bytes["store"]) / seconds,
    }


def _sooner(request: Request, speed: float) -> Request:
    return replace(request, timestamp_ms=request.timestamp_ms / speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--speeds", nargs="*", type=float, default=SPEEDS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        serve(*json.loads(arguments.engine))
        return
    if not arguments.apart:  # in a namespace of its own, with its own loopback
        if os.geteuid():
            raise NoLink("network namespaces take root")
        command = ["unshare", "--net", "--mount", "sh", "-c", 'mount -t sysfs none /sys && exec "$@"', "sh"]
        command += [sys.executable, "-m", "benchmarks.serving.two_hosts", "--apart", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as folder:
            libraries = {"LD_LIBRARY_PATH": library_path(Path(folder))}
            sys.exit(subprocess.run(command, env=os.environ | libraries).returncode)
    bandwidth = MEGABITS * 1e6 / 8
    runs = [*((ENGINES, speed) for speed in arguments.speeds), (1000, 1.0)]
    models = [{"speed": speed} | simulated(engines, speed, bandwidth) for engines, speed in runs]
    setup = {"engines": ENGINES, "per_host": PER_HOST, "megabits": MEGABITS, "chunk_bytes": CHUNK_BYTES}
    document = about("python -m benchmarks.serving.two_hosts", seed=0) | setup | {"simulated": models}
    rows: list[dict[str, Any]] = []
    with two_hosts() as hosts:
        for kind in arguments.stores:
            for speed, kill in [*((speed, False) for speed in arguments.speeds), (1.0, True)]:
                rows.append(measure(kind, speed, kill, hosts))
                print(json.dumps(rows[-1]), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
