"""Under SGLang's HiCache, no damage, kill, full disk or other version of kvkit brings a wrong page."""

from __future__ import annotations

import pytest
from page_attacks import Attacks

pytest.importorskip("sglang", reason="needs SGLang's Python files; `make test-sglang` runs it")


class TestAttacks(Attacks):
    engine = "hicache"
