"""Messages that docs/serve/troubleshooting.md quotes are those of kvkit's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from repository import ROOT

PAGE = ROOT / "docs/serve/troubleshooting.md"
FOREIGN = {
    "Unsupported connector type: KVKitConnector": "vLLM",
    "Available memory on node 0": "vLLM",
    "died unexpectedly": "vLLM",
    "cancelled": "vLLM, of a future",
    "error": "vLLM, a reason to finish",
    "operator torchvision::nms does not exist": "torchvision",
}
"""What is quoted of others, and of whom."""


def quoted() -> list[str]:
    """The quotations of messages: code in the first cell of a row, or at the start of an item of a list."""
    text = PAGE.read_text().partition("\n## ")[2].partition("\n## Next")[0]
    cells = re.findall(r"^\| (.*?) \| ", text, re.MULTILINE)
    items = re.findall(r"^- (`.*?`)", text, re.MULTILINE)
    return [span for cell in (*cells, *items) for span in re.findall(r"`(.*?)`", cell)]


@cache
def strings() -> tuple[str, ...]:
    """All strings of kvkit but docstrings, an ellipsis for each value that is put into them."""

    def found() -> Iterator[str]:
        folders = (ROOT / "kvkit", ROOT / "adapters", ROOT / "kernels")  # the last two are links in kvkit
        for path in (path for folder in folders for path in folder.rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values]
                    yield "".join(parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[\d.]*[a-z]", "…", node.value)

    return tuple(found())


def is_said(message: str) -> bool:
    """Whether a string of kvkit holds the message; its ellipses stand for values."""
    pieces = map(re.escape, filter(None, (piece.strip() for piece in message.split("…"))))
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    return any(pattern.search(string) for string in strings())


@pytest.mark.parametrize("message", quoted())
def test_a_message_is_in_the_code(message: str) -> None:
    assert is_said(message) or message in FOREIGN, message


def test_what_is_quoted_of_others_is_quoted() -> None:
    assert set(FOREIGN) <= set(quoted())
    assert not any(map(is_said, set(FOREIGN) - {"cancelled", "error"}))


@pytest.mark.parametrize(
    "message", ["tier … failed, and is empty", "close: lost …, and not saved", "the secret differs"]
)
def test_a_message_that_nobody_says_is_found(message: str) -> None:
    assert len(quoted()) > 30
    assert not is_said(message)
