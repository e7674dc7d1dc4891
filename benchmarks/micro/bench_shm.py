"""Hits of the engines of one host: a pool in shared memory, against memory of each engine's own, a folder in
/dev/shm, a Redis on a unix socket and LMCache's server. One process, and without the last one eight. And what
hits would take that no process could change after they were verified.

LMCache is measured where KVKIT_PEERS names a folder that has it, as in bench_pages.py, and pyzmq is there.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.timing import interleaved, ratio
from kvkit.cache import Cache, SequencePages
from kvkit.format import record as records
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import Pages
from kvkit.lab.serve.systems import free_port, serving
from kvkit.lab.testbed.servers import RedisServer
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.shm.file import pool_path
from kvkit.tiers.shm.tier import ShmTier

CHUNK_TOKENS, CHUNKS, WARMUP = 256, 16, 3
ROUNDS = {1: 30, 8: 10}
"""By processes."""
SMOLLM2 = LayerGroup(tuple(range(30)), kv_heads=3, k_size=64, v_size=64, dtype="bfloat16", block_tokens=128)
"""A chunk is 5.9 MB."""
WAIT_S = 300.0
IN_PLACE, COPY = "verify, put into pages", "copy, verify the copy, put that into pages"
Hit = Callable[[], object]
Spans = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Setup:
    """What the engines of a run have in common; what is empty is not measured.

    Args:
        pool: a URL.
        folder: in the same memory.
        redis: the path of a socket.
        lmcache: the port of a server.
    """

    chunks: int
    rounds: int
    pool: str
    folder: str = ""
    redis: str = ""
    lmcache: int = 0


class Engine:
    """Pages, and a sequence of `chunks` chunks for them."""

    def __init__(self, setup: Setup) -> None:
        self.layout = KVLayout((SMOLLM2,))
        self.space = Namespace("bench", self.layout.fingerprint(), SMOLLM2.dtype, chunk_tokens=CHUNK_TOKENS)
        self.record_bytes = RecordFormat.of(self.layout, 0, self.space).record_bytes
        self.blocks = np.arange(setup.chunks * CHUNK_TOKENS // SMOLLM2.block_tokens, dtype=np.int64)
        self.tensors = SMOLLM2.pages(len(self.blocks), fill_byte=1)
        self.place = SequencePages(Pages.of(SMOLLM2, self.tensors), blocks=self.blocks)
        self.tokens = np.random.default_rng(0).integers(0, 50_000, setup.chunks * CHUNK_TOKENS, np.int32)
        self.chunks = setup.chunks

    def open(self, stack: ExitStack, resident: int, tier_of: Callable[[Staging], Tier]) -> Cache:
        """A cache with one tier, and with slots for `resident` records that stay."""
        staging = Staging(self.record_bytes, self.chunks + resident)
        cache = Cache(self.layout, self.space, [tier_of(staging)], staging=staging)
        stack.callback(cache.close)
        staging.ready.wait(WAIT_S)
        return cache

    def hit(self, cache: Cache) -> None:
        assert cache.load(cache.lookup(self.tokens), self.place).tokens == len(self.tokens)


def systems(setup: Setup, engine: Engine, first: bool, stack: ExitStack) -> Mapping[str, Hit]:
    """What is compared, by name. The first engine has stored what the others hit when this returns."""
    size = setup.chunks * engine.record_bytes
    memory = engine.open(stack, setup.chunks, lambda slots: MemoryTier(slots, size))
    shared = {"shm": engine.open(stack, 0, lambda slots: ShmTier(pool_path(setup.pool), slots, size))}
    if setup.folder:
        shared["folder"] = engine.open(stack, 0, lambda slots: ObjectTier(setup.folder))
    for cache in (memory, *(shared.values() if first else ())):
        cache.store(engine.tokens, engine.place)
        cache.flush()
    caches = {"memory": memory, **shared}
    hits: dict[str, Hit] = {name: partial(engine.hit, cache) for name, cache in caches.items()}
    if setup.redis:
        hits["redis"] = redis_hit(setup.redis, memory, memory.chunks(engine.tokens).names, first)
    if setup.lmcache:
        hits["lmcache"] = lmcache_hit(setup.lmcache, engine, first)
    return hits


def redis_hit(path: str, memory: Cache, names: list[str], first: bool) -> Hit:
    """Its client's own get of all records; they are neither checked nor put into pages."""
    import redis

    client = redis.Redis(unix_socket_path=path)
    if first:
        for name in names:
            lease = memory.tiers["memory"].borrow(name)
            assert lease is not None
            with lease:
                client.set(name, lease.buffer[: lease.used])
    return lambda: client.mget(names)


