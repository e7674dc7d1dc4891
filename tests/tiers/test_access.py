"""An HTTP endpoint admits loopback addresses, or clients with its token."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from endpoints import TOKEN

from kvkit.environment import is_loopback
from kvkit.observe.access import make_token, read_token
from kvkit.settings import ConfigError
from kvkit.tiers.testing.contract import DEADLINE_S


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_token_is_made_once_and_for_one_user(tmp_path: Path) -> None:
    path = tmp_path / "state" / "kvkit" / "token"
    token = make_token(path)
    assert make_token(path) == read_token(path) == token
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["token"]
    assert make_token(tmp_path / "other") != token


def test_endpoints_that_start_together_share_the_token(tmp_path: Path) -> None:
    barrier = threading.Barrier(16)
    found: list[str] = []

    def start() -> None:
        barrier.wait(DEADLINE_S)
        found.append(make_token(tmp_path / "state" / "token"))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(found) == 16
    assert set(found) == {read_token(tmp_path / "state" / "token")}


def test_a_token_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"server\.token_file='.*token': .*No such file"):
        read_token(path)
    for content in (b"", b"short\n", b"\xff" * 20):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"server\.token_file="):
            make_token(path)
    path.write_text(TOKEN)
    for mode in (0o604, 0o602, 0o644):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:04o}; want 0600"):
            make_token(path)
    path.chmod(0o640)
    assert make_token(path) == TOKEN, "a group may be trusted"
    with pytest.raises(ConfigError, match="directory"):
        make_token(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="File exists"):
        make_token(tmp_path / "file" / "token")
