"""The ids that stand for a request's tokens: where media are, what these hold counts, not their names."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.multimodal.hasher import MultiModalHasher

from kvkit.adapters.vllm.step import TokenIds
from kvkit.format.keys import as_tokens

log = logging.getLogger(__name__)

KEPT = 65_536
"""Identifiers of media that are remembered with what they stood for; the oldest give way."""


def identity(tokens: Sequence[int], media: Iterable[tuple[str, int, int]] = ()) -> TokenIds:
    """The ids that stand for `tokens` in keys: int32 [T]. Mutates nothing.

    The placeholders of an image (or other media) are alike whatever it shows. In their place come negative
    ids, which no token has, made from the token and from all media that lie there.

    Args:
        tokens: token ids [T].
        media: (digest, offset, length) of each medium; those behind T do not count.
    """
    ids = as_tokens(tokens)
    inside = [(name, offset, min(offset + length, len(ids))) for name, offset, length in media]
    if not any(offset < stop for _, offset, stop in inside):
        return ids
    mixed, covered = ids.astype(np.int64), np.zeros(len(ids), bool)
    for name, offset, stop in inside:
        if offset < stop:
            mixed[offset:stop] += _noise(name, stop - offset)
            covered[offset:stop] = True
    return np.where(covered, -1 - (mixed & 0x7FFFFFFF), ids).astype(np.int32)


class Media:
    """What the media of requests hold. For the scheduler's thread.

    vLLM keeps images, what it made of them, and blocks under an identifier: a digest, or a `uuid` that a
    client gave instead, and nothing tells which of the two it is. Where the same identifier comes with
    something else, vLLM may have used the one for the other, so that nobody knows whose KV it is.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[str, str | None] = OrderedDict()
        self._known: WeakKeyDictionary[Any, list[tuple[str, int, int] | None]] = WeakKeyDictionary()

    def of(self, request: Any) -> list[tuple[str, int, int]] | None:
        """(digest, offset, length) of each medium of vLLM's request; None where one is not known by content.

        Every request is to be asked about before vLLM computes for it. Remembers what it found.
        """
        if not request.mm_features:
            return []
        known = self._known.setdefault(request, [])
        for feature in request.mm_features[len(known) :]:  # a session may get more
            digest = self._note(feature)
            place = feature.mm_position
            known.append(None if digest is None else (digest, place.offset, place.length))
        return None if None in known else [entry for entry in known if entry is not None]

    def _note(self, feature: Any) -> str | None:
        """The digest of a medium; None where it is not here, or another one had its identifier."""
        digest = _digest(feature)
        if digest is None:
            log.info("%s: what it holds is not known here, so its request is not cached", feature.identifier)
        named = self._digests.setdefault(feature.identifier, digest)
        self._digests.move_to_end(feature.identifier)
        if len(self._digests) > KEPT:
            self._digests.popitem(last=False)
        if named != digest and named is not None:
            log.warning("%s: it stood for something else before: not cached any more", feature.identifier)
            self._digests[feature.identifier] = None
        return digest if named == digest else None


def _digest(feature: Any) -> str | None:
    """Of a medium as the model gets it; None where an address tells workers alone where it is."""
    if feature.data is None or "address" in feature.data:
        return None
    data = feature.data.get_data()
    if any(value is None for value in data.values()):
        return None
    digest: str = MultiModalHasher.hash_kwargs("blake3", modality=feature.modality, data=data)
    return digest


def _noise(digest: str, count: int) -> np.ndarray:
    """`count` numbers below 2**31, int64, that differ wherever digests differ; a prefix of any longer run."""
    made = hashlib.shake_128(digest.encode()).digest(4 * count)
    return (np.frombuffer(made, "<u4") & 0x7FFFFFFF).astype(np.int64)
