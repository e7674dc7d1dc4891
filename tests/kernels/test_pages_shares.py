"""Pages with some heads of a record get the same bytes as pages with all heads would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import device, reference
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.kernels.pages.device import DeviceMove

HEADS, BLOCK, K, V, BLOCKS = 6, 4, 6, 4, 5
TABLE = np.array([[4, -1], [0, 2]])
SLOTS = (TABLE[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(2, -1)
SLOTS[0, BLOCK:] = -1
ROTATION = Rotation(Rope((0.5, 0.1)), np.array([3, -4]))
SHARES = [range(2), range(2, 4), range(3, 6), range(5, 6)]


def group_of(dtype: str = "bfloat16", precision: Any = None) -> LayerGroup:
    return LayerGroup((0, 1, 2), HEADS, K, V, dtype, BLOCK, precision=precision)


def random(channels: int = K + V, heads: int = HEADS) -> list[torch.Tensor]:
    return [torch.randn(BLOCKS, heads, BLOCK, channels).bfloat16() for _ in range(3)]


def records_of(group: LayerGroup) -> list[np.ndarray]:
    records = [np.zeros(group.chunk_bytes(2 * BLOCK), np.uint8) for _ in TABLE]
    pack(Pages.of(group, random()), records, blocks=np.array([[3, 1], [0, 2]]))
    return records


def by_api(pages: Pages, records: list[np.ndarray], rotation: Rotation | None) -> None:
    unpack(pages, records, blocks=TABLE, rotate=rotation)


def by_reference(pages: Pages, records: list[np.ndarray], rotation: Rotation | None) -> None:
    reference.unpack(pages.group, pages.parts, records, SLOTS, rotation)


def by_triton(pages: Pages, records: list[np.ndarray], rotation: Rotation | None) -> None:
    turns = None if rotation is None else ResolvedRotation(rotation.rope, *rotation.resolve(*SLOTS.shape))
    device.move(DeviceMove(pages, TABLE, False, False, turns), records)


@pytest.mark.parametrize("unpack_by", [by_api, by_reference, by_triton])
@pytest.mark.parametrize(("precision", "rotation"), [(None, None), (None, ROTATION), ("fp8", ROTATION)])
@pytest.mark.parametrize("heads", SHARES, ids=str)
def test_a_share_is_unpacked(unpack_by: Any, precision: Any, rotation: Rotation | None, heads: range) -> None:
    if unpack_by is by_triton and torch.cuda.is_available():
        pytest.skip("interpreted; test_gpu runs it compiled")
    group = group_of(precision=precision)
    records, whole = records_of(group), random()
    parts = [tensor[:, heads.start : heads.stop].clone() for tensor in whole]
    unpack(Pages.of(group, whole), records, blocks=TABLE, rotate=rotation)
    unpack_by(Pages.of(group, parts, heads=heads), records, rotation)
    for part, tensor in zip(parts, whole, strict=True):
        if rotation is None:
            assert torch.equal(part, tensor[:, heads.start : heads.stop])
        else:
            torch.testing.assert_close(part, tensor[:, heads.start : heads.stop], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("heads", SHARES, ids=str)
def test_layer_by_layer(heads: range) -> None:
    """K and V apart, and a view of an engine's memory, whose other heads stay as they were."""
    group = group_of()
    records, k, v = records_of(group), random(K), random(V)
    before = [tensor.clone() for tensor in k + v]
    whole = [tensor.clone() for tensor in k + v]
    unpack(Pages.of(group, list(zip(whole[:3], whole[3:], strict=True))), records, blocks=TABLE)
    cut = [
        (a[:, heads.start : heads.stop], b[:, heads.start : heads.stop]) for a, b in zip(k, v, strict=True)
    ]
    pages, size = Pages.of(group, cut, heads=heads), group.layer_bytes(2 * BLOCK)
    for i in (2, 0, 1):
        unpack(pages.layer(i), [record[i * size : (i + 1) * size] for record in records], blocks=TABLE)
    for tensor, want, old in zip(k + v, whole, before, strict=True):
        old[:, heads.start : heads.stop] = want[:, heads.start : heads.stop]
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("unpack_by", [by_api, by_reference])
@pytest.mark.parametrize("heads", SHARES, ids=str)
def test_opaque_pages(heads: range, unpack_by: Any) -> None:
    """A head's bytes are neighbours in a page, and so are a share's."""
    head = BLOCK * (K + V) * 2
    group = replace(group_of(), page_bytes=HEADS * head)
    assert len(records_of(group_of())[0]) == group.chunk_bytes(2 * BLOCK)
    records, whole = records_of(group_of()), random()
    parts = [tensor[:, heads.start : heads.stop].clone() for tensor in whole]
    unpack(Pages.of(group, whole), records, blocks=TABLE)
    pages = Pages.of(group, parts, heads=heads)
    if unpack_by is by_reference:
        reference.unpack(group, pages.parts, records, TABLE)
    else:
        unpack(pages, records, blocks=TABLE)
    for part, tensor in zip(parts, whole, strict=True):
        assert torch.equal(part.view(torch.uint8), tensor[:, heads.start : heads.stop].view(torch.uint8))


@pytest.mark.parametrize("heads", SHARES, ids=str)
def test_pages_of_an_order_of_their_own(heads: range) -> None:
    group = group_of()
    records, whole = records_of(group), random()
    count = len(heads) * BLOCK * (K + V)
    order = torch.randperm(count).view(len(heads), BLOCK, K + V)
    flat = [torch.zeros(BLOCKS, count, dtype=torch.bfloat16) for _ in whole]
    for tensor, pages in zip(whole, flat, strict=True):
        pages[:, order] = tensor[:, heads.start : heads.stop]
    unpack(Pages.of(group, whole), records, blocks=TABLE)
    unpack(Pages.of(group, flat, order, heads), records, blocks=TABLE)
    for tensor, pages in zip(whole, flat, strict=True):
        assert torch.equal(pages[:, order], tensor[:, heads.start : heads.stop])


@pytest.mark.parametrize("opaque", [False, True])
def test_what_has_a_share_is_not_packed(opaque: bool) -> None:
    group = group_of()
    if opaque:
        group = replace(group, page_bytes=HEADS * BLOCK * (K + V) * 2)
    pages = Pages.of(group, random(heads=3), heads=range(3, 6))
    assert not pages.whole
    with pytest.raises(LaunchError, match="a part of the heads of a record, and are only unpacked into"):
        pack(pages, [np.zeros(group.chunk_bytes(BLOCK), np.uint8)], blocks=np.array([[0]]))


@pytest.mark.parametrize("heads", [range(4), range(1, 3), range(0), range(6, 8), range(0, 6, 2), range(3, 9)])
def test_what_is_no_share_is_refused(heads: range) -> None:
    with pytest.raises(LaunchError, match=r"heads=range\(.*\): want one of the equal shares of 6 heads"):
        Pages.of(group_of(), random(heads=max(1, len(heads))), heads=heads)
