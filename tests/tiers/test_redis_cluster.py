"""A tier on a real cluster of Redis or Valkey fulfils the contract, while slots move and servers die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_tiers import finish, same

from kvkit.lab.testbed.redis_clusters import Cluster
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging
from kvkit.tiers.base import Tier, TierError
from kvkit.tiers.redis import PREFIX, RedisTier
from kvkit.tiers.redis_cluster import RedisClusterTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import (
    SLOT_BYTES,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)

PASSWORD = "a-password-that-must-not-be-shown"
TIMEOUT_S = 2.5


@pytest.fixture(scope="module", params=["redis", "valkey"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    for number in range(3):
        shared.call(number).flushall()


class TestRedisCluster(TierContract):
    @pytest.fixture
    def tier(self, cluster: Cluster) -> Tier:
        return RedisClusterTier(cluster.url)


def test_records_lie_on_all_servers_and_are_found_over_any(cluster: Cluster, staging: Staging) -> None:
    names = record_names(30)
    tier = RedisClusterTier(TierConfig(url=cluster.url, threads=2))
    assert put(tier, staging, names) == [None] * len(names)
    sizes = [cluster.call(number).dbsize() for number in range(3)]
    assert sum(sizes) == len(names)
    assert all(sizes)
    other = RedisClusterTier(f"redis+cluster://127.0.0.1:{cluster.servers[2].port}")
    assert other.match_prefix(names) == len(names)
    assert sorted(other.scan()) == sorted((name, SLOT_BYTES) for name in names)
    for tier_here in (tier, other):
        assert all(same(found, n) for found, n in zip(get(tier_here, staging, names), names, strict=True))
    other.delete(names[:10])
    assert (tier.match_prefix(names[10:]), tier.match_prefix(names)) == (20, 0)
    other.close()
    finish(tier, staging)


@pytest.mark.parametrize("complete", [True, False], ids=["moved", "moving"])
def test_a_slot_that_moves_costs_no_record(tmp_path: Path, staging: Staging, complete: bool) -> None:
    with Cluster(tmp_path, "valkey") as cluster:
        names = record_names(6)
        tier = RedisClusterTier(TierConfig(url=cluster.url, threads=1))
        put(tier, staging, names)
        assert all(same(found, n) for found, n in zip(get(tier, staging, names), names, strict=True))
        key = PREFIX + names[0]
        cluster.move(key, (cluster.owner(key) + 1) % 3, complete)
        assert same(get(tier, staging, names[:1])[0], names[0])
        part = memoryview(bytearray(8))
        tier.get_ranges(names[0], [(8, 8)], [part])
        assert part == record_bytes(names[0])[8:16].tobytes()
        assert tier.match_prefix(names) == len(names)
        tier.delete(names[:1])
        assert tier.match_prefix(names[:1]) == 0
        assert put(tier, staging, names[:1]) == [None]
        assert tier.size(names[0]) == SLOT_BYTES
        finish(tier, staging)


def test_a_killed_server_costs_its_records_alone(tmp_path: Path, staging: Staging) -> None:
    """They are errors, in time; those of the others are served; restarted, it is used again."""
    with Cluster(tmp_path, "valkey") as cluster:
        names = record_names(30)
        tier = RedisClusterTier(TierConfig(url=cluster.url, threads=2, timeout_s=TIMEOUT_S))
        put(tier, staging, names)
        get(tier, staging, names)
        lost = {name for name in names if cluster.owner(PREFIX + name) == 2}
        assert 0 < len(lost) < len(names)
        cluster.servers[2].kill()
        kept = [name for name in names if name not in lost]
        assert all(same(found, n) for found, n in zip(get(tier, staging, kept), kept, strict=True))
        errors = get(tier, staging, sorted(lost))
        assert all(isinstance(error, TierError) for error in errors), errors
        assert all(same(found, n) for found, n in zip(get(tier, staging, kept), kept, strict=True))
        cluster.servers[2].start()
        wait_for(lambda: cluster.knows_all(2) and cluster.knows_all(0))
        assert tier.match_prefix(kept) == len(kept)
        assert put(tier, staging, sorted(lost)) == [None] * len(lost)
        assert tier.match_prefix(names) == len(names)
        finish(tier, staging)


def test_a_replica_takes_over(tmp_path: Path, staging: Staging) -> None:
    with Cluster(tmp_path, "valkey", replicas=1) as cluster:
        names = record_names(20)
        tier = RedisClusterTier(TierConfig(url=cluster.url, threads=2, timeout_s=TIMEOUT_S))
        put(tier, staging, names)
        lost = [name for name in names if cluster.owner(PREFIX + name) == 0]
        client, replica = cluster.call(0), cluster.call(3)
        assert lost
        wait_for(lambda: replica.dbsize() == client.dbsize())
        cluster.servers[0].kill()
        wait_for(lambda: replica.info("replication")["role"] == "master")
        get(tier, staging, lost)  # it learns that the server is gone
        assert all(same(found, n) for found, n in zip(get(tier, staging, names), names, strict=True))
        assert put(tier, staging, record_names(23)[20:]) == [None] * 3
        finish(tier, staging)


def test_a_cluster_that_is_not_there_yet(tmp_path: Path, staging: Staging) -> None:
    """The tier opens without it, fails in words, and uses it once it is there."""
    cluster = Cluster(tmp_path, "valkey")
    tier = RedisClusterTier(TierConfig(url=cluster.url, timeout_s=TIMEOUT_S))
    names = record_names(2)
    errors = [*get(tier, staging, names), *put(tier, staging, names)]
    assert all(isinstance(error, TierError) for error in errors), errors
    with pytest.raises(TierError, match=r"records cannot be looked up: 127\.0\.0\.1:"):
        tier.match_prefix(names)
    with cluster:
        assert put(tier, staging, names) == [None, None]
        assert tier.match_prefix(names) == 2
    finish(tier, staging)


def test_a_user_and_a_wrong_password(tmp_path: Path, staging: Staging) -> None:
    rights = "~kvkit:* +get +set +exists +strlen +getrange +unlink +scan +cluster|slots +asking +command"
    users = (f"user me on >{PASSWORD} {rights}",)
    with Cluster(tmp_path, "valkey", *users) as cluster:
        names = record_names(6)
        tier = RedisClusterTier(TierConfig(url=cluster.url, username="me", password=PASSWORD))
        assert put(tier, staging, names) == [None] * 6
        assert all(same(found, n) for found, n in zip(get(tier, staging, names), names, strict=True))
        assert len(list(tier.scan())) == 6
        tier.delete(names)
        wrong = RedisClusterTier(TierConfig(url=cluster.url, username="me", password=f"not {PASSWORD}"))
        for error in [*get(wrong, staging, names[:1]), *put(wrong, staging, names[:1])]:
            assert isinstance(error, TierError)
            assert PASSWORD not in str(error)
        wrong.close()
        finish(tier, staging)


def test_a_server_of_a_cluster_named_alone_says_how_to_name_it(cluster: Cluster, staging: Staging) -> None:
    address = f"127.0.0.1:{cluster.servers[0].port}"
    tier = RedisTier(f"redis://{address}")
    errors = [error for error in put(tier, staging, record_names(6)) if error is not None]
    assert errors
    assert all(f"want redis+cluster://{address}" in str(error) for error in errors)
    finish(tier, staging)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"redis+cluster://me:{PASSWORD}@localhost", "it has a password; want it as a setting"),
        ("redis+cluster://me@localhost", "'far': url: give username and password as settings"),
        ("redis+cluster://", "want redis"),
        ("redis+cluster://a,,b", "want redis"),
        ("redis+cluster://a:port", "want redis"),
        ("redis+cluster://a:7000/3", "want redis"),
    ],
)
def test_wrong_urls(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        RedisClusterTier(url, name="far")
    assert PASSWORD not in str(caught.value)
