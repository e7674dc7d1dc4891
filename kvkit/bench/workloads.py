"""The field's workloads for KV caches, as requests from a seed.

Prompts are common English words, about one token each, so that any server takes them and any tokenizer
splits them alike.

    document-qa           questions on long documents: each is asked about once, then again, shuffled
    document-permutation  the same documents in front of a question, in other orders
    chat                  conversations: a turn's prompt is all that was said before, and more
    system-prompt         one long system prompt, many short questions
    rag                   a few of many documents, some more popular, in random orders in front of a question
    random                nothing in common: what a cache costs where it cannot help
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations
from typing import TypeAlias

import numpy as np

_LISTED = (
    "about above across after again air all almost along also always animal answer area around back ball "
    "base bear beauty bed been before began behind best better between bird black blue boat body book "
    "both box boy bring brought build busy call came car care carry center change check child circle city "
    "class clear close cold color come common complete could country course cover cross cry cut dark day "
    "decide deep differ direct does dog done door down draw drive dry during each early earth ease east "
    "eat end enough even ever every example eye face fact fall family far farm fast father feel feet few "
    "field figure fill final find fine fire first fish five fly follow food foot force form found four "
    "free friend front full game gave girl give gold good got govern great green ground group grow had "
    "half hand happen hard head hear heat"
)
WORDS = _LISTED.split()
"""The vocabulary."""

CONTROL = "random"
"""The workload without reuse."""
QUESTION_WORDS = 16
NAMES = ("Alma", "Boris", "Chloe", "Dario", "Edith", "Felix", "Greta", "Henry", "Irene", "Jonas")
"""Whose access codes documents tell and questions ask for."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request. Those of one session come one after the other, each when the last one was answered."""

    session: int
    text: str  # the prompt, or the end of one
    again: bool  # whether an earlier request began as this one does, so that a cache can help
    max_tokens: int = 16  # of the answer
    arrival_s: float = 0.0  # the earliest time that it is sent, after the first one
    documents: tuple[tuple[int, int], ...] = ()  # of `text`, characters [start, stop) that can be reused
    answer: str | None = None  # what an exact answer begins with
    follows: bool = True  # whether its session's earlier prompts and answers stand before `text`


