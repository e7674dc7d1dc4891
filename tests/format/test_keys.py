"""Chunk keys are the documented bytes for tokens of any integer type, and differ between namespaces."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import blake3
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkit.format import keys as chunks
from kvkit.format.keys import ChunkError, as_tokens, chunk_keys, namespace_digest
from kvkit.format.layout import Namespace

INT32 = 2**31
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "xxh3_128": lambda data: xxhash.xxh3_128(data).digest(),
    "blake3": lambda data: blake3.blake3(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}
algorithms = st.sampled_from(sorted(HASHES))
token_ids = st.integers(-INT32, INT32 - 1)


def reference(tokens: list[int], chunk_tokens: int, parent: bytes, algorithm: str) -> list[bytes]:
    keys = []
    for at in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        parent = HASHES[algorithm](parent + struct.pack(f"<{chunk_tokens}i", *tokens[at : at + chunk_tokens]))
        keys.append(parent)
    return keys


def first_parent(algorithm: str) -> bytes:
    return bytes(range(chunks.DIGEST_BYTES[algorithm]))


def random_tokens(size: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(-INT32, INT32, size, np.int32)


def namespace(**fields: Any) -> Namespace:
    return Namespace(**{"model": "m", "layout": "0123456789abcdef", "dtype": "bfloat16"} | fields)


# The namespace's digest and the keys of two chunks of four tokens, computed with xxhash, blake3 and hashlib
# alone from the bytes that the module's docstring describes.
GOLDEN_TOKENS = [0, 1, -2, INT32 - 1, -INT32, 5, 6, 7, 8]
GOLDEN = {
    "xxh3_128": [
        "01a99daf6f5a0284b5fcd29b5ca4f413",
        "46862d3aa8eacff836790928aed6cb2d",
        "eb7852634300b041b8e2ee1557678511",
    ],
    "blake3": [
        "3b6fe990ee3b71c31739166f370ea7b05a41c8514f315175dca2dce210b3998e",
        "24b93acf1ab2b4ada5a1dc89f93aa7f8683824b10852d6fa3223d55266fa3705",
        "64b65197f7ae174ed1fcfb949724d29d6d66ce7e07c45bd71089320504043f06",
    ],
    "sha256": [
        "6e78f53dfe69f75c970e72d931d64153ced45c17f4fdd4679eea792ee2c6aa62",
        "549de034566ef7a5fec8d16e0b9828b1e6be730a6a5fc784315db5a33546f417",
        "ff13ff6c8202158fcb196fd4ffe156e7dc8d6b1cda92d7e2a97b3b0ea5ee9ae0",
    ],
}


@pytest.mark.parametrize("algorithm", GOLDEN)
def test_golden(algorithm: str) -> None:
    parent = namespace_digest(namespace(revision="r", salt="s", chunk_tokens=4, hash=algorithm))
    keys = chunk_keys(GOLDEN_TOKENS, 4, parent, algorithm)
    assert [key.hex() for key in [parent, *keys]] == GOLDEN[algorithm]


@pytest.mark.parametrize("algorithm", GOLDEN)
def test_golden_input_is_what_is_documented(algorithm: str) -> None:
    document = (
        f'{{"chunk_tokens":4,"dtype":"bfloat16","format":1,"hash":"{algorithm}","isa":"",'
        '"layout":"0123456789abcdef","lora":"","model":"m","rank":0,"revision":"r","salt":"s","world":1}'
    )
    parent = HASHES[algorithm](document.encode())
    keys = reference(GOLDEN_TOKENS, 4, parent, algorithm)
    assert [key.hex() for key in [parent, *keys]] == GOLDEN[algorithm]


ELSEWHERE = """
import sys
import numpy as np
from kvkit.format.keys import chunk_keys, namespace_digest
from kvkit.format.layout import Namespace
keys = chunk_keys(np.arange(1600, dtype=np.int32), 16, namespace_digest(Namespace("m", "l", "d")))
assert "numba" not in sys.modules and "torch" not in sys.modules
print(b"".join(keys).hex())
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_keys_are_the_same_in_any_process(hash_seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    parent = namespace_digest(Namespace("m", "l", "d"))
    assert done.stdout.strip() == b"".join(reference(list(range(1600)), 16, parent, "xxh3_128")).hex(), (
        done.stderr
    )


@given(algorithms, st.integers(1, 300), st.integers(0, 4000), st.integers(0, 2**32))
def test_keys(algorithm: str, chunk_tokens: int, size: int, seed: int) -> None:
    tokens = random_tokens(size, seed)
    parent = first_parent(algorithm)
    keys = chunk_keys(tokens, chunk_tokens, parent, algorithm)
    assert keys == reference(tokens.tolist(), chunk_tokens, parent, algorithm)
    assert all(type(key) is bytes for key in keys)


def test_tokens_and_digests_may_end_in_zeros() -> None:
    tokens = np.zeros(200_000, np.int32)
    keys = chunk_keys(tokens, 1, bytes(16))
    assert any(key.endswith(b"\0") for key in keys)
    assert keys == reference(tokens.tolist(), 1, bytes(16), "xxh3_128")


@pytest.mark.parametrize("chunk_tokens", [4, 2**31, 2**70])
def test_tokens_shorter_than_a_chunk_have_no_key(chunk_tokens: int) -> None:
    assert chunk_keys([1, 2, 3], chunk_tokens, bytes(16)) == []


@given(st.integers(1, 20), st.integers(0, 2000), st.integers(0, 2000))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(chunk_tokens: int, size: int, cut: int) -> None:
    tokens = random_tokens(size)
    keys = chunk_keys(tokens, chunk_tokens, bytes(16))
    assert chunk_keys(tokens[:cut], chunk_tokens, bytes(16)) == keys[: min(cut, size) // chunk_tokens]


@given(algorithms, st.integers(1, 20), st.integers(1, 2000), st.data())
def test_a_token_changes_its_key_and_all_later_ones(
    algorithm: str, chunk_tokens: int, size: int, data: st.DataObject
) -> None:
    tokens = random_tokens(size)
    other = tokens.copy()
    place = data.draw(st.integers(0, size - 1))
    other[place] ^= 1 << data.draw(st.integers(0, 30))
    parent = first_parent(algorithm)
    before = chunk_keys(tokens, chunk_tokens, parent, algorithm)
    after = chunk_keys(other, chunk_tokens, parent, algorithm)
    same = place // chunk_tokens
    assert before[:same] == after[:same]
    assert all(a != b for a, b in zip(before[same:], after[same:], strict=True))


@pytest.mark.parametrize("fields", [{"salt": "b"}, {"revision": "b"}, {"rank": 1}, {"hash": "sha256"}])
def test_namespaces_share_no_key(fields: dict[str, Any]) -> None:
    tokens = random_tokens(1000)
    spaces = namespace(world=2), namespace(**{"world": 2} | fields)
    one, two = (chunk_keys(tokens, 4, namespace_digest(space), space.hash) for space in spaces)
    assert len(one) == len(two) == 250
    assert not set(one) & set(two)


@pytest.mark.parametrize(
    "dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u4"]
)
def test_any_integer_dtype(dtype: str) -> None:
    array = np.arange(100).astype(dtype)
    tokens = as_tokens(array)
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == list(range(100))
    assert chunk_keys(array, 16, bytes(16)) == chunk_keys(range(100), 16, bytes(16))


@given(st.lists(token_ids, max_size=50))
def test_kinds_agree(values: list[int]) -> None:
    array = np.array(values, np.int32)
    kinds: list[Any] = [
        values,
        tuple(values),
        array,
        array.astype(np.int64),
        array.astype(">i4"),
        np.repeat(array, 2)[::2],
        array[::-1].copy()[::-1],
        np.stack([array, array], 1)[:, 0],
        torch.tensor(values, dtype=torch.int32),
        torch.tensor(values, dtype=torch.int64),
        torch.tensor(values, dtype=torch.int64).repeat_interleave(2)[::2],
        [np.int64(value) for value in values],
    ]
    expected = reference(values, 3, bytes(16), "xxh3_128")
    for tokens in kinds:
        assert as_tokens(tokens).tolist() == values
        assert chunk_keys(tokens, 3, bytes(16)) == expected


def test_strides_in_a_large_job() -> None:
    tokens = random_tokens(4 * 2000)
    parent = bytes(16)
    for view in (tokens[::4], tokens[::-1], tokens.reshape(-1, 4)[:, 1], tokens.astype(">i4")[::-2]):
        assert chunk_keys(view, 16, parent) == reference(view.tolist(), 16, parent, "xxh3_128")


def test_tokens_at_an_odd_address() -> None:
    tokens = np.frombuffer(b"\0" + random_tokens(4000).tobytes(), np.uint8)[1:].view(np.int32)
    assert not tokens.flags.aligned
    assert chunk_keys(tokens, 16, bytes(16)) == reference(tokens.tolist(), 16, bytes(16), "xxh3_128")
    assert chunk_keys(tokens, 256, bytes(16)) == reference(tokens.tolist(), 256, bytes(16), "xxh3_128")


def test_contiguous_int32_is_not_copied() -> None:
    array = random_tokens(100)
    tensor = torch.arange(100, dtype=torch.int32)
    assert np.shares_memory(as_tokens(array), array)
    assert np.shares_memory(as_tokens(array[20:40]), array)
    assert as_tokens(tensor).ctypes.data == tensor.data_ptr()


def test_tokens_are_left_alone() -> None:
    array = random_tokens(4000)
    before = array.copy()
    array.flags.writeable = False
    chunk_keys(array, 16, bytes(16))
    assert np.array_equal(array, before)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2.0], r"tokens\[1\] is 2.0"),
        ([1, "a"], r"tokens\[1\] is 'a'"),
        ([[1, 2]], r"tokens\[0\] is \[1, 2\]"),
        ([0, INT32], r"tokens\[1\] is 2147483648"),
        ([-INT32 - 1], r"tokens\[0\] is -2147483649"),
        ([10**30], r"tokens\[0\] is 10"),
        ((1, None), r"tokens\[1\] is None"),
        (range(INT32, INT32 + 2), r"tokens\[0\] is 2147483648"),
        ("123", "are a str"),
        (b"123", "are a bytes"),
        ({1, 2}, "are a set"),
        (5, "are a int"),
        (None, "are a NoneType"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), r"\(1, 2\)"),
        (np.array(3), r"\(\)"),
        (np.array([1, INT32]), "from 1 to 2147483648"),
        (np.array([-INT32 - 1]), "-2147483649"),
        (np.array([2**64 - 1], np.uint64), "18446744073709551615"),
        (np.array([2**32 - 1], np.uint32), "4294967295"),
        (np.array([2**32], ">i8"), "4294967296"),
        (np.array(["a"]), "<U1"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "BFloat16"),
        (torch.tensor([1.0], requires_grad=True), "requires grad"),
        (torch.tensor([INT32]), "2147483648"),
        (torch.zeros(2, 2, dtype=torch.int32), r"\(2, 2\)"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "meta"),
    ],
)
def test_impossible_tokens(tokens: Any, message: str) -> None:
    for job in (as_tokens, lambda t: chunk_keys(t, 1, bytes(16))):
        with pytest.raises(ChunkError, match=message):
            job(tokens)


def test_unknown_algorithm() -> None:
    with pytest.raises(ChunkError, match="hash='md5': want one of 'xxh3_128', 'blake3', 'sha256'"):
        namespace_digest(namespace(hash="md5"))
    with pytest.raises(ChunkError, match="hash='md5'"):
        chunk_keys([1], 1, bytes(16), "md5")


def test_missing_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ChunkError, match=r"kvkit-llm\[blake3\].*'xxh3_128', 'sha256'"):
        namespace_digest(namespace(hash="blake3"))


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_impossible_chunk_size(chunk_tokens: int) -> None:
    with pytest.raises(ChunkError, match=f"chunk_tokens={chunk_tokens}"):
        chunk_keys([1], chunk_tokens, bytes(16))


@pytest.mark.parametrize(("algorithm", "width"), [("xxh3_128", 32), ("sha256", 16), ("blake3", 0)])
def test_a_parent_of_another_algorithm(algorithm: str, width: int) -> None:
    with pytest.raises(ChunkError, match=f"parent has {width} bytes"):
        chunk_keys([1], 1, bytes(width), algorithm)
