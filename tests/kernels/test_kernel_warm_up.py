"""Warming up compiles the kernels of the first store and load (in Triton's interpreter)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from two_tier_caches import make_engine, open_cache, sequence

import kvkit.cache
import kvkit.transfer.layer_load
import kvkit.transfer.layer_store
import kvkit.transfer.sequence
import kvkit.transfer.store
import kvkit.transfer.warm_up
from kvkit.cache import CacheError, SequencePages
from kvkit.kernels.pages import device
from kvkit.kernels.pages.api import Pages
from kvkit.kernels.pages.device import DeviceMove
from kvkit.kernels.tuning.configs import Launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu runs it compiled")

TOKENS = sequence(24)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernels of every move are compiled for, as each is made; pages move as those of a GPU do."""
    found: list[Any] = []
    made = DeviceMove.launch

    def launch(wanted: DeviceMove, *given: Any) -> Launch:
        launch = made(wanted, *given)
        constants = {name: value for name, value in launch.arguments.items() if name.isupper()}
        found.append((launch.kernel.fn.__name__, launch.config, str(constants)))
        return launch

    def mover(to_records: bool) -> Any:
        def move(
            pages: Pages,
            records: Sequence[Any],
            *,
            blocks: Any = None,
            slots: Any = None,
            rotate: None = None,
            after: Any = None,
        ) -> None:
            by_slots = blocks is None
            device.move(DeviceMove(pages, slots if by_slots else blocks, by_slots, to_records), records)

        return move

    monkeypatch.setattr(kvkit.cache, "warm_up_cpu", lambda: None)
    monkeypatch.setattr(DeviceMove, "launch", launch)
    monkeypatch.setattr(kvkit.transfer.warm_up, "COUNTS", (1, 3))
    for module in (kvkit.transfer.store, kvkit.transfer.layer_store, kvkit.transfer.warm_up):
        monkeypatch.setattr(module, "pack", mover(True))
    for module in (kvkit.transfer.sequence, kvkit.transfer.layer_load, kvkit.transfer.warm_up):
        monkeypatch.setattr(module, "unpack", mover(False))
    return found


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_first_moves_find_their_kernels(
    groups: int, by_slots: bool, compiled: list[Any], tmp_path: Path
) -> None:
    engine = make_engine(groups)
    table = engine.table(len(TOKENS))

    def places() -> list[SequencePages]:
        found = engine.places(table)
        if not by_slots:
            return found
        slots = (np.array(table)[:, None] * 4 + np.arange(4)).reshape(-1)
        return [SequencePages(place.pages, slots=slots) for place in found]

    with open_cache(engine, tmp_path, slots=12 * groups) as cache:
        before = [tensor.clone() for pool in engine.pools for tensor in pool]
        cache.warm_up(places()).result(60)
        assert all(map(torch.equal, before, [tensor for pool in engine.pools for tensor in pool]))
        cache.check_integrity()
        warm = set(compiled)
        assert len(warm) >= 2
        compiled.clear()
        engine.compute(TOKENS, table)
        cache.store(TOKENS, places())
        with cache.store_layers(sequence(24, seed=9), places()) as layers:
            for number in range(engine.layout.layers):
                layers.layer(number)
        cache.flush()
        hit = cache.lookup(TOKENS)
        assert cache.load(hit, places()).tokens == len(TOKENS)
        assert len(list(cache.load_layers(hit, places()))) == engine.layout.layers
    assert compiled
    assert set(compiled) <= warm


def test_pages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with open_cache(make_engine(2), tmp_path, slots=12) as cache, pytest.raises(CacheError, match="2 groups"):
        cache.warm_up(make_engine(1).places([0, 1]))