def lmcache_hit(port: int, engine: Engine, first: bool) -> Hit:
    """A lookup, a retrieve into the same pages, and the request's end, as its connector for vLLM has them."""
    sys.path.append(str(Path(os.environ["KVKIT_PEERS"]) / "lmcache"))
    import zmq
    from lmcache.integration.vllm import vllm_multi_process_adapter as adapters

    url, context = f"tcp://127.0.0.1:{port}", zmq.Context()
    parallel = adapters.ParallelStrategy(False, 1, 0, 1, 1, 1)
    given = (context, "bench", SMOLLM2.block_tokens, parallel)
    scheduler = adapters.LMCacheMPSchedulerAdapter([url], *given)
    worker = adapters.LMCacheMPWorkerAdapter(url, *given)
    layers = {f"model.layers.{i}.attn": tensor for i, tensor in enumerate(engine.tensors)}
    worker.register_kv_caches(layers, layout_hints={"kv_layout": "HND"})
    tokens, blocks, numbers = engine.tokens.tolist(), [engine.blocks.tolist()], count()
    work = adapters.LoadStoreOp(tokens, blocks, 0, len(tokens))

    def wait(done: Callable[[], object]) -> Any:
        until = time.monotonic() + WAIT_S
        while (found := done()) is None:
            assert time.monotonic() < until, "LMCache does not answer"
        return found

    def hit() -> None:
        request = f"{os.getpid()}-{next(numbers)}"
        scheduler.maybe_submit_lookup_request(request, tokens)
        assert wait(lambda: scheduler.check_lookup_result(request)) == len(tokens)
        worker.submit_retrieve_request(request, work, worker.create_recorded_event())
        wait(lambda: request in (worker.get_finished(set())[1] or ()) or None)
        assert not worker.get_block_ids_with_load_errors()
        scheduler.cleanup_lookup_result(request)
        scheduler.end_session(request)

    if first:
        worker.submit_store_request("store", work, worker.create_recorded_event())
        wait(lambda: not worker.store_futures or worker.get_finished({"store"})[0])
    return hit


def measure(setup: Setup, first: bool, together: Barrier) -> Spans:
    """When each of this engine's hits began and ended, all engines' hits of one system at the same time."""
    with ExitStack() as stack:
        engine = Engine(setup)
        if not first:
            together.wait(WAIT_S)
        hits = systems(setup, engine, first, stack)
        if first:
            together.wait(WAIT_S)
        names, spans = list(hits), {name: list[tuple[float, float]]() for name in hits}
        for turn in range(-WARMUP, setup.rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                together.wait(WAIT_S)
                began = time.perf_counter()
                hits[name]()
                if turn >= 0:
                    spans[name].append((began, time.perf_counter()))
        together.wait(WAIT_S)
    return spans


def attempt(setup: Setup, first: bool, together: Barrier) -> Spans | str:
    """As `measure`; what went wrong, in words, which ends the others' waiting, too."""
    try:
        return measure(setup, first, together)
    except Exception as error:
        together.abort()
        return repr(error)


def engine_process(setup: Setup, together: Barrier, results: Any) -> None:
    results.put(attempt(setup, False, together))


def run(setup: Setup, processes: int) -> dict[str, list[float]]:
    """Seconds of every round, from the first begin to the last end, by system."""
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(processes), context.Queue()
    others = [
        context.Process(target=engine_process, args=(setup, together, results), daemon=True)
        for _ in range(processes - 1)
    ]
    for other in others:
        other.start()
    ended = [attempt(setup, True, together), *(results.get(timeout=WAIT_S) for _ in others)]
    for other in others:
        other.join(WAIT_S)
    found = [spans for spans in ended if not isinstance(spans, str)]
    assert len(found) == processes, [error for error in ended if isinstance(error, str)]
    return {
        name: [
            max(end for _, end in spans) - min(begin for begin, _ in spans)
            for spans in zip(*(one[name] for one in found), strict=True)
        ]
        for name in found[0]
    }


@contextmanager
def lmcache_server(folder: Path) -> Iterator[int]:
    """The port of one with a GiB of memory; 0 where there is none."""
    peers = os.environ.get("KVKIT_PEERS")
    if not peers:
        yield 0
        return
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1"]
    command += [
        "--port",
        str(port),
        "--shm-name",
        f"bench-{port}",
        "--l1-size-gb",
        "1",
        "--chunk-size",
        str(CHUNK_TOKENS),
    ]
    command += ["--eviction-policy", "LRU", "--no-l1-use-lazy", "--disable-metrics"]
    # without a GPU engines copy, from and to memory that they share with the server
    command += ["--supported-transfer-mode", "engine_driven"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(Path(peers) / "lmcache"), os.environ.get("PYTHONPATH", ""))),
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONHASHSEED": "0",
    }

    def serves() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
        return False

    with serving("lmcache", command, environment, folder, serves):
        yield port


