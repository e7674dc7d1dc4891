"""Tasks about Python: classify a name after examples, and complete a line of the standard library."""

from __future__ import annotations

import builtins
import keyword
import sys
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from numpy.random import Generator

from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS, Encode, Sample, Texts, cut, with_question

SOURCES = (
    "argparse",
    "ast",
    "datetime",
    "doctest",
    "inspect",
    "optparse",
    "pickle",
    "tarfile",
    "typing",
    "zipfile",
)
LEAST_WORDS = 4
"""Minimum words of the line that is completed."""


def classify(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for the kind of a name of Python, after examples of names and kinds."""
    kinds = _kinds()
    ids: list[int] = []
    seen: set[str] = set()

    def draw() -> tuple[str, str]:
        kind = str(rng.choice(list(kinds)))
        return str(rng.choice(kinds[kind])), kind

    while len(ids) < documents * DOCUMENT_TOKENS:
        name, kind = draw()
        seen.add(name)
        ids += encode(f"Name: {name}\nKind: {kind}\n\n")
    name, kind = next(drawn for drawn in iter(draw, None) if drawn[0] not in seen)
    return with_question(cut(ids, documents), encode, f"\n\nName: {name}\nKind:", f" {kind}")


def code(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    """Ask for the last word of a line that follows documents of a standard library source."""
    lines = _source(str(rng.choice(SOURCES)))
    ids: list[int] = []
    line_number = int(rng.integers(len(lines)))
    while len(ids) < documents * DOCUMENT_TOKENS:
        ids += encode(lines[line_number % len(lines)])
        line_number += 1
    lead = ""
    while len(words := lines[line_number % len(lines)].split()) < LEAST_WORDS:
        lead += lines[line_number % len(lines)]
        line_number += 1
    line = lines[line_number % len(lines)].rstrip()
    before = line.rindex(words[-1]) - 1  # up to the space before the last word
    ids = ids[-documents * DOCUMENT_TOKENS :]
    return with_question(cut(ids, documents), encode, lead + line[:before], line[before:])


@cache
def _source(module: str) -> list[str]:
    """Return the lines of a standard library module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8").splitlines(keepends=True)


@cache
def _kinds() -> dict[str, list[str]]:
    """Return names of Python by kind."""
    named = {name: value for name, value in vars(builtins).items() if not name.startswith("_")}
    classes = {name: value for name, value in named.items() if isinstance(value, type)}
    errors = [name for name, value in classes.items() if issubclass(value, BaseException)]
    functions = [name for name, value in named.items() if name.islower() and name not in classes]
    modules = [name for name in sys.stdlib_module_names if not name.startswith("_")]
    return {
        "error": sorted(errors),
        "type": sorted(classes.keys() - errors),
        "function": sorted(functions),
        "keyword": sorted(keyword.kwlist),
        "module": sorted(modules),
    }
