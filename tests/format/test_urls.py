"""Secrets in URLs of stores appear in no configuration, error, log or command output."""

from __future__ import annotations

import json
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvkit.adapters.vllm.settings import read_settings
from kvkit.cli import app
from kvkit.config import load_config
from kvkit.format.urls import has_password, hide, shown
from kvkit.handoff.transport import addresses
from kvkit.settings import ConfigError
from kvkit.staging import Staging
from kvkit.tiers import mooncake, redis
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import SLOT_BYTES, get, put, record_names

MARK = "S3CR3T"
# whatever a TOML file can hold in one line, with what separates the parts of a URL more often than not
CHARACTERS = st.one_of(
    st.sampled_from("@:/?#&=%[];' \"\\"), st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp"))
)
RAW = st.text(CHARACTERS, max_size=12).map(lambda text: f"{MARK}{text}{MARK}")
QUOTED = RAW.map(lambda text: quote(text, safe=""))
WORDS = st.text("abcxyz019-.", min_size=1, max_size=8)


@st.composite
def links(draw: st.DrawFn, secrets: st.SearchStrategy[str]) -> str:
    """A link of a chain, with a secret in one or more of the places where URLs have them."""
    scheme = draw(st.sampled_from(["ftp", "https", "redis", "mooncake", "s3", "az", "nosuch", "simplecache"]))
    secret = draw(secrets)
    user = draw(st.sampled_from(["", f"{secret}@", f"me:{secret}@", f":{secret}@", f"{secret}:{secret}@"]))
    query = draw(st.sampled_from(["", f"?sig={secret}", f"?a=b&sig={secret}&c={secret}", f"?{secret}"]))
    fragment = draw(st.sampled_from(["", f"#{secret}"]))
    return f"{scheme}://{user}{draw(WORDS)}/{draw(WORDS)}{query}{fragment}"


def chains(secrets: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    caches = st.sampled_from(["", "simplecache::", "filecache::simplecache::", "zip://x.zip::"])
    several = st.lists(links(secrets), min_size=1, max_size=3).map("::".join)
    return st.builds(lambda cache, chain: cache + chain, caches, several)


URLS = st.one_of(chains(QUOTED), chains(RAW))


@given(URLS)
@example(f"https://h/x?mail=me@h&sig={MARK}")
@example(f"ftp://me:{MARK}?{MARK}@h/x")
@example(f"simplecache::ftp://me:{MARK}::{MARK}@h/x")
@example(f"zip:///x.zip::ftp://{MARK}@h")
def test_what_is_shown_has_no_secret(url: str) -> None:
    assert MARK not in shown(url)
    assert shown(shown(url)) == shown(url)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("/mnt/nvme0/me@work/kv#1?", "/mnt/nvme0/me@work/kv#1?"),
        ("file:///mnt/me@work/kv", "file:///mnt/me@work/kv"),
        ("~/.cache/kvkit/store", "~/.cache/kvkit/store"),
        ("s3://records/kv", "s3://records/kv"),
        ("redis://[::1]:6379/3", "redis://[::1]:6379/3"),
        ("abfss://token@account.dfs.core.windows.net/kv", "abfss://***@account.dfs.core.windows.net/kv"),
        ("simplecache::ftp://me:pw@host:21/kv", "simplecache::ftp://***@host:21/kv"),
        ("https://host/kv?sv=1&sig=x#y", "https://host/kv?***"),
    ],
)
def test_the_rest_of_a_url_is_shown(url: str, wanted: str) -> None:
    assert shown(url) == wanted


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("ftp://me:pw@host", True),
        ("simplecache::ftp://me:pw@host/x", True),
        ("zip://x::ftp://:pw@host", True),
        ("redis://host:6379", False),
        ("az://token@host", False),
        ("s3://bucket/a:b@c", False),
        ("ftp://[me@host", False),
    ],
)
def test_a_password_in_any_link_is_found(url: str, found: bool) -> None:
    assert has_password(url) is found


@given(st.one_of(chains(QUOTED), chains(RAW)), st.sampled_from(["{}", "'{}'", "no {}/ab/0, see {}", "<{}>"]))
def test_no_text_keeps_a_secret_of_the_url(url: str, text: str) -> None:
    inner = url.rpartition("::")[2]
    quoting = "; ".join(text.replace("{}", form) for form in (url, inner, repr(url), f"{inner}/ab/0"))
    assert MARK not in hide(quoting, url)


def test_values_of_options_are_hidden_too() -> None:
    options = {"ftp": {"password": "a b'c", "port": 2121}, "key": "x/y"}
    told = hide('refused: "a b\'c" a%20b%27c x%2Fy x/y 2121', "ftp://h", options)
    assert told == 'refused: "***" *** *** *** ***'


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(URLS, st.booleans())
def test_no_configuration_shows_a_secret(tmp_path: Path, url: str, several: bool) -> None:
    """Not its repr, not the error that refuses it, not `kvkit doctor`, which tries to reach it."""
    urls = [url, "memory://x"] if several else url
    try:
        told = repr(TierConfig(url=urls, scope="shared"))
    except ValueError as error:
        told = "".join(traceback.format_exception(error))
    try:
        config = load_config(tiers={"far": {"url": urls}})
    except ConfigError as error:
        told += "".join(traceback.format_exception(error))
    else:
        told += f"{config!r} {config} {config.tiers} {config.model_dump_json()}"
    file = tmp_path / "kvkit.toml"
    shown_url = json.dumps(urls, ensure_ascii=False)
    file.write_text(f"timeout_s = 0.1\n[tiers.far]\nurl = {shown_url}\ntimeout_s = 0.1\n", encoding="utf-8")
    told += CliRunner().invoke(app, ["doctor", str(file)]).output
    assert "far" in told
    assert MARK not in told


