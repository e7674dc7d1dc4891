"""Under LMCache, no damage, kill, full disk or other version of kvkit brings a wrong page."""

from __future__ import annotations

from pathlib import Path

import page_attacks
import pytest
from product_copy import copy_product
from run_sizes import NIGHTLY

pytest.importorskip("lmcache", reason="needs LMCache's files; `make test-lmcache` runs it")

ENGINE = "lmcache_l2"


def test_damage(tmp_path: Path) -> None:
    assert page_attacks.damage(ENGINE, tmp_path, NIGHTLY) > 90


def test_kills(tmp_path: Path) -> None:
    page_attacks.kills(ENGINE, tmp_path, 20 if NIGHTLY else 1)


def test_a_full_disk(small_disk: Path) -> None:
    page_attacks.full_disk(ENGINE, small_disk)


def test_two_versions_of_kvkit(tmp_path: Path) -> None:
    page_attacks.two_versions(ENGINE, copy_product(tmp_path / "copy"), tmp_path / "kv")
