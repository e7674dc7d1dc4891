"""Under LMCache, no damage, kill, full disk or other version of kvkit brings a wrong page."""

from __future__ import annotations

import pytest
from page_attacks import Attacks

pytest.importorskip("lmcache", reason="needs LMCache's files; `make test-lmcache` runs it")


class TestAttacks(Attacks):
    engine = "lmcache_l2"
