"""The store in tests/fixtures/store-1b1a6c3, and what is in it: written by the kvkit of commit 1b1a6c3.

It uses only what that commit and today's kvkit and tests have in common, and so can make the store anew:

    git worktree add /tmp/kvkit-1b1a6c3 1b1a6c3
    cd /tmp/kvkit-1b1a6c3 && mkdir -p kvkit/lab/testbed
    ln -s $PWD/tests/engine.py kvkit/lab/testbed/engine_stub.py
    PYTHONPATH=.:tests python -P $OLDPWD/tests/support/old_store.py FOLDER
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvkit.config import load_config, open_cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkit.cache import Cache

STORE = Path(__file__).parent.parent / "fixtures" / "store-1b1a6c3"
CHUNK = 8
NAMESPACE: Mapping[str, Any] = {
    "model": "a model",
    "dtype": "float32",
    "revision": "",
    "lora": "",
    "rank": 0,
    "world": 1,
    "isa": "",
    "salt": "",
    "chunk_tokens": CHUNK,
    "hash": "xxh3_128",
    "format": 1,
}


@dataclass(frozen=True)
class Case:
    """What is stored in one namespace, which is `NAMESPACE` but for the fields named here."""

    chunks: int
    codec: str
    namespace: Mapping[str, Any]
    groups: int = 1
    group: Mapping[str, Any] = field(default_factory=dict)

    def engine(self) -> Engine:
        layout = small_layout(self.groups)
        layout = replace(layout, groups=tuple(replace(group, **self.group) for group in layout.groups))
        return Known(layout, replace(small_namespace(layout), **{**NAMESPACE, **self.namespace}))

    def tokens(self) -> npt.NDArray[np.int32]:
        return (np.arange(self.chunks * CHUNK) * 7919 % 50_000).astype(np.int32)

    @contextmanager
    def cache(self, folder: Path, engine: Engine) -> Iterator[Cache]:
        tiers = {"store": {"url": str(folder), "codec": self.codec}}
        config = load_config(chunk_tokens=CHUNK, hash=engine.namespace.hash, staging="1MiB", tiers=tiers)
        with open_cache(config, engine.layout, engine.namespace) as cache:
            yield cache


class Known(Engine):
    """An engine whose KV can be compressed, and depends on no library's random numbers."""

    def kv(self, key: bytes, group: int) -> npt.NDArray[np.uint8]:
        size = self.layout.groups[group].chunk_bytes(CHUNK)
        return np.frombuffer(hashlib.shake_128(key + bytes([group])).digest(size), np.uint8) & 3


CASES = {
    "plain": Case(3, "none", {"salt": "a tenant's"}),
    "bfloat16 in two groups": Case(
        2,
        "zstd",
        {"hash": "sha256", "revision": "v2", "lora": "an adapter's digest"},
        groups=2,
        group={"dtype": "bfloat16"},
    ),
    "opaque": Case(
        2,
        "bitshuffle-zstd",
        {"hash": "blake3", "isa": "avx512", "rank": 1, "world": 2},
        group={"dtype": "bfloat16", "page_bytes": 2 * 4 * 12 * 2},
    ),
}


def write(folder: Path) -> None:
    """Store every case, as the kvkit that is imported does."""
    for case in CASES.values():
        engine = case.engine()
        tokens = case.tokens()
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        with case.cache(folder, engine) as cache:
            cache.store(tokens, engine.places(table))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
