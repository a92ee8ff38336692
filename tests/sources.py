"""The source files of the checkout, each read and parsed once for all tests that look through them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def text_of(path: Path) -> str:
    """Returns the text of a module."""
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    """Returns the syntax tree of a module, which no test may change."""
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a module's syntax tree."""
    return tuple(ast.walk(tree_of(path)))
