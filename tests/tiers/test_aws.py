"""Credentials of S3 buckets come from options or profiles, and missing ones are named."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvkit.tiers.base import TierError
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import record_names

TIMEOUT_S = 5.0
SIGNED = re.compile(r"Credential=(\w+)/\d+/([\w-]+)/s3/")
CREDENTIALS = """
[default]
aws_access_key_id = DEFAULT
aws_secret_access_key = hush
[work]
aws_access_key_id = WORK
aws_secret_access_key = hush
"""
CONFIG = f"""
[profile work]
region = eu-west-7
[profile process]
region = eu-west-8
credential_process = {sys.executable} -c "print('{{\\"Version\\": 1, \\"AccessKeyId\\": \\"PROCESS\\",\
 \\"SecretAccessKey\\": \\"hush\\"}}')"
"""


class Empty(ThreadingHTTPServer):
    """A server on which there is nothing, which keeps who asked for what."""

    daemon_threads = True

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.signed: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), Missing)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Missing(BaseHTTPRequestHandler):
    server: Empty

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.signed += SIGNED.findall(self.headers.get("Authorization", ""))
        self.send_error(404)

    do_HEAD = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Empty]:
    with Empty() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with three profiles, and nothing of AWS in the environment."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    return tmp_path


def look(server: Empty, **options: object) -> None:
    """Look for a record in a bucket of that server."""
    config = TierConfig(url="s3://bucket/x", options={"endpoint": server.url, **options}, timeout_s=TIMEOUT_S)
    with closing(ObjectTier(config)) as tier:
        assert tier.match_prefix(record_names(1)) == 0


@pytest.mark.parametrize(
    ("environment", "signed"),
    [
        ({}, ("DEFAULT", "us-east-1")),
        ({"AWS_PROFILE": "work"}, ("WORK", "eu-west-7")),
        ({"AWS_PROFILE": "process"}, ("PROCESS", "eu-west-8")),
        ({"AWS_PROFILE": "work", "AWS_DEFAULT_REGION": "eu-west-9"}, ("WORK", "eu-west-9")),
        (
            {"AWS_ACCESS_KEY_ID": "KEYS", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_PROFILE": "default"},
            ("KEYS", "us-east-1"),
        ),
    ],
)
def test_a_profile_is_heeded(
    environment: dict[str, str],
    signed: tuple[str, str],
    server: Empty,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    look(server)
    assert set(server.signed) == {signed}


def test_profiles_of_other_files(server: Empty, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in (("credentials", "AWS_SHARED_CREDENTIALS_FILE"), ("config", "AWS_CONFIG_FILE")):
        (home / ".aws" / name).rename(home / name)
        monkeypatch.setenv(variable, str(home / name))
    monkeypatch.setenv("AWS_PROFILE", "work")
    look(server)
    assert set(server.signed) == {("WORK", "eu-west-7")}


def test_options_win_over_a_profile(server: Empty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    look(server, access_key_id="GIVEN", secret_access_key="hush", region="eu-west-1")
    assert set(server.signed) == {("GIVEN", "eu-west-1")}


def test_a_profile_that_is_not_there_is_refused_by_name(
    server: Empty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "wrok")
    with pytest.raises(ValueError, match="wrok"):
        look(server)
    assert server.paths == []


def test_profiles_need_botocore(server: Empty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkit.tiers.aws.find_spec", lambda name: None)
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(ValueError, match="AWS_PROFILE='work': profiles need botocore: pip install botocore"):
        look(server)


def test_the_metadata_service_is_not_asked_where_that_is_disabled(
    server: Empty, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws" / "credentials").unlink()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ValueError, match="tier 'disk': no credentials: none among the options") as caught:
        look(server, metadata_endpoint=server.url)
    for place in ("AWS_ACCESS_KEY_ID", "the profile 'default' of ~/.aws/credentials", "is not asked"):
        assert place in str(caught.value)
    assert server.paths == []
    look(server, skip_signature=True)
    assert server.signed == []


def test_missing_credentials_are_named(server: Empty, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".aws" / "credentials").unlink()
    with pytest.raises(TierError, match=r"no credentials: none among the options.*service gives none"):
        look(server, metadata_endpoint=server.url)
    assert "/latest/api/token" in server.paths


def test_a_profile_whose_credentials_fail_is_an_error_of_the_store(
    server: Empty, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws" / "config").write_text("[profile broken]\ncredential_process = false\n")
    monkeypatch.setenv("AWS_PROFILE", "broken")
    with pytest.raises((TierError, ValueError), match=r"broken|process"):
        look(server)
