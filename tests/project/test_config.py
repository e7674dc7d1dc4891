"""Every setting is read, from the environment before the file, and opens what it names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_blocks import blocks
from pydantic import BaseModel, Secret, SecretStr

from kvkit.config import Config, PolicyConfig, load_config, open_cache
from kvkit.format.record import RecordFormat
from kvkit.lab.simulate.config import load_simulation
from kvkit.lab.simulate.traces import read_trace
from kvkit.lab.testbed.engine_stub import small_layout
from kvkit.router.settings import read_router_config
from kvkit.settings import ConfigError
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.redis import RedisTier
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.policy import Policy

EVERYTHING = """
chunk_tokens = 128
hash = "sha256"
staging = "64MiB"
timeout_s = 2.5
shutdown_timeout_s = 12
precision = "fp8"
unchecked_precision = true

[tiers.memory]
capacity = "32MiB"
keep_s = 600

[tiers.shared]
url = ["memory://bucket", "memory://other"]
spread = "stripe"
capacity = [5000000, 6000000]
codec = "zstd"
eviction = "arc"
quota = "1MiB"
precision = "int8"
threads = 3
fsync = true
scope = "shared"
timeout_s = 4
options = { endpoint = "https://host", secret_access_key = "hush" }

[tiers.team]
url = "file:///mnt/team"
access = "group"

[tiers.redis]
url = "redis://host"
username = "me"
password = "hush"

[policy]
retrieve_from = ["shared", "memory"]
store_to = ["shared"]
write_back_to = []
staging_only = true

[server]
enabled = true
host = "::1"
port = 9000
token = "0123456789abcdef"

