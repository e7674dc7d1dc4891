"""Moves on a GPU wait for the streams of the threads that asked for them (events are stand-ins)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from two_tier_caches import make_engine, open_cache, sequence

import kvkit.cache
import kvkit.transfer.layer_load
import kvkit.transfer.sequence
import kvkit.transfer.store

TOKENS = sequence(24)
Order = tuple[str, Any, int]
"""Of a move: its way, what it waited for, and the thread that made it."""


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """Every move of the cache, as it was made; an event is the thread whose streams it marks."""
    found: list[Order] = []

    def marks(devices: Any) -> tuple[int, ...]:
        assert {device.type for device in devices} == {"cpu"}
        return (threading.get_ident(),)

    def noting(way: str, move: Callable[..., None]) -> Callable[..., None]:
        def noted(*given: Any, after: Any = None, **named: Any) -> None:
            found.append((way, after, threading.get_ident()))
            move(*given, after=after, **named)

        return noted

    for module in (kvkit.cache, kvkit.transfer.layer_load):
        monkeypatch.setattr(module, "marks", marks)
    for module, way in ((kvkit.transfer.sequence, "unpack"), (kvkit.transfer.store, "pack")):
        monkeypatch.setattr(module, way, noting(way, getattr(module, way)))
    monkeypatch.setattr(
        kvkit.transfer.layer_load, "unpack", noting("layer", kvkit.transfer.layer_load.unpack)
    )
    return found


def test_moves_wait_for_the_streams_of_who_asked(orders: list[Order], tmp_path: Path) -> None:
    engine, here = make_engine(), threading.get_ident()
    with open_cache(engine, tmp_path, slots=24) as cache:
        engine.compute(TOKENS, engine.table(len(TOKENS)))
        places = engine.places(engine.table(len(TOKENS)))
        cache.store_async(TOKENS, places).result(60)
        ready = threading.Event()
        cache.store_async(sequence(24, seed=5), places, ready=ready.set).result(60)
        assert ready.is_set()
        cache.load_async(cache.lookup(TOKENS), places).result(60)
        assert len(list(cache.load_layers(cache.lookup(TOKENS), places))) == engine.layout.layers
    ways = [way for way, *_ in orders]
    assert ways[:2] == ["pack", "pack"]
    assert set(ways[2:]) == {"unpack", "layer"}
    assert [after for _, after, _ in orders] == [(here,), (), *[(here,)] * (len(orders) - 2)]
    assert all(thread != here for way, _, thread in orders if way != "layer")
