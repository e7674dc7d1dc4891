"""Where documents stand in a prompt of tokens: plain functions over token ids.

A tokenizer merges characters over the edges of a document, so its first and last tokens depend on what stands
around it. As the document's own count those that do not depend on what stands before it: `common_end` of the
text behind several others. What it has before them right behind a prefix is its joint there: KV is kept of
prefix, joint and document in a row, whoever computed it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

TokenArray: TypeAlias = "array[int]"
_TOKEN_BYTES = array("i").itemsize
BEFORE = ("", "a", " ", "\n")
"""Texts before a document, each of which another kind of character merges with."""
LEAST_TOKENS = 16
"""A shorter document is not worth looking for."""
_LOOSE_END = 16
"""So many tokens at its end, at most half of them, may be others in a prompt: what follows merges, too."""


def tokens_of(ids: Sequence[int]) -> TokenArray:
    """Token ids, each below 2**31, as they are kept here."""
    return array("i", ids)


def common_end(sequences: Sequence[Sequence[int]]) -> TokenArray:
    """What all of these end with."""
    count = _common(*(reversed(ids) for ids in sequences))
    return tokens_of(sequences[0][len(sequences[0]) - count :])


def common_start(sequences: Sequence[Sequence[int]]) -> TokenArray:
    """What all of these begin with."""
    return tokens_of(sequences[0][: _common(*sequences)])


def find_spans(
    prompt: Sequence[int], documents: Sequence[TokenArray], first: int = 0
) -> list[tuple[int, int] | None]:
    """Where documents stand in a prompt from token `first` on, each after the one before it.

    Returns:
        (start, stop) of each, ascending and apart: tokens equal to the document's first ones, all of them but
        for a few at its end at most. None: it is too short, or found nowhere.
    """
    raw, spans = tokens_of(prompt), list[tuple[int, int] | None]()
    whole = raw.tobytes()
    for ids in documents:
        sure = len(ids) - min(_LOOSE_END, len(ids) // 2)
        start = _index(whole, ids[:sure].tobytes(), first) if len(ids) >= LEAST_TOKENS else -1
        if start >= 0:
            first = start + _common(raw[start : start + len(ids)], ids)
        spans.append((start, first) if start >= 0 else None)
    return spans


def _common(*sequences: Iterable[int]) -> int:
    """How many tokens all of these have in common, from the first on."""
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in same)


def _index(whole: bytes, part: bytes, first: int) -> int:
    """The token of `whole`, from `first` on, at which `part` begins; -1: it is not there."""
    at = whole.find(part, first * _TOKEN_BYTES)
    while at > 0 and at % _TOKEN_BYTES:
        at = whole.find(part, at + 1)
    return at // _TOKEN_BYTES
