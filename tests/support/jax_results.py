"""Results of the operations for JAX arrays, kept by one version of JAX and compared by another.

python tests/support/jax_results.py FILE writes FILE, or compares with it where it is there. The
environment's version is tested against the reference, which is in torch; one that runs where torch is not,
against that by this.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax_reference import problem
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup, Precision
from kvkit.format.rope import Rope
from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.pages import jax as pages

SMALL = LayerGroup((0, 1), kv_heads=2, k_size=8, v_size=6, dtype="float32", block_tokens=4)
SLOTS = np.array([[3, 0, -1, 11, 6, 21, 17], [9, 1, 8, 2, 10, -5, 23]])
ROPES = Rope((1.0, 0.1, 0.01)), Rope((1.0, 0.1), interleaved=True, first=3)


def moves() -> Iterator[tuple[str, jax.Array]]:
    """Of pages: to be equal bit by bit but for what is rotated."""
    random = np.random.default_rng(0)
    forms: tuple[Precision | None, ...] = (None, "fp8", "int8")
    for dtype, precision in itertools.product(("float32", "float16", "bfloat16"), forms):
        group = replace(SMALL, dtype=dtype, precision=precision)
        layers = [jnp.asarray(random.standard_normal((6, 2, 4, 14)), dtype) for _ in range(2)]
        packed = pages.pack(group, layers, slots=SLOTS)
        yield f"pack {dtype} {precision}", packed
        unpack = jax.jit(partial(pages.unpack, group, slots=SLOTS))
        yield f"unpack {dtype} {precision}", jnp.stack(unpack(layers, packed))
        for rope in ROPES:
            turns = rope.delta_table(np.arange(14) * 997 - 3).reshape(2, 7, -1)
            turned = pages.unpack(group, layers, packed, slots=SLOTS, rope=rope, cos_sin=turns)
            yield f"rotated {dtype} {precision} {rope.interleaved}", jnp.stack(turned)
    blocks = np.array([[5, 0, -1], [1, -2, 3]])
    yield "pack blocks", pages.pack(SMALL, [jnp.arange(672.0).reshape(6, 2, 4, 14)] * 2, blocks=blocks)


def attentions() -> Iterator[tuple[str, jax.Array]]:
    """Of rows: to be near."""
    for seed, (window, softcap) in enumerate(itertools.product((None, 7), (None, 2.0))):
        scoring, given = Scoring(0.3, window, softcap), problem(seed)
        o, lse = attention.blend_attention(*given, scoring=scoring)
        yield f"o {window} {softcap}", o
        yield f"lse {window} {softcap}", lse
        q, k, v, one = problem(seed, requests=1)
        for values in (None, v):
            yield (
                f"scores {window} {softcap} {values is None}",
                attention.query_scores(q, k, values, one, scoring),
            )
    q, k, v, _ = jax.tree.map(jnp.nan_to_num, problem(9, requests=1, heads=2))
    rows, slots = q[:, :2], np.array([3, 0, -1, 11, 6, 21, 17, 9, 1, 8, 2, 10, -5])
    for rope in ROPES:
        turns = RowRotations(rope, jnp.asarray(rope.table(np.arange(13) * 31 + 1)))
        made = attention.rope_scatter(q, rows, rows[..., :5], turns, slots, k, v, deviation=True)
        for name, x in zip(("q", "k_pages", "v_pages", "deviation"), made, strict=True):
            yield f"scatter {name} {rope.interleaved}", x
    yield "token_deviation", attention.token_deviation(rows, rows * 1.5 + 1)


def results() -> dict[str, NDArray[np.float32 | np.uint8]]:
    """By name; bytes where bits count."""
    found: dict[str, NDArray[np.float32 | np.uint8]] = {}
    for name, x in moves():
        exact = np.asarray(x)
        found[name] = exact.astype(np.float32) if "rotated" in name else exact.view(np.uint8)
    return found | {name: np.asarray(x, np.float32) for name, x in attentions()}


def differences(
    found: Mapping[str, NDArray[np.float32 | np.uint8]], wanted: Mapping[str, NDArray[np.float32 | np.uint8]]
) -> list[str]:
    """Names of results that another version lacks, or has otherwise."""
    if found.keys() != wanted.keys():
        return sorted(found.keys() ^ wanted.keys())
    wrong = []
    for name, x in found.items():
        # one rounding to the dtype may fall the other way
        step = 2e-2 if "bfloat16" in name else 2e-3 if "float16" in name else 2e-5
        equal = (
            np.array_equal
            if x.dtype == np.uint8
            else partial(np.allclose, rtol=step, atol=step, equal_nan=True)
        )
        if x.shape != wanted[name].shape or not equal(x, wanted[name]):
            wrong.append(name)
    return wrong


def main(path: Path) -> int:
    """Write, or compare and print what differs."""
    found = results()
    if not path.exists():
        np.savez(path, **found)  # type: ignore[arg-type]
        return 0
    with np.load(path) as wanted:
        wrong = differences(found, dict(wanted))
    print(f"{len(found)} results by JAX {jax.__version__}, {len(wrong)} of them others: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
