"""Tiers on real servers of this machine against their bare clients: S3 through obstore and s3fs, Redis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import redis
import redis.cluster
import s3fs
from obstore.store import S3Store

from benchmarks.batch import Batch
from benchmarks.timing import interleaved, ratio
from kvkit.lab.testbed.redis_clusters import Cluster
from kvkit.lab.testbed.servers import RedisServer, S3Server, data_folder
from kvkit.tiers.base import Tier, default_threads
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.redis import PREFIX, RedisTier
from kvkit.tiers.redis_cluster import RedisClusterTier
from kvkit.tiers.settings import TierConfig

MIB = 1 << 20
RECORDS = 32
THREADS = default_threads()
ROUNDS = 7


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with data_folder("bench-s3") as folder, S3Server(folder) as server:
        yield server


class Remote(Batch):
    """A batch, and as many threads as the tier has."""

    def __init__(self, records: int, record_bytes: int) -> None:
        super().__init__(records, record_bytes)
        self._pool = ThreadPoolExecutor(THREADS)

    def bare(self, move: Callable[[str, memoryview], object]) -> None:
        """The batch by threads that do nothing else."""
        slots = [lease.buffer[: lease.used] for lease in self.leases]
        list(self._pool.map(move, self.names, slots))

    def close(self, tier: Tier) -> None:
        tier.close()
        self._pool.shutdown()
        self.release()


@pytest.fixture(params=[2, 32], ids=["32x2MiB", "4x32MiB"])
def batch(request: Any, benchmark: Any) -> Remote:
    records, size = (RECORDS, 2 * MIB) if request.param == 2 else (4, 32 * MIB)
    return Remote(records, size) if benchmark.enabled else Remote(4, size >> 6)


def compare(benchmark: Any, ours: Callable[[], object], other: Callable[[], object], against: str) -> None:
    """Time of `ours` over that of `other`, from calls that take turns."""
    rounds = ROUNDS if benchmark.enabled else 1
    benchmark.pedantic(ours, rounds=rounds)
    times = interleaved({"ours": ours, "other": other}, rounds, warmup=1)
    found = ratio(times, "ours", "other")
    benchmark.extra_info.update(
        ratio_min=found["min"], ratio_median=found["median"], against=against, threads=THREADS
    )


def s3_tier(server: S3Server, prefix: str) -> ObjectTier:
    url = f"s3://{server.BUCKET}/{prefix}"
    return ObjectTier(TierConfig(url=url, options=server.options, timeout_s=60, threads=THREADS))


def bare_store(server: S3Server, prefix: str) -> S3Store:
    return S3Store(
        server.BUCKET,
        prefix=prefix,
        config=server.options,  # type: ignore[arg-type]
        client_options={"allow_http": True, "timeout": "60s"},
    )


@pytest.mark.parametrize("peer", ["obstore", "s3fs"])
def test_get(benchmark: Any, server: S3Server, batch: Remote, peer: str) -> None:
    """Into slots; against the client's own get, which leaves the bytes where it put them."""
    prefix = f"get-{peer}-{batch.leases[0].used}"
    tier, store = s3_tier(server, prefix), bare_store(server, prefix)
    batch.move(tier.put)
    written = [lease.array.copy() for lease in batch.leases]
    for lease in batch.leases:
        lease.array[:] = 0
    if peer == "obstore":

        def other() -> None:
            batch.bare(lambda name, slot: obstore.get(store, name).bytes())
    else:
        files = s3fs.S3FileSystem(
            endpoint_url=server.endpoint, key=server.KEY, secret=server.SECRET, skip_instance_cache=True
        )
        paths = [f"{server.BUCKET}/{prefix}/{name}" for name in batch.names]

        def other() -> None:
            files.cat(paths)

    compare(benchmark, lambda: batch.move(tier.get), other, f"{peer}, nothing copied to slots")
    for lease, data in zip(batch.leases, written, strict=True):
        assert np.array_equal(lease.array, data)
    batch.close(tier)