@pytest.mark.parametrize("processes", [1, 8])
def test_hits(benchmark: Any, tmp_path: Path, processes: int) -> None:
    """16 chunks of 5.9 MB in memory, into pages; the time of all processes over that with private memory."""
    setup = Setup(CHUNKS, ROUNDS[processes], f"shm://bench-{uuid.uuid4().hex}")
    if not benchmark.enabled:
        setup, processes = replace(setup, chunks=1, rounds=1), 1
    with ExitStack() as stack:
        stack.callback(Path(pool_path(setup.pool)).unlink, missing_ok=True)  # a run may not get so far
        if benchmark.enabled:
            folder = stack.enter_context(TemporaryDirectory(dir="/dev/shm"))
            path = Path(stack.enter_context(TemporaryDirectory())) / "redis.sock"
            stack.enter_context(RedisServer(tmp_path, "redis", f"unixsocket {path}"))
            # eight that copy leave it too little of two cores: pings come late, and its clients give it up
            port = stack.enter_context(lmcache_server(tmp_path)) if processes == 1 else 0
            setup = replace(setup, folder=folder, redis=str(path), lmcache=port)
        times = benchmark.pedantic(lambda: run(setup, processes), rounds=1)
    benchmark.extra_info["against"] = "memory of each process's own"
    benchmark.extra_info["bytes"] = setup.chunks * SMOLLM2.chunk_bytes(CHUNK_TOKENS)
    for name in times:
        benchmark.extra_info[name] = {"us": min(times[name]) * 1e6, **ratio(times, name, "memory")}


def test_copy_before_verifying(benchmark: Any) -> None:
    """16 chunks of 5.9 MB of a pool, verified where others can write and put into pages, as loads do; against
    copying them to private slots first, and against verifying them once more at the end."""
    setup = Setup(CHUNKS if benchmark.enabled else 1, 0, f"shm://bench-{uuid.uuid4().hex}")
    engine = Engine(setup)
    with ExitStack() as stack:
        stack.callback(Path(pool_path(setup.pool)).unlink, missing_ok=True)
        hits = ways_to_trust(setup, engine, stack)
        for tensor in engine.tensors:
            tensor.fill_(0)
        times = interleaved(hits, ROUNDS[1] if benchmark.enabled else 1)
        assert all(bool((tensor.view(torch.uint8) == 1).all()) for tensor in engine.tensors)
        benchmark.pedantic(hits[COPY], rounds=1)
    benchmark.extra_info["against"] = IN_PLACE
    benchmark.extra_info["bytes"] = setup.chunks * engine.record_bytes
    for name in times:
        benchmark.extra_info[name] = {"us": min(times[name]) * 1e6, **ratio(times, name, IN_PLACE)}


def ways_to_trust(setup: Setup, engine: Engine, stack: ExitStack) -> dict[str, Hit]:
    """Store records in a pool; return hits of them, by the way in which verified bytes are the bytes used."""
    size = setup.chunks * engine.record_bytes
    cache = engine.open(stack, 0, lambda slots: ShmTier(pool_path(setup.pool), slots, size))
    cache.store(engine.tokens, engine.place)
    cache.flush()
    chunks, pool = cache.chunks(engine.tokens), cache.tiers["shm"]
    (form,) = chunks.formats
    private = cache.staging.acquire(setup.chunks, WAIT_S, at_least=setup.chunks)
    stack.callback(release_all, private)

    def lent() -> list[Lease]:
        return [lease for name in chunks.names if (lease := pool.borrow(name)) is not None]

    def verify(leases: list[Lease]) -> None:
        for chunk, lease in enumerate(leases):
            assert records.verify(form, lease.buffer[: lease.used], *chunks.identity(chunk)) is None

    def place(leases: list[Lease]) -> None:
        payloads = [records.payload(form, lease.array) for lease in leases]
        engine.place.fill(form, 0, payloads, None, None)

    def in_place(again: bool) -> None:
        leases = lent()
        verify(leases)
        place(leases)
        if again:
            verify(leases)
        release_all(leases)

    def copy() -> None:
        leases = lent()
        for own, lease in zip(private, leases, strict=True):
            own.used = lease.used
            own.record[:] = lease.record
        release_all(leases)
        verify(private)
        place(private)

    return {
        IN_PLACE: partial(in_place, False),
        COPY: copy,
        f"{IN_PLACE}, verify again": partial(in_place, True),
    }
