"""Standard workloads of KV caches, as requests generated from a seed.

Prompts are common English words, about one token each, so that every server accepts them and tokenizers
split them alike.

    document-qa           questions about long documents: one per document first, then more in random order
    document-permutation  the same documents before a question, in random orders
    chat                  conversations: each prompt is the conversation so far and a new message
    system-prompt         one long system prompt, many short questions
    rag                   a few of many documents, some more popular, in random order before a question
    random                prompts without a common prefix: the overhead of a cache without reuse
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
"""Vocabulary of the prompts."""

CONTROL = "random"
"""Workload without reuse."""
QUESTION_WORDS = 16
NAMES = ("Alma", "Boris", "Chloe", "Dario", "Edith", "Felix", "Greta", "Henry", "Irene", "Jonas")
"""Names in documents and questions about access codes."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Completion request; requests of a session are sent one after the other, each after the last answer."""

    session: int
    text: str  # the prompt, or the end of one
    again: bool  # whether a cache can help: an earlier request had the same prefix or documents
    max_tokens: int = 16  # maximum tokens of the answer
    arrival_s: float = 0.0  # earliest time to send it, in seconds after the start
    documents: tuple[tuple[int, int], ...] = ()  # reusable parts of `text`, characters [start, stop)
    answer: str | None = None  # prefix of an exact answer
    follows: bool = True  # whether the session's earlier prompts and answers precede `text`
    first_token: int | None = None  # token that the answer is made to begin with


def document_qa(seed: int, requests: int, words: int, questions: int = 4) -> list[CompletionRequest]:
    """Return `questions` of them about each document of `words` words: one per document, then the rest."""
    rng = _rng(seed, "document-qa")
    documents = [text_of(rng, words) for _ in range(-(-requests // questions))]
    first = list(range(len(documents)))
    later = [int(d) for d in rng.permutation(np.repeat(first, questions - 1))]
    order = (first + later)[:requests]
    return [
        CompletionRequest(i, f"{documents[d]}\n\n{_question(rng)}", again=i >= len(documents))
        for i, d in enumerate(order)
    ]


def document_permutation(seed: int, requests: int, words: int, documents: int = 4) -> list[CompletionRequest]:
    """Return questions after the same `documents` in random orders, `words` words in all."""
    rng = _rng(seed, "document-permutation")
    texts = [text_of(rng, max(1, words // documents)) for _ in range(documents)]
    completion_requests, seen = [], set[int]()
    for i in range(requests):
        order = [int(d) for d in rng.permutation(documents)]
        text = "\n\n".join([*(texts[d] for d in order), _question(rng)])
        completion_requests.append(CompletionRequest(i, text, again=order[0] in seen))
        seen.add(order[0])
    return completion_requests


def chat(seed: int, requests: int, words: int, turns: int = 4) -> list[CompletionRequest]:
    """Return interleaved conversations of `turns` turns, `words` words from the user in each conversation."""
    rng = _rng(seed, "chat")
    sessions = -(-requests // turns)
    messages = (f"\n\nUser: {text_of(rng, words // turns)}\n\nAssistant:" for _ in range(requests))
    return [CompletionRequest(i % sessions, text, again=i >= sessions) for i, text in enumerate(messages)]


def system_prompt(seed: int, requests: int, words: int) -> list[CompletionRequest]:
    """Return questions after the same system prompt of `words` words."""
    rng = _rng(seed, "system-prompt")
    shared = text_of(rng, words)
    return [CompletionRequest(i, f"{shared}\n\n{_question(rng)}", again=i > 0) for i in range(requests)]


def rag(seed: int, requests: int, words: int, drawn: int = 4) -> list[CompletionRequest]:
    """Return questions after `drawn` of many documents, `words` words in all, as from a search engine.

    Every document comes alone first, as when it is indexed. Popularity follows Zipf's law: rank r has weight
    1 / r. Each document states an access code; a question asks for one of them.
    """
    rng = _rng(seed, "rag")
    names = [*NAMES, *(" ".join(pair) for pair in permutations(NAMES, 2))]
    count = min(-(-requests // 4), len(names))
    drawn = min(drawn, count)
    codes = [str(code) for code in rng.integers(10_000, 100_000, count)]
    documents = [
        with_access_code(text_of(rng, max(1, words // drawn - 5)), names[d], codes[d]) for d in range(count)
    ]
    completion_requests = [
        CompletionRequest(d, text, False, documents=((0, len(text)),)) for d, text in enumerate(documents)
    ]
    popularity = 1 / np.arange(1, count + 1)
    for i in range(count, requests):
        chosen = rng.choice(count, drawn, replace=False, p=popularity / popularity.sum())
        order = [int(d) for d in rng.permutation(chosen)]
        target = order[int(rng.integers(drawn))]
        ends = accumulate((len(documents[d]) for d in order), initial=0)
        text = "".join([*(documents[d] for d in order), access_code_question(names[target])])
        spans = tuple(pairwise(ends))
        completion_requests.append(CompletionRequest(i, text, True, documents=spans, answer=codes[target]))
    return completion_requests


def with_access_code(text: str, name: str, code: str) -> str:
    """Return a document of `text` that states the access code of `name`."""
    words = text.split(" ")
    before, after = (" ".join(half) for half in (words[: len(words) // 2], words[len(words) // 2 :]))
    return f"{before} Access code of {name}: {code}. {after}\n\n"


def access_code_question(name: str) -> str:
    """Return a question for the access code of `name`; an exact answer begins with the code."""
    return f"Question: what is the access code of {name}? Access code of {name}:"


def random_prefill(seed: int, requests: int, words: int) -> list[CompletionRequest]:
    """Return prompts of `words` random words, without a common prefix."""
    rng = _rng(seed, CONTROL)
    return [CompletionRequest(i, text_of(rng, words), again=False) for i in range(requests)]


Workload: TypeAlias = Callable[[int, int, int], list[CompletionRequest]]
"""(seed, requests, words) -> requests in order of arrival; equal arguments give equal requests."""

WORKLOADS: dict[str, Workload] = {
    "document-qa": document_qa,
    "document-permutation": document_permutation,
    "chat": chat,
    "system-prompt": system_prompt,
    "rag": rag,
    CONTROL: random_prefill,
}


def arriving(requests: Sequence[CompletionRequest], per_second: float, seed: int) -> list[CompletionRequest]:
    """Return the requests with Poisson arrival times, `per_second` of them on average."""
    gaps = _rng(seed, "arrivals").exponential(1 / per_second, len(requests))
    times = np.cumsum(gaps) - gaps[:1]
    return [replace(request, arrival_s=float(time)) for request, time in zip(requests, times, strict=True)]


def _rng(seed: int, name: str) -> np.random.Generator:
    """Return a random generator for one workload, so that no two workloads share text."""
    return np.random.default_rng([seed, *name.encode()])


def text_of(rng: np.random.Generator, words: int) -> str:
    """Return `words` random words separated by spaces."""
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), words))


def _question(rng: np.random.Generator) -> str:
    return f"Question: {text_of(rng, QUESTION_WORDS)}? Answer:"
