"""`import kvkit` gives the public names, and imports no heavy package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvkit

HOMES = {
    "Cache": "kvkit.cache",
    "Hit": "kvkit.transfer.sequence",
    "Policy": "kvkit.transfer.policy",
    "RequestPolicy": "kvkit.transfer.policy",
    "SequencePages": "kvkit.transfer.sequence",
    "Tier": "kvkit.tiers.base",
    "load_config": "kvkit.config",
    "open_cache": "kvkit.config",
}


def in_new_process(code: str) -> str:
    """What some Python prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_public_face_is_what_the_modules_define() -> None:
    assert set(kvkit.__all__) == set(HOMES)
    for name, home in HOMES.items():
        assert getattr(kvkit, name) is vars(sys.modules[home])[name]
        assert getattr(kvkit, name).__module__ == home
    assert set(kvkit.__all__) <= set(dir(kvkit))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'kvkit' has no attribute 'Cash'"):
        getattr(kvkit, "Cash")  # noqa: B009 - a type checker knows that it is not there


def test_importing_kvkit_imports_nothing_of_it() -> None:
    seen = in_new_process(
        "import sys, importlib, typing; before = set(sys.modules); import kvkit; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert {name.split(".")[0] for name in seen.split()} <= {"__future__", "kvkit"}
    assert "kvkit." not in seen


def test_a_name_brings_its_own_module_alone() -> None:
    seen = in_new_process("import sys; from kvkit import Policy; print(*sys.modules)")
    assert "kvkit.transfer.policy" in seen.split()
    assert not {"kvkit.cache", "kvkit.config", "numba", "torch"} & set(seen.split())
