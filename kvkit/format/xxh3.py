"""XXH3-128 in numba, bit for bit the C library's: a whole chain of digests in one call.

Why not the C library alone: Python calls it once per chunk, and that call costs more than hashing a few
tokens does. Here one call, without the GIL, does them all.

From the specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, whose names are kept.
A kernel takes addresses (int64) and lengths in bytes, so that it can hash any memory; whoever calls it keeps
that memory alive. Arithmetic is modulo 2**64 on uint64 only: numba turns uint64 with int64 into float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

if sys.byteorder != "little":
    raise ImportError("kvkit.format.xxh3 reads memory as little-endian words: want a little-endian machine")

F = TypeVar("F", bound=Callable[..., Any])


def _jit(function: F) -> F:
    return cast(F, numba.njit(nogil=True, cache=True)(function))


PRIME32_1, PRIME32_2, PRIME32_3 = (np.uint64(p) for p in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))
PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME64_3 = np.uint64(0x165667B19E3779F9)
PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
PRIME_MX1 = np.uint64(0x165667919E3779F9)
PRIME_MX2 = np.uint64(0x9FB21C651E98DF25)
INITIAL = tuple(
    int(p) for p in (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
)
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)  # [192]
ZERO = np.uint64(0)

U64 = ir.IntType(64)
LANES = ir.VectorType(U64, 8)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(LANES, [value] * 8)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _loader(bits: int) -> Any:
    def load(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.zext(_load(builder, args[0], ir.IntType(bits)), U64)

        return types.uint64(types.int64), generate

    return intrinsic(load)


# The unsigned word at an address, aligned or not, as uint64.
_u8, _u32, _u64 = _loader(8), _loader(32), _loader(64)


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _multiply(context: Any, a: Any, b: Any) -> Any:
    """(lower, higher) half of the 128-bit product."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        higher = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), U64)
        return context.make_tuple(builder, signature.return_type, [builder.trunc(product, U64), higher])

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _accumulate(context: Any, head: Any, data: Any, length: Any, secret: Any) -> Any:
    """Steps 1 to 3 for large inputs: the eight accumulators.

    Written in LLVM vectors, which every target can lower: numba compiles a loop over eight lanes to scalar
    code, four times as slow.

    The first 64 bytes are read at `head`, all others from `data`: so a parent key can stand before a chunk
    that is hashed where it lies. That stripe is added last in its block (addition commutes), for the parent
    key is what a chain waits for.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        head, data, length, secret = args
        number = ir.IntType(64)
        swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
        total = cgutils.alloca_once_value(builder, ir.Constant(LANES, INITIAL))

        def at(base: Any, step: Any, size: int) -> Any:
            return builder.add(base, builder.mul(step, number(size)))

        def add(stripe: Any, key: Any) -> None:
            stripe, key = _load(builder, stripe, LANES), _load(builder, key, LANES)
            value = builder.xor(stripe, key)
            product = builder.mul(builder.and_(value, _splat(0xFFFFFFFF)), builder.lshr(value, _splat(32)))
            swapped = builder.shuffle_vector(stripe, stripe, swap)
            builder.store(builder.add(builder.load(total), builder.add(product, swapped)), total)

        def scramble() -> None:
            value = builder.load(total)
            value = builder.xor(value, builder.lshr(value, _splat(47)))
            value = builder.xor(value, _load(builder, builder.add(secret, number(128)), LANES))
            builder.store(builder.mul(value, _splat(int(PRIME32_1))), total)

        before_last = builder.sub(length, number(1))
        blocks = builder.udiv(before_last, number(1024))
        stripes = builder.udiv(builder.urem(before_last, number(1024)), number(64))
        with cgutils.for_range(builder, blocks) as block:
            start = at(data, block.index, 1024)
            for n in range(1, 16):
                add(builder.add(start, number(64 * n)), builder.add(secret, number(8 * n)))
            first = builder.icmp_unsigned("==", block.index, number(0))
            add(builder.select(first, head, start), secret)
            scramble()
        start = at(data, blocks, 1024)
        with cgutils.for_range(builder, stripes) as stripe:
            here = at(start, stripe.index, 64)
            first = builder.icmp_unsigned("==", builder.or_(blocks, stripe.index), number(0))
            add(builder.select(first, head, here), at(secret, stripe.index, 8))
        add(builder.add(data, builder.sub(length, number(64))), builder.add(secret, number(121)))
        result = builder.load(total)
        lanes = [builder.extract_element(result, ir.IntType(32)(i)) for i in range(8)]
        return context.make_tuple(builder, signature.return_type, lanes)

    eight = types.UniTuple(types.uint64, 8)
    return eight(types.int64, types.int64, types.int64, types.int64), generate


@_jit
def _fold(a: Any, b: Any) -> Any:
    lower, higher = _multiply(a, b)
    return lower ^ higher


@_jit
def _bswap32(x: Any) -> Any:
    x = ((x & np.uint64(0x00FF00FF)) << np.uint64(8)) | ((x >> np.uint64(8)) & np.uint64(0x00FF00FF))
    return ((x << np.uint64(16)) | (x >> np.uint64(16))) & np.uint64(0xFFFFFFFF)


@_jit
def _bswap64(x: Any) -> Any:
    return (_bswap32(x & np.uint64(0xFFFFFFFF)) << np.uint64(32)) | _bswap32(x >> np.uint64(32))


@_jit
def _avalanche(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(37))) * PRIME_MX1
    return x ^ (x >> np.uint64(32))


@_jit
def _avalanche_xxh64(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(33))) * PRIME64_2
    x = (x ^ (x >> np.uint64(29))) * PRIME64_3
    return x ^ (x >> np.uint64(32))


@_jit
def _combined(data: Any, length: Any) -> Any:
    """1 to 3 bytes and their number as one 32-bit word."""
    first, middle, last = _u8(data), _u8(data + (length >> 1)), _u8(data + length - 1)
    return last | (np.uint64(length) << np.uint64(8)) | (first << np.uint64(16)) | (middle << np.uint64(24))


@_jit
def _mix(data: Any, secret: Any) -> Any:
    return _fold(_u64(data) ^ _u64(secret), _u64(data + 8) ^ _u64(secret + 8))


@_jit
def _merge(lanes: Any, secret: Any, start: Any) -> Any:
    start += _fold(lanes[0] ^ _u64(secret), lanes[1] ^ _u64(secret + 8))
    start += _fold(lanes[2] ^ _u64(secret + 16), lanes[3] ^ _u64(secret + 24))
    start += _fold(lanes[4] ^ _u64(secret + 32), lanes[5] ^ _u64(secret + 40))
    start += _fold(lanes[6] ^ _u64(secret + 48), lanes[7] ^ _u64(secret + 56))
    return _avalanche(start)


@_jit
def _long_128(head: Any, data: Any, length: Any) -> Any:
    """(lower, higher) half of XXH3-128 of more than 240 bytes, the first 64 of them at `head`."""
    secret = SECRET.ctypes.data
    lanes = _accumulate(head, data, length, secret)
    size = np.uint64(length)
    return (
        _merge(lanes, secret + 11, size * PRIME64_1),
        _merge(lanes, secret + 117, ~(size * PRIME64_2)),
    )


@_jit
def _mix_two(low: Any, high: Any, one: Any, two: Any, secret: Any) -> Any:
    low = (low + _mix(one, secret)) ^ (_u64(two) + _u64(two + 8))
    high = (high + _mix(two, secret + 16)) ^ (_u64(one) + _u64(one + 8))
    return low, high


@_jit
def _medium_128(data: Any, length: Any) -> Any:
    """(lower, higher) half of XXH3-128 of 17 to 240 bytes."""
    secret = SECRET.ctypes.data
    size = np.uint64(length)
    low, high = size * PRIME64_1, ZERO
    if length <= 128:
        for i in range((length - 1) >> 5, -1, -1):
            low, high = _mix_two(low, high, data + 16 * i, data + length - 16 * i - 16, secret + 32 * i)
    else:
        for i in range(4):
            low, high = _mix_two(low, high, data + 32 * i, data + 32 * i + 16, secret + 32 * i)
        low, high = _avalanche(low), _avalanche(high)
        for i in range(4, length >> 5):
            low, high = _mix_two(low, high, data + 32 * i, data + 32 * i + 16, secret + 32 * i - 125)
        low, high = _mix_two(low, high, data + length - 16, data + length - 32, secret + 103)
    return (
        _avalanche(low + high),
        ZERO - _avalanche(low * PRIME64_1 + high * PRIME64_4 + size * PRIME64_2),
    )


@_jit
def _short_128(data: Any, length: Any) -> Any:
    """(lower, higher) half of XXH3-128 of 0 to 16 bytes."""
    secret = SECRET.ctypes.data
    size = np.uint64(length)
    if length > 8:
        last = _u64(data + length - 8)
        one = _u64(secret + 32) ^ _u64(secret + 40) ^ _u64(data) ^ last
        two = _u64(secret + 48) ^ _u64(secret + 56) ^ last
        low, high = _multiply(one, PRIME64_1)
        low += (size - np.uint64(1)) << np.uint64(54)
        high += two + (two & np.uint64(0xFFFFFFFF)) * (PRIME32_2 - np.uint64(1))
        low, carry = _multiply(low ^ _bswap64(high), PRIME64_2)
        return _avalanche(low), _avalanche(carry + high * PRIME64_2)
    if length > 3:
        combined = _u32(data) | (_u32(data + length - 4) << np.uint64(32))
        value = _u64(secret + 16) ^ _u64(secret + 24) ^ combined
        low, high = _multiply(value, PRIME64_1 + (size << np.uint64(2)))
        high += low << np.uint64(1)
        low ^= high >> np.uint64(3)
        low = (low ^ (low >> np.uint64(35))) * PRIME_MX2
        return low ^ (low >> np.uint64(28)), _avalanche(high)
    if length > 0:
        combined = _combined(data, length)
        swapped = _bswap32(combined)
        rotated = ((swapped << np.uint64(13)) | (swapped >> np.uint64(19))) & np.uint64(0xFFFFFFFF)
        return (
            _avalanche_xxh64(_u32(secret) ^ _u32(secret + 4) ^ combined),
            _avalanche_xxh64(_u32(secret + 8) ^ _u32(secret + 12) ^ rotated),
        )
    return (
        _avalanche_xxh64(_u64(secret + 64) ^ _u64(secret + 72)),
        _avalanche_xxh64(_u64(secret + 80) ^ _u64(secret + 88)),
    )


@_jit
def xxh3_128(address: Any, length: Any) -> Any:
    """XXH3-128, seed 0, of `length` bytes at `address`: (lower, higher) half, uint64 each.

    Args:
        address, length: int64, `length` at least 0.
    """
    if length > 240:
        return _long_128(address, address, length)
    if length > 16:
        return _medium_128(address, length)
    return _short_128(address, length)


@_jit
def _chain(tokens: Any, chunk_bytes: Any, parent: Any, digests: Any) -> None:
    length = 16 + chunk_bytes
    # How the message starts: the parent, then tokens. All of it where it is short.
    words = np.empty(30, np.uint64)
    words[:2] = parent
    head = words.ctypes.data
    copied = min(chunk_bytes, 48 if length > 240 else 224) >> 3
    for i in range(digests.shape[0]):
        chunk = tokens + i * chunk_bytes
        for j in range(copied):
            words[2 + j] = _u64(chunk + 8 * j)
        if chunk_bytes & 4:
            words[2 + copied] = _u32(chunk + 8 * copied)
        if length > 240:
            low, high = _long_128(head, chunk - 16, length)
        else:
            low, high = _medium_128(head, length)
        words[0] = digests[i, 0] = _bswap64(high)
        words[1] = digests[i, 1] = _bswap64(low)


def chain(tokens: NDArray[np.int32], chunk_tokens: int, parent: bytes) -> NDArray[np.uint8]:
    """The chained XXH3-128 digests of whole chunks, each of (the digest before it || the chunk's bytes).

    Args:
        tokens: int32 [T], contiguous; tokens after the last whole chunk are not hashed.
        chunk_tokens: at least 1.
        parent: 16 bytes, before the first chunk.

    Returns:
        uint8 [T // chunk_tokens, 16], digests in canonical (big-endian) form, as xxhash's `digest()`.

    Raises:
        ValueError: a wrong dtype, stride or size.
    """
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(f"tokens are {tokens.dtype} {tokens.shape}: want int32 [T], contiguous")
    if chunk_tokens < 1 or len(parent) != 16:
        raise ValueError(
            f"chunk_tokens={chunk_tokens}, parent of {len(parent)} bytes: want at least 1, and 16"
        )
    digests = np.empty((tokens.size // chunk_tokens, 2), np.uint64)
    _chain(tokens.ctypes.data, 4 * chunk_tokens, np.frombuffer(parent, np.uint64), digests)
    return digests.view(np.uint8)
