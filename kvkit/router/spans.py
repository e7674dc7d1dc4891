"""Spans of documents in a prompt: pure functions over token ids.

A tokenizer merges characters across the edges of a document, so the document's first and last tokens depend
on the text around it. Its own tokens are those that do not depend on the text before it: the `common_end` of
the document tokenized behind several texts. If it directly follows a prefix, the tokens between the prefix
and its own tokens are its joint. KV is kept for prefix, joint and document in a row, whoever computed it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

TokenArray: TypeAlias = "array[int]"
_TOKEN_BYTES = array("i").itemsize
CONTEXTS = ("", "a", " ", "\n")
"""Texts to tokenize a document behind: each merges with another kind of character."""
MIN_TOKENS = 16
"""Minimum length of a document in tokens; shorter ones are not searched for."""
_UNSTABLE_TOKENS = 16
"""Tokens at a document's end (at most half of it) that may differ in a prompt: later text merges."""


def tokens_of(ids: Sequence[int]) -> TokenArray:
    """Return token ids, each below 2**31, as an array of C ints."""
    return array("i", ids)


def common_end(sequences: Sequence[Sequence[int]]) -> TokenArray:
    """Return the longest common end of the sequences."""
    count = _common_length(*(reversed(ids) for ids in sequences))
    return tokens_of(sequences[0][len(sequences[0]) - count :])


def common_start(sequences: Sequence[Sequence[int]]) -> TokenArray:
    """Return the longest common beginning of the sequences."""
    return tokens_of(sequences[0][: _common_length(*sequences)])


def find_spans(
    prompt: Sequence[int], documents: Sequence[TokenArray], first: int = 0
) -> list[tuple[int, int] | None]:
    """Find documents in a prompt from token `first` on, each after the one before it.

    Returns:
        (start, stop) of each document, ascending and without overlap: its tokens in the prompt, except a few
        at its end at most. None: the document is too short or not found.
    """
    prompt_tokens, spans = tokens_of(prompt), list[tuple[int, int] | None]()
    prompt_bytes = prompt_tokens.tobytes()
    for ids in documents:
        stable_count = len(ids) - min(_UNSTABLE_TOKENS, len(ids) // 2)
        start = _find(prompt_bytes, ids[:stable_count].tobytes(), first) if len(ids) >= MIN_TOKENS else -1
        if start >= 0:
            first = start + _common_length(prompt_tokens[start : start + len(ids)], ids)
        spans.append((start, first) if start >= 0 else None)
    return spans


def _common_length(*sequences: Iterable[int]) -> int:
    """Return the number of leading tokens that all sequences share."""
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in shared)


def _find(data: bytes, pattern: bytes, first: int) -> int:
    """Return the token index in `data`, from `first` on, at which `pattern` begins; -1: not found."""
    offset = data.find(pattern, first * _TOKEN_BYTES)
    while offset > 0 and offset % _TOKEN_BYTES:
        offset = data.find(pattern, offset + 1)
    return offset // _TOKEN_BYTES
