"""Results carry the machine and the versions of packages."""

from __future__ import annotations

import ctypes
import json
import platform
import re
from types import SimpleNamespace
from typing import Any

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
    assert versions["kvkit"] == environment.version_of(environment.DISTRIBUTION)
    assert set(versions) <= {"python", "kvkit", *environment.PACKAGES}
    assert None not in versions.values()


def test_describe_names_no_host_user_or_path() -> None:
    text = json.dumps(environment.describe())
    assert platform.node() not in text
    assert "/home" not in text
    assert "/root" not in text


def test_versions() -> None:
    assert environment.version_of("no-such-package") is None
    assert environment.version_of("kvkit-llm") == environment.version_of("KVKit_LLM") is not None


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


def test_a_thread_is_outside_captures_only_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver stands in: it swaps the thread's mode (0: global, 2: relaxed) for the one given."""
    mode = 0

    def exchange(given: Any) -> int:
        nonlocal mode
        at = ctypes.cast(given, ctypes.POINTER(ctypes.c_int))
        mode, at[0] = at[0], mode
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(environment, "cuda_driver", lambda: driver)
    within = environment.outside_captures()
    within.__enter__()
    assert mode == 2
    assert not within.__exit__(KeyError, KeyError(), None)
    assert mode == 0
    monkeypatch.setattr(environment, "cuda_driver", lambda: None)
    with environment.outside_captures():
        pass
