"""A fault has the same words wherever it is found: its sentence has one home, and the others call it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.sources import nodes_of, text_of

ROOT = Path(__file__).parents[1] / "dstrain"
_MAY_TELL = re.compile("free|larger|RAM|written|held by|placeholder|supported range|installed|but only")
ROOMS = ("config/lint", "doctor", "facts", "launch", "train", "monitor", "cli")
"""Packages that find faults, beside the modules at the top."""
HOMES: dict[str, tuple[str, ...]] = {
    r"\b(needs?|takes?)\b.* free\b| free\b.*\b(needs?|needed|takes?|written)\b": (
        "doctor/checks.py",  # a port; /dev/shm, which is no disk; and the facts of a machine that fits
    ),
    r" are free ": ("findings.py",),
    r"\blarger (disk|drive)\b": ("findings.py",),
    r"\bneeds .* of RAM on\b": ("findings.py",),
    r"\b(output_dir|nvme_path|folder\.path)\b.*\bcannot be written\b": (),
    r"\bheld by no visible process\b": ("facts/deepspeed_ops.py",),
    r"\bis a placeholder\b": ("facts/cluster/machines.py",),
    r" outside the supported range|, and \{version\} is installed": ("errors.py",),
    r", but only \{.*GPU": ("facts/cluster/machines.py",),
    r"\bnot installed\b": (
        "errors.py",
        "launch/command.py",  # numactl, without which a run is slower
        "launch/filesync.py",  # on another machine, in the words of a shell script
        "launch/remote.py",
        "launch/prepare/lint_job.py",  # the title of the rule
        "doctor/gpu_checks.py",  # nvidia-smi
        "doctor/software_checks.py",  # dstrain itself, from a checkout
    ),
}
"""Pattern of the sentences about a fault → the modules that may word one."""


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else ""


@cache
def sentences(path: Path) -> tuple[str, ...]:
    """Returns the texts of a module without its docstrings; values are in braces."""
    nodes = nodes_of(path)
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (
                f"{{{ast.unparse(p.value)}}}" if isinstance(p, ast.FormattedValue) else _text(p) for p in node.values
            )
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said | inner:
            found.append(node.value)
    return tuple(found)


def worded(pattern: str) -> dict[str, list[str]]:
    """Returns the sentences with a pattern by module."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if ("/" not in name or name.startswith(ROOMS)) and _MAY_TELL.search(text_of(path)):
            texts = [text for text in sentences(path) if re.search(pattern, text)]
            found |= {name: texts} if texts else {}
    return found


@pytest.mark.parametrize("pattern", HOMES)
def test_a_fault_has_one_home(pattern: str) -> None:
    found = worded(pattern)
    assert {name: texts for name, texts in found.items() if name not in HOMES[pattern]} == {}
    assert set(HOMES[pattern]) <= found.keys()  # a pattern that finds nothing proves nothing
