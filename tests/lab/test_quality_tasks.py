"""Answers of quality tasks follow from their prompts, and users' own files are read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkit.lab.quality.statistics import f1, paired_p
from kvkit.lab.quality.tasks import python
from kvkit.lab.quality.tasks.registry import SETS, TASKS, samples
from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS

MADE = [kind for kind in TASKS if kind not in SETS]


def encode(text: str) -> list[int]:
    """A token per byte."""
    return list(text.encode())


def decode(tokens: Any) -> str:
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def numbers(told: str, question: str) -> str:
    whose = re.search(r"numbers? of (.*?)(?: is|, in order)", question)[1].split(" and ")
    return ", ".join(n for who in whose for n in re.findall(rf"number of {who} is (\d+)\.", told))


def tracking(told: str, question: str) -> str:
    given = {of: name for name, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", told)}
    chain = [re.search(r"value (\d+)", question)[1]]
    while chain[-1] in given:
        chain.append(given[chain[-1]])
    return ", ".join(f"VAR {name}" for name in chain[2:])


def words(told: str, question: str) -> str:
    return ", ".join(sorted(word for word, _ in Counter(told.split()[1:-1]).most_common(3)))


def home(told: str, question: str) -> str:
    who = re.search(r"does (?:the teacher of )?(.*?) live", question)[1]
    if "teacher" in question:
        who = re.search(rf"teacher of {who} is (.*?)\.", told)[1]
    return re.search(rf"{who} (?:is a \w+ and )?lives in (\w+)\.", told)[1]


def classified(told: str, question: str) -> str:
    name = re.search(r"Name: (\w+)", question)[1]
    (kind,) = (kind for kind, names in python._kinds().items() if name in names)
    assert name not in re.findall(r"Name: (\w+)", told)
    return kind


def completed(told: str, question: str) -> str:
    """The only thing between what was read and the end of the line, in one of the sources."""
    read = (told + question)[-2 * DOCUMENT_TOKENS :]
    (source,) = (text for text in map("".join, map(python._source, python.SOURCES)) if read in text * 2)
    return (source * 2).split(read, 1)[1].splitlines()[0].strip()


SOLVERS: dict[str, Callable[[str, str], str]] = {
    **dict.fromkeys(("needle", "needle keys", "needle values", "needle queries"), numbers),
    "tracking": tracking,
    "words": words,
    "qa": home,
    "hops": home,
    "classify": classified,
    "code": completed,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("tokens", [600, 2048])
def test_the_answer_follows_from_the_prompt(kind: str, tokens: int) -> None:
    for sample in samples(kind, encode, 4, tokens):
        end = sample.documents[-1][1]
        told, question = decode(sample.prompt[:end]), decode(sample.prompt[end:])
        assert question
        assert decode(sample.continuation[: sample.answer]) == " " + SOLVERS[kind](told, question)
        assert decode(sample.continuation[sample.answer :]) == "\n"


@pytest.mark.parametrize("kind", MADE)
def test_samples_are_always_the_same_and_differ(kind: str) -> None:
    one, again, other = (samples(kind, encode, 3, 600, seed) for seed in (0, 0, 1))
    assert [s.prompt.tolist() for s in one] == [s.prompt.tolist() for s in again]
    assert len({s.prompt.tobytes() for s in [*one, *other]}) == 6
    for sample in one:
        assert all(b - a == DOCUMENT_TOKENS for a, b in sample.documents)
        assert [a for a, _ in sample.documents] == [0, *(b for _, b in sample.documents[:-1])]


def test_facts_of_a_chain_lie_in_several_documents() -> None:
    (sample,) = samples("tracking", encode, 1, 4096)
    holding = [re.search(r"^VAR", decode(sample.prompt[a:b]), re.M) for a, b in sample.documents]
    assert sum(map(bool, holding)) == 8


LONGBENCH = {
    "input": "Who?",
    "context": "Passage 1:\nAda wrote.\nPassage 2:\nBob read.\n",
    "answers": ["Ada", "A."],
}
WIKI = {"question": "Who?", "context": [["Ada", ["She", "wrote."]], ["Bob", ["He read."]]], "answer": "Ada"}


def test_files_of_users_are_read(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, [LONGBENCH, WIKI, {**LONGBENCH, "context": "x" * 600}])))
    first, second, plain = samples(str(path), encode, 9, 4096)
    assert [decode(first.prompt[a:b]) for a, b in first.documents] == [
        "Passage 1:\nAda wrote.\n",
        "Passage 2:\nBob read.\n",
    ]
    assert [decode(second.prompt[a:b]) for a, b in second.documents] == [
        "Ada\nShe wrote.\n\n",
        "Bob\nHe read.\n\n",
    ]
    assert [b - a for a, b in plain.documents] == [256, 256, 88]
    for sample in (first, second):
        assert decode(sample.prompt[sample.documents[-1][1] :]) == "\n\nQuestion: Who?\nAnswer:"
        assert decode(sample.continuation) == " Ada\n"
    (short,) = samples(str(path), encode, 1, 20)
    assert [decode(short.prompt[a:b]) for a, b in short.documents] == ["Passage 1:", "Passage 2:"]


def test_lines_of_a_file_end_at_newlines_alone(tmp_path: Path) -> None:
    """What stands unescaped within a text ends no line, and a byte order mark is none of it."""
    path = tmp_path / "some.jsonl"
    sample = {**WIKI, "context": [["Ada", ["She\u2028 \x85wrote."]]]}
    path.write_text(f"{json.dumps(sample, ensure_ascii=False)}\n" * 2, encoding="utf-8-sig")
    one, same = samples(str(path), encode, 9, 4096)
    assert one.prompt.tolist() == same.prompt.tolist()


@pytest.mark.parametrize("line", ["", "no JSON", '{"input": "Who?"}', '{"question": "Who?", "context": [1]}'])
def test_other_files_are_refused_by_name(line: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"some\.jsonl"):
        samples(str(path), encode, 1, 600)


def test_f1_of_known_answers() -> None:
    assert f1(["a", "b", "c"], ["a", "b", "c"]) == 1
    assert f1(["a", "a", "b"], ["a", "c", "d"]) == pytest.approx(1 / 3)  # precision 1/3, recall 1/3
    assert f1(["a", "b"], ["a", "b", "c", "d"]) == pytest.approx(2 / 3)  # 1, 1/2
    assert f1(["a"], ["b"]) == f1([], ["b"]) == 0


def test_a_paired_test_of_known_cases() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 10, 40)  # what both have drops out
    assert paired_p(noise, noise + 1) < 0.01
    assert paired_p(noise, noise) == 1
    few = paired_p(np.array([1.0, 1.0, 1.0]), np.zeros(3))
    assert few == pytest.approx(0.25, abs=0.05)  # 2 of 8 ways of the signs
    by_chance = [paired_p(rng.normal(0, 1, 20), rng.normal(0, 1, 20), seed) for seed in range(200)]
    assert 0.01 < np.mean(np.array(by_chance) < 0.05) < 0.12
