"""Tiers on real Redis and Valkey fulfil the contract, also when servers refuse, fill, die or hang."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from remote_tiers import finish, kill_amid_a_load, same
from spoiling_proxy import Proxy

from kvkit.format.record import Damage
from kvkit.lab.testbed.servers import RedisServer, free_ports
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging
from kvkit.tiers.base import DamagedObject, Tier, TierError, TierFull
from kvkit.tiers.redis import PREFIX, RedisTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import (
    RECORDS,
    SLOT_BYTES,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)

TIMEOUT_S = 2.5
"""More than a busy machine needs for a request."""
PASSWORD = "a-password-that-must-not-be-shown"


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, request.param) as server:
        yield server


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, "valkey") as server:
        yield server


class TestRedis(TierContract):
    @pytest.fixture
    def tier(self, server: RedisServer) -> Tier:
        return RedisTier(server.url)


def test_only_its_own_keys(server: RedisServer, staging: Staging) -> None:
    """Others may use the same database; records are plain values under their names."""
    client = redis.Redis("127.0.0.1", server.port)
    client.set("kvkit:not a record", b"x")
    client.set(b"kvkit:\xff", b"x")
    client.set("0123456789abcdef/0/c.0.0.0.0.0.0", b"x")
    tier = RedisTier(server.url)
    names = record_names(2)
    assert tier.match_prefix(names) == 0
    assert put(tier, staging, names) == [None, None]
    assert sorted(tier.scan()) == [(name, SLOT_BYTES) for name in names]
    assert client.get(PREFIX + names[0]) == record_bytes(names[0]).tobytes()
    tier.delete(names)
    assert len(client.keys("*")) == 3
    client.close()
    finish(tier, staging)


def test_a_value_of_another_type_in_a_records_place_is_damage(server: RedisServer, staging: Staging) -> None:
    client = redis.Redis("127.0.0.1", server.port)
    tier = RedisTier(server.url)
    names = record_names(3)
    assert put(tier, staging, names) == [None] * 3
    client.delete(PREFIX + names[1])
    client.lpush(PREFIX + names[1], "a list")
    found = get(tier, staging, names)
    assert isinstance(found[1], DamagedObject)
    assert found[1].damage == Damage.FOREIGN
    assert [isinstance(found[i], OSError) for i in (0, 2)] == [False, False]
    with pytest.raises(DamagedObject):
        tier.get_ranges(names[1], [(0, 4)], [memoryview(bytearray(4))])
    assert tier.size(names[1]) is None
    assert sorted(tier.scan()) == [(names[0], SLOT_BYTES), (names[2], SLOT_BYTES)]
    tier.delete(names[1:2])
    assert put(tier, staging, names[1:2]) == [None]
    assert tier.match_prefix(names) == 3
    finish(tier, staging)


def test_a_long_run_takes_several_round_trips(valkey: RedisServer, staging: Staging) -> None:
    tier = RedisTier(valkey.url)
    names = record_names(1500)
    client = redis.Redis("127.0.0.1", valkey.port)
    client.mset({PREFIX + name: b"x" for name in names[:1300]})
    assert tier.match_prefix(names) == 1300
    client.delete(PREFIX + names[700])
    assert tier.match_prefix(names) == 700
    assert tier.match_prefix(names[701:1300]) == 599
    assert len(list(tier.scan())) == 1299
    tier.delete(names)
    assert client.dbsize() == 0
    client.close()
    finish(tier, staging)


def test_a_put_never_replaces(valkey: RedisServer, staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that found nothing there when it looked."""
    tier = RedisTier(valkey.url)
    (name,) = record_names(1)
    client = redis.Redis("127.0.0.1", valkey.port)
    client.set(PREFIX + name, b"first")
    monkeypatch.setattr(tier._client, "exists", lambda key: 0)
    assert put(tier, staging, [name]) == [None]
    assert client.get(PREFIX + name) == b"first"
    client.close()
    finish(tier, staging)


