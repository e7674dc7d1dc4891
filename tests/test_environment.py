"""The description of machine and versions that results carry."""

from __future__ import annotations

import json
import platform
import re

import pytest

import kvkit.environment as environment


def test_describe_is_json_and_complete() -> None:
    described = json.loads(json.dumps(environment.describe()))
    machine, versions = described["machine"], described["versions"]
    assert set(machine) == {"cpu", "cores", "gpu", "memory_gib", "system"}
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["memory_gib"] >= 1
    assert machine["system"].startswith(platform.system())
    assert versions["python"] == platform.python_version()
    assert versions["kvkit"] == environment.version_of("kvkit")
    assert set(versions) <= {"python", *environment.PACKAGES}
    assert None not in versions.values()


def test_describe_names_no_host_user_or_path() -> None:
    text = json.dumps(environment.describe())
    assert platform.node() not in text
    assert "/home" not in text
    assert "/root" not in text


def test_versions() -> None:
    assert environment.version_of("no-such-package") is None
    assert environment.version_of("kvkit") == environment.version_of("KVKit")


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [("NVIDIA H200", "nvidia-h200"), ("(odd) /name\\ ", "odd-name"), (None, None)],
)
def test_slug_is_a_file_name(monkeypatch: pytest.MonkeyPatch, gpu: str | None, expected: str | None) -> None:
    monkeypatch.setattr(environment, "gpu_name", lambda: gpu)
    slug = environment.slug()
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)
    if expected is None:
        assert slug.endswith("-cores")
    else:
        assert slug == expected
