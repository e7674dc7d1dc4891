"""Triton's pack and unpack equal the reference, in Triton's interpreter; test_gpu compiles them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from numpy.typing import NDArray
from run_sizes import examples, nightly
from test_pages_numba import (
    POISON,
    SMALL,
    Conversion,
    Job,
    check,
    check_conversion,
    conversions,
    jobs,
)

from kvkit.format.layout import ORDERS, LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import device, triton_kernels
from kvkit.kernels.pages import triton as kernels
from kvkit.kernels.pages.api import Pages
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.kernels.pages.device import DeviceMove
from kvkit.kernels.tuning.configs import KernelConfig, Launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu runs it compiled")


def by_triton(
    pages: Pages,
    records: list[NDArray[np.uint8]],
    job: Job,
    to_records: bool,
    rotation: Rotation | None = None,
) -> None:
    """What `pack` and `unpack` do for pages on a GPU."""
    turns = None if rotation is None else ResolvedRotation(rotation.rope, *rotation.resolve(*job.slots.shape))
    wanted = DeviceMove(pages, job.ids, job.granular == "slots", to_records, turns)
    device.move(wanted, records)


@settings(max_examples=examples(20), deadline=None)
@given(job=jobs())
def test_any_layout(job: Job) -> None:
    check(job, by_triton)


@settings(max_examples=examples(20), deadline=None)
@given(conversion=conversions())
def test_any_conversion(conversion: Conversion) -> None:
    check_conversion(conversion, by_triton)


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    group = replace(SMALL, order=order, dtype="bfloat16")
    check(Job(group, "joined", 7, 4, 0, np.array([[5, 0, 2], [1, -1, 3]]), "blocks", 64), by_triton)


@pytest.mark.parametrize("gap", [64, 8, 4, 2, 1])
def test_widths(gap: int) -> None:
    """Records of every alignment, and rows of 132 bytes."""
    group = LayerGroup((0, 1), 1, 132, 0, "uint8", block_tokens=4)
    check(Job(group, "joined", 5, 4, 0, np.array([[4, 1], [0, 3]]), "blocks", gap), by_triton)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float16", "float32")])
@pytest.mark.parametrize("precision", [None, "fp8", "int8"])
def test_vectors(interleaved: bool, dtype: str, precision: Any) -> None:
    """Sizes that take the widest vectors: a latent whose last channels are rotary, skipped tokens, apart."""
    group = LayerGroup((0, 1), 2, 48, 16, dtype, block_tokens=4, precision=precision)
    rope = Rope(tuple(np.linspace(1, 0.01, 8)), interleaved, first=32)
    ids = np.array([[9, 3, -1, 7, 0, 1, 15, 2], [12, 8, 4, 5, -1, 6, 13, 14]])
    delta = np.random.default_rng(0).integers(-9, 9, ids.shape)
    for form in ("joined", "apart"):
        job = Job(group, form, 4, 4, 0, ids, "slots", 64)
        check_conversion(Conversion(job, Rotation(rope, delta)), by_triton)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_layers_of_several_kinds(precision: Any) -> None:
    """Layers with K and V side by side among layers with both apart."""
    group = LayerGroup((0, 1, 2), 2, 48, 16, "bfloat16", block_tokens=4, precision=precision)
    job = Job(group, "mixed", 4, 4, 0, np.array([[3, 0, 2]]), "blocks", 64)
    check_conversion(Conversion(job, None), by_triton)


@pytest.mark.parametrize("form", ["joined", "split", "mixed"])
def test_k_and_v_of_a_layer_are_neighbours(form: str) -> None:
    """Programs take one part after the other: K's and V's bytes meet in the GPU's cache."""
    group = LayerGroup((0, 1, 2), 2, 48, 16, "bfloat16", block_tokens=4, precision="fp8")
    job = Job(group, form, 4, 4, 0, np.array([[3, 0, 2]]), "blocks", 64)
    halves = Pages.of(group, job.tensors(job.pools(0))).halves()
    assert halves[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert halves[:, 1].tolist() == [0, 96] * 3
    assert halves[:, 2].tolist() == [96, 32] * 3


def made(
    group: LayerGroup,
    *,
    config: KernelConfig | None = None,
    precision: Any = None,
    pairs: int = 0,
    to_records: bool = False,
    at: int = 0,
) -> Launch:
    """A launch of two blocks whose records are 4096 and `at` bytes from an address."""
    pages = Pages.of(replace(group, precision=precision), group.pages(2))
    rope = Rope((1.0,) * pairs) if pairs else None
    tokens = 2 * group.block_tokens
    turns = ResolvedRotation(rope, *Rotation(rope, np.array([1])).resolve(1, tokens)) if rope else None
    return kernels.move(
        pages,
        [4096 + at],
        np.array([[0, 1]]),
        to_records,
        rotation=turns,
        config=config,
    )


LARGE = LayerGroup((0, 1), 2, 64, 64, "bfloat16", block_tokens=16)


@pytest.mark.parametrize(
    ("arguments", "kernel", "width", "record_width"),
    [
        ({}, "copy_rows", 16, 16),
        ({"at": 8}, "copy_rows", 8, 8),
        ({"at": 2}, "copy_rows", 2, 2),
        ({"at": 3}, "copy_rows", 1, 1),
        ({"pairs": 32}, "decode_rows", 16, 16),
        ({"pairs": 4}, "decode_rows", 8, 8),
        ({"pairs": 32, "at": 8}, "decode_rows", 16, 8),
        ({"precision": "fp8"}, "decode_rows", 16, 8),
        ({"precision": "int8", "to_records": True}, "encode_rows", 16, 8),
    ],
)
def test_widest_access(arguments: dict[str, Any], kernel: str, width: int, record_width: int) -> None:
    """Bytes that a lane may move at a time, in pages and in records: rows of codes are 136 bytes."""
    launch = made(LARGE, **arguments)
    given = launch.arguments
    item = given["WORD"].primitive_bitwidth // 8 if kernel == "copy_rows" else 2
    record_item = 1 if given.get("FORM") else item
    assert launch.kernel.__name__ == kernel
    assert given["WIDTH"] * item == width
    assert given.get("RECORD_WIDTH", given["WIDTH"]) * record_item == record_width


def test_codes_of_fp8_are_decoded() -> None:
    """All 256, -0 and numbers below the smallest normal among them; a NaN of either sign is a NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    got = torch.full((256,), 7.0)
    decode_codes[(1,)](codes, got)
    want = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(got.isnan(), want.isnan())
    keep = ~want.isnan()
    assert torch.equal(got[keep].view(torch.int32), want[keep].view(torch.int32))


def numbers_for_fp8() -> torch.Tensor:
    """Codes, middles between them, the numbers beside either, what is larger or tiny, of both signs."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    more = [448.0, 460.0, 464.0, 465.0, 480.0, 1e38, torch.inf, 1e-45, 1e-39, 1.2e-38, 2.0**-11]
    x = torch.cat([codes, middles, torch.tensor(more)])
    x = torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(0.0))])
    return torch.cat([x, -x, torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100])


