"""Tasks that continue or repeat the text of the documents.

contiguous   running text cut into documents; each continues the one before
documents    different texts, then a request to continue one of them
retrieval    texts with sentences "The access code for NAME is | 48217." cut at the end of a document,
             then a request to repeat the codes
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from numpy.random import Generator

from kvkit.lab.quality.tasks.sample import (
    CONTINUATION_TOKENS,
    DOCUMENT_TOKENS,
    Encode,
    Sample,
    Texts,
    from_documents,
)
from kvkit.lab.serve.workloads import NAMES

QUESTION_TOKENS = 32
"""Tokens of `contiguous` between the last document and the continuation."""


def contiguous(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Continue running text, cut into documents.

    Raises:
        ValueError: the text is shorter than a prompt.
    """
    stream = np.array([token for _, ids in texts for token in ids], np.int32)
    prompt = documents * DOCUMENT_TOKENS + QUESTION_TOKENS
    spare_tokens = len(stream) - prompt - CONTINUATION_TOKENS
    if spare_tokens < 0:
        raise ValueError(f"the text has {len(stream)} tokens, a prompt of {prompt} is too long")
    start = int(spare_tokens * at)
    text = stream[start : start + prompt + CONTINUATION_TOKENS]
    cuts = np.arange(documents + 1) * DOCUMENT_TOKENS
    return from_documents([text[a:b] for a, b in itertools.pairwise(cuts)], text[cuts[-1] :], 0)


def documents(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Continue one of several different texts."""
    long = [(title, ids) for title, ids in texts if len(ids) >= DOCUMENT_TOKENS + CONTINUATION_TOKENS]
    chosen = [long[j] for j in rng.choice(len(long), documents, replace=len(long) < documents)]
    title, continued_ids = chosen[int(rng.integers(documents))]
    document_ids, end = [], 0
    for name, ids in chosen:
        head = encode(f"\n\n# {name}\n\n")
        keep = DOCUMENT_TOKENS - len(head)
        document_ids.append(np.array([*head, *ids[:keep]], np.int32))
        if name == title:
            end = keep
    question = encode(f"\n\n# {title}, continued from where the text above ends\n\n")
    # the question ends with a few words to continue
    continuation = [*continued_ids[end - 8 : end], *continued_ids[end : end + CONTINUATION_TOKENS]]
    return from_documents(document_ids, np.array([*question, *continuation], np.int32), 0)


def retrieval(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Repeat access codes, each of which continues a sentence at the end of the previous document."""
    stream = [token for _, ids in texts for token in ids]
    names = [NAMES[j % len(NAMES)] for j in rng.permutation(max(documents - 1, len(NAMES)))[: documents - 1]]
    codes = [int(code) for code in rng.integers(10_000, 100_000, documents - 1)]
    start = int(rng.integers(len(stream) - documents * DOCUMENT_TOKENS))
    document_ids = []
    for d in range(documents):
        head = encode(f" {codes[d - 1]}.\n") if d else []
        tail = encode(f"\nThe access code for {names[d]} is") if d < documents - 1 else []
        keep = DOCUMENT_TOKENS - len(head) - len(tail)
        document_ids.append(np.array([*head, *stream[start : start + keep], *tail], np.int32))
        start += keep
    # a name that repeats in a long prompt would have two codes
    unique = [d for d in range(documents - 1) if names.count(names[d]) == 1] or [0]
    order = [unique[j] for j in rng.permutation(len(unique))]
    statements = " ".join(f"The access code for {names[d]} is {codes[d]}." for d in order)
    lead = f"The access code for {names[order[0]]} is"
    question = encode(f"\n\nRepeat the access codes that the text above tells.\n{lead}")
    answer = encode(f" {codes[order[0]]}")
    rest = encode(f".{statements[len(lead) + 1 + len(str(codes[order[0]])) + 1 :]}\n" + " The end." * 16)
    continuation = [*answer, *rest][:CONTINUATION_TOKENS]
    return from_documents(document_ids, np.array([*question, *continuation], np.int32), len(answer))
