"""Stores filled as a cache fills them, and what a listing finds in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvkit.config import load_config, open_cache
from kvkit.format.layout import KVLayout
from kvkit.format.record import RecordFormat
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.observe.inspect import ArrayListing, list_store

CHUNK = 8
SETTINGS = ("codec", "spread", "options")
"""Arguments of `fill` that are settings of the tier; others are fields of the namespace."""


def fill(
    url: str | list[str],
    chunks: int = 3,
    *,
    groups: int = 1,
    layout: KVLayout | None = None,
    seed: int = 0,
    **fields: object,
) -> Engine:
    """Store `chunks` chunks of a sequence at `url`, as a cache does."""
    tier = {"url": url} | {name: fields.pop(name) for name in SETTINGS if name in fields}
    layout = layout or small_layout(groups)
    engine = Engine(layout, small_namespace(layout, CHUNK, **fields))
    tokens = np.random.default_rng(seed).integers(0, 50_000, chunks * CHUNK, np.int32)
    config = load_config(chunk_tokens=CHUNK, staging="1MiB", tiers={"store": tier}, policy={})
    with open_cache(config, layout, engine.namespace) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
    return engine


def listings(url: str) -> dict[str, ArrayListing]:
    return {listing.array: listing for listing, done in list_store(url) if done}


def only(url: str) -> ArrayListing:
    (listing,) = listings(url).values()
    return listing


def form_of(engine: Engine, group: int = 0) -> RecordFormat:
    return RecordFormat.of(engine.layout, group, engine.namespace)


def records(folder: Path) -> list[Path]:
    return sorted(folder.rglob("c.*.0.0.0.0"))
