"""Small arrays are uploaded in one copy from pinned memory that the host does not wait for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kvkit.kernels import uploads
from kvkit.kernels.uploads import ALIGNMENT, DeviceArray, upload, upload_arguments

CPU = torch.device("cpu")
some_arrays = st.sampled_from(["int32", "int64", "float32"]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=7))
)


@given(st.lists(some_arrays, max_size=5), st.booleans(), st.booleans())
def test_tensors_are_equal_to_the_arrays_and_their_own(
    given_arrays: list[Any], reverse: bool, on_host: bool
) -> None:
    """Of any shape, empty ones among them, and any strides; later changes of an array change no tensor."""
    given_arrays = [array[::-1].T if reverse else array for array in given_arrays]
    wanted = [array.copy() for array in given_arrays]
    with mock.patch.object(uploads, "_is_host", return_value=on_host):
        tensors = upload(given_arrays, CPU)
    for array in given_arrays:
        array[...] = 7
    assert len(tensors) == len(wanted)
    for tensor, array in zip(tensors, wanted, strict=True):
        assert tensor.is_contiguous()
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


@given(st.lists(some_arrays, max_size=5))
def test_arguments_are_the_same_bytes_at_aligned_addresses(given_arrays: list[Any]) -> None:
    with mock.patch.object(uploads, "_is_host", return_value=False):
        found = upload_arguments(given_arrays, CPU)
        tensors = upload(given_arrays, CPU)
    for argument, tensor in zip(found, tensors, strict=True):
        assert isinstance(argument, DeviceArray)
        assert len(argument) == tensor.numel()
        assert argument.dtype == tensor.dtype
        assert argument.data_ptr() == argument.address
        assert (argument.address - argument.memory.data_ptr()) % ALIGNMENT == 0
        assert argument.tensor().numpy().tobytes() == tensor.numpy().tobytes()
        assert not len(argument) or argument.tensor().data_ptr() == argument.address


def test_arguments_on_a_host_are_tensors() -> None:
    (argument,) = upload_arguments([np.arange(6, dtype=np.int32).reshape(2, 3)], CPU)
    assert isinstance(argument, torch.Tensor)
    assert argument.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_each_begins_where_kernels_expect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_is_host", lambda device: False)
    counts = 1, 5, 0, 3
    tensors = upload([np.arange(count, dtype=np.int32) for count in counts], CPU)
    starts = [tensor.storage_offset() * 4 for tensor in tensors]
    assert starts == [0, 16, 48, 48]
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_a_gpu_gets_one_copy_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, copies, memory = [], [], torch.zeros(32, dtype=torch.uint8)

    class Pinned:
        def __len__(self) -> int:
            return len(memory)

        def data_ptr(self) -> int:
            return memory.data_ptr()

        def to(self, device: Any, non_blocking: bool = False) -> torch.Tensor:
            copies.append((device, non_blocking))
            return memory.clone()

    def empty(count: int, **options: Any) -> Pinned:
        asked.append((count, options))
        return Pinned()

    monkeypatch.setattr(torch, "empty", empty)
    gpu: Any = SimpleNamespace(type="cuda")
    first, second = upload([np.array([1, 2], np.int32), np.array([3])], gpu)
    assert asked == [(32, {"dtype": torch.uint8, "pin_memory": True})]
    assert copies == [(gpu, True)]
    assert first.tolist() == [1, 2]
    assert second.tolist() == [3]
    assert bytes((ctypes.c_uint8 * 16).from_address(memory.data_ptr()))[8:] == bytes(8)
