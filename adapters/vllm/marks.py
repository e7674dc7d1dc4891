"""Marks in the token ids of prompts and answers: around documents, and before a tool call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvkit.adapters.vllm.settings import WHERE as SETTINGS
from kvkit.format.keys import as_tokens
from kvkit.settings import ConfigError


def encoded(setting: str, texts: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[bytes, ...]:
    """Return the token ids of marks, as bytes of int32.

    Raises:
        ConfigError: a mark has no tokens.
    """
    ids = [as_tokens(list(encode(text))) for text in texts]
    if not all(map(len, ids)):
        raise ConfigError(f"{SETTINGS}.{setting} = {texts!r}: want texts that have tokens")
    return tuple(mark.tobytes() for mark in ids)


def holds(tokens: Sequence[int], marks: Sequence[bytes]) -> bool:
    """Return whether one of the marks is in `tokens`."""
    ids = as_tokens(tokens).tobytes()
    return any(find(ids, mark, 0) >= 0 for mark in marks)


def find(ids: bytes, mark: bytes, start: int) -> int:
    """Return the byte offset of `mark` in int32 ids, from byte `start` on; -1: not found."""
    while (start := ids.find(mark, start)) >= 0 and start % np.dtype(np.int32).itemsize:
        start += 1
    return start


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
        return cls(*encoded("blend.marks", texts, encode))

    def documents(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each document between marks; ignore a document without an end mark."""
        ids, position = as_tokens(prompt).tobytes(), 0
        while (start := find(ids, self.before, position)) >= 0:
            start += len(self.before)
            position = find(ids, self.after, start)
            if position < 0:
                return
            yield start // 4, position // 4
            position += len(self.after)
