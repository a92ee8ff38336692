"""The Tab key, pressed in real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.editors

TIMEOUT_S = 120
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(dstrain show completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(dstrain show completion zsh)"'),
}
"""How a shell is started without the user's files, and what its own file holds."""
TYPED = [
    ("dstrain gen-c", "dstrain gen-config "),
    ("dstrain plan --inter", "dstrain plan --interconnect "),
    ("dstrain plan --model qwen3-32", "dstrain plan --model qwen3-32b "),
    ("dstrain gen-config --gpu h100-p", "dstrain gen-config --gpu h100-pcie "),
    ("dstrain script sl", "dstrain script slurm "),
]
"""The text before the Tab key is pressed, and the completed line."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which `dstrain` is this checkout's."""
    program = tmp_path / "bin" / "dstrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m dstrain.cli "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TERM": "dumb", "PS1": "$ "}


class Terminal:
    """A terminal with a shell in it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` is shown; what is shown after it stays to be read."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            readable, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{text!r} is not in {self.shown!r}"
            self.shown += os.read(self.descriptor, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]


@contextmanager
def terminal(command: list[str], environment: dict[str, str]) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as child:
        os.close(theirs)
        try:
            yield Terminal(ours)
        finally:
            child.kill()
    os.close(ours)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes_what_is_typed(
    shell: str, environment: dict[str, str], need: Callable[[object, str], None]
) -> None:
    command, profile = SHELLS[shell]
    need(shutil.which(shell), f"{shell} is not installed")
    with terminal(command, environment) as shown:
        shown.type(f"{profile}; echo re''ady\n")
        shown.wait_for("ready\r\n")
        for typed, completed in TYPED:
            shown.type(f"{typed}\t")
            shown.wait_for(completed)
            shown.type("\x15")  # Ctrl-U empties the line


@pytest.mark.parametrize(("typed", "completed"), TYPED)
def test_fish_completes_what_is_typed(
    typed: str, completed: str, environment: dict[str, str], need: Callable[[object, str], None]
) -> None:
    need(shutil.which("fish"), "fish is not installed")
    code = f"dstrain show completion fish | source; complete -C '{typed}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == [completed.split()[-1]]
