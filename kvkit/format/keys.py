"""Chained keys of token ids: digests that name a chunk, its prefix and its namespace.

Keys are defined byte for byte, for any machine and any language:

    parent_0 = H(namespace.to_bytes())
    key_i    = H(parent_i || the chunk's token ids, each a little-endian int32)
    parent_i+1 = key_i

H is `xxh3_128` (XXH3, seed 0, canonical big-endian form, 16 bytes), `blake3` (32 bytes) or `sha256` (32
bytes), never truncated. A trailing partial chunk has no key. XXH3 does not resist malicious collisions:
records verify their tokens, and a store that tenants share can use one of the other two.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkit.format.layout import Namespace

DIGEST_BYTES: Mapping[str, int] = {"xxh3_128": 16, "blake3": 32, "sha256": 32}
TOKEN = np.dtype("<i4")


class ChunkError(ValueError):
    """Invalid tokens, or an invalid hash setting. The message names the value and the choices."""


class SupportsArray(Protocol):
    """A numpy array, a CPU torch tensor or a JAX array."""

    def __array__(self) -> Any: ...


Tokens: TypeAlias = SupportsArray | Sequence[int]


def namespace_digest(namespace: Namespace) -> bytes:
    """Return the first parent key: the digest of `namespace.to_bytes()` under `namespace.hash`.

    Raises:
        ChunkError: the algorithm is unknown or not installed.
    """
    return _digest(namespace.hash)(namespace.to_bytes())


def chunk_keys(tokens: Tokens, chunk_tokens: int, parent: bytes, algorithm: str = "xxh3_128") -> list[bytes]:
    """Return the keys of the whole chunks of `tokens`, in order.

    Args:
        tokens: token ids [T], see `as_tokens`.
        chunk_tokens: tokens per chunk, at least 1.
        parent: namespace digest, or key of the chunk before these tokens.
        algorithm: name in `DIGEST_BYTES`.

    Returns:
        T // chunk_tokens keys.

    Raises:
        ChunkError: an argument is invalid (`tokens`: see `as_tokens`), or the algorithm is not installed.
    """
    digest = _digest(algorithm)
    if chunk_tokens < 1:
        raise ChunkError(f"chunk_tokens={chunk_tokens}: want at least 1")
    if len(parent) != (digest_bytes := DIGEST_BYTES[algorithm]):
        raise ChunkError(f"parent has {len(parent)} bytes: want {digest_bytes}, a digest of {algorithm}")
    ids = as_tokens(tokens)
    count = ids.size // chunk_tokens
    if not count:
        return []
    # half the time of slicing a memoryview; numpy's void type, unlike its strings, keeps trailing zeros
    pieces = ids[: count * chunk_tokens].view(f"V{chunk_tokens * TOKEN.itemsize}").tolist()
    return [parent := digest(parent + piece) for piece in pieces]


def as_tokens(tokens: Tokens) -> NDArray[np.int32]:
    """Convert token ids to a contiguous, little-endian int32 array [T]. Do not write to the result.

    Contiguous int32 in numpy or in a CPU torch tensor is not copied, so the result may be the caller's array.
    A Python list costs 5 ns a token: keep tokens in an array where you can.

    Args:
        tokens: integers of any width in a 1-D numpy array, torch tensor or JAX array, or a sequence of ints.

    Raises:
        ChunkError: the tokens are not integers, not 1-D, or do not fit int32.
    """
    if not hasattr(tokens, "__array__"):
        return _from_sequence(tokens)
    try:
        array = np.asarray(tokens)
    except (TypeError, RuntimeError) as error:  # torch: a tensor on a GPU, or a dtype that numpy lacks
        raise ChunkError(f"tokens ({type(tokens).__name__}) are no array in memory: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ChunkError(f"tokens are {array.dtype} {array.shape}: want integers [T]")
    if array.size and not np.can_cast(array.dtype, TOKEN):
        low, high = int(array.min()), int(array.max())
        if not (_fits(low) and _fits(high)):
            raise ChunkError(f"tokens are from {low} to {high}: want int32")
    return np.ascontiguousarray(array, TOKEN)


def _from_sequence(tokens: Any) -> NDArray[np.int32]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise ChunkError(f"tokens are a {type(tokens).__name__}: want an array or a sequence of ints")
    try:
        # A third of the time that numpy takes, and it rejects floats and values that do not fit.
        # `struct.pack` would copy the sequence twice.
        return np.frombuffer(struct.Struct(f"<{len(tokens)}i").pack(*tokens), TOKEN)
    except struct.error as error:
        invalid = [
            f"tokens[{i}] is {value!r}"
            for i, value in enumerate(tokens)
            if not hasattr(value, "__index__") or not _fits(operator.index(value))
        ]
        raise ChunkError(f"{', '.join(invalid[:3])}: want int32") from error


def _fits(value: int) -> bool:
    return -(2**31) <= value < 2**31


def _digest(algorithm: str) -> Callable[[bytes], bytes]:
    if algorithm == "xxh3_128":
        return xxhash.xxh3_128_digest
    if algorithm == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    if algorithm != "blake3":
        raise ChunkError(f"hash={algorithm!r}: want one of {', '.join(map(repr, DIGEST_BYTES))}")
    try:
        from blake3 import blake3
    except ImportError as error:
        package = "the package blake3 (pip install 'kvkit-llm[blake3]')"
        raise ChunkError(f"hash='blake3' needs {package}; without it: 'xxh3_128', 'sha256'") from error
    return lambda data: blake3(data).digest()
