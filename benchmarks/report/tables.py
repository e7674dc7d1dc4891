"""Write the tables of README.md and docs/ from results/, as tables.toml says: no figure is typed by hand.

python -m benchmarks.report.tables
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.folders import RESULTS, ROOT
from benchmarks.report.spec import Rows, load, read

PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "<!-- table:" in path.read_text()
)

TABLES = read(Path(__file__).with_suffix(".toml"))
"""By the name in a page's marker."""


def render(page: str, results: Path = RESULTS) -> str:
    """`page` with each table between its markers made anew.

    A table without its result, or without a row, is a sentence.

    Raises:
        KeyError: a marker names no table, or a result lacks a figure.
    """

    def fill(match: re.Match[str]) -> str:
        table = TABLES[match[2]]
        try:
            rows = table.made(load(results, table.file))
        except FileNotFoundError:
            rows = []
        return f"{match[1]}\n{_markdown(rows)}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def _markdown(rows: Rows) -> str:
    if len(rows) < 2:
        return "*Not measured yet.*"
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def main() -> None:
    """Bring every page up to date."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
