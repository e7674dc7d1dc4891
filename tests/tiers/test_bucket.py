"""Buckets on a real S3 server fulfil the contract, also when it refuses, dies, is slow or hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import obstore
import pytest
from remote_tiers import finish, kill_amid_a_load, same
from repository import ROOT
from s3_fixture import s3  # noqa: F401 - a fixture
from spoiling_proxy import Proxy
from two_tier_caches import make_engine, open_cache, sequence, store

from kvkit.format.record import Damage
from kvkit.lab.testbed.servers import S3Server
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import Tier, TierError
from kvkit.tiers.bucket import Bucket
from kvkit.tiers.health import FAILURES_TO_PAUSE
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig, open_tier
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    RECORDS,
    Completions,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)
from kvkit.transfer.policy import Policy

TIMEOUT_S = 2.5
"""More than a busy machine needs for a request."""


@pytest.fixture
def url() -> str:
    """A prefix that nobody else uses."""
    return f"s3://{S3Server.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:  # noqa: F811
    with Proxy(s3.port) as proxy:
        yield proxy


def through(proxy: Proxy, server: S3Server) -> dict[str, str]:
    return server.options | {"endpoint": f"http://127.0.0.1:{proxy.port}"}


class TestBucket(TierContract):
    @pytest.fixture
    def tier(self, s3: S3Server, url: str) -> Tier:  # noqa: F811
        return ObjectTier(TierConfig(url=url, options=s3.options, scope="shared"))


def test_another_process_writes_and_a_restart_finds_it(s3: S3Server, url: str, staging: Staging) -> None:  # noqa: F811
    ours, theirs = (ObjectTier(TierConfig(url=url, options=s3.options)) for _ in range(2))
    names = record_names(4)
    put(theirs, staging, names[:3])
    assert ours.match_prefix(names) == 3
    theirs.delete([names[1]])
    assert isinstance(get(ours, staging, names[:3])[1], FileNotFoundError)
    assert ours.match_prefix(names) == 1, "what vanished is not a hit twice"
    reopened = ObjectTier(TierConfig(url=url, options=s3.options))
    assert {name for name, _ in reopened.scan()} == {names[0], names[2]}
    theirs.close()
    reopened.close()
    finish(ours, staging)


WRITER = """
import sys
from kvkit.staging import Staging
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, put, record_names
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig, open_tier
tier = ObjectTier(TierConfig(url=sys.argv[1], options={"endpoint": sys.argv[2]}))
staging = Staging(SLOT_BYTES, SLOTS)
names = record_names(16)
turn = int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
assert put(tier, staging, names[turn:] + names[:turn]) == [None] * 16
tier.close()
staging.close()
"""


def test_processes_write_the_same_records(s3: S3Server, url: str, staging: Staging) -> None:  # noqa: F811
    """With credentials from the environment."""
    environment = {"AWS_ACCESS_KEY_ID": s3.KEY, "AWS_SECRET_ACCESS_KEY": s3.SECRET, "PATH": "/usr/bin"}
    pythonpath = {"PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, url, s3.endpoint, str(5 * turn)],
            env=environment | pythonpath,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for turn in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(DEADLINE_S) for writer in writers] == [0, 0, 0]
    for writer in writers:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.close()
        writer.stdout.close()
    tier = ObjectTier(TierConfig(url=url, options=s3.options))
    names = record_names(16)
    assert sorted(name for name, _ in tier.scan()) == sorted(names)
    assert all(same(found, name) for found, name in zip(get(tier, staging, names), names, strict=True))
    finish(tier, staging)


def test_a_put_never_replaces(s3: S3Server, url: str) -> None:  # noqa: F811
    """Even one that was started before the object was there."""
    bucket = Bucket(url, s3.options, TIMEOUT_S)
    (name,) = record_names(1)
    bucket.write(name, memoryview(b"first"))
    bucket.write(name, memoryview(b"later"))
    buffer = memoryview(bytearray(5))
    assert bucket.read(name, buffer) == 5
    assert bytes(buffer) == b"first"


def test_one_layer_is_one_request(s3: S3Server, url: str, staging: Staging, proxy: Proxy) -> None:  # noqa: F811
    tier = ObjectTier(TierConfig(url=url, options=through(proxy, s3)))
    (name,) = record_names(1)
    put(tier, staging, [name])
    proxy.requests.clear()
    layer = memoryview(bytearray(3000))
    tier.get_ranges(name, [(4096, 3000)], [layer])
    assert np.array_equal(layer, record_bytes(name)[4096:7096])
    assert len(proxy.requests) == 1
    layers = [memoryview(bytearray(1000)) for _ in range(3)]
    tier.get_ranges(name, [(0, 1000), (1000, 1000), (2000, 1000)], layers)
    assert np.array_equal(np.concatenate(layers), record_bytes(name)[:3000])
    assert len(proxy.requests) == 2, "neighbours are one request"
    finish(tier, staging)


@pytest.mark.parametrize("wrong", ["secret", "user", "bucket", "may not write"])
def test_a_store_that_refuses(
    wrong: str,
    s3: S3Server,  # noqa: F811
    url: str,
    staging: Staging,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It opens all the same; each put says why it failed, and nothing shows the secret."""
    options = dict(s3.options)
    if wrong == "secret":
        options["secret_access_key"] = "hidden-but-wrong"
    elif wrong == "user":
        options["access_key_id"] = "nobody"
    elif wrong == "may not write":
        options |= {"access_key_id": s3.READER, "secret_access_key": s3.READER_SECRET}
    else:
        url = "s3://no-such-bucket/x"
    tier = ObjectTier(TierConfig(url=url, options=options))
    (name,) = record_names(1)
    (error,) = put(tier, staging, [name])
    assert isinstance(error, TierError)
    assert "refuses these credentials" in str(error)
    assert name in str(error)
    if wrong == "may not write":
        assert "AccessDenied" in str(error)
        assert tier.match_prefix([name]) == 0
    else:
        code = {"secret": "SignatureDoesNotMatch", "user": "InvalidAccessKeyId"}.get(wrong, "AccessDenied")
        assert "cannot be listed" in caplog.text
        assert code in caplog.text
        if wrong == "bucket":  # nothing else than without permission to list
            assert tier.match_prefix([name]) == 0
            assert "denies access to missing objects" in caplog.text
        else:
            with pytest.raises(TierError, match="credentials"):
                tier.match_prefix([name])
    for text in (str(error), caplog.text, repr(tier)):
        assert options["secret_access_key"] not in text
    finish(tier, staging)