def document_qa(seed: int, requests: int, words: int, asked: int = 4) -> list[CompletionRequest]:
    """Documents of `words` words, `asked` questions on each. First every document once, then the others."""
    rng = _rng(seed, "document-qa")
    documents = [text_of(rng, words) for _ in range(-(-requests // asked))]
    first = list(range(len(documents)))
    later = [int(d) for d in rng.permutation(np.repeat(first, asked - 1))]
    order = (first + later)[:requests]
    return [
        CompletionRequest(i, f"{documents[d]}\n\n{_question(rng)}", again=i >= len(documents))
        for i, d in enumerate(order)
    ]


def document_permutation(seed: int, requests: int, words: int, documents: int = 4) -> list[CompletionRequest]:
    """The same `documents`, `words` words in all, in random orders. Prefixes are common as far as these."""
    rng = _rng(seed, "document-permutation")
    texts = [text_of(rng, max(1, words // documents)) for _ in range(documents)]
    made, seen = [], set[int]()
    for i in range(requests):
        order = [int(d) for d in rng.permutation(documents)]
        text = "\n\n".join([*(texts[d] for d in order), _question(rng)])
        made.append(CompletionRequest(i, text, again=order[0] in seen))
        seen.add(order[0])
    return made


def chat(seed: int, requests: int, words: int, turns: int = 4) -> list[CompletionRequest]:
    """Conversations of `turns` turns that take turns, `words` words from the user in each."""
    rng = _rng(seed, "chat")
    sessions = -(-requests // turns)
    said = (f"\n\nUser: {text_of(rng, words // turns)}\n\nAssistant:" for _ in range(requests))
    return [CompletionRequest(i % sessions, text, again=i >= sessions) for i, text in enumerate(said)]


def system_prompt(seed: int, requests: int, words: int) -> list[CompletionRequest]:
    """A system prompt of `words` words in front of every question."""
    rng = _rng(seed, "system-prompt")
    shared = text_of(rng, words)
    return [CompletionRequest(i, f"{shared}\n\n{_question(rng)}", again=i > 0) for i in range(requests)]


def rag(seed: int, requests: int, words: int, drawn: int = 4) -> list[CompletionRequest]:
    """Questions on `drawn` of many documents, `words` words in all, as a search engine might find them.

    First every document once, alone, as when it is indexed. Their popularity goes by Zipf's law: the one of
    rank r is drawn 1 / r times as often as the first. Each tells an access code, one of which is asked for.
    """
    rng = _rng(seed, "rag")
    names = [*NAMES, *(" ".join(pair) for pair in permutations(NAMES, 2))]
    count = min(-(-requests // 4), len(names))
    drawn = min(drawn, count)
    codes = [str(code) for code in rng.integers(10_000, 100_000, count)]
    documents = [told(text_of(rng, max(1, words // drawn - 5)), names[d], codes[d]) for d in range(count)]
    made = [
        CompletionRequest(d, text, False, documents=((0, len(text)),)) for d, text in enumerate(documents)
    ]
    popularity = 1 / np.arange(1, count + 1)
    for i in range(count, requests):
        found = rng.choice(count, drawn, replace=False, p=popularity / popularity.sum())
        order = [int(d) for d in rng.permutation(found)]
        asked = order[int(rng.integers(drawn))]
        ends = accumulate((len(documents[d]) for d in order), initial=0)
        text = "".join([*(documents[d] for d in order), asking(names[asked])])
        spans = tuple(pairwise(ends))
        made.append(CompletionRequest(i, text, True, documents=spans, answer=codes[asked]))
    return made


def told(text: str, name: str, code: str) -> str:
    """A document of `text` that tells the access code of `name`."""
    words = text.split(" ")
    before, after = (" ".join(part) for part in (words[: len(words) // 2], words[len(words) // 2 :]))
    return f"{before} Access code of {name}: {code}. {after}\n\n"


def asking(name: str) -> str:
    """A question whose exact answer begins with the access code of `name`."""
    return f"Question: what is the access code of {name}? Access code of {name}:"


def random_prefill(seed: int, requests: int, words: int) -> list[CompletionRequest]:
    """Prompts of `words` words that have nothing in common."""
    rng = _rng(seed, CONTROL)
    return [CompletionRequest(i, text_of(rng, words), again=False) for i in range(requests)]


Workload: TypeAlias = Callable[[int, int, int], list[CompletionRequest]]
"""(seed, requests, words) -> requests in the order of their arrival. Equal arguments give equal requests."""

WORKLOADS: dict[str, Workload] = {
    "document-qa": document_qa,
    "document-permutation": document_permutation,
    "chat": chat,
    "system-prompt": system_prompt,
    "rag": rag,
    CONTROL: random_prefill,
}


def arriving(requests: Sequence[CompletionRequest], per_second: float, seed: int) -> list[CompletionRequest]:
    """The same requests, `per_second` of them on average, at times of a Poisson process."""
    gaps = _rng(seed, "arrivals").exponential(1 / per_second, len(requests))
    times = np.cumsum(gaps) - gaps[:1]
    return [replace(request, arrival_s=float(time)) for request, time in zip(requests, times, strict=True)]


def _rng(seed: int, name: str) -> np.random.Generator:
    """Of its own for each workload, so that two of them share no text."""
    return np.random.default_rng([seed, *name.encode()])


def text_of(rng: np.random.Generator, words: int) -> str:
    """So many words, one space between two."""
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), words))


def _question(rng: np.random.Generator) -> str:
    return f"Question: {text_of(rng, QUESTION_WORDS)}? Answer:"
