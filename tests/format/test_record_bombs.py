"""Records that claim huge sizes are misses, and take no more memory than their slot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from memory_limits import Measured
from record_corpus import CORPUS
from two_tier_caches import make_engine, open_cache, sequence, store
from victim_record import TOKENS, VICTIM, victim_file

from kvkit.format.record import HEADER
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.policy import Policy

ROOM_BYTES = 32 << 20
"""What opening a cache and loading from it takes, however large its slots of 8 KiB are made to seem."""


def sparse(file: Path) -> None:
    """3 GiB of nothing behind a header that says it is compressed."""
    data = bytearray(file.read_bytes())
    np.frombuffer(data, HEADER, 1)["codec"] = 1
    file.write_bytes(data)
    os.truncate(file, 3 << 30)


def seed(name: str) -> Callable[[Path], None]:
    return lambda file: file.write_bytes((CORPUS / name).read_bytes()) and None


BOMBS: dict[str, Callable[[Path], None]] = {
    "sparse": sparse,
    "1 GiB in 74 KB": seed("bomb.zstd"),
    "without a size": seed("bomb-without-size.zstd"),
    "an absurd shape": seed("absurd-shape.zstd"),
    "an absurd shape, plain": seed("absurd-shape.none"),
}


def load(folder: Path, codec: str, layerwise: bool, bomb: str) -> None:
    """Load what `folder` holds, of which one record is a bomb, unless that is ""."""
    engine, tokens = make_engine(), sequence(TOKENS)
    tier = ObjectTier(TierConfig(url=str(folder), codec=codec))
    policy = Policy(("disk",), ("disk",))
    with open_cache(engine, None, memory_slots=0, policy=policy, extra=[tier]) as cache:
        table = engine.table(TOKENS)
        hit = cache.lookup(tokens)
        assert hit.tokens == TOKENS
        if layerwise:
            layers = cache.load_layers(hit, engine.places(table))
            assert list(layers) == [0, 1]
            loaded = layers.loaded
        else:
            loaded = cache.load(hit, engine.places(table))
        chunks = VICTIM if bomb else 5
        assert loaded.tokens == 8 * chunks
        engine.assert_loaded(tokens, table, chunks)
        assert cache.tier_states() == {"disk": "ok"}
        assert not cache.counts().read_errors
        assert sum(cache.counts().damaged.values()) == bool(bomb)
        if bomb:
            assert cache.lookup(tokens).tokens == 8 * VICTIM, "it is a hit again"


def load_from_a_sound_store(folder: Path, codec: str, layerwise: bool, bomb: str) -> None:
    load(folder.with_name("sound"), codec, layerwise, "")


@pytest.fixture(scope="module")
def process() -> Iterator[Measured]:
    with Measured() as process:
        yield process


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layers"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_bomb_is_a_miss_and_takes_no_memory(
    codec: str, layerwise: bool, bomb: str, process: Measured, tmp_path: Path
) -> None:
    engine = make_engine()
    for folder in (tmp_path / "sound", tmp_path / "harmed"):
        with open_cache(engine, folder, memory_slots=0) as cache:
            store(cache, engine, sequence(TOKENS))
    BOMBS[bomb](victim_file(engine, sequence(TOKENS), tmp_path / "harmed"))
    arguments = (tmp_path / "harmed", codec, layerwise, bomb)
    assert process.peak_bytes(load, *arguments, prepare=load_from_a_sound_store) < ROOM_BYTES