@settings(max_examples=60, deadline=None)
@given(URLS, st.sampled_from(["scope", "urll", "password", "threads"]))
def test_no_error_about_a_misplaced_url_shows_a_secret(url: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tiers={"far": {"url": "memory://x", setting: url}})
    assert MARK not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError) as caught:
        load_config(tiers=[url])
    assert MARK not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "kvkit", [MARK, [f"ftp://{MARK}@h"], {"tiers": {"far": {"url": f"ftp://:{MARK}@h"}}}]
)
def test_the_connector_shows_no_secret(kvkit: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"kvkit": kvkit})
    assert MARK not in "".join(traceback.format_exception(caught.value))
    tier = {"url": "memory://far", "options": {"key": MARK}}
    assert MARK not in repr(read_settings({"kvkit": {"tiers": {"far": tier}}}))


@settings(max_examples=60, deadline=None)
@given(URLS)
def test_no_server_whose_url_is_refused_shows_a_secret(url: str) -> None:
    told = ""
    for scheme, parse in (("redis", redis._parse), ("mooncake", mooncake._parse)):
        for one in (url, f"{scheme}://{url.partition('://')[2]}"):
            try:
                parse("far", one)
            except ValueError as error:
                told += "".join(traceback.format_exception(error))
    assert MARK not in told


class _Refusing(BaseHTTPRequestHandler):
    """Has the status that the first part of the path names."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:4]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """host:port of a server that refuses everything."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def nobody() -> Iterator[str]:
    """host:port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("status", [404, 403, 500])
@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_what_a_library_says_of_a_url_has_no_secret(
    status: int, chain: str, refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """fsspec and aiohttp quote all of it."""
    caplog.set_level(logging.INFO)
    staging = Staging(SLOT_BYTES, 2)
    tier = ObjectTier(f"{chain}http://{MARK}@{refusing}/{status}?sig={MARK}%2F{MARK}")
    names = record_names(1)
    told = [*put(tier, staging, names), *get(tier, staging, names)]
    asks: list[Callable[[], object]] = [
        lambda: tier.size(names[0]),
        lambda: list(tier.scan()),
        lambda: tier.delete(names),
    ]
    for ask in asks:
        try:
            ask()
        except OSError as error:
            told.append(error)
    tier.close()
    staging.close()
    errors = [error for error in told if isinstance(error, BaseException)]
    assert any("127.0.0.1" in str(error) for error in errors), "where it was"
    assert MARK not in "".join("".join(traceback.format_exception(error)) for error in errors)
    assert MARK not in caplog.text


@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_what_a_library_says_when_nobody_answers_has_no_secret(
    chain: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = TierConfig(url="ftp://h/x", options={"timeout": 1})  # which would refuse a password
    with nobody() as address:
        url = f"{chain}ftp://me:{MARK}@{address}/x"
        with closing(ObjectTier(config.model_copy(update={"url": url}))) as tier:
            assert "ftp://***@127" in caplog.text
            with pytest.raises(ConnectionRefusedError) as caught:
                tier.match_prefix(record_names(1))
    assert MARK not in "".join(traceback.format_exception(caught.value))
    assert MARK not in caplog.text


@pytest.mark.parametrize("url", [f"nosuch://{MARK}@h/x", f"simplecache::nosuch://h/x?sig={MARK}"])
def test_commands_show_no_secret(url: str) -> None:
    result = CliRunner().invoke(app, ["inspect", url])
    assert result.exit_code == 1
    assert MARK not in result.output
    result = CliRunner().invoke(app, ["top", url.replace("simplecache::", "").replace("nosuch", "http")])
    assert result.exit_code == 1
    assert "want an address" in result.output
    assert MARK not in result.output


HANDOFF_ADDRESSES = [
    f"tcp://me:{MARK}@127.0.0.1:1",
    f"tcp://{MARK}@127.0.0.1:1",
    f"tcp://me:{MARK}@127.0.0.1",
    f"tcp://me:{MARK}@h:99999",
    f"tcp://me:{MARK}@[::1",
    f"tcp://me:{MARK}@h\N{ACCOUNT OF}:1",
    f"tcp://h:1?token={MARK}",
    f"tcp://h:1#{MARK}",
    f"unix://me:{MARK}@/x",
    f"unix:///x?{MARK}",
    f"http://me:{MARK}@h:1",
    f"me:{MARK}@h:1",
]


@pytest.mark.parametrize("address", HANDOFF_ADDRESSES)
def test_no_address_of_handoff_is_quoted_with_a_secret(address: str) -> None:
    """None has a place for one, so each is refused."""
    secret = {"secret": "0123456789abcdef"}
    decode = {"role": "decode", "buffer": "1MiB"}
    for handoff in (
        decode | secret | {"listen": [address]},
        decode | {"listen": [address]},
        decode | {"listen": address},
        secret | {"role": "prefill", "peers": {"d": address}},
    ):
        with pytest.raises(ConfigError, match=r"handoff.*want|handoff\.listen") as caught:
            load_config(handoff=handoff)
        assert MARK not in str(caught.value)
    with pytest.raises(ValueError, match="want unix:///<path>, tcp://<host>:<port> or") as refused:
        addresses.parse(address)
    assert MARK not in str(refused.value)


def test_no_peer_s_name_is_quoted_with_a_secret() -> None:
    params = pytest.importorskip("kvkit.adapters.vllm.params")
    with pytest.raises(ConfigError, match=r"\*\*\*@h:1.: no such peer") as caught:
        params.read({"do_remote_decode": True, "handoff": f"me:{MARK}@h:1"}, {})
    assert MARK not in str(caught.value)
