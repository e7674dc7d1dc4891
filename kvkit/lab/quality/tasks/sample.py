"""Samples of tasks, each a prompt of documents and a question; and their texts, Python's documentation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Encode = Callable[[str], Sequence[int]]
Texts = list[tuple[str, list[int]]]
"""Titles, and the token ids of their texts."""

DOCUMENT_TOKENS = 256
CONTINUATION_TOKENS = 32
SYSTEM_PROMPT = (
    "You are a careful assistant. Below are excerpts that were found for the user, one after another. "
    "Read all of them, then do what is asked at the end.\n\n"
)
"""The beginning of every measured prompt, as of a retrieval service."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Prompt of documents and a question, and the text that follows it."""

    prompt: NDArray[np.int32]  # [T]
    documents: tuple[tuple[int, int], ...]  # (start, stop) of each
    continuation: NDArray[np.int32]  # [C]
    answer: int = 0  # leading tokens of the continuation that are the exact answer; 0: there is none

    def behind(self, lead: NDArray[np.int32]) -> Sample:
        """Return the sample with `lead` before its prompt."""
        prompt, shift = np.concatenate([lead, self.prompt]), len(lead)
        return replace(
            self, prompt=prompt, documents=tuple((a + shift, b + shift) for a, b in self.documents)
        )


def corpus() -> list[tuple[str, str]]:
    """Return (title, text) of Python's reference topics, sorted by title."""
    from pydoc_data.topics import topics

    return [(title, text.strip()) for title, text in sorted(topics.items())]


def from_documents(documents: Sequence[NDArray[np.int32]], rest: NDArray[np.int32], answer: int) -> Sample:
    """Build a sample of documents, then `rest`: a question and `CONTINUATION_TOKENS` tokens."""
    prompt = np.concatenate([*documents, rest[:-CONTINUATION_TOKENS]])
    return Sample(prompt, _spans(documents), rest[-CONTINUATION_TOKENS:], answer)


def with_question(
    documents: Sequence[NDArray[np.int32]], encode: Encode, question: str, answer: str
) -> Sample:
    """Build a sample of documents and a question; the continuation is the answer and a newline."""
    prompt = np.concatenate([*documents, encode(question)]).astype(np.int32)
    answer_ids = encode(answer)
    continuation = np.array([*answer_ids, *encode("\n")], np.int32)
    return Sample(prompt, _spans(documents), continuation, len(answer_ids))


def _spans(documents: Sequence[NDArray[np.int32]]) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each document in a prompt that begins with them."""
    ends = np.cumsum([0, *(len(document) for document in documents)]).tolist()
    return tuple(itertools.pairwise(ends))


def cut(ids: Sequence[int], documents: int) -> list[NDArray[np.int32]]:
    """Split token ids into documents of `DOCUMENT_TOKENS` tokens; drops the rest."""
    return np.split(np.array(ids[: documents * DOCUMENT_TOKENS], np.int32), documents)
