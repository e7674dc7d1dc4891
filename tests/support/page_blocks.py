"""The fenced blocks of README and docs, as tests take them from the pages.

What a page shows is run as it stands: a test that asks `on_page` for a command or a program, or has
`run_page` run all of a page's Python, counts as running it. `EXCUSE` on the page is for what no test can run.
A `text` block right after a command is what it prints: `check_printed` compares the two.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repository import ROOT

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
RUNNABLE = ("sh", "bash", "console", "python")
DATA = ("toml", "yaml", "json", "text")
EXCUSE = "<!-- not run: "
"""The beginning of a comment after a block that no test runs; then comes why."""


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences.

    Attributes:
        language: empty where the page gives none.
        after: the paragraph that follows it.
        expected: the `text` block that follows it with at most a paragraph between; else empty.
    """

    page: str
    language: str
    text: str
    after: str
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page, in order; of all languages where none is named."""
    text = (ROOT / page).read_text()
    found = []
    for fenced in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        rest = text[fenced.end() :].strip()
        after = rest.partition("\n\n")[0]
        printed = re.match(r"(?:(?!```)[^\n]+\n)*\n?```text\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
        found.append(Block(page, fenced[1], fenced[2], after, printed[1] if printed else ""))
    return [block for block in found if not languages or block.language in languages]


def on_page(page: str, start: str) -> str:
    """The text of the one block of a page that begins with `start`."""
    (block,) = (block for block in blocks(page) if block.text.startswith(start))
    return block.text


def check_printed(page: str, start: str, printed: str) -> None:
    """Compare what a command printed with what the page shows after its block, which begins with `start`.

    Lines of the page must be among the printed ones, in order. Numbers and paths match any of their kind,
    an ellipsis matches anything, and white space any white space.

    Raises:
        AssertionError: the page shows nothing, or a line that was not printed.
    """
    (block,) = (block for block in blocks(page) if block.text.startswith(start))
    assert block.expected, f"{block}: no output is shown"
    lines = iter(printed.splitlines())
    for line in filter(str.strip, block.expected.splitlines()):
        assert any(re.fullmatch(_shape(line), other.strip()) for other in lines), f"{line!r} not in {printed}"


def _shape(line: str) -> str:
    """A pattern for a line as a page shows it."""
    shape = re.escape(" ".join(line.split())).replace("…", ".*").replace(r"\ ", r"\s+")
    shape = re.sub(r"\d+(?:\\\.\d+)?(?:[\\,]+\d{3})*", lambda _: r"\d[\d.,]*", shape)
    return re.sub(r"(?:/tmp|/home)[\w/.-]*", lambda _: r"/[\w/.-]+", shape)


def run_page(page: str, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a page's Python, one block after the other; returns the names that it defined.

    Args:
        changes: what is replaced in it, such as a port.

    Raises:
        AssertionError: it prints something else than its comments promise.
    """
    names: dict[str, Any] = {}
    examples = blocks(page, "python")
    assert examples
    for block in examples:
        code = changed(block.text, changes)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        comments = re.findall(r"print\(.*\)  # (.*)", code)
        promised = [line for comment in comments for line in _lines(comment)]
        assert printed.getvalue().splitlines() == promised, code
    return names


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Of a shell at home in `folder`: its state is kept there, models are where they are."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "KVKIT_"))}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),  # a program must find the tree that is tested
        "HOME": str(folder),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        "COLUMNS": "80",
        **variables,
    }


def run_shell(
    text: str, folder: Path, changes: Mapping[str, str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a page's command lines in `folder`; the first that fails ends them.

    Args:
        changes: what is replaced in them: models, addresses, sizes.
        variables: of the environment, besides.

    Raises:
        AssertionError: a command failed, or something that should be replaced is not there.
    """
    done = subprocess.run(
        ["bash", "-euc", changed(text, changes)],
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def changed(text: str, changes: Mapping[str, str] | None) -> str:
    """`text` with each of `changes` made.

    Raises:
        AssertionError: there is nothing to change.
    """
    for old, new in (changes or {}).items():
        assert old in text, f"{old!r} is not in {text!r}"
        text = text.replace(old, new)
    return text


def words_of(command: str) -> list[str]:
    """The words of a command; lines that a backslash joins are one."""
    return shlex.split(command.replace("\\\n", " "))


def _lines(comment: str) -> list[str]:
    """What a comment says is printed: several lines have commas between them."""
    return [comment] if "{" in comment else comment.split(", ")