def test_put(benchmark: Any, server: S3Server) -> None:
    """32 x 2 MiB under new names each time; the tier also asks first whether the object is there."""
    batch = Remote(RECORDS, 2 * MIB if benchmark.enabled else 32768)
    turn = itertools.count()
    tier = s3_tier(server, "put")
    store = bare_store(server, "put-bare")
    names = batch.names

    def renamed(move: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            space = f"{next(turn):x}"
            batch.names = [f"{space}/{name.partition('/')[2]}" for name in names]
            move()

        return call

    ours = renamed(lambda: batch.move(tier.put))
    other = renamed(
        lambda: batch.bare(lambda name, slot: obstore.put(store, name, slot, use_multipart=False))
    )
    compare(benchmark, ours, other, "obstore.put")
    assert tier.size(batch.names[0]) or obstore.head(store, batch.names[0])
    batch.close(tier)


def test_one_layer(benchmark: Any, server: S3Server) -> None:
    """The layers of one record, each a request, one after the other."""
    layers, layer_bytes = (30, 196608) if benchmark.enabled else (3, 4096)
    batch = Remote(1, layers * layer_bytes)
    tier, store = s3_tier(server, "layers"), bare_store(server, "layers")
    batch.move(tier.put)
    name, slot = batch.names[0], batch.leases[0].buffer
    starts = [layer * layer_bytes for layer in range(layers)]

    def ours() -> None:
        for start in starts:
            tier.get_ranges(name, [(start, layer_bytes)], [slot[start : start + layer_bytes]])

    def other() -> None:
        for start in starts:
            obstore.get_range(store, name, start=start, length=layer_bytes)

    compare(benchmark, ours, other, "obstore.get_range, nothing copied to slots")
    batch.close(tier)


@pytest.mark.parametrize("other", ["redis-py", "one server"])
def test_redis_cluster(benchmark: Any, tmp_path: Path, other: str) -> None:
    """Gets of 32 x 2 MiB from three servers; against redis-py's own, copied, or one server's tier."""
    batch = Remote(RECORDS, 2 * MIB if benchmark.enabled else 4096)
    with Cluster(tmp_path / "cluster", "valkey") as cluster, RedisServer(tmp_path, "valkey") as server:
        tier = RedisClusterTier(TierConfig(url=cluster.url, threads=THREADS, timeout_s=60))
        single = RedisTier(TierConfig(url=server.url, threads=THREADS, timeout_s=60))
        client = redis.cluster.RedisCluster("127.0.0.1", cluster.servers[0].port)

        def get(name: str, slot: memoryview) -> None:
            slot[:] = client.get(PREFIX + name)

        batch.move(tier.put)
        batch.move(single.put)
        if other == "redis-py":
            compare(
                benchmark, lambda: batch.move(tier.get), lambda: batch.bare(get), "RedisCluster.get, copied"
            )
        else:
            compare(benchmark, lambda: batch.move(tier.get), lambda: batch.move(single.get), "one server")
        client.close()
        single.close()
        batch.close(tier)


@pytest.mark.parametrize("job", ["get", "put"])
def test_redis(benchmark: Any, tmp_path: Path, job: str) -> None:
    """32 x 2 MiB; against redis-py with hiredis, with a copy into the slot."""
    batch = Remote(RECORDS, 2 * MIB if benchmark.enabled else 4096)
    with RedisServer(tmp_path, "valkey") as server:
        tier = RedisTier(TierConfig(url=server.url, threads=THREADS, timeout_s=60))
        client = redis.Redis("127.0.0.1", server.port)

        def get(name: str, slot: memoryview) -> None:
            slot[:] = client.get(PREFIX + name)  # type: ignore[assignment]

        def put(name: str, slot: memoryview) -> None:
            client.set(PREFIX + name, slot)  # type: ignore[arg-type]

        if job == "get":
            batch.move(tier.put)
            compare(benchmark, lambda: batch.move(tier.get), lambda: batch.bare(get), "redis-py get, copied")
        else:

            def emptied(move: Callable[[], None]) -> Callable[[], None]:
                def call() -> None:
                    client.flushdb()
                    move()

                return call

            ours, other = emptied(lambda: batch.move(tier.put)), emptied(lambda: batch.bare(put))
            compare(benchmark, ours, other, "redis-py set")
        client.close()
        batch.close(tier)
