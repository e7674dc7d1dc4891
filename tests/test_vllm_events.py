"""KV events: what a tier holds is told once every rank has stored it, and not before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkit.adapters.vllm.events import KEPT, Events
from kvkit.tiers.settings import TierConfig

TIERS = {
    "memory": TierConfig(capacity=1 << 20),
    "disk": TierConfig(url="file:///kv"),
    "pool": TierConfig(url="s3://pool/kv", scope="shared"),
}


@dataclass
class Request:
    request_id: str = "a"
    all_token_ids: list[int] = field(default_factory=lambda: list(range(40)))
    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([i]) * 32 for i in range(10)])
    lora_request: Any = None


def new_events(ranks: int = 1) -> Events:
    return Events(TIERS, chunk_tokens=16, hash_tokens=4, ranks=ranks)


def test_a_chunk_is_told_with_its_blocks_when_all_ranks_have_it() -> None:
    events, request = new_events(ranks=2), Request()
    events.saved(request, 0, 2)
    events.stored("a", "disk", 1)
    assert events.take() == []
    events.stored("a", "memory", 1)
    assert events.take() == []  # one rank in each of two tiers
    events.stored("a", "disk", 1)
    (event,) = events.take()
    assert event.block_hashes == [maybe_convert_block_hash(h) for h in request.block_hashes[4:8]]
    assert event.parent_block_hash == maybe_convert_block_hash(request.block_hashes[3])
    assert event.token_ids == list(range(16, 32))
    assert event.block_size == 4
    assert events.take() == []


@pytest.mark.parametrize(
    ("tier", "told"),
    [
        ("memory", ("CPU", "LOCAL", "memory")),
        ("disk", ("STORAGE", "LOCAL", "disk")),
        ("pool", ("STORAGE", "REMOTE", "pool")),
    ],
)
def test_the_tier_is_told(tier: str, told: tuple[str, str, str]) -> None:
    events = new_events()
    events.saved(Request(), 0, 1)
    events.stored("a", tier, 0)
    (event,) = events.take()
    assert (event.medium, event.locality, event.ownership) == told
    assert event.parent_block_hash is None


def test_what_never_arrives_is_forgotten() -> None:
    events = new_events()
    events.saved(Request("lost"), 0, 1)
    for i in range(KEPT):
        events.saved(Request(str(i)), 0, 1)
    events.stored("lost", "disk", 0)
    assert events.take() == []
    events.stored("0", "disk", 0)
    assert len(events.take()) == 1
