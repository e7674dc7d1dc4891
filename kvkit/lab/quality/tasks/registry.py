"""Registry of tasks by name, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

from numpy.random import Generator, default_rng

from kvkit.lab.files import BenchError
from kvkit.lab.quality.tasks import continued, generated, python
from kvkit.lab.quality.tasks.files import read_samples
from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS, Encode, Sample, Texts, corpus

MakeSample = Callable[[Texts, Encode, int, Generator, Fraction], Sample]
SETS: Mapping[str, MakeSample] = {
    "contiguous": continued.contiguous,
    "documents": continued.documents,
    "retrieval": continued.retrieval,
}
"""Tasks of the gate by name: (texts, encode, documents, rng, at) -> sample.

`documents` is their number, `at` the position in the corpus, from 0 to 1."""
TASKS: Mapping[str, MakeSample] = {
    **SETS,
    "needle": generated.needle,
    "needle keys": generated.needle_keys,
    "needle values": generated.needle_values,
    "needle queries": generated.needle_queries,
    "tracking": generated.tracking,
    "words": generated.words,
    "qa": generated.qa,
    "hops": generated.hops,
    "classify": python.classify,
    "code": python.code,
}


def samples(kind: str, encode: Encode, count: int, tokens: int, seed: int = 0) -> list[Sample]:
    """Return `count` samples of a task with prompts of about `tokens` tokens; equal for equal arguments.

    Args:
        kind: one of `TASKS`, or a file `*.jsonl` (see `kvkit.lab.quality.tasks.files`), with perhaps fewer.
        encode: tokenizer without special tokens.

    Raises:
        ValueError: the task is unknown, or the text is too short for such prompts.
        OSError: the file cannot be read.
    """
    if kind.endswith(".jsonl"):
        return read_samples(Path(kind), encode, count, tokens)
    if kind not in TASKS:
        raise ValueError(f"kind={kind!r}: want one of {', '.join(TASKS)}, or a file .jsonl")
    texts = [(title, list(encode(text))) for title, text in corpus()]
    documents = max(2, tokens // DOCUMENT_TOKENS)
    make = TASKS[kind]
    return [make(texts, encode, documents, default_rng([seed, i]), Fraction(i, count)) for i in range(count)]


def parse_tasks(tasks: str) -> tuple[str, ...]:
    """Split names of tasks at semicolons.

    Raises:
        BenchError: a name is neither one of `TASKS` nor an existing file `*.jsonl`.
    """
    names = tuple(name.strip() for name in tasks.split(";") if name.strip())
    for name in names:
        if name not in TASKS and not (name.endswith(".jsonl") and Path(name).is_file()):
            raise BenchError(f"tasks: {name!r}, want some of {'; '.join(TASKS)}, or existing files .jsonl")
    return names