def test_a_user_with_no_more_rights_than_needed(tmp_path: Path, staging: Staging) -> None:
    rights = "~kvkit:* +get +set +exists +strlen +getrange +unlink +scan +select"
    users = ("user default off", f"user me on >{PASSWORD} {rights}", "user guest on >guest ~kvkit:* +exists")
    with RedisServer(tmp_path, "valkey", *users) as server:
        tier = RedisTier(TierConfig(url=server.url.replace("/0", "/3"), username="me", password=PASSWORD))
        names = record_names(3)
        assert put(tier, staging, names) == [None] * 3
        assert all(same(found, name) for found, name in zip(get(tier, staging, names), names, strict=True))
        part = memoryview(bytearray(8))
        tier.get_ranges(names[0], [(8, 8)], [part])
        assert part == record_bytes(names[0])[8:16].tobytes()
        assert tier.match_prefix(names) == 3
        assert tier.size(names[0]) == SLOT_BYTES
        tier.delete(names[:1])
        assert len(list(tier.scan())) == 2
        guest = RedisTier(TierConfig(url=server.url, username="guest", password="guest"))
        assert guest.match_prefix(names) == 0
        assert "no permissions" in str(put(guest, staging, names[:1])[0])
        guest.close()
        finish(tier, staging)


@pytest.mark.parametrize("user", ["me", None, "nobody"])
def test_a_wrong_password(
    user: str | None, tmp_path: Path, staging: Staging, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (f"requirepass {PASSWORD}", f"user me on >{PASSWORD} ~* +@all")
    with RedisServer(tmp_path, "valkey", *settings) as server:
        tier = RedisTier(TierConfig(url=server.url, username=user, password=f"not {PASSWORD}"))
        (name,) = record_names(1)
        errors = [*get(tier, staging, [name]), *put(tier, staging, [name])]
        with pytest.raises(TierError, match="refuses the username or the password"):
            tier.match_prefix([name])
        for error in errors:
            assert isinstance(error, TierError)
            assert "refuses the username or the password" in str(error)
            assert name in str(error)
        for text in (*map(str, errors), *map(repr, errors), repr(tier), caplog.text):
            assert PASSWORD not in text
        anonymous = RedisTier(server.url)
        assert "uthentication required" in str(get(anonymous, staging, [name])[0])
        anonymous.close()
        finish(tier, staging)


def test_a_full_server_that_lets_nothing_go(tmp_path: Path, staging: Staging) -> None:
    with RedisServer(tmp_path, "valkey", "maxmemory 3mb", "maxmemory-policy noeviction") as server:
        tier = RedisTier(server.url)
        names = record_names(400)
        full: list[str] = []
        for first in range(0, len(names), RECORDS):
            batch = names[first : first + RECORDS]
            errors = put(tier, staging, batch)
            assert all(error is None or isinstance(error, TierFull) for error in errors), errors
            full += [name for name, error in zip(batch, errors, strict=True) if error is not None]
            if full:
                break
        assert full
        assert tier.match_prefix(full[:1]) == 0
        assert same(get(tier, staging, names[:1])[0], names[0]), "what it has, it serves"
        tier.delete([name for name, _ in tier.scan()])
        assert put(tier, staging, full[:1]) == [None]
        finish(tier, staging)


def test_a_server_that_lets_go_what_was_used_least(tmp_path: Path, staging: Staging) -> None:
    """What is let go is a miss: no process believes in an index of its own."""
    with RedisServer(tmp_path, "valkey", "maxmemory 3mb", "maxmemory-policy allkeys-lru") as server:
        tier = RedisTier(server.url)
        names = record_names(400)
        for first in range(0, len(names), RECORDS):
            assert put(tier, staging, names[first : first + RECORDS]) == [None] * RECORDS
        held = {name for name, _ in tier.scan()}
        found = {name for name in names if tier.match_prefix([name])}
        left = {name for name, _ in tier.scan()}  # asking takes memory, too, for which more is let go
        assert 0 < len(left) <= len(held) < len(names)
        assert left <= found <= held
        finish(tier, staging)


def test_the_server_is_killed_and_restarted_amid_a_load(server: RedisServer, staging: Staging) -> None:
    """Each record is right or an error, in time; a restarted server is used again, and is empty."""
    tier = RedisTier(TierConfig(url=server.url, threads=2, timeout_s=TIMEOUT_S))
    names = kill_amid_a_load(server, tier, staging)
    with pytest.raises(TierError, match="refused"):
        tier.match_prefix(names)
    server.start()
    assert tier.match_prefix(names) == 0
    assert put(tier, staging, names[:2]) == [None, None]
    assert same(get(tier, staging, names[:1])[0], names[0])
    finish(tier, staging)


@pytest.mark.parametrize("how", ["stopped", "slow", "cut", "deaf"])
def test_a_server_that_answers_badly(how: str, valkey: RedisServer, staging: Staging) -> None:
    """Stopped, slow, breaking off or never answering: an error while that lasts; then it is as before."""
    names = record_names(2)
    with Proxy(valkey.port) as proxy, socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1] if how == "deaf" else proxy.port
        tier = RedisTier(TierConfig(url=f"redis://127.0.0.1:{port}", threads=1, timeout_s=TIMEOUT_S))
        if how != "deaf":
            put(tier, staging, names[:1])
            get(tier, staging, names[:1])
        if how == "stopped":
            valkey.stop()
        elif how != "deaf":
            proxy.spoil = how  # type: ignore[assignment]
        (error,) = get(tier, staging, names[:1])
        assert isinstance(error, TierError)
        assert ("closed the connection" if how == "cut" else f"within timeout_s={TIMEOUT_S}") in str(error)
        proxy.spoil = ""
        if how == "stopped":
            valkey.resume()
        if how != "deaf":
            assert same(get(tier, staging, names[:1])[0], names[0])
            assert tier.match_prefix(names) == 1
        finish(tier, staging)