[handoff]
role = "prefill"
listen = ["tcp://127.0.0.1:0"]
peers = { decode = "unix:///run/kvkit/decode-{rank}.sock" }
buffer = "1GiB"
shared_memory = false
max_prefill_tokens = 1000
allocation_timeout_s = 1
transfer_timeout_s = 2
idle_timeout_s = 3
shutdown_timeout_s = 4
max_ranks = 16
secret = "0123456789abcdef"
tls_certificate = "/certificate"
tls_key = "/key"
tls_ca = "/ca"
"""
KEYS = {"access_key_id": "me", "secret_access_key": "hush"}
DISK = {"disk": {"url": "memory://d"}}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVKIT_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "kvkit.toml"
    path.write_text(text)
    return path


def fields(model: type[BaseModel]) -> dict[str, Any]:
    return {name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items()}


def test_defaults() -> None:
    assert load_config().model_dump() == {
        "chunk_tokens": 256,
        "hash": "xxh3_128",
        "staging": 512 * 2**20,
        "timeout_s": 30.0,
        "shutdown_timeout_s": 30.0,
        "precision": None,
        "unchecked_precision": False,
        "tiers": {},
        "policy": {"retrieve_from": None, "store_to": None, "write_back_to": None, "staging_only": False},
        "server": {"enabled": False, "host": "127.0.0.1", "port": 9477, "token": None, "token_file": None},
        "handoff": None,
    }
    assert fields(TierConfig) == {
        "url": None,
        "spread": "by_key",
        "eviction": "lru",
        "quota": None,
        "keep_s": 0.0,
        "capacity": None,
        "codec": "none",
        "precision": None,
        "threads": None,
        "fsync": False,
        "access": "user",
        "scope": "node",
        "kind": None,
        "timeout_s": 10.0,
        "username": None,
        "password": None,
        "options": {},
    }


def test_every_setting_from_a_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, EVERYTHING))
    assert config.model_dump() == {
        "chunk_tokens": 128,
        "hash": "sha256",
        "staging": 64 * 2**20,
        "timeout_s": 2.5,
        "shutdown_timeout_s": 12.0,
        "precision": "fp8",
        "unchecked_precision": True,
        "tiers": {
            "memory": fields(TierConfig) | {"capacity": 32 * 2**20, "keep_s": 600.0},
            "shared": {
                "url": ("memory://bucket", "memory://other"),
                "spread": "stripe",
                "eviction": "arc",
                "quota": 2**20,
                "keep_s": 0.0,
                "capacity": (5_000_000, 6_000_000),
                "codec": "zstd",
                "precision": "int8",
                "threads": 3,
                "fsync": True,
                "access": "user",
                "scope": "shared",
                "kind": None,
                "timeout_s": 4.0,
                "username": None,
                "password": None,
                "options": {"endpoint": Secret("https://host"), "secret_access_key": Secret("hush")},
            },
            "team": fields(TierConfig) | {"url": "file:///mnt/team", "access": "group"},
            "redis": fields(TierConfig)
            | {"url": "redis://host", "username": "me", "password": SecretStr("hush")},
        },
        "policy": {
            "retrieve_from": ("shared", "memory"),
            "store_to": ("shared",),
            "write_back_to": (),
            "staging_only": True,
        },
        "server": {
            "enabled": True,
            "host": "::1",
            "port": 9000,
            "token": SecretStr("0123456789abcdef"),
            "token_file": None,
        },
        "handoff": {
            "role": "prefill",
            "listen": ("tcp://127.0.0.1:0",),
            "peers": {"decode": "unix:///run/kvkit/decode-{rank}.sock"},
            "buffer": 2**30,
            "shared_memory": False,
            "max_prefill_tokens": 1000,
            "allocation_timeout_s": 1.0,
            "transfer_timeout_s": 2.0,
            "idle_timeout_s": 3.0,
            "shutdown_timeout_s": 4.0,
            "max_ranks": 16,
            "secret": SecretStr("0123456789abcdef"),
            "secret_file": None,
            "tls_certificate": Path("/certificate"),
            "tls_key": Path("/key"),
            "tls_ca": Path("/ca"),
        },
    }
    assert config.resolved_policy() == Policy(("shared", "memory"), ("shared",), (), staging_only=True)
    # nothing above may be a default: a setting that the file cannot reach would go unnoticed
    default = fields(Config)
    assert all(getattr(config, name) != value for name, value in default.items())
    for name, value in fields(TierConfig).items():
        if name != "kind":  # takes a package that has it: test_tier_plugins.py
            assert any(getattr(tier, name) != value for tier in config.tiers.values()), name
    assert all(getattr(config.policy, n) is not None for n in PolicyConfig.model_fields)


def test_every_setting_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "KVKIT_CHUNK_TOKENS": "128",
        "KVKIT_HASH": "sha256",
        "KVKIT_STAGING": "64MiB",
        "KVKIT_TIMEOUT_S": "2.5",
        "KVKIT_SHUTDOWN_TIMEOUT_S": "12",
        "KVKIT_PRECISION": "fp8",
        "KVKIT_UNCHECKED_PRECISION": "true",
        "KVKIT_TIERS__MEMORY__CAPACITY": "32MiB",
        "KVKIT_TIERS__MEMORY__KEEP_S": "600",
        "KVKIT_TIERS__SHARED__URL": '["memory://bucket", "memory://other"]',
        "KVKIT_TIERS__SHARED__SPREAD": "stripe",
        "KVKIT_TIERS__SHARED__EVICTION": "arc",
        "KVKIT_TIERS__SHARED__QUOTA": "1MiB",
        "KVKIT_TIERS__SHARED__PRECISION": "int8",
        "KVKIT_TIERS__SHARED__CAPACITY": "[5000000, 6000000]",
        "KVKIT_TIERS__SHARED__CODEC": "zstd",
        "KVKIT_TIERS__SHARED__THREADS": "3",
        "KVKIT_TIERS__SHARED__FSYNC": "true",
        "KVKIT_TIERS__SHARED__SCOPE": "shared",
        "KVKIT_TIERS__SHARED__TIMEOUT_S": "4",
        "KVKIT_TIERS__SHARED__OPTIONS__ENDPOINT": "https://host",
        "KVKIT_TIERS__SHARED__OPTIONS__SECRET_ACCESS_KEY": "hush",
        "KVKIT_TIERS__TEAM__URL": "file:///mnt/team",
        "KVKIT_TIERS__TEAM__ACCESS": "group",
        "KVKIT_TIERS__REDIS__URL": "redis://host",
        "KVKIT_TIERS__REDIS__USERNAME": "me",
        "KVKIT_TIERS__REDIS__PASSWORD": "hush",
        "KVKIT_POLICY__RETRIEVE_FROM": '["shared", "memory"]',
        "KVKIT_POLICY__STORE_TO": '["shared"]',
        "KVKIT_POLICY__WRITE_BACK_TO": "[]",
        "KVKIT_POLICY__STAGING_ONLY": "true",
        "KVKIT_SERVER__ENABLED": "true",
        "KVKIT_SERVER__HOST": "::1",
        "KVKIT_SERVER__PORT": "9000",
        "KVKIT_SERVER__TOKEN": "0123456789abcdef",
        "KVKIT_HANDOFF__ROLE": "prefill",
        "KVKIT_HANDOFF__LISTEN": '["tcp://127.0.0.1:0"]',
        "KVKIT_HANDOFF__PEERS__DECODE": "unix:///run/kvkit/decode-{rank}.sock",
        "KVKIT_HANDOFF__BUFFER": "1GiB",
        "KVKIT_HANDOFF__SHARED_MEMORY": "false",
        "KVKIT_HANDOFF__MAX_PREFILL_TOKENS": "1000",
        "KVKIT_HANDOFF__ALLOCATION_TIMEOUT_S": "1",
        "KVKIT_HANDOFF__TRANSFER_TIMEOUT_S": "2",
        "KVKIT_HANDOFF__IDLE_TIMEOUT_S": "3",
        "KVKIT_HANDOFF__SHUTDOWN_TIMEOUT_S": "4",
        "KVKIT_HANDOFF__MAX_RANKS": "16",
        "KVKIT_HANDOFF__SECRET": "0123456789abcdef",
        "KVKIT_HANDOFF__TLS_CERTIFICATE": "/certificate",
        "KVKIT_HANDOFF__TLS_KEY": "/key",
        "KVKIT_HANDOFF__TLS_CA": "/ca",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_config() == load_config(write(tmp_path, EVERYTHING))


def test_the_file_wins_over_the_environment_and_settings_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 'chunk_tokens = 64\nhash = "sha256"\n[tiers.disk]\nurl = "/file"\n')
    monkeypatch.setenv("KVKIT_CHUNK_TOKENS", "32")
    monkeypatch.setenv("KVKIT_TIMEOUT_S", "7")
    monkeypatch.setenv("KVKIT_TIERS__DISK__URL", "/environment")
    monkeypatch.setenv("KVKIT_TIERS__DISK__CAPACITY", "1GB")
    config = load_config(path, hash="blake3")
    assert (config.chunk_tokens, config.timeout_s, config.hash) == (64, 7.0, "blake3")
    assert config.tiers["disk"].url == "/file"
    assert config.tiers["disk"].capacity == 10**9, "what the file leaves out comes from the environment"


def test_tiers_keep_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, '[tiers.memory]\ncapacity = "1GiB"\n[tiers.disk]\nurl = "/d"\n')
    monkeypatch.setenv("KVKIT_TIERS__BUCKET__URL", "memory://b")
    monkeypatch.setenv("KVKIT_TIERS__DISK__CAPACITY", "1GiB")
    config = load_config(path)
    assert list(config.tiers) == ["memory", "disk", "bucket"]
    assert config.resolved_policy() == Policy.default(["memory", "disk", "bucket"])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1.5 MiB", 3 << 19),
        ("4GiB", 4 << 30),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    config = load_config(staging=text, tiers={"memory": {"capacity": text}})
    assert config.staging == config.tiers["memory"].capacity == size


def test_what_the_policy_leaves_out_is_every_tier_in_order() -> None:
    tiers = {"memory": {"capacity": "1MiB"}, **DISK}
    assert load_config(tiers=tiers).resolved_policy() == Policy(
        ("memory", "disk"), ("memory", "disk"), ("memory",)
    )
    given = load_config(tiers=tiers, policy={"retrieve_from": ["disk"], "write_back_to": []})
    assert given.resolved_policy() == Policy(("disk",), ("memory", "disk"), ())


def test_the_example_on_the_page_loads(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, blocks("docs/reference/configuration.md", "toml")[0].text))
    assert config.chunk_tokens == 256
    assert list(config.tiers) == ["memory", "disk"]
    assert config.resolved_policy() == Policy.default(["memory", "disk"])


def test_which_tiers_are_shared_where_nothing_is_said() -> None:
    urls = {"disk": "/x", "bucket": "s3://b/kv", "redis": "redis://h:1/0", "pool": "mooncake://h:1"}
    config = load_config(tiers={name: {"url": url} for name, url in urls.items()})
    assert [name for name, tier in config.tiers.items() if tier.scope == "shared"] == ["pool"]


def test_secrets_of_tiers_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the file's password wins over the environment's."""
    path = write(tmp_path, '[tiers.redis]\nurl = "redis://h"\npassword = "hush"\n')
    monkeypatch.setenv("KVKIT_TIERS__REDIS__PASSWORD", "other")
    monkeypatch.setenv("KVKIT_TIERS__S3__URL", "s3://b")
    monkeypatch.setenv("KVKIT_TIERS__S3__OPTIONS__SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("KVKIT_TIERS__S3__OPTIONS__ACCESS_KEY_ID", "12345")
    config = load_config(path)
    assert config.tiers["redis"].password == SecretStr("hush")
    assert config.tiers["s3"].plain_options() == {"secret_access_key": "hush", "access_key_id": "12345"}
    for shown in (repr(config), str(config), config.model_dump_json(), str(config.tiers["s3"].model_dump())):
        assert "hush" not in shown


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(server={"token": "open-sesame-open-sesame"})
    assert "sesame" not in repr(config) + str(config.model_dump()) + config.model_dump_json()
    for given in ("sesame", ["sesame", "sesame"]):
        with pytest.raises(ConfigError, match=r"server\.token: ") as caught:
            load_config(server={"token": given})
        assert "sesame" not in str(caught.value)
    monkeypatch.setenv("KVKIT_SERVER__TOKEN", "sesame")
    with pytest.raises(ConfigError, match=r"environment: server\.token: ") as caught:
        load_config()
    assert "sesame" not in str(caught.value)


def test_variables_of_others_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    default = load_config().model_dump()
    for name in ("KVKIT_SERVICE_HOST", "KVKIT_PORT", "KVKIT_PORT_8000_TCP", "KVKITCHUNK_TOKEN"):
        monkeypatch.setenv(name, "tcp://10.0.0.1")
    assert load_config().model_dump() == default


def test_a_config_does_not_change() -> None:
    config = load_config(tiers=DISK)
    for target, setting in ((config, "hash"), (config.tiers["disk"], "url"), (config.policy, "store_to")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(target, setting, None)


def test_the_namespace_has_the_chunk_size_and_the_digest() -> None:
    layout = small_layout()
    config = load_config(chunk_tokens=8, hash="sha256")
    namespace = config.namespace(layout, model="m", dtype="float32", salt="s")
    assert (namespace.chunk_tokens, namespace.hash, namespace.salt) == (8, "sha256", "s")
    assert namespace.layout == layout.fingerprint()


def test_open_cache_builds_what_was_asked(tmp_path: Path) -> None:
    layout = small_layout(groups=2)
    config = load_config(
        chunk_tokens=8,
        staging="64KiB",
        timeout_s=3,
        shutdown_timeout_s=4,
        tiers={
            "memory": {"capacity": "32KiB"},
            "disk": {"url": f"file://{tmp_path}", "capacity": "1MiB", "codec": "zstd", "threads": 2},
            "bucket": {"url": "memory://bucket", "scope": "shared"},
            "redis": {"url": "redis://localhost:1", "password": "hush", "threads": 1, "timeout_s": 2},
            "s3": {"url": "s3://b", "timeout_s": 0.2, "options": {"endpoint": "http://127.0.0.1:1"} | KEYS},
        },
        policy={"retrieve_from": ["memory", "bucket"], "store_to": ["disk", "bucket"]},
    )
    namespace = config.namespace(layout, model="m", dtype="float32")
    slot_bytes = RecordFormat.of(layout, 0, namespace).record_bytes
    with open_cache(config, layout, namespace) as cache:
        assert cache.layout == layout
        assert cache.namespace == namespace
        assert (cache.timeout_s, cache.shutdown_timeout_s) == (3, 4)
        assert cache.policy == Policy(("memory", "bucket"), ("disk", "bucket"), ("memory",))
        assert {name: type(tier) for name, tier in cache.tiers.items()} == {
            "memory": MemoryTier,
            "disk": ObjectTier,
            "bucket": ObjectTier,
            "redis": RedisTier,
            "s3": ObjectTier,
        }
        assert (cache.tiers["disk"].codec, cache.tiers["disk"].scope) == ("zstd", "node")
        assert (cache.tiers["bucket"].codec, cache.tiers["bucket"].scope) == ("none", "shared")
        # what rests in memory does not take from what records pass through
        assert cache.staging.slots == (64 + 32) * 1024 // slot_bytes


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"port": 1}, "port"),
        ({"host": "127.0.0.1", "token": "open-sesame-open-sesame"}, "host, token"),
        ({"port": 1, "enabled": False}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("rank", [None, 1])
def test_settings_of_an_endpoint_that_is_not_enabled_are_told(
    server: dict[str, object], told: str | None, rank: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    layout = small_layout()
    config = load_config(chunk_tokens=8, tiers={"memory": {"capacity": "32KiB"}}, server=server)
    if rank is not None:  # as an engine of several ranks has it
        config = config.model_copy(update={"server": config.server.of_rank(rank)})
    with open_cache(config, layout, config.namespace(layout, model="m", dtype="float32")) as cache:
        assert cache.server is None
    lines = [record.getMessage() for record in caplog.records if record.name == "kvkit.config"]
    assert lines == (
        []
        if told is None
        else [f"server: {told} given, but not enabled, so there is no endpoint; want enabled = true or false"]
    )
    assert "sesame" not in caplog.text


DEEP = 5000


@pytest.mark.parametrize("text", ["a = " + "[" * DEEP + "]" * DEEP, "a = " + "{a=" * DEEP])
@pytest.mark.parametrize("read", [load_config, read_router_config, load_simulation])
def test_a_file_nested_too_deep_is_named(text: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvkit\.toml: .*nested too deep"):
        read(write(tmp_path, text))


@pytest.mark.parametrize("variable", ["KVKIT_TIERS", "KVKIT_POLICY__STORE_TO", "KVKIT_HANDOFF"])
def test_a_variable_nested_too_deep_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "[" * 100 * DEEP)
    with pytest.raises(ConfigError, match=r"environment: .*nested too deep"):
        load_config()


@pytest.mark.parametrize("text", ["[" * 100 * DEEP, '{"a":' * 100 * DEEP])
def test_a_trace_nested_too_deep_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)kvkit\.toml:.* recursion"):
        read_trace(write(tmp_path, text))
