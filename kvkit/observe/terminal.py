"""Tables that commands print: no cell is cut, at any width of the terminal or through a pipe."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_ENDLESS = 100_000
"""Width of a line that is not wrapped, in characters: rich needs a limit."""


class FittedTable:
    """A table that is rendered whole, in the first shape that fits the width.

    The shapes are: unchanged, without lines, with rows and columns swapped, and row by row. Right-justified
    columns hold numbers, which never wrap; headings and other cells wrap between words. With `endless`, lines
    are as wide as the table, whatever the console's width.
    """

    def __init__(self, table: Table, endless: bool = False) -> None:
        self.table = table
        self.endless = endless

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the first shape that fits."""
        texts = [_texts(column, console) for column in self.table.columns]
        heads, *rows = map(list, zip(*texts, strict=True))
        width = _ENDLESS if self.endless else options.max_width
        swapped = [Column(), *(Column(justify="right") for _ in rows)]
        bare = copy.copy(self.table)
        bare.box, bare.padding = None, (0, 2, 0, 0)
        for style, columns, lines in (
            (self.table, self.table.columns, [heads, *rows]),
            (bare, self.table.columns, [heads, *rows]),
            (self.table, swapped, [list(line) for line in zip(heads, *rows, strict=True)]),
        ):
            fitted = _fitted(style, columns, lines, width, console)
            if fitted is not None:
                yield fitted
                return
        if self.table.title is not None:
            yield console.render_str(str(self.table.title), style="table.title")
        for row in rows:
            for head, cell in zip(heads, row, strict=True):
                name = " ".join(head.plain.split())
                yield Text.assemble(f"{name}: ", cell, overflow="fold", no_wrap=False)
            yield Text()


def show(table: Table, console: Console | None = None) -> None:
    """Print a table within the terminal's width or, without a terminal, at the table's own width.

    COLUMNS in the environment sets a width without a terminal, too.
    """
    console = console or Console()
    console.print(FittedTable(table, is_endless(console)), crop=False)


def is_endless(console: Console) -> bool:
    """Return whether lines have no width limit: there is no terminal, and COLUMNS is not set."""
    return not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit()


def print_text(text: str, console: Console | None = None) -> None:
    """Print a text unchanged: without markup, highlighting or added line breaks."""
    (console or Console()).print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(document: Any, indent: int | None = None) -> None:
    """Print a document as ASCII JSON; NaN and infinities, which JSON lacks, become null."""
    plain = json.loads(json.dumps(document), parse_constant=lambda name: None)
    print(json.dumps(plain, indent=indent))


def _texts(column: Column, console: Console) -> list[Text]:
    """Return the heading and the cells of a column; numbers are marked as not to be wrapped."""
    texts = [console.render_str(str(cell), highlight=False) for cell in (column.header, *column.cells)]
    for text in texts[1:]:
        text.no_wrap = column.justify == "right" or column.no_wrap
    return texts


def _fitted(
    table: Table, columns: Sequence[Column], lines: Sequence[Sequence[Text]], width: int, console: Console
) -> Table | None:
    """Build a table of `lines`, headings first, in the style of `table`; None if `width` is too small."""
    ample = console.options.update(width=_ENDLESS)
    slack = []
    result = copy.copy(table)
    result.columns, result.rows = [], []
    for column, texts in zip(columns, zip(*lines, strict=True), strict=True):
        sizes = [Measurement.get(console, ample, text) for text in texts]
        min_width = max(
            size.maximum if text.no_wrap else size.minimum for size, text in zip(sizes, texts, strict=True)
        )
        slack.append(max(size.maximum for size in sizes) - min_width)
        result.add_column(texts[0], header_style=column.header_style, justify=column.justify, width=min_width)
    spare = width - Measurement.get(console, ample, result).maximum
    if spare < 0:
        return None
    order = sorted(range(len(slack)), key=lambda index: slack[index])
    for position, index in enumerate(order):  # narrow columns leave some of their equal share to wide ones
        share = min(slack[index], spare // (len(order) - position))
        result.columns[index].width = (result.columns[index].width or 0) + share
        spare -= share
    for line in lines[1:]:
        result.add_row(*line)
    result.width = Measurement.get(console, ample, result).maximum  # else rich narrows it to the console
    return result
