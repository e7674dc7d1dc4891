"""Tasks from files of JSON lines, in the formats of LongBench and 2WikiMultihopQA."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS, Encode, Sample, with_question

PASSAGE = re.compile(r"(?=^Passage \d+:\n)", re.MULTILINE)
"""Start of a document in the multi-document questions of LongBench."""


def read_samples(path: Path, encode: Encode, count: int, tokens: int) -> list[Sample]:
    """Read up to `count` samples of a file, one per line:

        LongBench          {"input": question, "context": text, "answers": [answer, ...], ...}
        2WikiMultihopQA    {"question": question, "context": [[title, [sentence, ...]], ...], "answer": text}

    Documents are the passages; a text without passages is split into pieces of `DOCUMENT_TOKENS`. Each
    document is cut to an equal share of `tokens` tokens. The first of several answers counts.

    Raises:
        ValueError: the file has no samples, or a line has neither format; the message names the line.
        OSError: the file cannot be read.
    """
    samples = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(islice(lines, count), 1):
            try:
                samples.append(_sample_of(json.loads(line), encode, tokens))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                expected = "want a sample of LongBench or 2WikiMultihopQA"
                raise ValueError(f"{path}, line {number}: {expected}: {error!r}") from error
    if not samples:
        raise ValueError(f"{path}: want samples, a line of JSON each")
    return samples


def _sample_of(entry: Mapping[str, Any], encode: Encode, tokens: int) -> Sample:
    if "input" in entry:
        question, answer, text = entry["input"], entry["answers"][0], entry["context"]
        passages = [encode(passage) for passage in PASSAGE.split(text) if passage]
        if len(passages) == 1:
            ids = passages[0]
            passages = [ids[start : start + DOCUMENT_TOKENS] for start in range(0, len(ids), DOCUMENT_TOKENS)]
    else:
        question, answer = entry["question"], entry["answer"]
        passages = [encode(f"{title}\n{' '.join(lines)}\n\n") for title, lines in entry["context"]]
    document_tokens = max(1, tokens // len(passages))
    document_ids = [np.array(passage[:document_tokens], np.int32) for passage in passages]
    return with_question(document_ids, encode, f"\n\nQuestion: {question}\nAnswer:", f" {answer}")
