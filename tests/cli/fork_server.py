"""Runs commands for the tests, each in a process of its own, forked after the imports that are most of its cost.

Reads a line of JSON for each command: its words, folder, environment and files for output. Answers with two lines: the
child's process id, and its exit code, negative for a signal.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import os
import pickle
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import dstrain.cli
from dstrain.cli.main import cli
from dstrain.plan import estimate
from dstrain.plan.search import decide
from tests.forked import run_and_exit

USUAL = ("--gpus", "16", "--model", "qwen3-32b")
EIGHT = ("--gpus", "8", "--gpu", "h100", "--model", "qwen3-8b")
ASKED = (
    *(("plan", words) for words in (USUAL, (*USUAL, "--seq-len", "2048"), EIGHT)),
    ("gen-config", EIGHT),
    *((verb, ()) for verb in ("lint", "explain")),
)
"""What most tests ask; dstrain remembers what it has worked out, and imports what a command needs."""


def remembered(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Returns a pure function that keeps its results in a folder, for all commands of all workers: most of what they
    compute are plans, and most of their plans are those of other tests."""

    @wraps(function)
    def answer(*args: Any, **options: Any) -> Any:
        asked = pickle.dumps((function.__qualname__, args, options))
        file = folder / hashlib.sha256(asked).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        found = function(*args, **options)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(file)
        return found

    return answer


def remember(function: Callable[..., Any], folder: Path) -> None:
    """Lets all that has imported a function remember, but the search itself, whose estimates are faster than a file."""
    answer = remembered(function, folder)
    for name, module in list(sys.modules.items()):
        is_search = name.startswith("dstrain.plan.search") and name != function.__module__
        if name.startswith("dstrain.") and not is_search and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, answer)


def become(words: list[str], cwd: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Makes this process the one that `python -P -m dstrain.cli` starts."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, stdout, os.O_WRONLY | os.O_APPEND),
        (2, stderr, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv[1:] = words


def serve() -> dict[str, object] | None:
    """Answers requests until there are no more; returns the request in the child that is to carry it out."""
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            request: dict[str, object] = json.loads(line)
            return request
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def main() -> None:
    for module in pkgutil.iter_modules(dstrain.cli.__path__):
        if module.name != "__main__":
            import_module(f"dstrain.cli.{module.name}")
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        for verb, words in ASKED:
            try:
                cli.main([verb, *words], prog_name="dstrain", standalone_mode=False)
            except SystemExit as end:
                raise RuntimeError(f"dstrain {verb} ended with {end.code}:\n{said.getvalue()}") from end
    for source, name in ((decide, "survey"), (decide, "choice"), (estimate, "assess")):
        remember(getattr(source, name), Path(sys.argv[1]))
    gc.disable()  # commands are short
    request = serve()
    if request is not None:
        become(**request)  # type: ignore[arg-type]  # as tests/cli/conftest.py writes it
        run_and_exit("dstrain.cli")


if __name__ == "__main__":
    main()