def test_every_kind_of_number_is_encoded_as_hardware_does() -> None:
    """NaNs of both signs among them.

    `cvt.rn.satfinite.e4m3x2` rounds to nearest, ties to even, takes what is larger than 448 for 448, and any
    NaN for 0x7F.
    """
    x = numbers_for_fp8()
    nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    x = torch.cat([x, nans.view(torch.float32), (nans | -0x80000000).view(torch.float32)])
    got = torch.full((len(x),), POISON, dtype=torch.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        encode_numbers[(1,)](x, got, len(x))
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    want[x.isnan()] = 0x7F
    assert got.tolist() == want.tolist()


@triton.jit
def decode_codes(codes, numbers):
    i = tl.arange(0, 256)
    tl.store(numbers + i, triton_kernels._decode(tl.load(codes + i), "fp8", True))


@triton.jit
def encode_numbers(numbers, codes, count):
    i = tl.arange(0, 4096)
    x = tl.load(numbers + i, mask=i < count)
    tl.store(codes + i, triton_kernels._encode(x, "fp8", 448.0, True), mask=i < count)


@pytest.mark.parametrize("arguments", [{}, {"pairs": 8}, {"precision": "fp8", "to_records": True}])
def test_every_configuration_has_programs_for_all_rows(arguments: dict[str, Any]) -> None:
    """2 layers (K and V apart where they are converted) of 2 heads, 32 tokens, 128 channels."""
    for config in kernels.configs(made(LARGE, **arguments).kernel.__name__):
        launch = made(LARGE, config=config, **arguments)
        tile, given = dict(config.tiles)["TILE"], launch.arguments
        elements = {"copy_rows": 8, "decode_rows": 2 * given["WIDTH"], "encode_rows": 1}[
            launch.kernel.__name__
        ]
        parts = given["parts_count"]
        programs = 2 * parts * -(-32 * (256 // parts) // (tile * elements))
        assert launch.config == config
        assert prod(launch.grid) == programs


def test_configurations_give_the_same_bytes() -> None:
    """Tiles that are no multiple of a row, rows wider than a tile, programs that move several tiles."""
    exact = LayerGroup((0,), 3, 40, 24, "float32", block_tokens=4)
    pages = exact.pages(3)
    for tensor in pages:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    ids, rope = np.array([[2, 0]]), Rope((1.0,) * 20)
    turns = ResolvedRotation(rope, *Rotation(rope, np.array([3])).resolve(1, 8))
    for group in (exact, replace(exact, precision="fp8")):
        results = []
        for tile, programs in ((16, 0), (64, 0), (1024, 0), (16, 5), (64, 1), (1024, 99)):
            config = KernelConfig((("TILE", tile),))
            record = np.full(group.chunk_bytes(8), POISON, np.uint8)
            out = group.pages(3, POISON)
            address = np.array([record.ctypes.data])
            source, into = Pages.of(group, pages), Pages.of(group, out)
            for pages_moved, to_records, rotation in ((source, True, None), (into, False, turns)):
                move = partial(
                    kernels.move, pages_moved, address, ids, to_records, rotation=rotation, config=config
                )
                few = move(programs=programs)
                assert not programs or few.grid == (min(programs, prod(move().grid)),)
                few.run()
            results.append((record, out))
        for record, out in results[1:]:
            np.testing.assert_array_equal(record, results[0][0])
            assert torch.equal(out[0].view(torch.uint8), results[0][1][0].view(torch.uint8))


def test_buckets() -> None:
    """The same for requests alike; another for another form or a size twice as large."""
    bucket = kernels.bucket(made(LARGE))
    assert bucket.op == "copy_rows"
    assert bucket == kernels.bucket(made(LARGE))
    assert bucket != kernels.bucket(made(LARGE, at=8))
    assert bucket != kernels.bucket(made(LARGE, to_records=True))
    twice = kernels.bucket(made(replace(LARGE, layers=(0, 1, 2, 3))))
    assert (twice.form, twice.sizes[0]) == (bucket.form, 2 * bucket.sizes[0])
