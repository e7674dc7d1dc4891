"""Errors of a configuration name their source, the setting, the value and the choices."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from test_config import DISK, clean_environment, write  # noqa: F401 - a fixture

from kvkit.config import Config, PolicyConfig, ServerConfig, load_config, open_cache
from kvkit.format.layout import LayoutError
from kvkit.format.record import CODECS
from kvkit.handoff.settings import HandoffConfig
from kvkit.lab.testbed.engine_stub import small_layout, small_namespace
from kvkit.settings import ConfigError
from kvkit.tiers.settings import TierConfig

UNIX = "unix:///run/kvkit/x.sock"
HANDOFF = {"listen": [UNIX], "buffer": "1MiB"}
DECODE = HANDOFF | {"role": "decode"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chunk_token": 3}, ["chunk_token:", "unknown", "did you mean 'chunk_tokens'", "hash, staging"]),
        ({"xyz": 3}, ["xyz:", "unknown", *Config.model_fields]),
        (
            {"tiers": {"disk": {"ur": "/x"}}},
            ["tiers.disk.ur:", "did you mean 'url'", *TierConfig.model_fields],
        ),
        ({"policy": {"store": []}}, ["policy.store:", "did you mean 'store_to'", *PolicyConfig.model_fields]),
        ({"chunk_tokens": "many"}, ["chunk_tokens = 'many'", "integer"]),
        ({"chunk_tokens": 2.5}, ["chunk_tokens = 2.5", "integer"]),
        ({"chunk_tokens": 0}, ["chunk_tokens = 0", "greater than or equal to 1"]),
        ({"chunk_tokens": 2**21}, ["chunk_tokens = 2097152", "less than or equal to 1048576"]),
        ({"timeout_s": 0}, ["timeout_s = 0", "greater than 0"]),
        ({"timeout_s": float("nan")}, ["timeout_s = nan"]),
        ({"timeout_s": "soon"}, ["timeout_s = 'soon'", "number"]),
        ({"hash": "md5"}, ["hash = 'md5'", "xxh3_128", "blake3", "sha256"]),
        ({"staging": "4 parsecs"}, ["staging = '4 parsecs'", "parsecs", "'4GiB'"]),
        ({"staging": 1.5}, ["staging = 1.5", "bytes", "'4GiB'"]),
        ({"staging": -1}, ["staging = -1", "bytes"]),
        ({"staging": 0}, ["staging = 0", "greater than 0"]),
        ({"tiers": {"disk": {}}}, ["tiers.disk:", "url", "capacity"]),
        ({"tiers": {"disk": 3}}, ["tiers.disk = 3", "dictionary"]),
        ({"tiers": 3}, ["tiers = 3", "dictionary"]),
        ({"tiers": {"disk": {"url": "/x", "codec": "gzip"}}}, ["tiers.disk.codec = 'gzip'", *CODECS]),
        (
            {"tiers": {"disk": {"url": ""}}},
            ["tiers.disk: url = ''", "a variable is not set", "no url at all"],
        ),
        ({"tiers": {"disk": {"url": "file://"}}}, ["url = 'file://'", "it names nothing"]),
        ({"tiers": {"disk": {"url": ["/x", " "]}}}, ["url = ' '", "it names nothing"]),
        (
            {"tiers": {"disk": {"url": ["/x/y", "file:///x/z/../y"]}}},
            ["/x/y and file:///x/z/../y are one location"],
        ),
        ({"tiers": {"far": {"url": ["s3://b/x", "s3://b/x"]}}}, ["s3://b/x and s3://b/x are one location"]),
        ({"tiers": {"disk": {"url": "/x", "scope": "all"}}}, ["tiers.disk.scope = 'all'", "node", "shared"]),
        ({"tiers": {"disk": {"url": "/x", "threads": 0}}}, ["tiers.disk.threads = 0", "equal to 1"]),
        ({"tiers": {"disk": {"url": "/x", "threads": 257}}}, ["tiers.disk.threads = 257", "equal to 256"]),
        ({"tiers": {"disk": {"url": "/x", "fsync": "maybe"}}}, ["tiers.disk.fsync = 'maybe'", "boolean"]),
        (
            {"tiers": {"disk": {"url": "/x", "access": "0640"}}},
            ["tiers.disk.access = '0640'", "user", "group", "all"],
        ),
        ({"tiers": {"far": {"url": "s3://b", "access": "all"}}}, ["access = 'all': only a tier in a folder"]),
        ({"tiers": {"m": {"capacity": 9, "access": "all"}}}, ["access = 'all': only a tier in a folder"]),
        ({"tiers": DISK, "policy": {"store_to": "disk"}}, ["policy.store_to = 'disk'", "tuple"]),
        (
            {"tiers": DISK, "policy": {"store_to": ["dsk"]}},
            ["policy:", "store_to='dsk'", "no such tier", "disk"],
        ),
        ({"tiers": DISK, "policy": {"store_to": ["disk", "disk"]}}, ["store_to", "disk", "twice"]),
        ({"policy": {"retrieve_from": ["disk"]}}, ["retrieve_from='disk'", "the tiers are none"]),
        ({"server": {"prt": 1}}, ["server.prt:", "did you mean 'port'", *ServerConfig.model_fields]),
        ({"server": {"port": 65536}}, ["server.port = 65536", "equal to 65535"]),
        ({"server": {"host": "0.0.0.0"}}, ["server:", "'0.0.0.0' is open to other hosts", "token_file"]),
        ({"server": {"token": "x" * 16, "token_file": "/x"}}, ["server:", "one of the two"]),
        ({"handoff": {"rol": "x"}}, ["handoff.rol:", "did you mean 'role'", *HandoffConfig.model_fields]),
        ({"handoff": {"role": "p"}}, ["handoff.role = 'p'", "prefill", "decode", "both"]),
        ({"handoff": {"role": "decode", "buffer": 9}}, ["handoff:", "listen: none given", "'decode'"]),
        ({"handoff": {"listen": [UNIX]}}, ["handoff:", "buffer: none given", "role = 'both'"]),
        (
            {"handoff": HANDOFF | {"listen": ["http://x"]}},
            ["handoff:", "http://x: want unix:///<path>, tcp"],
        ),
        (
            {"handoff": HANDOFF | {"listen": ["tcp://0.0.0.0:1"]}},
            ["handoff:", "listen: tcp://0.0.0.0:1 has no secret", "give secret or secret_file"],
        ),
        ({"handoff": HANDOFF | {"listen": ["tcp://[::1]:{rank}"]}}, ["listen: tcp://[::1]:0 has no secret"]),
        ({"handoff": HANDOFF | {"listen": ["nixl://127.0.0.1:1"]}}, ["listen: nixl://127.0.0.1:1 has no"]),
        (
            {"handoff": {"role": "prefill", "peers": {"D": "tcp://127.0.0.1:1"}}},
            ["handoff:", "peers.D: tcp://127.0.0.1:1 has no secret", "the same at both sides", "unix:///"],
        ),
        *(
            ({"handoff": HANDOFF | {"peers": {name: UNIX}}}, ["handoff:", repr(name), "printable ASCII"])
            for name in ("my peer", "für", "x" * 130, "")
        ),
        (
            {"tiers": {"x" * 257: {"capacity": "1MiB"}}, "handoff": HANDOFF},
            ["handoff: tier 'xxx", "want at most 256 characters"],
        ),
        ({"handoff": HANDOFF | {"peers": {"a": "there"}}}, ["handoff:", "there: want unix:///<path>, tcp"]),
        ({"handoff": HANDOFF | {"secret": "x" * 16, "secret_file": "/x"}}, ["handoff:", "one of the two"]),
        ({"handoff": HANDOFF | {"secret": "short"}}, ["handoff.secret:", "16"]),
        ({"handoff": HANDOFF | {"tls_key": "/x"}}, ["handoff:", "tls_certificate and tls_key go together"]),
        ({"handoff": HANDOFF | {"idle_timeout_s": 0}}, ["handoff.idle_timeout_s = 0", "greater than 0"]),
        ({"handoff": HANDOFF | {"transfer_timeout_s": float("inf")}}, ["handoff.transfer_timeout_s = inf"]),
        ({"tiers": DISK, "handoff": HANDOFF | {"peers": {"disk": UNIX}}}, ["tier name 'disk' is used twice"]),
        ({"handoff": HANDOFF | {"peers": {"handoff": UNIX}}}, ["tier name 'handoff' is used twice"]),
        (
            {"tiers": DISK, "handoff": DECODE, "policy": {"store_to": ["disk", "handoff"]}},
            ["store_to='handoff': role = 'decode' sends nothing; the choices are disk"],
        ),
        (
            {"tiers": DISK, "handoff": {"role": "prefill"}, "policy": {"retrieve_from": ["handoff"]}},
            ["retrieve_from='handoff': role = 'prefill' receives nothing; the choices are disk"],
        ),
        (
            {"tiers": DISK, "handoff": HANDOFF | {"peers": {"p": UNIX}}, "policy": {"store_to": ["p"]}},
            ["store_to='p': it is another node's memory; the choices are disk, handoff"],
        ),
        (
            {"tiers": DISK, "handoff": HANDOFF, "policy": {"write_back_to": ["handoff"]}},
            ["write_back_to='handoff': handoff takes no write-backs; the choices are disk"],
        ),
        (
            {"tiers": DISK, "handoff": HANDOFF, "policy": {"store_to": ["p"]}},
            ["store_to='p'", "the tiers are disk, handoff"],
        ),
    ],
)
def test_an_error_names_the_setting_the_value_and_the_choices(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**settings)
    for word in ["settings: ", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "redis://h", "password": 3}, ["tiers.far.password:", "string"]),
        ({"url": "s3://b", "options": "hush"}, ["tiers.far.options:", "dictionary"]),
        ({"url": "redis://me:hush@h"}, ["tiers.far:", "url", "password"]),
        ({"url": "file:///d", "keep_s": 1}, ["tiers.far:", "keep_s = 1.0: only a tier in memory"]),
        ({"url": "s3://b", "password": "hush"}, ["tiers.far:", "password: only a tier on Redis"]),
        ({"url": "redis://h", "options": {"a": "hush"}}, ["tiers.far:", "options: no tier on Redis"]),
        ({"url": "redis://h", "capacity": "1GiB"}, ["tiers.far:", "capacity:", "maxmemory"]),
        ({"url": "redis://h", "codec": "zstd"}, ["tiers.far:", "codec = 'zstd': no tier on Redis"]),
        ({"url": "mooncake://h", "password": "hush"}, ["tiers.far:", "password: only a tier on Redis"]),
        ({"url": "mooncake://h", "capacity": "1GiB"}, ["tiers.far:", "options.global_segment_size"]),
        ({"url": "mooncake://h", "fsync": True}, ["tiers.far:", "fsync = True: no tier on Mooncake"]),
        ({"capacity": "1GiB", "codec": "zstd"}, ["tiers.far:", "codec = 'zstd': no tier in memory"]),
        ({"url": ("mooncake://h", "mooncake://i")}, ["tiers.far:", "url: a tier on Mooncake has one"]),
        ({"url": "s3://b", "timeout_s": 0}, ["tiers.far.timeout_s = 0", "greater than 0"]),
    ],
)
def test_errors_of_tiers_on_servers_show_no_secret(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tiers={"far": settings})
    shown = "".join(traceback.format_exception(caught.value))
    for word in words:
        assert word in str(caught.value)
    assert "hush" not in shown
    assert "password = 3" not in shown


def test_all_errors_of_a_file_are_reported_with_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, 'chunk_tokens = 0\nstagin = 3\n[tiers.disk]\nurl = "/x"\ncodec = "lz4"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{path}: ") for line in lines)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KVKIT_CHUNK_TOKENS", "many", ["chunk_tokens = 'many'"]),
        ("KVKIT_TIERS__DISK__UR", "/x", ["tiers.disk.ur:", "did you mean 'url'"]),
        ("KVKIT_CHUNK_TOKEN", "64", ["KVKIT_CHUNK_TOKEN:", "did you mean KVKIT_CHUNK_TOKENS?"]),
        ("KVKIT_TIER__DISK__URL", "/x", ["KVKIT_TIER__DISK__URL:", "did you mean KVKIT_TIERS?"]),
        ("kvkit_stagin", "1GiB", ["kvkit_stagin:", "did you mean KVKIT_STAGING?"]),
        ("KVKIT_TIERS", "{broken", ["tiers"]),
        ("KVKIT_POLICY__STORE_TO", "disk", ["policy.store_to"]),
    ],
)
def test_an_error_in_the_environment_is_told_from_one_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: list[str]
) -> None:
    path = write(tmp_path, 'hash = "sha256"\n[tiers.disk]\nurl = "/d"\n')
    monkeypatch.setenv(variable, value)
    for source in (None, path):
        with pytest.raises(ConfigError) as caught:
            load_config(source)
        for word in ["environment: ", *words]:
            assert word in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: .*No such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"kvkit\.toml: .*line 2"):
        load_config(write(tmp_path, "chunk_tokens = 3\nstaging = \n"))
    (tmp_path / "latin.toml").write_bytes(b'hash = "\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml: .*utf-8"):
        load_config(tmp_path / "latin.toml")


def test_a_single_folder_is_not_looked_at_while_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a mount that is dead, where that would wait for ever."""

    def hang(path: str) -> str:
        raise RuntimeError(f"{path} was resolved")

    monkeypatch.setattr("os.path.realpath", hang)
    assert TierConfig(url="/dead/kvkit").urls == ("/dead/kvkit",)
    with pytest.raises(RuntimeError, match="was resolved"):
        TierConfig(url=("/dead/a", "/dead/b"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["tiers: none given"]),
        ({"staging": "1kB", "tiers": DISK}, ["staging=1000B", "2 slots of"]),
        ({"tiers": {**DISK, "memory": {"capacity": 4095}}}, ["tier 'memory'", "4095", "at least 1"]),
        ({"tiers": {**DISK, "far": {"url": "nowhere://x"}}}, ["tier 'far'", "nowhere://x", "memory"]),
        ({"tiers": {"memory": {"capacity": "8000PiB"}}}, ["memory tiers", "7.8EiB", "cannot be allocated"]),
        ({"handoff": HANDOFF | {"buffer": 4096}}, ["handoff: buffer=4.0KiB: a chunk takes 2 slots of 8192"]),
        (
            {"handoff": HANDOFF | {"max_prefill_tokens": 600}},
            [
                "handoff: max_prefill_tokens=600 take 152 slots",
                "1.0MiB has 128",
                "a buffer of 1.2MiB or more",
            ],
        ),
        ({"handoff": HANDOFF | {"listen": ["unix:///dev/null/x"]}}, ["handoff:", "/dev/null"]),
        ({"handoff": HANDOFF | {"secret_file": "/nowhere"}}, ["handoff: secret_file='/nowhere'"]),
        (
            {"handoff": HANDOFF | {"tls_certificate": "/nowhere", "tls_key": "/x"}},
            ["handoff: certificate=/nowhere"],
        ),
    ],
)
def test_a_cache_that_cannot_be_opened_leaves_nothing_running(
    settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    layout = small_layout(groups=2)
    config = load_config(chunk_tokens=8, **{"staging": "1MiB"} | settings)
    namespace = config.namespace(layout, model="m", dtype="float32")
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        open_cache(config, layout, namespace)
    for word in words:
        assert word in str(caught.value)
    assert set(threading.enumerate()) <= threads


def test_chunks_that_do_not_fit_the_engines_blocks() -> None:
    layout = small_layout()
    config = load_config(chunk_tokens=6, tiers=DISK)
    with pytest.raises(LayoutError, match=r"chunk_tokens=6: .*block_tokens=4"):
        open_cache(config, layout, small_namespace(layout, chunk_tokens=6))
