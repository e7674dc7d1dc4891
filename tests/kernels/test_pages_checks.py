"""pack and unpack refuse arguments that do not fit, and choose the backend by the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.api import Pages, pack, unpack

Tensors = list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
POISON = 0xA5
SMALL = LayerGroup(layers=(0, 1), kv_heads=2, k_size=16, v_size=16, dtype="float32", block_tokens=4)
OPAQUE = replace(SMALL, page_bytes=SMALL.block_bytes)
IDS = np.array([[0, 1]])


def _apart(k: tuple[int, ...], v: tuple[int, ...]) -> Tensors:
    return [(torch.zeros(k), torch.zeros(v)) for _ in range(2)]


@pytest.mark.parametrize(
    ("group", "tensors", "message"),
    [
        (SMALL, SMALL.pages(2)[:1], r"tensors: 1 given, the group has 2 layers"),
        (SMALL, [torch.zeros(2, 2, 4)] * 2, r"tensors\[0\]: \(2, 2, 4\)"),
        (SMALL, [torch.zeros(2, 3, 4, 32)] * 2, r"tensors\[0\]: \(2, 3, 4, 32\).*want \[B, 2, N, 32\]"),
        (SMALL, [torch.zeros(2, 2, 4, 31)] * 2, r"tensors\[0\]: \(2, 2, 4, 31\)"),
        (SMALL, [torch.zeros(0, 2, 4, 32)] * 2, r"tensors\[0\]: \(0, 2, 4, 32\)"),
        (SMALL, [torch.zeros(2, 2, 4, 32).half()] * 2, r"tensors\[0\]: .* float16, want .* float32"),
        (SMALL, [torch.zeros(2, 2, 4, 32).int()] * 2, r"tensors\[0\]: .* int32, want .* float32"),
        (SMALL, [torch.zeros(2, 2, 32, 4).transpose(2, 3)] * 2, r"tensors\[0\]: stride .* C innermost"),
        (SMALL, [torch.zeros(1, 2, 4, 32).expand(2, 2, 4, 32)] * 2, r"tensors\[0\]: .* overlap"),
        (SMALL, [torch.zeros(999).as_strided((2, 2, 4, 32), (255, 128, 32, 1))] * 2, r"overlap"),
        (SMALL, [torch.zeros(2, 2, 4, 32)] * 2, r"tensors: two of them start at the same address"),
        (SMALL, [torch.zeros(2, 2, 4, 32), torch.zeros(3, 2, 4, 32)], r"tensors\[1\]: \(3, 2, 4, 32\)"),
        (SMALL, [torch.zeros(2, 2, 4, 32), torch.zeros(2, 2, 5, 32)], r"tensors\[1\]: \(2, 2, 5, 32\)"),
        (SMALL, [torch.zeros(2, 2, 4, 32), torch.zeros(2, 2, 4, 32, device="meta")], r"tensors\[1\].*meta"),
        (SMALL, _apart((2, 2, 4, 15), (2, 2, 4, 16)), r"tensors\[0\]\[0\]: \(2, 2, 4, 15\)"),
        (SMALL, _apart((2, 2, 4, 16), (2, 2, 4, 17)), r"tensors\[0\]\[1\]: \(2, 2, 4, 17\)"),
        (SMALL, _apart((2, 2, 4, 16), (2, 2, 5, 16)), r"tensors\[0\]\[1\]: \(2, 2, 5, 16\)"),
        (OPAQUE, [torch.zeros(2, 2, 4, 31)] * 2, r"tensors\[0\]: .* page_bytes=1024"),
        (OPAQUE, [torch.zeros(2, 2, 5, 32)[:, :, :4]] * 2, r"tensors\[0\]: .* page_bytes=1024"),
        (OPAQUE, [torch.zeros(1, 1024).byte().expand(2, 1024)] * 2, r"tensors\[0\]: .* overlap"),
        (OPAQUE, [torch.zeros(0, 1024).byte()] * 2, r"tensors\[0\]: \(0, 1024\)"),
        (OPAQUE, _apart((2, 2, 4, 16), (2, 2, 4, 16)), r"tensors\[0\]: tuple"),
    ],
)
def test_tensors_refused(group: LayerGroup, tensors: Tensors, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Pages.of(group, tensors)


RECORD = np.zeros(SMALL.chunk_bytes(8), np.uint8)
READ_ONLY = np.frombuffer(bytes(len(RECORD)), np.uint8)


@pytest.mark.parametrize("move", [pack, unpack])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"blocks, slots: give one"),
        ({"blocks": IDS, "slots": IDS}, r"blocks, slots: give one"),
        ({"blocks": IDS.astype(np.int32)}, r"blocks: int32"),
        ({"slots": IDS.tolist()}, r"slots: list"),
        ({"blocks": IDS[0]}, r"blocks: \(2,\)"),
        ({"blocks": IDS[:, :0]}, r"blocks: \(1, 0\)"),
        ({"blocks": np.array([[1, 2]])}, r"blocks: 2 is out of range, the pages have 2 blocks"),
        ({"slots": np.array([[0, 1, 2, 3, 4, 5, 6, 8]])}, r"slots: 8 is out of range, the pages have 8"),
        ({"blocks": np.array([[0, 1], [0, 1]])}, r"records: 1 given for 2 chunks"),
        ({"blocks": IDS[:, :1]}, r"records\[0\]: \(4096,\).*want \(2048,\)"),
        ({"blocks": IDS, "records": [RECORD[:-1]]}, r"records\[0\]: \(4095,\).*want \(4096,\)"),
        ({"blocks": IDS, "records": [np.zeros(8192, np.uint8)[::2]]}, r"records\[0\]: .*strides \(2,\)"),
        ({"blocks": IDS, "records": [RECORD.view(np.int8)]}, r"records\[0\]: int8"),
        ({"blocks": IDS, "records": [RECORD.reshape(2, -1)]}, r"records\[0\]: \(2, 2048\)"),
        ({"blocks": IDS, "records": [bytearray(4096)]}, r"records\[0\]: bytearray"),
        ({"blocks": IDS, "threads": 0}, r"threads=0"),
    ],
)
def test_call_refused(move: Callable[..., None], arguments: dict[str, Any], message: str) -> None:
    pages = SMALL.pages(2, POISON)
    with pytest.raises(LaunchError, match=message):
        move(Pages.of(SMALL, pages), **{"records": [RECORD]} | arguments)
    assert all((t.view(torch.uint8) == POISON).all() for t in pages)
    assert not RECORD.any()


def _rotation(delta: Any = (1,), pairs: int = 8, first: int = 0) -> Rotation:
    return Rotation(Rope((1.0,) * pairs, first=first), np.asarray(delta))


UINT8 = replace(SMALL, dtype="uint8")


@pytest.mark.parametrize(
    ("group", "arguments", "message"),
    [
        (replace(SMALL, precision="fp8"), {"records": [RECORD]}, r"records\[0\]: \(4096,\).*want \(1280,\)"),
        (UINT8, {"rotate": _rotation()}, r"rotate: the pages are uint8"),
        (OPAQUE, {"rotate": _rotation()}, r"rotate: the pages are opaque"),
        (SMALL, {"rotate": _rotation(pairs=9)}, r"rotate: channels 0 to 18, but a head of K has 16"),
        (SMALL, {"rotate": _rotation(first=2)}, r"rotate: channels 2 to 18, but a head of K has 16"),
        (SMALL, {"rotate": _rotation((1, 2))}, r"rotate: delta: \(2,\), want \(1,\) or \(1, 8\)"),
        (SMALL, {"rotate": _rotation((1.0,))}, r"rotate: delta: float64"),
        (SMALL, {"records": [torch.zeros(4096, dtype=torch.uint8)]}, r"records\[0\]: Tensor"),
    ],
)
def test_conversion_refused(group: LayerGroup, arguments: dict[str, Any], message: str) -> None:
    pages = group.pages(2, POISON)
    record = np.zeros(group.chunk_bytes(8), np.uint8)
    with pytest.raises(LaunchError, match=message):
        unpack(Pages.of(group, pages), **{"records": [record], "blocks": IDS} | arguments)
    assert all((t.view(torch.uint8) == POISON).all() for t in pages)


def test_read_only_record_refused() -> None:
    """By pack, and before it writes the records that could be written."""
    pages = Pages.of(SMALL, SMALL.pages(2, POISON))
    first = np.zeros_like(RECORD)
    with pytest.raises(LaunchError, match=r"records\[1\]: read-only"):
        pack(pages, [first, READ_ONLY], blocks=np.array([[0, 1], [0, 1]]))
    assert not first.any()
    unpack(pages, [READ_ONLY], blocks=IDS)


def test_slots_of_opaque_pages_refused() -> None:
    with pytest.raises(LaunchError, match="slots: opaque pages move whole"):
        pack(Pages.of(OPAQUE, OPAQUE.pages(2)), [RECORD], slots=IDS)


def test_blocks_of_another_size_refused() -> None:
    """A Hugging Face cache is one block as long as its capacity: only slots make sense."""
    pages = Pages.of(SMALL, [torch.zeros(1, 2, 100, 32) for _ in range(2)])
    with pytest.raises(LaunchError, match="N = 100 is not block_tokens = 4"):
        pack(pages, [RECORD], blocks=np.array([[0, 0]]))
    pack(pages, [RECORD.copy()], slots=np.arange(92, 100).reshape(1, 8))


def test_backend_by_device() -> None:
    """Other devices than the CPU go to torch, not to the host kernel."""
    pages = Pages.of(SMALL, SMALL.pages(2, device="meta"))
    with mock.patch.object(reference, "unpack") as called:
        unpack(pages, [RECORD], blocks=IDS)
    called.assert_called_once()
    assert called.call_args.args[:2] == (SMALL, pages.parts)


def test_import_is_light() -> None:
    code = (
        "import sys, kvkit.kernels.pages.api, kvkit.kernels.attention.api;"
        "print({'numba', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
