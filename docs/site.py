"""What `mkdocs build` makes of code and notebooks: a page for each public module, and for each notebook, with
its pictures. These pages exist in the site alone."""

from __future__ import annotations

import ast
import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent.parent))  # where mkdocs is run as a command
from docs import reference

NOTEBOOKS = sorted((reference.ROOT / "examples").glob("*.ipynb"))
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):\s*(.*)", re.DOTALL)
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here. Called by mkdocs."""
    made: dict[str, str | bytes] = {f"api/{module}.md": module_page(module) for module in reference.API}
    for path in NOTEBOOKS:
        text, pictures = notebook_page(path)
        made |= {f"notebooks/{path.stem}.md": text}
        made |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
    made["notebooks/index.md"] = gallery()
    for place, content in made.items():
        inclusion = InclusionLevel.INCLUDED if place.endswith("index.md") else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, place, content=content, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead to the pages that are made here. Called by mkdocs."""
    if page.file.src_uri.startswith(("api/", "notebooks/")):
        return markdown
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"`examples/(\w+)\.ipynb`", rf"[\g<0>]({up}notebooks/\1.md)", markdown)
    if page.file.src_uri == "reference/python.md":
        markdown = re.sub(
            r"^## `kvkit\.([\w.]+)`$", rf"## [`kvkit.\1`]({up}api/\1.md)", markdown, flags=re.MULTILINE
        )
    return markdown


def module_page(module: str) -> str:
    """A module's docstring, and signature and docstring of each public class, method and function."""
    tree = ast.parse(reference.source_of(module).read_text())
    parts = [f"# `kvkit.{module}`", described(tree)]
    for node in reference.public(tree):
        parts += [f"## `{node.name}`", f"```python\n{signature(node)}\n```", described(node)]
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name[0] != "_" and ast.get_docstring(inner):
                    parts += [f"### `{node.name}.{inner.name}`", f"```python\n{signature(inner)}\n```"]
                    parts.append(described(inner))
    return "\n\n".join([*parts, "[All modules](../reference/python.md)", ""])


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """How it is called: of a class its fields where it is a dataclass or a model, else its constructor."""
    if isinstance(node, ast.FunctionDef):
        decorators = "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list)
        returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
        return f"{decorators}def {node.name}({_arguments(node)}){returns}"
    head = f"class {node.name}" + (f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else "")
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return f"{head}:\n" + indent(f"def __init__({_arguments(inner)})", "    ")
    fields = [i for i in node.body if isinstance(i, ast.AnnAssign | ast.Assign)]
    shown = [ast.unparse(f) for f in fields if not ast.unparse(f).startswith(("_", "model_config"))]
    return "\n".join([f"{head}:", *(f"    {line}" for field in shown for line in field.splitlines())])


def _arguments(node: ast.FunctionDef) -> str:
    """On one line, or each on its own."""
    text = ast.unparse(node.args)
    if len(text) <= 80:
        return text
    depth, lines, last = 0, [""], ""
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and last == "," and not depth:
            lines.append("")
        else:
            lines[-1] += letter
        last = letter
    return "\n    " + "\n    ".join(lines) + ",\n"


def described(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: its sections as lists, what is indented as code."""
    parts = []
    for block in (ast.get_docstring(node) or "").split("\n\n"):
        if found := _SECTION.fullmatch(block):
            body = "\n".join(line.removeprefix("    ") for line in found[2].splitlines())
            entries = [" ".join(entry.split()) for entry in _ENTRY.split(body) if entry.strip()]
            named = (_escaped(re.sub(r"^([\w*., ]+): ", r"`\1`: ", entry)) for entry in entries)
            parts.append(f"**{found[1]}**\n\n" + "\n".join(f"- {entry}" for entry in named))
        else:
            parts.append(block if block.startswith("    ") else _escaped(block))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """Without what Markdown would take for HTML, for a link or for emphasis; what is code stays as it is."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([<\[\]*_])", r"\\\1", p) for p in pieces)


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page with what was printed when it was committed, and its pictures by file name."""
    parts, pictures = [], dict[str, bytes]()
    for cell in cells(path):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![]({name})")
            elif text := "".join(output.get("text") or data.get("text/plain", "")).rstrip():
                parts.append(f"```text\n{text}\n```")
    parts.append(f"This is `examples/{path.name}`. [All notebooks](index.md)")
    return "\n\n".join(parts) + "\n", pictures


def gallery() -> str:
    """Title, first words and pictures of each notebook."""
    parts = ["# Notebooks", "Each runs on a laptop's CPU, and is run by the tests."]
    for path in NOTEBOOKS:
        title, *paragraphs = "".join(next(cells(path))["source"]).split("\n\n")
        parts += [f"## [{title.removeprefix('# ')}]({path.stem}.md)", paragraphs[0]]
        parts += [f"[![]({name})]({path.stem}.md)" for name in notebook_page(path)[1]]
    return "\n\n".join(parts) + "\n"


def cells(path: Path) -> Iterator[dict[str, Any]]:
    """The cells of a notebook."""
    yield from json.loads(path.read_text())["cells"]
