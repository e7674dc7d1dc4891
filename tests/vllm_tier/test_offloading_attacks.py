"""Under vLLM's offloading, no damage, kill, full disk or other version of kvkit brings a wrong page."""

from __future__ import annotations

import pytest
from page_attacks import Attacks

pytest.importorskip("vllm")


class TestAttacks(Attacks):
    engine = "offloading"
