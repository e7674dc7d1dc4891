"""Tables as specifications: which keys of a result become which cells, and how they are written.

A cell is a format string: `{ttft_s[p50]:.3f} s`. In its braces may be, besides a key and keys inside it:

    {failed plus error}, {cold over warm:.1f}   a sum, a quotient
    {ratio_min or min:.2f}                      the first of these that is there
    {gap_s|median|*1e3:.0f}                     what FILTERS and arithmetic (*N, /N, >>N, 1/) make of it
    {puts_per_s?none:,.0f}                      a cell "none" where the key is missing
    {0}                                         the key, or number from 1, at the first * of the rows' path
                                                or all of the row, where rows are listed one by one
"""

from __future__ import annotations

import json
import operator
import re
import statistics
import string
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

MACHINE = "amd-epyc-2-cores"
"""Whose results are quoted."""
GPU = "nvidia-h100-80gb-hbm3"
"""And which GPU's."""
BENCHMARKS = "{machine}.json"
"""Results of `make bench`; as a document, entries by name."""

Rows = list[list[str]]
OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {"over": operator.truediv, "plus": operator.add}


def _nonzero(value: float) -> float:
    if not value:
        raise KeyError(value)
    return value


FILTERS: Mapping[str, Callable[[Any], Any]] = {
    "min": min,
    "median": statistics.median,
    "sum": lambda found: sum(found.values()),
    "yes": lambda found: "yes" if found else "no",
    "nonzero": _nonzero,
    "asked": lambda found: sum(number for what, number in found.items() if what.startswith("asked")),
    "release": lambda version: version.partition("+")[0],
    "escaped": lambda text: text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " "),
    "1/": lambda found: 1 / found,
}
ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul,
    "/": operator.truediv,
    ">>": operator.rshift,
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one result, or of all that a pattern names.

    Args:
        file: {machine} and {gpu} are `MACHINE` and `GPU`; of several files, the document is the union
            of their objects; with a *, it is a list of all documents.
        heads: of the columns, with " | " between them; format strings on the document.
        cells: of a row, likewise.
        rows: where rows are: a path into the document, / between keys, * for all of an object or a list; or
            for each row its path and its first cells, while `cells` has the others; or what makes rows of the
            document. A row whose path leads nowhere is left out.
        where: what a row has to hold.
    """

    file: str
    heads: str
    rows: str | Sequence[tuple[str, str]] | Callable[[Any], Iterable[Mapping[str, Any]]]
    cells: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)

    def made(self, document: Any) -> Rows:
        """The table, its heads first."""
        forms = self.cells.split(" | ")
        return [[cell(head, (), document) for head in self.heads.split(" | ")], *self._rows(document, forms)]

    def _rows(self, document: Any, forms: list[str]) -> Iterator[list[str]]:
        if callable(self.rows):
            yield from ([cell(form, (), row) for form in forms] for row in self.rows(document))
        elif isinstance(self.rows, str):
            for keys, row in walk(document, self.rows):
                if all(row.get(key) == value for key, value in self.where.items()):
                    yield [cell(form, keys, row) for form in forms]
        else:
            columns = len(self.heads.split(" | "))
            for path, first in self.rows:
                own = first.split(" | ") if first else []
                for _, row in walk(document, path):
                    rest = forms[len(forms) - (columns - len(own)) :]
                    yield [cell(form, (row,), row) for form in [*own, *rest]]


@dataclass(frozen=True, slots=True)
class Computed:
    """A table that a function makes of the document of a result; `file` as of `Table`."""

    file: str
    made: Callable[[Any], Rows]


def read(path: Path) -> dict[str, Table | Computed]:
    """The tables of a file as tables.toml is, by name."""
    text = path.read_text()
    for word, cells in tomllib.loads(text).pop("words").items():
        text = re.sub(rf"\| {word}$", lambda _, cells=cells: f"| {cells}", text, flags=re.MULTILINE)
    found = tomllib.loads(text)
    del found["words"]
    whole = {name: Computed(file, _function(place)) for name, (file, place) in found.pop("computed").items()}
    alike = found.pop("alike")
    each = {name: Table(**one | {"rows": _rows(one["rows"])}) for name, one in found.items()}
    return whole | each | {name: replace(each[other], file=file) for name, (other, file) in alike.items()}


def _rows(told: str) -> Any:
    """The rows of a `Table`: "module:function" below benchmarks, a path, or a line for each row."""
    if "\n" in told:
        return [(path, cells) for path, _, cells in (line.partition(" | ") for line in told.splitlines())]
    return _function(told) if ":" in told else told


def _function(place: str) -> Any:
    return resolve_name(f"benchmarks.{place}")


def load(results: Path, file: str) -> Any:
    """The document, or documents, of `file` in a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if "*" in file:
        return [json.loads(path.read_text()) for path in sorted(results.glob(file))]
    found: dict[str, Any] = {}
    for one in file.split():
        document = json.loads((results / one.format(machine=MACHINE, gpu=GPU)).read_text())
        found |= {each["name"]: each for each in document["results"]} if one == BENCHMARKS else document
    return found


def walk(found: Any, path: str, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what a path leads to, with its keys at each *; nothing if it leads nowhere."""
    step, _, rest = path.partition("/")
    inner = {str(n): one for n, one in enumerate(found, 1)} if isinstance(found, list) else found
    if not path:
        yield keys, found
    elif step == "*":
        for key, value in inner.items():
            yield from walk(value, rest, (*keys, key))
    elif step in inner:
        yield from walk(inner[step], rest, keys)


def cell(form: str, keys: Sequence[Any], row: Any) -> str:
    """One cell: `form` with the row's figures.

    Raises:
        KeyError: a key is missing, and nothing says what the cell is then.
    """
    try:
        return _CELLS.vformat(form, keys, row)
    except _MissingError as missing:
        return str(missing)


class _MissingError(Exception):
    """A figure is missing, and the message is the cell."""


class _Cells(string.Formatter):
    """Formats what is in braces as the first lines of this file have it."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name, question, otherwise = field_name.partition("?")
        expression, *filters = name.split("|")
        try:
            value = self._value(expression, args, kwargs)
            for each in filters:
                value = _filtered(value, each)
        except KeyError as error:
            if question:
                raise _MissingError(otherwise) from error
            raise
        return value, None

    def _value(self, expression: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if match := re.fullmatch(r"(.+) (over|plus) (.+)", expression):
            first, second = (self._value(part, args, kwargs) for part in (match[1], match[3]))
            return OPERATORS[match[2]](first, second)
        first_name, _, others = expression.partition(" or ")
        try:
            return super().get_field(first_name, args, kwargs)[0]
        except KeyError:
            if not others:
                raise
            return self._value(others, args, kwargs)


def _filtered(value: Any, each: str) -> Any:
    if each in FILTERS:
        return FILTERS[each](value)
    match = re.fullmatch(r"(\*|/|>>)(.+)", each)
    assert match, f"{each} is no filter"
    number = float(match[2]) if match[1] != ">>" else int(match[2])
    return ARITHMETIC[match[1]](value, number)


_CELLS = _Cells()