def test_an_object_that_is_denied_costs_no_other_a_hit(
    s3: S3Server,  # noqa: F811
    url: str,
    proxy: Proxy,
) -> None:
    """It can be neither read nor removed; the rest of the bucket goes on being read."""
    engine, tokens, others = make_engine(), sequence(40), sequence(40, 1)
    table = engine.table(40)
    policy = Policy(("bucket",), ("bucket",))
    bucket = ObjectTier(TierConfig(url=url, options=through(proxy, s3)), name="bucket")
    with open_cache(engine, None, memory_slots=0, policy=policy, extra=[bucket]) as cache:
        store(cache, engine, tokens)
        store(cache, engine, others)
        stale = cache.lookup(tokens)
        proxy.denied = stale.chunks.names[1]
        for _ in range(2 * FAILURES_TO_PAUSE):
            assert cache.load(stale, engine.places(table)).tokens == 8
            assert cache.lookup(tokens).tokens == 8, "it is a hit again"
        assert cache.tier_states() == {"bucket": "ok"}
        for _ in range(10):
            assert cache.load(cache.lookup(others), engine.places(table)).tokens == 40
        assert set(cache.counts().damaged) == {("bucket", Damage.UNREADABLE)}


def test_the_server_is_killed_and_restarted_amid_a_load(s3: S3Server, url: str, staging: Staging) -> None:  # noqa: F811
    """What was read before is right, what failed is an error in time, and all of it is there again after."""
    tier = ObjectTier(TierConfig(url=url, options=s3.options, timeout_s=TIMEOUT_S, threads=2))
    try:
        names = kill_amid_a_load(s3, tier, staging)
        assert all(isinstance(error, TierError) for error in put(tier, staging, record_names(9)[8:]))
    finally:
        s3.start()
    assert all(same(found, name) for found, name in zip(get(tier, staging, names), names, strict=True))
    assert tier.match_prefix(names) == RECORDS
    finish(tier, staging)


@pytest.mark.parametrize("spoil", ["error", "slow", "hang"])
def test_a_store_that_answers_badly(
    spoil: Any,
    s3: S3Server,  # noqa: F811
    url: str,
    staging: Staging,
    proxy: Proxy,
) -> None:
    """HTTP 503, or a body too slow for the deadline, or none: an error while that lasts; then as before."""
    tier = ObjectTier(TierConfig(url=url, options=through(proxy, s3), timeout_s=TIMEOUT_S))
    names = record_names(3)
    put(tier, staging, names[:2])
    proxy.spoil = spoil
    found = get(tier, staging, names[:2])
    # the answer to a put is so short that it is never late
    errors = [*found, *(put(tier, staging, names[2:]) if spoil != "slow" else [])]
    reason = "503" if spoil == "error" else f"no answer within timeout_s={TIMEOUT_S}"
    for error in errors:
        assert isinstance(error, TierError), error
        assert reason in str(error)
    proxy.spoil = ""
    if spoil != "hang":  # there, the proxy keeps what it has to the end
        assert all(same(f, n) for f, n in zip(get(tier, staging, names[:2]), names, strict=False))
        assert tier.match_prefix(names) == 2
    finish(tier, staging)


