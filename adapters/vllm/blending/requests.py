"""Blend requests: read from `kv_transfer_params.blend`, or found in a prompt as the settings say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.adapters.vllm.settings import WHERE as SETTINGS
from kvkit.adapters.vllm.settings import BlendSettings
from kvkit.blend import requests
from kvkit.blend.plan import Selection, split
from kvkit.blend.requests import WHERE, BlendFields
from kvkit.format.keys import as_tokens
from kvkit.settings import ConfigError


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """The documents of a prompt with reusable KV, and how tokens to compute again are chosen.

    Args:
        documents: (start, stop) of each document, ascending and disjoint.
        prefix: number of leading tokens of the prompt after which each document was computed.
        selection: how tokens to compute again are chosen.
        joints: per document, the tokens between the prefix and the document when it was computed; empty:
            there were none before any document.
    """

    documents: tuple[tuple[int, int], ...]
    prefix: int
    selection: Selection
    joints: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
        """Pairs of each document and its joint."""
        return zip(self.documents, self.joints or ((),) * len(self.documents), strict=True)


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids of the marks before and after a document, as bytes of int32."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, texts: tuple[str, str], encode: Callable[[str], Sequence[int]]) -> Marks:
        """Encode the marks of the settings.

        Raises:
            ConfigError: a mark has no tokens.
        """
        ids = [as_tokens(list(encode(text))) for text in texts]
        if not all(map(len, ids)):
            raise ConfigError(f"{SETTINGS}.blend.marks = {texts!r}: want two texts that have tokens")
        return cls(*(mark.tobytes() for mark in ids))

    def documents(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each document between marks; ignore a document without an end mark."""
        ids, position = as_tokens(prompt).tobytes(), 0
        while (start := _find(ids, self.before, position)) >= 0:
            start += len(self.before)
            position = _find(ids, self.after, start)
            if position < 0:
                return
            yield start // 4, position // 4
            position += len(self.after)


def read(request: Any, settings: BlendSettings, marks: Marks | None = None) -> BlendRequest | None:
    """Read the blend request of vLLM's `Request`; None: it is not blended.

    `false` turns blending off. For a request without `blend`, `marks` or `settings.split` find the documents.

    Raises:
        ConfigError: the `blend` of the request is invalid, or the request cannot be blended.
    """
    params: Mapping[str, Any] = request.kv_transfer_params or {}
    blend_param = params.get("blend")
    if blend_param is False or (blend_param is None and marks is None and not settings.split):
        return None
    obstacle = _obstacle(request, params)
    if obstacle and blend_param is None:
        return None
    if obstacle:
        raise ConfigError(f"{WHERE}: not with {obstacle}")
    fields = requests.read({} if blend_param is None else blend_param, settings.least_ratio, settings.methods)
    requests.check_spans(fields, len(request.prompt_token_ids))
    documents, prefix = _documents(request.prompt_token_ids, fields, settings, marks)
    if not documents:
        return None
    if len(documents) > settings.max_documents:
        raise ConfigError(
            f"{WHERE}: {len(documents)} documents: want at most {SETTINGS}.blend.max_documents = "
            f"{settings.max_documents}"
        )
    joints = tuple(map(tuple, fields.joints))
    return BlendRequest(documents, prefix, _selection(fields, settings), joints)


def _obstacle(request: Any, params: Mapping[str, Any]) -> str:
    """Return the feature of a request that rules out blending; "" if there is none."""
    return next(
        (
            name
            for name, found in (
                ("a handoff", params.get("do_remote_decode") or params.get("do_remote_prefill")),
                ("images or other media", request.mm_features),
                ("embeddings in place of token ids", request.prompt_embeds is not None),
                ("pooling", request.pooling_params is not None),
                ("streamed input", request.resumable),
                ("logprobs of the prompt", request.skip_reading_prefix_cache),
            )
            if found
        ),
        "",
    )


def _documents(
    prompt: Sequence[int], fields: BlendFields, settings: BlendSettings, marks: Marks | None
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (start, stop) of each document, and the number of prefix tokens of each when computed."""
    if fields.documents is None:
        documents = () if marks is None else tuple(marks.documents(prompt))
        prefix = documents[0][0] if documents and fields.prefix is None else fields.prefix or 0
        if not documents and settings.split:
            documents = tuple(itertools.pairwise(split(prompt).tolist()))
        elif marks is None:
            raise ConfigError(f"{WHERE}.documents: want [[start, stop], ...]: {SETTINGS}.blend has no marks")
        return tuple(span for span in documents if span[0] >= prefix), prefix
    return tuple((start, stop) for start, stop in fields.documents), fields.prefix or 0


def _selection(fields: BlendFields, settings: BlendSettings) -> Selection:
    """Return the selection. With ratio 0 and no `first_n`, no token is computed again."""
    ratio = settings.ratio if fields.ratio is None else fields.ratio
    selection = Selection(fields.method or settings.methods[0], ratio, coverage=settings.coverage)
    if fields.first_n is None and ratio:
        return selection
    return replace(selection, first_n=fields.first_n or 0)


def _find(ids: bytes, mark: bytes, start: int) -> int:
    """Return the byte offset of `mark` in int32 ids, from byte `start` on; -1: not found."""
    while (start := ids.find(mark, start)) >= 0 and start % np.dtype(np.int32).itemsize:
        start += 1
    return start
