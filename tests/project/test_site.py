"""The site has pages for public docstrings, and notebooks with their pictures."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

from docs import reference, site


def test_a_modules_page_has_every_public_name_and_parameter() -> None:
    assert [
        lacking for module in reference.API for lacking in lacking_on(module, site.module_page(module))
    ] == []


def lacking_on(module: str, page: str) -> Iterator[str]:
    """Public classes, functions and parameters of a module that are not on its page."""
    for node in reference.public(ast.parse(reference.source_of(module).read_text())):
        name = f"{module}.{node.name}"
        section = page.partition(f"\n## `{node.name}`\n")[2].split("\n## ")[0]
        first = (ast.get_docstring(node) or "").split()[0].strip("`")
        if first not in section.replace("\\", ""):
            yield name
        calls = [node] if isinstance(node, ast.FunctionDef) else node.body
        for call in (c for c in calls if isinstance(c, ast.FunctionDef)):
            if call.name == "__init__" or (call.name[0] != "_" and ast.get_docstring(call)):
                given = (*call.args.posonlyargs, *call.args.args, *call.args.kwonlyargs)
                yield from (f"{name}.{call.name}: {a.arg}" for a in given if a.arg not in section)


def test_what_a_modules_page_lacks_is_found() -> None:
    page = site.module_page("format.keys")
    (last, *_) = reversed(page.split("\n## "))
    assert [*lacking_on("format.keys", page.removesuffix(f"\n## {last}"))]


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


def test_a_notebooks_page_shows_its_cells_and_pictures() -> None:
    gallery = site.gallery()
    for path in site.NOTEBOOKS:
        page, pictures = site.notebook_page(path)
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                assert "".join(cell["source"]) in page, path
        assert page.count("![](") == len(pictures) == path.read_text().count('"image/png"'), path
        assert all(picture.startswith(b"\x89PNG") and name in page for name, picture in pictures.items()), (
            path
        )
        assert "](../docs/" not in page, path
        assert all(name in gallery for name in (f"]({path.stem}.md)", *pictures)), path
