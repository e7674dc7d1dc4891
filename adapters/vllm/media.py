"""Ids that stand for a request's tokens in keys; media count by content, not by name."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.vllm import compat
from kvkit.format.keys import as_tokens

log = logging.getLogger(__name__)

MIN_CHUNK_TOKENS = 16
"""Minimum number of tokens of a chunk with media: its ids have room for a digest of 496 bits."""
MAX_REMEMBERED = 65_536
"""Maximum number of media identifiers that are remembered with their digests; the oldest are dropped."""


def ids_in_keys(
    tokens: Sequence[int], media: Iterable[tuple[str, int, int]] = (), *, chunk_tokens: int
) -> tuple[TokenIds, str]:
    """Return the ids that stand for `tokens` in keys, and a digest for an unfilled chunk with media.

    The placeholder tokens of an image (or other medium) are the same whatever it shows. So each chunk with
    part of a medium, including the unfilled last one, gets negative ids, which no token has: 31 bits each of
    one digest (SHAKE-128) of the chunk's tokens and of all media in it. Even a small part of a medium changes
    all ids of its chunk. Mutates nothing.

    Args:
        tokens: token ids [T].
        media: (digest, offset, length) of each medium; those after T do not count.
        chunk_tokens: tokens per chunk, at least `MIN_CHUNK_TOKENS`.

    Returns:
        ids int32 [T], and the digest of the unfilled last chunk in 32 hex digits if part of a medium is in
        it, else "". That chunk may have too few ids for a digest.
    """
    ids = as_tokens(tokens)
    media_by_chunk: dict[int, list[tuple[str, int, int]]] = {}
    for name, offset, length in sorted(media):
        stop = min(offset + length, len(ids))
        for chunk in range(offset // chunk_tokens, -(-stop // chunk_tokens)) if offset < stop else ():
            media_by_chunk.setdefault(chunk, []).append((name, offset - chunk * chunk_tokens, length))
    mixed, rest = ids.copy() if media_by_chunk else ids, ""
    for chunk, chunk_media in media_by_chunk.items():
        span = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
        message = json.dumps(chunk_media).encode() + ids[span].tobytes()
        shake = hashlib.shake_128(message)
        mixed[span] = np.frombuffer(shake.digest(ids[span].nbytes), "<i4") | np.int32(-(2**31))
        rest = shake.hexdigest(16) if span.stop > len(ids) else rest
    return mixed, rest


class Media:
    """Digests of the media of requests. For the scheduler's thread.

    vLLM keeps images, their encodings and blocks under an identifier: a digest, or a `uuid` that a client
    gave instead; the two look alike. If an identifier comes with different contents, vLLM may have used one
    medium for the other, so it is uncertain to which of them the KV belongs.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[str, str | None] = OrderedDict()
        self._known: WeakKeyDictionary[Any, list[tuple[str, int, int] | None]] = WeakKeyDictionary()

    def of_request(self, request: Any) -> list[tuple[str, int, int]] | None:
        """Return (digest, offset, length) of each medium of vLLM's request; None if a digest is unknown.

        Call it for every request before vLLM computes anything for it. Remembers the digests.
        """
        if not request.mm_features:
            return []
        known = self._known.setdefault(request, [])
        for feature in request.mm_features[len(known) :]:  # a session may get more of them
            digest = self._note_digest(feature)
            position = feature.mm_position
            known.append(None if digest is None else (digest, position.offset, position.length))
        return None if None in known else [entry for entry in known if entry is not None]

    def _note_digest(self, feature: Any) -> str | None:
        """Return a medium's digest; None if its data is missing, or its identifier had another digest."""
        digest = _digest(feature)
        if digest is None:
            log.info(
                "%s: its contents are not known in this process, so its request is not cached",
                feature.identifier,
            )
        named = self._digests.setdefault(feature.identifier, digest)
        self._digests.move_to_end(feature.identifier)
        if len(self._digests) > MAX_REMEMBERED:
            self._digests.popitem(last=False)
        if named != digest and named is not None:
            log.warning(
                "%s: it had other contents before, so requests with it are not cached",
                feature.identifier,
            )
            self._digests[feature.identifier] = None
        return digest if named == digest else None


def _digest(feature: Any) -> str | None:
    """Return the digest of a medium's data as the model gets it; None if only workers can read the data."""
    if feature.data is None or "address" in feature.data or compat.missing_reason("media"):
        return None
    data = feature.data.get_data()
    if any(value is None for value in data.values()):
        return None
    digest: str = compat.find("MultiModalHasher").hash_kwargs("blake3", modality=feature.modality, data=data)
    return digest
