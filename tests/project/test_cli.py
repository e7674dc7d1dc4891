"""Commands print results, return exit statuses, and report errors without tracebacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import uuid
from importlib.metadata import metadata
from pathlib import Path

import pytest
from command_line import failed, plain_terminal, run  # noqa: F401 - plain_terminal is a fixture
from repository import ROOT
from store_listing import fill, form_of, records
from typer.testing import Result

from kvkit.doctor import report as doctor
from kvkit.environment import DISTRIBUTION, version_of


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process of its own."""
    command = [str(Path(sys.executable).parent / "kvkit"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | environment)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("demo", "doctor", "inspect", "tune")),
        (("--help",), ("demo", "doctor", "inspect", "tune")),
        (("demo", "--help"), ("--model", "--json", "--png")),
        (("doctor", "--help"), ("a configuration file to check",)),
        (("inspect", "--help"), ("redis://", "--config", "changes nothing")),
    ],
)
def test_help(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0 or not arguments
    for word in words:
        assert word in result.output


@pytest.mark.parametrize("arguments", [("nothing",), ("inspect",), ("doctor", "--what")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert "Traceback" not in result.output


def test_doctor_lists_versions() -> None:
    result = run("doctor", "--verbose")
    assert result.exit_code == 0
    assert f"kvkit {version_of(DISTRIBUTION)}" in result.stdout
    for packages, purpose, _ in doctor.FEATURES:
        (line,) = (line for line in result.stdout.splitlines() if purpose in line)
        names = packages.split(" or ")
        package = next(filter(version_of, names), names[0])
        assert package in line
        assert (version_of(package) or "missing") in line


@pytest.mark.parametrize("command", ["router", "inspect", "doctor"])
def test_a_command_of_the_core_loads_nothing_of_the_laboratory(command: str) -> None:
    code = (
        "import sys; from kvkit.cli import app; app([sys.argv[1], '--help'], standalone_mode=False); "
        "print([name for name in sys.modules if name.startswith('kvkit.lab')])"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvkit {version_of(DISTRIBUTION)}\n")


def test_doctor_notices_the_package_of_another_project(tmp_path: Path) -> None:
    """PyPI's "kvkit", which is none of ours, is one `pip install` away."""
    told = "the package kvkit 0.1.2 is installed"
    assert told not in script("doctor").stdout
    folder = tmp_path / "kvkit-0.1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kvkit\nVersion: 0.1.2\n")
    done = script("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert told in done.stdout
    assert f"pip uninstall kvkit {DISTRIBUTION}" in done.stdout


def test_doctor_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (("no-such-package", "nothing", "[demo]"), ("nor-this-one", "all", "torch for CUDA"))
    monkeypatch.setattr(doctor, "FEATURES", absent)
    result = run("doctor")
    assert result.exit_code == 0
    assert "missing for nothing: no-such-package: pip install 'kvkit-llm[demo]'" in result.stdout
    assert "missing for all: nor-this-one: comes with torch for CUDA" in result.stdout
    result = run("doctor", "--verbose")
    assert "missing: pip install 'kvkit-llm[demo]'" in result.stdout
    assert "missing: comes with torch for CUDA" in result.stdout


def test_every_extra_that_brings_a_feature_is_told_of() -> None:
    path = ROOT / "pyproject.toml"
    extras = set(tomllib.loads(path.read_text())["project"]["optional-dependencies"])
    told = {extra for *_, source in doctor.FEATURES for extra in re.findall(r"\[([\w-]+)\]", source)}
    assert extras - told == {"dev", "paper", "simulate"}, "matplotlib and typst, and what contributors need"


def test_every_source_of_a_feature_is_an_extra_that_exists() -> None:
    extras = metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    for package, _, source in doctor.FEATURES:
        extra = re.fullmatch(r"\[([\w-]+)\]", source)
        assert extra is None or extra[1] in extras, package


def test_doctor_checks_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "[odd] name.toml"
    disk = f'url = "{tmp_path / "disk"}"'
    path.write_text(f'[tiers.memory]\ncapacity = "1MiB"\n[tiers.disk]\n{disk}\n[policy]\nstore_to = []\n')
    result = run("doctor", path, "--verbose")
    assert result.exit_code == 0
    assert f"{path}: ok" in result.stdout
    assert "retrieve_from: memory, disk" in result.stdout
    assert "store_to: none" in result.stdout
    assert "write_back_to: memory" in result.stdout
    shown = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    assert shown["tiers"]["memory"]["capacity"] == 2**20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chunk_token = 3", ("chunk_token: unknown setting", "did you mean 'chunk_tokens'")),
        ("[tiers.disk]", ("tiers.disk", "needs a capacity")),
        ("staging = ", ("Invalid value",)),
        ("hash = '[/bold]'", ("hash = '[/bold]'", "xxh3_128")),
    ],
)
def test_doctor_refuses_a_wrong_configuration(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    failed(run("doctor", path), f"{path}: ", *words)


def test_doctor_without_the_file(tmp_path: Path) -> None:
    failed(run("doctor", tmp_path / "absent.toml"), "absent.toml", "No such file")


def row(result: Result, digest: str) -> list[str]:
    """The cells of the one row of the table that shows this namespace."""
    (line,) = (line for line in result.stdout.splitlines() if f"│ {digest}" in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_inspect_a_good_store(tmp_path: Path) -> None:
    engine = fill(str(tmp_path), 3, groups=2)
    result = run("inspect", tmp_path)
    assert result.exit_code == 0
    for group in range(2):
        form = form_of(engine, group)
        megabytes = f"{3 * form.record_bytes / 1e6:.1f}"
        digest = form.array.split("/")[0]
        lines = [line for line in result.stdout.splitlines() if digest in line]
        cells = [cell.strip() for cell in lines[group].strip("│").split("│")]
        assert cells == [digest, str(group), "test float32", "3", "24", megabytes, "0"]


def test_inspect_lists_damage_and_returns_1(tmp_path: Path) -> None:
    engine = fill(str(tmp_path), 3)
    one, two, three = records(tmp_path)
    one.write_bytes(one.read_bytes()[:-1])
    two.write_bytes(b"[/bold]")
    (tmp_path / form_of(engine).array / "zarr.json").unlink()
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert row(result, form_of(engine).digest[:16].hex())[2:] == ["no zarr.json", "3", "8", "0.0", "2"]
    assert f"damaged: {one.relative_to(tmp_path)}: truncated\n" in result.stdout
    assert f"damaged: {two.relative_to(tmp_path)}: not a kvkit record\n" in result.stdout
    assert str(three.relative_to(tmp_path)) not in result.stdout


def test_inspect_shows_names_as_they_are(tmp_path: Path) -> None:
    engine = fill(str(tmp_path / "[bold]"), 1, revision="[/red]")
    (tmp_path / "[bold]" / "ab" / "0").mkdir(parents=True)
    (tmp_path / "[bold]" / "ab" / "0" / "c.0.0.0.0.0.0").write_bytes(b"")
    result = run("inspect", tmp_path / "[bold]")
    assert result.exit_code == 1
    assert form_of(engine).array.split("/")[0] in result.stdout
    assert "damaged: ab/0/c.0.0.0.0.0.0: not a kvkit record" in result.stdout


def test_inspect_prints_no_byte_that_a_terminal_obeys(tmp_path: Path) -> None:
    form = form_of(fill(str(tmp_path), 1))
    file = tmp_path / form.array / "zarr.json"
    hostile = "te\x1b]0;owned\x07\x9b31mst\u202e\nrow"
    file.write_text(file.read_text().replace('"test"', json.dumps(hostile)))
    result = run("inspect", tmp_path)
    assert result.exit_code == 0
    assert r"te\x1b]0;owned\x07\x9b31mst\u202e\nrow" in result.stdout
    assert not set(hostile) & {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.stdout)
    refused = run("inspect", f"{tmp_path}/a\x1b[2Jb")
    failed(refused, r"a\x1b[2Jb: no such store")
    assert "\x1b" not in refused.output


def test_inspect_a_tier_of_a_configuration(tmp_path: Path) -> None:
    engine = fill(str(tmp_path / "a"), 3)
    config = tmp_path / "kvkit.toml"
    config.write_text(f'[tiers.disk]\nurl = "{tmp_path}/a"\n[tiers.memory]\ncapacity = "1MiB"\n')
    result = run("inspect", "disk", "--config", config)
    assert result.exit_code == 0
    assert row(result, form_of(engine).array.split("/")[0])[3:5] == ["3", "24"]
    failed(run("inspect", "bucket", "--config", config), "no tier 'bucket'", "disk, memory")
    failed(run("inspect", "memory", "--config", config), "memory of its process")


def test_inspect_prints_as_json(tmp_path: Path) -> None:
    """Whatever somebody wrote into the store."""
    form = form_of(fill(str(tmp_path), 3))
    digest, _, group = form.array.partition("/")
    file = tmp_path / form.array / "zarr.json"
    file.write_text(file.read_text().replace('"test"', '"te\\u001b\\ud800"'))
    result = run("inspect", tmp_path, "--json")
    assert result.exit_code == 0
    assert result.stdout.isascii()
    document = json.loads(result.stdout)
    (array,) = document.pop("arrays")
    assert document == {"store": str(tmp_path)}
    assert array.pop("fields")["model"] == "te\x1b\ud800"
    size = 3 * form.record_bytes
    counts = {"chunk_tokens": 8, "chunks": 3, "tokens": 24, "bytes": size, "damaged": []}
    assert array == {"namespace": digest, "group": group} | counts
    first = records(tmp_path)[0]
    first.write_bytes(b"")
    result = run("inspect", tmp_path, "--json")
    assert result.exit_code == 1
    (damaged,) = json.loads(result.stdout)["arrays"][0]["damaged"]
    assert damaged == {"record": str(first.relative_to(tmp_path)), "reason": "not a kvkit record"}
    (tmp_path / "empty").mkdir()
    assert json.loads(run("inspect", tmp_path / "empty", "--json").stdout)["arrays"] == []


def test_inspect_any_url() -> None:
    bucket = f"memory://{uuid.uuid4().hex}"
    engine = fill(bucket)
    result = run("inspect", bucket)
    assert result.exit_code == 0
    assert row(result, form_of(engine).array.split("/")[0])[3:5] == ["3", "24"]


def test_inspect_an_empty_folder(tmp_path: Path) -> None:
    result = run("inspect", tmp_path)
    assert result.exit_code == 0
    assert "no records" in result.stdout


def test_inspect_nothing(tmp_path: Path) -> None:
    failed(run("inspect", tmp_path / "absent"), "absent: no such store")
    failed(run("inspect", "nowhere://x"), "nowhere")


def test_demo_with_nowhere_to_write(tmp_path: Path) -> None:
    failed(run("demo", "--json", tmp_path / "absent" / "demo.json"), "absent", "no folder")


def test_the_installed_command(tmp_path: Path) -> None:
    done = script("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"kvkit {version_of(DISTRIBUTION)}" in done.stdout
    (tmp_path / "wrong.toml").write_text("hash = 'md5'")
    done = script("doctor", str(tmp_path / "wrong.toml"))
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'wrong.toml'}: hash = 'md5': Input should be 'xxh3_128', " + (
        "'blake3' or 'sha256'\n"
    )
