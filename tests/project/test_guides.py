"""Guides have one shape: for whom, why, what is needed, a command, what it prints, where next."""

from __future__ import annotations

import re
from pathlib import Path

from page_blocks import PAGES, blocks, check_printed
from repository import ROOT

GUIDES = [page for page in PAGES if page.startswith(("docs/serve/", "docs/research/"))]
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "benchmarks/gpu/README.md")]
WORDS_PER_GUIDE, ROWS_PER_TABLE, WORDS_IN_ALL = 1200, 10, 40_000
COLUMNS = 100
HEADER = re.compile(r"# .+\n\n- \*\*For:\*\* .+\n- \*\*Why:\*\* .+\n- \*\*You need:\*\* .+\n\n")


def prose(text: str) -> str:
    """A page without generated parts, code and comments."""
    text = re.sub(r"<!-- (?:table|reference): .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def words(path: Path) -> int:
    return len(prose(path.read_text()).split())


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)


def test_a_guide_says_for_whom_and_why_and_what_it_needs() -> None:
    assert [page for page in GUIDES if not HEADER.match((ROOT / page).read_text())] == []
    needs = {
        page: re.findall(r"^- \*\*You need:\*\* (.*)$", (ROOT / page).read_text(), re.M) for page in GUIDES
    }
    assert [
        page for page, found in needs.items() if not re.search(r"\d+ (?:minute|second)", "".join(found))
    ] == []


def test_a_guide_shows_what_a_command_prints() -> None:
    shown = {page for page in GUIDES for block in blocks(page, "sh", "python", "console") if block.expected}
    shown |= {
        page
        for page in GUIDES
        for block in blocks(page, "python")
        if re.search(r"print\(.*\)  # ", block.text)
    }
    assert sorted(set(GUIDES) - shown) == []


def test_a_guide_leads_on() -> None:
    ends = {page: (ROOT / page).read_text().rpartition("\n## Next\n") for page in GUIDES}
    assert [page for page, (_, found, last) in ends.items() if not found or "](" not in last] == []


def test_a_guide_is_short() -> None:
    long = {page: count for page in GUIDES if (count := words(ROOT / page)) > WORDS_PER_GUIDE}
    assert long == {}
    rows = {
        page: max((t.count("\n") - 2 for t in tables((ROOT / page).read_text())), default=0)
        for page in GUIDES
    }
    assert {page: count for page, count in rows.items() if count > ROWS_PER_TABLE} == {}


def test_all_pages_are_short() -> None:
    pages = [ROOT / page for page in PAGES] + OTHERS
    assert sum(map(words, pages)) <= WORDS_IN_ALL
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "docs/index.md").read_text().splitlines()) <= 30
    assert words(ROOT / "CONTRIBUTING.md") <= 900
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 16


def test_lines_of_tables_fit() -> None:
    """A page's words are not moved into its code blocks or into cells."""
    cells = {
        page: [
            cell for t in tables(prose((ROOT / page).read_text())) for cell in t.split("|") if len(cell) > 160
        ]
        for page in GUIDES
    }
    assert {page: found for page, found in cells.items() if found} == {}


def test_commands_fit_the_page() -> None:
    shown = [block for page in GUIDES for block in blocks(page, "sh", "console", "toml")]
    long = {str(block): line for block in shown for line in block.text.splitlines() if len(line) > COLUMNS}
    assert long == {}


def test_output_is_compared_by_its_shape(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\n\n```sh\nrun\n```\n\nIt prints\n\n```text\nhit 1,024 of 2.5 …\nin  /tmp/a\n```\n")
    check_printed(str(page), "run", "noise\nhit 7 of 12 tokens (so)\nin /elsewhere/b.c")
    for printed in ("hit 7 of 12 tokens", "in /tmp/a\nhit 7 of 12 x", "hit none of 12 x\nin /tmp/a"):
        try:
            check_printed(str(page), "run", printed)
        except AssertionError:
            continue
        raise AssertionError(printed)
