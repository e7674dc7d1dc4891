"""kvkit.format.xxh3 against the C library."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkit.format import xxh3

BYTES = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
LONG = [1023, 1024, 1025, 2047, 2048, 2049, 2112, 4096, 65_536, 98_304, 1_000_003]

UNTIMED = settings(deadline=None)  # an example may have to wait for the JIT

# Lengths around every change of path, and far from them.
lengths = st.one_of(st.integers(0, 300), st.integers(0, 5000), st.sampled_from(LONG))
offsets = st.integers(0, 64)


def ours_128(data: NDArray[np.uint8]) -> int:
    low, high = xxh3.xxh3_128(data.ctypes.data, data.size)
    return int(high) << 64 | int(low)


@pytest.mark.parametrize("offset", [0, 5])
def test_equals_the_c_library_at_every_length(offset: int) -> None:
    for length in [*range(1101), *LONG]:
        data = BYTES[offset : offset + length]
        assert ours_128(data) == xxhash.xxh3_128_intdigest(data.data), length


@UNTIMED
@given(lengths, offsets)
def test_equals_the_c_library(length: int, offset: int) -> None:
    data = BYTES[offset : offset + length]
    assert ours_128(data) == xxhash.xxh3_128_intdigest(data.data)


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_carries_propagate(fill: int) -> None:
    for length in [*range(260), 1024, 3000]:
        data = np.full(length, fill, np.uint8)
        assert ours_128(data) == xxhash.xxh3_128_intdigest(data.data)


@UNTIMED
@given(st.integers(1, 300), st.integers(0, 2000), offsets, st.binary(min_size=16, max_size=16))
def test_chain(chunk_tokens: int, size: int, offset: int, parent: bytes) -> None:
    tokens = BYTES[offset : offset + 4 * size].view(np.int32)  # at odd addresses too
    expected: list[bytes] = []
    for at in range(0, size - size % chunk_tokens, chunk_tokens):
        expected.append(
            xxhash.xxh3_128_digest((expected or [parent])[-1] + tokens[at : at + chunk_tokens].tobytes())
        )
    digests = xxh3.chain(tokens, chunk_tokens, parent)
    assert digests.dtype == np.uint8
    assert digests.shape == (size // chunk_tokens, 16)
    assert digests.tobytes() == b"".join(expected)


def test_chain_of_read_only_tokens() -> None:
    tokens = np.frombuffer(BYTES[:4096].tobytes(), np.int32)
    assert not tokens.flags.writeable
    assert np.array_equal(xxh3.chain(tokens, 16, bytes(16)), xxh3.chain(tokens.copy(), 16, bytes(16)))


@pytest.mark.parametrize(
    ("tokens", "chunk_tokens", "parent"),
    [
        (np.zeros(8, np.int64), 4, bytes(16)),
        (np.zeros((2, 4), np.int32), 4, bytes(16)),
        (np.zeros(16, np.int32)[::2], 4, bytes(16)),
        (np.zeros(8, np.int32), 0, bytes(16)),
        (np.zeros(8, np.int32), 4, bytes(15)),
    ],
)
def test_chain_refuses(tokens: NDArray[np.int32], chunk_tokens: int, parent: bytes) -> None:
    with pytest.raises(ValueError, match="want"):
        xxh3.chain(tokens, chunk_tokens, parent)


def test_threads_do_not_share_state() -> None:
    def digests(start: int) -> bytes:
        return xxh3.chain(BYTES[start * 4 :].view(np.int32), 256, bytes(16)).tobytes()

    expected = [digests(start) for start in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(digests, range(8))) == expected


# A page of bytes between two that cannot be read: one byte too far ends the process.
GUARDED = """
import ctypes, mmap
import numpy as np
from kvkit.format import xxh3

page = mmap.PAGESIZE
whole = np.frombuffer(mmap.mmap(-1, 3 * page), np.uint8)
libc = ctypes.CDLL(None, use_errno=True)
for guard in (0, 2):
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + guard * page), page, 0) == 0
middle = whole[page : 2 * page]
for length in [*range(300), 1024, 1025, 2000, page]:
    for data in (middle[:length], middle[page - length :]):
        xxh3.xxh3_128(data.ctypes.data, length)
for chunk_tokens in [*range(1, 70), 256, 300]:
    tokens = 2 * chunk_tokens
    for data in (middle[: 4 * tokens], middle[page - 4 * tokens :]):
        xxh3.chain(data.view(np.int32), chunk_tokens, bytes(16))
print("whole")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
def test_reads_nothing_outside() -> None:
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr
