"""The site has pages for public docstrings, and notebooks with their pictures."""

from __future__ import annotations

import ast
import json

import pytest

from docs import reference, site


@pytest.mark.parametrize("module", reference.API)
def test_a_modules_page_has_every_public_name_and_parameter(module: str) -> None:
    page = site.module_page(module)
    for node in reference.public(ast.parse(reference.source_of(module).read_text())):
        section = page.split(f"\n## `{node.name}`\n")[1].split("\n## ")[0]
        first = (ast.get_docstring(node) or "").split()[0].strip("`")
        assert first in section.replace("\\", "")
        calls = [node] if isinstance(node, ast.FunctionDef) else node.body
        for call in (c for c in calls if isinstance(c, ast.FunctionDef)):
            if call.name == "__init__" or (call.name[0] != "_" and ast.get_docstring(call)):
                names = [a.arg for a in (*call.args.posonlyargs, *call.args.args, *call.args.kwonlyargs)]
                assert all(name in section for name in names), call.name


def test_docstrings_become_markdown() -> None:
    text = """Move `a_b` of <name>.

        x = 1 < 2

    Args:
        size_s: how long,
            in seconds.
        *more: [not](a link).

    Raises:
        OSError: it is *gone*.
    """
    node = ast.parse(f'def f(size_s, *more): """{text}"""').body[0]
    assert isinstance(node, ast.FunctionDef)
    assert site.described(node) == "\n\n".join(
        [
            "Move `a_b` of \\<name>.",
            "    x = 1 < 2",
            "**Args**",
            "- `size_s`: how long, in seconds.\n- `*more`: \\[not\\](a link).",
            "**Raises**",
            "- `OSError`: it is \\*gone\\*.",
        ]
    )
    assert site.signature(node) == "def f(size_s, *more)"


@pytest.mark.parametrize("path", site.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_page_shows_its_cells_and_pictures(path: site.Path) -> None:
    page, pictures = site.notebook_page(path)
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert "".join(cell["source"]) in page
    assert page.count("![](") == len(pictures) == path.read_text().count('"image/png"')
    assert all(picture.startswith(b"\x89PNG") and name in page for name, picture in pictures.items())
    assert "](../docs/" not in page
    assert all(name in site.gallery() for name in (f"]({path.stem}.md)", *pictures))
