"""The ids that stand for a request's tokens: where media are, what these hold counts, not their names."""

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

LEAST_TOKENS = 16
"""Tokens of a chunk whose ids can stand for media: in 496 bits."""
KEPT = 65_536
"""Identifiers of media that are remembered with what they stood for; the oldest give way."""


def identity(
    tokens: Sequence[int], media: Iterable[tuple[str, int, int]] = (), *, chunk_tokens: int
) -> tuple[TokenIds, str]:
    """The ids that stand for `tokens` in keys: int32 [T], and what they cannot hold. Mutates nothing.

    The placeholders of an image (or other media) are alike whatever it shows. So each chunk in which a medium
    lies, the unfilled last one included, has negative ids, which no token has: 31 bits each of one digest
    (SHAKE-128) of the chunk's tokens and of all media in it. However little of a medium lies in a chunk, all
    of the chunk's ids tell it from another one.

    Args:
        tokens: token ids [T].
        media: (digest, offset, length) of each medium; those after T do not count.
        chunk_tokens: tokens of a chunk, at least `LEAST_TOKENS`.

    Returns:
        The ids, and where a medium lies in the unfilled chunk after the last whole one the digest of that in
        32 hex digits: it may have too few ids. Empty where none does.
    """
    ids = as_tokens(tokens)
    inside: dict[int, list[tuple[str, int, int]]] = {}
    for name, offset, length in sorted(media):
        stop = min(offset + length, len(ids))
        for chunk in range(offset // chunk_tokens, -(-stop // chunk_tokens)) if offset < stop else ():
            inside.setdefault(chunk, []).append((name, offset - chunk * chunk_tokens, length))
    mixed, rest = ids.copy() if inside else ids, ""
    for chunk, found in inside.items():
        part = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
        told = json.dumps(found).encode() + ids[part].tobytes()
        made = hashlib.shake_128(told)
        mixed[part] = np.frombuffer(made.digest(ids[part].nbytes), "<i4") | np.int32(-(2**31))
        rest = made.hexdigest(16) if part.stop > len(ids) else rest
    return mixed, rest


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
    if feature.data is None or "address" in feature.data or compat.absent("media"):
        return None
    data = feature.data.get_data()
    if any(value is None for value in data.values()):
        return None
    digest: str = compat.find("MultiModalHasher").hash_kwargs("blake3", modality=feature.modality, data=data)
    return digest
