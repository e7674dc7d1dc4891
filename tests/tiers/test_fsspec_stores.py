"""Calls on fsspec stores end with a reason when servers refuse, fail or never answer."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from failing_servers import deaf_server, failing_server, http_server, refusing_server
from fsspec.implementations.memory import MemoryFileSystem
from store_listing import fill, listings
from typer.testing import CliRunner

from kvkit.cache import Cache
from kvkit.cli import app
from kvkit.config import load_config, open_cache
from kvkit.lab.testbed.engine_stub import small_layout, small_namespace
from kvkit.observe.inspect import list_tier
from kvkit.staging import Staging
from kvkit.tiers.base import TierError
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import get, put, record_names

TIMEOUT_S = 0.2
LATE_S = 20.0
"""Far less than what libraries wait by themselves, and far more than the calls of a test may take."""


@pytest.mark.parametrize("protocol", ["http", "webhdfs", "ftp"])
def test_a_server_that_never_answers(
    protocol: str, staging: Staging, caplog: pytest.LogCaptureFixture
) -> None:
    begun, names = time.monotonic(), record_names(2)
    with deaf_server() as port:
        url = f"{protocol}://127.0.0.1:{port}/records"
        with closing(ObjectTier(TierConfig(url=url, timeout_s=TIMEOUT_S))) as tier:
            assert f"{url} cannot be listed: " in caplog.text
            assert f"no answer within timeout_s={TIMEOUT_S}" in caplog.text
            with pytest.raises(TimeoutError, match="no answer within"):
                tier.match_prefix(names)
            for errors in (get(tier, staging, names), put(tier, staging, names)):
                assert all(isinstance(error, TimeoutError) for error in errors)
        with pytest.raises(TierError, match=f"^{url} cannot be listed: .*no answer"):
            list(list_tier("far", TierConfig(url=url, timeout_s=TIMEOUT_S)))
    assert time.monotonic() - begun < LATE_S
    staging.close()


@pytest.mark.parametrize("protocol", ["http", "webhdfs", "ftp"])
def test_a_call_that_hangs_keeps_no_process_alive(protocol: str) -> None:
    script = (
        "import sys; from kvkit.tiers.objects import ObjectTier; from kvkit.tiers.settings import TierConfig;"
        "ObjectTier(TierConfig(url=sys.argv[1], timeout_s=0.2)).close(); print('opened')"
    )
    with deaf_server() as port:
        url = f"{protocol}://127.0.0.1:{port}/records"
        done = subprocess.run(
            [sys.executable, "-c", script, url], capture_output=True, text=True, timeout=200, check=True
        )
    assert done.stdout == "opened\n"


@pytest.mark.parametrize("protocol", ["http", "ftp"])
def test_a_cache_passes_over_a_tier_that_never_answers(protocol: str) -> None:
    """It opens in time, and its health says what is wrong after one lookup."""
    begun = time.monotonic()
    with deaf_server() as port, opened(f"{protocol}://127.0.0.1:{port}/records") as (cache, tokens):
        assert cache.lookup(tokens).tokens == 0
        assert cache.tier_states() == {"far": "open"}
    assert time.monotonic() - begun < LATE_S


@contextmanager
def opened(url: str) -> Iterator[tuple[Cache, Any]]:
    """A cache with a tier at `url`, and tokens of two chunks."""
    layout = small_layout()
    config = load_config(chunk_tokens=8, staging="1MiB", tiers={"far": {"url": url, "timeout_s": TIMEOUT_S}})
    with closing(open_cache(config, layout, small_namespace(layout, 8))) as cache:
        yield cache, np.arange(16, dtype=np.int32)


CAUSES = [
    pytest.param(refusing_server, 0, "Cannot connect to host", id="refused"),
    pytest.param(failing_server, 403, "403, message='Forbidden'", id="403"),
    pytest.param(failing_server, 500, "500, message='Internal Server Error'", id="500"),
]


@pytest.mark.parametrize(("server", "status", "cause"), CAUSES)
def test_a_server_that_fails_is_no_empty_store(server: Any, status: int, cause: str) -> None:
    with server(status) as url:
        result = CliRunner().invoke(app, ["inspect", url])
        assert result.exit_code == 1
        assert f"{url} cannot be listed: " in result.stderr
        assert cause in result.stderr
        with opened(url) as (cache, tokens):
            for _ in range(3):
                assert cache.lookup(tokens).tokens == 0
            assert cache.tier_states() == {"far": "open"}


def test_records_are_listed_and_read_over_http(tmp_path: Path) -> None:
    fill(str(tmp_path / "records"))
    (tmp_path / "records" / "another").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http_server(partial(Quiet, directory=str(tmp_path))) as url:
        assert listings(url) == listings(str(tmp_path / "records"))
        assert listings(f"{url}/absent") == {}


class Fickle(MemoryFileSystem):  # type: ignore[misc] # fsspec is untyped
    """A store that connects when it is made, as ftp's does, and whose server comes and goes."""

    protocol = "fickle"
    there, broken, connected = False, False, 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if not self.there:
            raise ConnectionRefusedError("nobody listens")
        type(self).connected += 1

    def info(self, path: str, **settings: Any) -> Any:
        if self.broken:
            raise ConnectionResetError("the connection is lost")
        return super().info(path, **settings)


def test_a_server_that_comes_back_is_connected_to_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("fickle", Fickle, clobber=True)
    for name, value in (("there", False), ("broken", False), ("connected", 0)):
        monkeypatch.setattr(Fickle, name, value)
    names = record_names(1)
    with closing(ObjectTier(TierConfig(url=f"fickle://{uuid.uuid4().hex}"))) as tier:
        with pytest.raises(ConnectionRefusedError):
            tier.match_prefix(names)
        monkeypatch.setattr(Fickle, "there", True)
        assert tier.match_prefix(names) == 0
        assert tier.match_prefix(names) == 0
        assert Fickle.connected == 1
        monkeypatch.setattr(Fickle, "broken", True)
        with pytest.raises(ConnectionResetError):
            tier.match_prefix(names)
        monkeypatch.setattr(Fickle, "broken", False)
        assert tier.match_prefix(names) == 0
        assert Fickle.connected == 2