def test_too_large_a_record_does_not_spoil_the_connection(valkey: RedisServer, staging: Staging) -> None:
    tier = RedisTier(TierConfig(url=valkey.url, threads=1))
    names = record_names(2)
    put(tier, staging, names)
    small = Staging(4096, 1)
    assert isinstance(get(tier, small, names[:1])[0], DamagedObject)
    small.close()
    assert all(same(found, name) for found, name in zip(get(tier, staging, names), names, strict=True))
    finish(tier, staging)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"redis://me:{PASSWORD}@localhost", "url: it has a password; want it as a setting"),
        (f"redis://:{PASSWORD}@localhost", "url: it has a password; want it as a setting"),
        ("redis://me@localhost", "'far': url: give username and password as settings"),
        ("redis://", "want redis://"),
        ("http://localhost", "want redis://"),
        ("redis://localhost:port", "want redis://"),
        ("redis://localhost:99999", "want redis://"),
        ("redis://localhost/0?db=3", "want redis://"),
        ("redis://localhost/first", "want a number for the database"),
    ],
)
def test_wrong_urls(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        RedisTier(url, name="far")
    assert "url: " in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("moved", [True, False])
def test_a_server_of_a_cluster_is_told_by_that_name(moved: bool, tmp_path: Path, staging: Staging) -> None:
    """A key is another server's, or nobody's."""
    servers = []
    for name, port in zip(("one", "two"), free_ports(2), strict=True):
        (tmp_path / name).mkdir()
        cluster = ("cluster-enabled yes", f"cluster-port {port}")
        servers.append(RedisServer(tmp_path / name, "valkey", *cluster))
    with servers[0] as one, servers[1] as two:
        if moved:
            client, other = redis.Redis("127.0.0.1", one.port), redis.Redis("127.0.0.1", two.port)
            other.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            client.execute_command("CLUSTER MEET", "127.0.0.1", two.port, port)
            wait_for(lambda: client.execute_command("CLUSTER INFO")["cluster_slots_assigned"] == "16384")
        tier = RedisTier(one.url)
        (error,) = put(tier, staging, record_names(1))
        assert isinstance(error, TierError)
        assert "is part of a Redis Cluster" in str(error)
        with pytest.raises(TierError, match=rf"want redis\+cluster://127\.0\.0\.1:{one.port}"):
            tier.match_prefix(record_names(1))
        finish(tier, staging)
