"""Errors of the router's settings name the setting, the value and the choices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvkit.cli import app
from kvkit.router.settings import parse_engine_options, read_router_config
from kvkit.settings import ConfigError

D = {"d": {"url": "http://127.0.0.1:1"}}


def test_the_command_line_wins_and_adds_engines(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('port = 1\nspread = 7\n[decode.d0]\nurl = "http://h:1/v1/"\n')
    config = read_router_config(path, port=2, decode=parse_engine_options(["d1=https://h:2"], "decode"))
    assert (config.port, config.spread) == (2, 7)
    assert {name: engine.url for name, engine in config.decode.items()} == {
        "d0": "http://h:1",
        "d1": "https://h:2",
    }


def test_engines_have_the_name_of_their_address_or_their_own() -> None:
    found = parse_engine_options(["http://h:1/?a=b", "mine=http://h:2"], "decode")
    assert found == {"h:1": {"url": "http://h:1/?a=b"}, "mine": {"url": "http://h:2"}}
    given = ["http://h:1,handoff=unix:///d.sock,cache=http://h:3", "b=http://h:2,token_file=t"]
    assert parse_engine_options(given, "decode") == {
        "h:1": {"url": "http://h:1", "handoff": "unix:///d.sock", "cache": "http://h:3"},
        "b": {"url": "http://h:2", "token_file": "t"},
    }
    with pytest.raises(ConfigError, match="--decode http://h:1: there is a 'h:1' already"):
        parse_engine_options(["http://h:1", "http://h:1"], "decode")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "decode: no engine given; want at least one --decode URL"),
        (
            {"decode": {"d": {"url": "10.0.0.1:8000"}}},
            "decode.d.url = '10.0.0.1:8000': want http://HOST:PORT",
        ),
        ({"decode": {"d": {"url": "http://me:pw@h"}}}, "decode.d.url.*: it has a user name or password"),
        ({"decode": {"d": {}}}, "decode.d.url: Field required"),
        ({"decode": D, "direct_share": 2}, "direct_share = 2: Input should be less than or equal to 1"),
        ({"decode": D, "port": 70000}, "port = 70000"),
        ({"decode": D, "request_timeout_s": float("inf")}, "request_timeout_s = inf"),
        ({"decode": D, "direct_token": 2}, "direct_token: unknown setting; did you mean 'direct_tokens'"),
        (
            {"decode": {"d": D["d"] | {"hand": 1}}},
            "decode.d.hand: unknown setting; .*here are url",
        ),
        ({"decode": D, "prefill": D}, "prefill.d: there is a decode.d, too"),
        ({"decode": {"d": D["d"] | {"token_file": "t"}}}, "d.token_file: given without d.cache"),
        ({"decode": {"d": D["d"] | {"replay": "tcp://h:1"}}}, "d.replay: given without d.events"),
        (
            {"decode": {"d": D["d"] | {"data_parallel": 2, "events": "ipc:///a"}}},
            "d.events = 'ipc:///a': want HOST:PORT with data_parallel",
        ),
        (
            {"decode": {"d": D["d"] | {"data_parallel": 2, "handoff": "tcp://h:1"}}},
            "d.handoff: want none with data_parallel",
        ),
        ({"decode": {"d": D["d"] | {"events": "tcp://*:1"}}}, "d.events = .*: want tcp://HOST:PORT"),
        ({"decode": {"d": D["d"] | {"handoff": "tcp://h"}}}, "d.handoff = 'tcp://h': tcp://h: want unix:///"),
        (
            {"decode": D, "blend": {"marks": ["<d>", "a<d>"]}},
            "blend.marks.*: want two texts, neither containing",
        ),
        ({"decode": D, "blend": {"methods": ["k_deviation"]}}, "blend.methods.0 = 'k_deviation'"),
        (
            {"decode": D, "prefill": {"p": D["d"] | {"handoff": "tcp://h:1"}}},
            "prefill.p.handoff: only a decode engine has one",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_router_config(**settings)


@pytest.mark.parametrize("text", [None, "port = "])
def test_a_file_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        read_router_config(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "decode: no engine given"),
        (["--decode", "nowhere"], "want http://HOST:PORT"),
        (["--decode", "http://[::1"], "url = 'http://[::1': Invalid IPv6 URL"),
        (["--decode", "http://h:99999"], "url = 'http://h:99999': Port out of range"),
        (["--decode", "http://h:0"], "url = 'http://h:0': want a port from 1 to 65535"),
        (["--decode", "http://h:1,unix:///d"], "'unix:///d': want SETTING=VALUE once each, of url, cache,"),
        (["--decode", "http://h:1,handof=unix:///d"], "did you mean 'handoff'"),
        (["--decode", "http://h:1,handoff=/d"], "decode.h:1.handoff = '/d': /d: want unix:///<path>"),
        (["--decode", "http://h:1", "--host", "192.0.2.1"], "host = '192.0.2.1', port = 8000: "),
        (["--decode", "http://h:1", "--port", "-1"], "port = -1: "),
    ],
)
def test_the_command_says_what_is_wrong(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["router", *options])
    assert done.exit_code == 1
    assert "error: " in done.output
    assert words in done.output
