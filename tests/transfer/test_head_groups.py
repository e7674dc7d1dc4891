"""Groups of a layer's heads have records of their own in a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from caches import CHUNK, new_cache, new_staging, sequence

from kvkit.format.layout import KVLayout
from kvkit.lab.testbed.engine_stub import POISON, Engine, small_layout, small_namespace
from kvkit.tiers.objects import ObjectTier


def test_layers_whose_heads_are_in_several_groups(tmp_path: Path) -> None:
    """A layer is there when all of its heads are, and stored with all of them."""
    groups = [
        replace(group, kv_heads=1, model_heads=2, first_head=head)
        for group in small_layout(2).groups
        for head in (0, 1)
    ]
    layout = KVLayout(tuple(groups))
    engine, tokens = Engine(layout, small_namespace(layout, CHUNK)), sequence(2)
    staging = new_staging(engine, 16)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        with cache.store_layers(tokens, engine.places(table)) as store:
            for layer in range(4):
                store.layer(layer)
        cache.flush()
        engine.wipe()
        seen = []
        for layer in cache.load_layers(cache.lookup(tokens), engine.places(table)):
            seen.append(layer)
            parts = [pool[layer % 2][table[:4]] for pool in engine.pools[layer // 2 * 2 :][:2]]
            assert all((part.contiguous().numpy().view(np.uint8) != POISON).any() for part in parts)
        assert seen == [0, 1, 2, 3]
        engine.assert_loaded(tokens, table, 2)
        assert staging.free == staging.slots
