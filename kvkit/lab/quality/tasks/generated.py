"""Tasks about generated facts hidden in running text, with known answers.

The kinds of RULER (https://arxiv.org/abs/2404.06654): needles (one key, one of many keys, many values of a
key, several keys), variable tracking, common words, QA over distractors. `hops` needs two facts, as
2WikiMultihopQA (https://arxiv.org/abs/2011.01060) does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from string import ascii_uppercase

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS, Encode, Sample, Texts, cut, with_question
from kvkit.lab.serve.workloads import NAMES

SURNAMES = ("Abel", "Berg", "Cole", "Dahl", "Eng", "Ford", "Gray", "Holt", "Ives", "Jung")
PEOPLE = [" ".join(name) for name in itertools.product(NAMES, SURNAMES)]
CITIES = ("Lisbon", "Vienna", "Oslo", "Cairo", "Lima", "Hanoi", "Dublin", "Quito", "Riga", "Accra")
TRADES = ("baker", "pilot", "nurse", "painter", "lawyer", "farmer", "singer", "tailor", "judge", "miner")
WORDS = (
    *("apple", "river", "candle", "window", "garden", "pencil", "bridge", "orange", "mirror", "basket"),
    *("forest", "button", "ladder", "pillow", "rocket", "saddle", "tunnel", "violin", "wallet", "anchor"),
    *("bottle", "carpet", "dragon", "engine", "feather", "guitar", "hammer", "island", "jacket", "kettle"),
)
VALUES, QUERIES, LINKS, COMMON = 3, 2, 3, 3
"""Values per key, keys per question, variables after the first one, common words."""


def needle(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for one person's number."""
    return _ask_numbers(texts, encode, documents, rng, (1, 1, 1))


