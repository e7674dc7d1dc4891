"""`kvkit doctor` writes, reads and deletes a record in every tier, and reports failures in a line each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import plain_terminal, run  # noqa: F401 - a fixture
from failing_servers import deaf_server, failing_server
from store_listing import fill, listings

from kvkit.tiers.shm.file import pool_path


def written(folder: Path, text: str) -> Path:
    path = folder / "kvkit.toml"
    path.write_text(text)
    return path


def examined(path: Path, status: int = 0) -> dict[str, Any]:
    """The checks that `kvkit doctor --json` tells of, by name."""
    result = run("doctor", path, "--json")
    assert result.exit_code == status, result.output
    told = json.loads(result.stdout)
    assert told["passed"] is (status == 0)
    return {check["name"]: check for check in told["checks"]}


def test_a_line_for_each_tier(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
        [tiers.memory]
        capacity = "1GiB"
        [tiers.disk]
        url = "{tmp_path}/disk"
        codec = "zstd"
        capacity = "1MiB"
        [tiers.few]
        url = ["{tmp_path}/a", "{tmp_path}/b"]
        precision = "fp8"
        [tiers.stripe]
        url = ["{tmp_path}/c", "{tmp_path}/d"]
        spread = "stripe"
        [tiers.pool]
        url = "shm://test-{os.getpid()}"
        capacity = "16MiB"
        """,
    )
    names = ["memory", "disk", "few[0]", "few[1]", "stripe", "pool"]
    result = run("doctor", path)
    assert result.exit_code == 0, result.output
    for name in names:
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"tiers.{name}: "))
        for word in (": ok: open ", " ms, put ", " ms, get ", " ms, delete "):
            assert word in line
    assert len(result.stdout.splitlines()) == 4 + len(names), "what matters, and no more"
    found = examined(path)
    assert list(found) == ["kernels on the CPU", str(path), *(f"tiers.{name}" for name in names)]
    for name in names:
        assert list(found[f"tiers.{name}"]["seconds"]) == ["open", "put", "get", "delete"]
    for folder in "disk", "a", "b", "c", "d":
        assert list((tmp_path / folder).rglob("*")) == [], "something is left"
    assert not Path(pool_path(f"shm://test-{os.getpid()}")).exists()


def test_nothing_is_evicted_or_put_where_the_policy_stores_nothing(tmp_path: Path) -> None:
    fill(str(tmp_path / "full"))
    before = listings(str(tmp_path / "full"))
    path = written(
        tmp_path,
        f"""
        [tiers.full]
        url = "{tmp_path}/full"
        capacity = 1
        [tiers.read]
        url = "memory://read"
        [policy]
        store_to = ["full"]
        write_back_to = []
        """,
    )
    found = examined(path)
    assert list(found["tiers.read"]["seconds"]) == ["open", "lookup"]
    assert found["tiers.read"]["notes"] == ["nothing was put: the policy stores nothing there"]
    assert listings(str(tmp_path / "full")) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('url = "/dev/null/kv"', ("put: ", "/dev/null")),
        ('url = "nosuch://h/x"', ("open: ", "nosuch", "want a folder")),
        ('url = "redis://127.0.0.1:1"', ("put: ", "127.0.0.1:1", "Connection refused")),
        ('url = "ftp://127.0.0.1:1/x"', ("put: ", "Connection refused")),
        ('url = "s3://b/x"\noptions = { endpint = "hush" }', ("open: ", "endpint")),
        ('url = "/tmp/x"\noptions = { key = "hush" }', ("open: ", "a folder has none")),
        ('url = "shm://x"\ncapacity = "4000TiB"', ("settings: ", "/dev/shm has")),
    ],
)
def test_a_tier_that_fails_is_a_line(settings: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, f"[tiers.memory]\ncapacity = '1MiB'\n[tiers.bad]\n{settings}\n")
    result = run("doctor", path)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "hush" not in result.output
    assert "tiers.memory: ok" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("tiers.bad: failed: "))
    for word in words:
        assert word in line
    assert examined(path, status=1)["tiers.bad"]["error"]


def test_a_server_that_answers_everything_with_an_error(tmp_path: Path) -> None:
    with failing_server(500) as url:
        path = written(tmp_path, f'[tiers.bad]\nurl = "{url}"\n[policy]\nstore_to = []\nwrite_back_to = []\n')
        bad = examined(path, status=1)["tiers.bad"]
    assert bad["error"].startswith("lookup: ")
    assert "500" in bad["error"]
    assert [url in warning for warning in bad["warnings"]] == [True]


def test_a_server_that_never_answers_ends(tmp_path: Path) -> None:
    with deaf_server() as port:
        url = f"ftp://127.0.0.1:{port}/x"
        path = written(tmp_path, f'timeout_s = 0.2\n[tiers.bad]\nurl = "{url}"\ntimeout_s = 0.2\n')
        assert "no answer within" in examined(path, status=1)["tiers.bad"]["error"]


def test_a_wrong_setting_is_told_as_json(tmp_path: Path) -> None:
    path = written(tmp_path, "chunk_token = 3\n")
    assert "did you mean 'chunk_tokens'" in examined(path, status=1)[str(path)]["error"]


@pytest.mark.parametrize("option", ["--verbose", "--json"])
def test_options_that_have_no_effect_are_refused(option: str) -> None:
    result = run("doctor", "--blend", "model", option)
    assert result.exit_code == 2
    assert "not for --blend" in result.stderr
