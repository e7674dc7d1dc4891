"""Digest of a kernel's source and of the functions it calls, which tuned configurations depend on."""

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

LIBRARIES = {*sys.stdlib_module_names, "jax", "llvmlite", "numba", "numpy", "torch", "triton"}
"""Packages with functions that are not digested: `tables.Build` has their versions."""


class SourceError(TypeError):
    """A kernel without Python source. Names the kernel."""


def source_digest(kernel: Any) -> str:
    """Digest the code of a Triton kernel, a numba function or a plain function; 16 hex digits.

    Functions and constants of modules that the code names count, and so do those that they name. Comments,
    docstrings and the position in the file do not count, unlike in Triton's own key, so that a table survives
    edits that change no instruction. The digest is equal for every version of Triton.

    Raises:
        SourceError: the kernel is no function with Python source.
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
    """Return the Python function that Triton, numba or a decorator wrapped, else the value itself."""
    while (inner := getattr(value, "fn", None) or getattr(value, "__wrapped__", None)) is not None:
        value = inner
    return value


def _texts(function: FunctionType, seen: dict[FunctionType, None]) -> Iterator[str]:
    """Yield the code of a function and of all that it names, each once, in any order."""
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
        elif value not in seen and value.__module__.partition(".")[0] not in LIBRARIES:
            yield from _texts(value, seen)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield names that a function and its inner functions look up in the module or among builtins."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _global_names(inner)


def _named(tree: ast.AST, names: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a function's code names: module globals, and names in these modules."""
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
    """Return numbers, strings and collections of these as text, equal in every process; else ""."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{_constant(k)}: {_constant(v)}' for k, v in value.items())})"
    value = getattr(value, "value", value)  # of tl.constexpr
    return repr(value) if isinstance(value, int | float | str | bytes | None) else ""
