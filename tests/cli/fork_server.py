"""Runs commands for the tests, each in a process of its own, forked after the imports that are most of its cost.

Reads a line of JSON for each command: its words, folder, environment and files for output. Answers with two lines: the
child's process id, and its exit code, negative for a signal.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import runpy
import sys
from importlib import import_module

import dstrain.cli
from dstrain.cli.options.question import plan_inputs
from dstrain.cli.plan import command
from dstrain.plan.search.decide import survey

USUAL = ("--gpus", "16", "--model", "qwen3-32b")
ASKED = (USUAL, (*USUAL, "--seq-len", "2048"), ("--gpus", "8", "--gpu", "h100", "--model", "qwen3-8b"))
"""What most tests ask; the planner remembers what it has worked out."""


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
    for words in ASKED:
        options = command.make_context("plan", list(words)).params
        inputs = plan_inputs({name: options[name] for name in options.keys() - {"top", "verbose", "as_json"}})
        survey(inputs.workload, inputs.request)
    gc.disable()  # commands are short
    request = serve()
    if request is not None:
        become(**request)  # type: ignore[arg-type]  # as tests/cli/conftest.py writes it
        runpy.run_module("dstrain.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