def test_a_connection_that_breaks_is_tried_again(
    s3: S3Server,  # noqa: F811
    url: str,
    staging: Staging,
    proxy: Proxy,
) -> None:
    tier = ObjectTier(TierConfig(url=url, options=through(proxy, s3), timeout_s=DEADLINE_S, threads=1))
    (name,) = record_names(1)
    put(tier, staging, [name])
    proxy.requests.clear()
    proxy.spoil = "cut"
    leases = staging.acquire(1, DEADLINE_S)
    done = Completions()
    tier.get([name], leases, done)
    proxy.wait_for_requests(2)
    proxy.spoil = ""
    assert done.wait(1) == [(name, None)]
    assert np.array_equal(leases[0].record, record_bytes(name))
    release_all(leases)
    finish(tier, staging)


def test_a_server_that_never_answers(url: str, staging: Staging) -> None:
    """It accepts connections: opening, looking up, reading and writing all end while it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        options = {"endpoint": endpoint, "access_key_id": "x", "secret_access_key": "y"}
        tier = ObjectTier(TierConfig(url=url, options=options, timeout_s=TIMEOUT_S))
        names = record_names(2)
        with pytest.raises(TierError, match=f"no answer within timeout_s={TIMEOUT_S}"):
            tier.match_prefix(names)
        assert all(isinstance(error, TierError) for error in get(tier, staging, names))
        assert all(isinstance(error, TierError) for error in put(tier, staging, names))
        finish(tier, staging)


@pytest.mark.parametrize(
    ("url", "options", "kind", "root"),
    [
        ("s3://bucket/a/b", {"region": "eu-west-1"}, "S3Store", "a/b"),
        ("s3a://bucket/a", {}, "S3Store", "a"),
        ("gs://bucket/a", {"skip_signature": True}, "GCSStore", "a"),
        ("gcs://bucket", {"skip_signature": True}, "GCSStore", None),
        ("az://box/a", {"account_name": "acc", "account_key": "c2VjcmV0"}, "AzureStore", "a"),
        (
            "abfs://box@acc.dfs.core.windows.net/a",
            {"account_key": "c2VjcmV0"},
            "AzureStore",
            "a",
        ),
    ],
)
def test_every_cloud_by_url(url: str, options: dict[str, Any], kind: str, root: str | None) -> None:
    """Construction alone: no request is made."""
    store: Any = Bucket(url, options, 3.0)._store
    assert type(store).__name__ == kind
    assert store.prefix == root
    assert {name: store.config[name] for name in options} == {
        name: str(value).lower() if value is True else value for name, value in options.items()
    }


def test_options_win_over_the_environment(
    s3: S3Server,  # noqa: F811
    url: str,
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    tier = ObjectTier(TierConfig(url=url, options=s3.options))
    assert put(tier, staging, record_names(1)) == [None]
    finish(tier, staging)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://bucket", {"endpint": "http://x", "secret_access_key": "hush"}, ["'far'", "endpint"]),
        ("s3://", {"secret_access_key": "hush"}, ["'far'", "s3://"]),
        ("az://box", {"account_key": "hush"}, ["'far'", "Account must be specified"]),
        ("az://box", {"account_name": "acc", "account_key": "hush hush"}, ["'far'"]),
        ("/tmp/folder", {"endpoint": "hush"}, ["'far'", "endpoint", "a folder has none"]),
    ],
)
def test_wrong_settings(url: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        ObjectTier(TierConfig(url=url, options=options), name="far")
    for word in words:
        assert word in str(caught.value)
    assert "hush" not in str(caught.value)


def test_without_obstore_the_package_to_install_is_named(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvkit.tiers.bucket")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ValueError, match=r"obstore is missing: pip install 'kvkit-llm\[s3\]'"):
        open_tier("far", TierConfig(url="s3://bucket"), staging)


def test_the_server_knows_the_records_by_their_names(s3: S3Server, url: str, staging: Staging) -> None:  # noqa: F811
    """The object is the record, byte for byte, where any S3 client finds it."""
    tier = ObjectTier(TierConfig(url=url, options=s3.options))
    (name,) = record_names(1)
    put(tier, staging, [name])
    tier.describe("0123456789abcdef/0", b"{}")
    client = obstore.store.S3Store(s3.BUCKET, config=s3.options, client_options={"allow_http": True})
    prefix = url.rpartition("/")[2]
    assert bytes(obstore.get(client, f"{prefix}/{name}").bytes()) == record_bytes(name).tobytes()
    assert bytes(obstore.get(client, f"{prefix}/0123456789abcdef/0/zarr.json").bytes()) == b"{}"
    finish(tier, staging)