def needle_keys(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for one person's number; every document has one person's number."""
    return _ask_numbers(texts, encode, documents, rng, (documents, 1, 1))


def needle_values(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for all numbers of one person, in order."""
    return _ask_numbers(texts, encode, documents, rng, (1, VALUES, 1))


def needle_queries(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for the numbers of several of many persons."""
    return _ask_numbers(texts, encode, documents, rng, (max(documents, QUERIES), 1, QUERIES))


def tracking(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask which variables have a given value, after a chain of assignments."""
    letters = "".join(rng.permutation(list(ascii_uppercase)))
    names = [letters[start : start + 3] for start in range(0, 3 * 2 * (LINKS + 1), 3)]
    chain, decoys = names[: LINKS + 1], names[LINKS + 1 :]
    value, decoy_value = (str(number) for number in _draw_codes(2, rng))
    pairs = zip(_chain(value, chain), _chain(decoy_value, decoys), strict=True)
    facts = [fact for pair in pairs for fact in pair]
    question = f"\n\nThe variables that have the value {value}, in order: VAR {chain[0]},"
    answer = ",".join(f" VAR {name}" for name in chain[1:])
    return with_question(_hide_facts(texts, encode, documents, rng, facts), encode, question, answer)


def words(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for the most common words of a long list."""
    order = [WORDS[j] for j in rng.permutation(len(WORDS))]
    common, rare = order[:COMMON], order[COMMON:]
    ids: list[int] = []
    while len(ids) < documents * DOCUMENT_TOKENS:
        batch = [*common * 2, *(rare[j] for j in rng.choice(len(rare), COMMON, replace=False))]
        ids += encode("".join(f" {batch[j]}" for j in rng.permutation(len(batch))))
    question = f"\n\nThe {COMMON} most common words in the list above, in alphabetical order:"
    return with_question(cut(ids, documents), encode, question, " " + ", ".join(sorted(common)))


def qa(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask in which city a person lives; other passages are about other persons."""
    people = _draw(PEOPLE, documents, rng)
    trades, cities = (rng.choice(some, documents) for some in (TRADES, CITIES))
    facts = [
        f"{person} is a {trade} and lives in {city}."
        for person, trade, city in zip(people, trades, cities, strict=True)
    ]
    index = int(rng.integers(documents))
    question = f"\n\nQuestion: In which city does {people[index]} live?\nAnswer: {people[index]} lives in"
    return with_question(
        _hide_facts(texts, encode, documents, rng, facts), encode, question, f" {cities[index]}"
    )


def hops(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask where a pupil's teacher lives; one fact names the teacher, another one the teacher's city."""
    pairs = max(2, documents // 2)
    people, cities = _draw(PEOPLE, 2 * pairs, rng), rng.choice(CITIES, pairs)
    pupils, teachers = people[:pairs], people[pairs:]
    facts = [f"The teacher of {pupil} is {teacher}." for pupil, teacher in zip(pupils, teachers, strict=True)]
    facts += [f"{teacher} lives in {city}." for teacher, city in zip(teachers, cities, strict=True)]
    facts = [facts[j] for j in rng.permutation(len(facts))]
    index = int(rng.integers(pairs))
    lead = f"The teacher of {pupils[index]} lives in"
    question = f"\n\nQuestion: In which city does the teacher of {pupils[index]} live?\nAnswer: {lead}"
    return with_question(
        _hide_facts(texts, encode, documents, rng, facts), encode, question, f" {cities[index]}"
    )


def _ask_numbers(
    texts: Texts, encode: Encode, documents: int, rng: Generator, counts: tuple[int, int, int]
) -> Sample:
    """Ask for numbers of persons; `counts`: persons, numbers per person, and persons asked for."""
    persons, each, queries = counts
    people, codes = _draw(PEOPLE, persons, rng), _draw_codes(persons * each, rng).reshape(persons, each)
    facts = [
        f"The magic number of {person} is {number}."
        for person, numbers in zip(people, codes, strict=True)
        for number in numbers
    ]
    chosen = rng.permutation(persons)[:queries]
    names = " and ".join(people[j] for j in chosen)
    is_or_are = "number of {} is" if each * queries == 1 else "numbers of {}, in order, are"
    question = f"\n\nThe magic {is_or_are.format(names)}"
    answer = " " + ", ".join(str(code) for code in codes[chosen].ravel())
    return with_question(_hide_facts(texts, encode, documents, rng, facts), encode, question, answer)


def _chain(value: str, names: Sequence[str]) -> list[str]:
    sources = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {source}." for source, name in zip(sources, names, strict=False)]


def _draw(items: Sequence[str], count: int, rng: Generator) -> list[str]:
    """Draw `count` items; they repeat only if there are fewer."""
    return [items[j % len(items)] for j in rng.permutation(max(count, len(items)))[:count]]


def _draw_codes(count: int, rng: Generator) -> NDArray[np.int64]:
    return 10_000 + rng.choice(90_000, count, replace=False)


def _hide_facts(
    texts: Texts, encode: Encode, documents: int, rng: Generator, facts: Sequence[str]
) -> list[NDArray[np.int32]]:
    """Return documents of running text with the facts in them, in order, each on a line of its own."""
    stream = [token for _, ids in texts for token in ids]
    start = int(rng.integers(max(1, len(stream) - documents * DOCUMENT_TOKENS)))
    fact_documents = rng.permutation(np.arange(max(len(facts), documents)) % documents)[: len(facts)]
    inserted_ids: list[list[int]] = [[] for _ in range(documents)]
    for document, fact in zip(np.sort(fact_documents), facts, strict=True):
        inserted_ids[document] += encode(f"\n{fact}\n")
    document_ids = []
    for inserted in inserted_ids:
        filler = [stream[(start + j) % len(stream)] for j in range(DOCUMENT_TOKENS - len(inserted))]
        before = int(rng.integers(len(filler) + 1))
        document_ids.append(np.array([*filler[:before], *inserted, *filler[before:]], np.int32))
        start += len(filler)
    return document_ids
