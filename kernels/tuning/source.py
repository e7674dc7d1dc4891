"""The digest of a kernel's source with what it calls: what a tuned configuration was measured with."""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

OTHERS = {*sys.stdlib_module_names, "jax", "llvmlite", "numba", "numpy", "torch", "triton"}
"""Packages whose functions are not looked into: their versions are told apart elsewhere."""


class SourceError(TypeError):
    """There is no Python source of a kernel. Names the kernel."""


def source_digest(kernel: Any) -> str:
    """Digest of a Triton kernel's, a numba function's or a plain function's code, 16 hex digits.

    The functions and constants of modules that it names count, and those that they name in turn. Comments,
    docstrings and where in its file it stands do not, unlike in Triton's own key, so that a table survives
    what changes no instruction; it is equal for every version of Triton.

    Raises:
        SourceError: it is no function with Python source.
    """
    function = _plain(kernel)
    if not isinstance(function, FunctionType):
        raise SourceError(f"kernel {kernel!r}: want a Triton kernel, a numba function or a function")
    return _digest(function)


@functools.cache
def _digest(function: FunctionType) -> str:
    seen: dict[FunctionType, None] = {}
    texts = sorted(_texts(function, seen))
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """The Python function that Triton, numba or a decorator wrapped, else the value itself."""
    while (inner := getattr(value, "fn", None) or getattr(value, "__wrapped__", None)) is not None:
        value = inner
    return value


def _texts(function: FunctionType, seen: dict[FunctionType, None]) -> Iterator[str]:
    """The code of a function and of what it names, each once, in any order."""
    seen[function] = None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as error:  # typed at a prompt; a lambda within an expression
        raise SourceError(f"{function.__module__}.{function.__qualname__}: no source: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    yield ast.unparse(tree)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    names = {name: function.__globals__.get(name) for name in _global_names(function.__code__)}
    names |= {name: cell.cell_contents for name, cell in cells}
    for name, value in sorted(_named(tree, names).items()):
        value = _plain(value)
        if not isinstance(value, FunctionType):
            yield f"{name} = {_constant(value)}"
        elif value not in seen and value.__module__.partition(".")[0] not in OTHERS:
            yield from _texts(value, seen)


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function, and those within it, look up in the module or among Python's own."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _global_names(inner)


def _named(tree: ast.AST, names: dict[str, Any]) -> dict[str, Any]:
    """What a function's code names: module globals, and names in modules that it names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            found[node.id] = names[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id)
            if isinstance(module, ModuleType) and hasattr(module, node.attr):
                found[f"{node.value.id}.{node.attr}"] = getattr(module, node.attr)
    return found


def _constant(value: Any) -> str:
    """A number, a text or several of these as text that is the same in every process; "" for all else."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{_constant(k)}: {_constant(v)}' for k, v in value.items())})"
    value = getattr(value, "value", value)  # of tl.constexpr
    return repr(value) if isinstance(value, int | float | str | bytes | None) else ""
