"""Runs the command line as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]
Type = Callable[..., Any]
"""Types a command: the fixture `dstrain`."""
TIMEOUT_S = 120


def lay_traps(folder: Path) -> None:
    """Writes what a stranger's folder may hold: modules with the names of those that Python is about to import."""
    folder.mkdir(exist_ok=True)
    for name in ("torch", "psutil", "click", "json", "pydantic", "deepspeed", "dstrain"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the folder's own {name}.py was run')\n")


def edit(path: Path, old: str, new: str) -> None:
    """Edits a file as a user does by hand."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


class Server:
    """Types commands to a process that has imported dstrain and forks for each of them."""

    def __init__(self, folder: Path, plans: Path) -> None:
        """Starts the process; it keeps files in a folder of its own, and plans where those of other workers are."""
        plans.mkdir(exist_ok=True)
        line = [sys.executable, "-P", "-m", "tests.cli.fork_server", str(plans)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
        self.child = subprocess.Popen(
            line, env=environment, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.folder = folder
        self.begun: dict[object, tuple[Done, Path]] = {}

    def begin(self, words: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> Done:
        """Runs `gen-config` in an empty folder, or copies the files of the same command that ran in another one."""
        key = (words, *sorted(set(environment.items()) - {("PYTEST_CURRENT_TEST", os.environ["PYTEST_CURRENT_TEST"])}))
        if key in self.begun:
            done, files = self.begun[key]
            shutil.copytree(files, cwd, dirs_exist_ok=True)
            return done
        done = self.run(words, cwd, environment)
        written = [path.read_text() for path in cwd.rglob("*") if path.is_file()]
        if not any(str(cwd) in text for text in (done.stdout, done.stderr, *written)):
            files = self.folder / f"begun-{len(self.begun)}"
            shutil.copytree(cwd, files)
            self.begun[key] = (done, files)
        return done

    def run(self, words: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> Done:
        """Returns the output and the exit code of a command, which is killed after two minutes."""
        out, err = self.folder / "stdout", self.folder / "stderr"
        for file in (out, err):
            file.write_bytes(b"")
        request = {"words": words, "cwd": str(cwd), "environment": environment, "stdout": str(out), "stderr": str(err)}
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(request) + "\n")
        answer = self.child.stdout.readline()
        assert answer, "the server that types commands has ended; its error is that of the first test"
        pid = int(answer)
        alarm = threading.Timer(TIMEOUT_S, os.kill, (pid, signal.SIGKILL))
        alarm.start()
        code = int(self.child.stdout.readline())
        alarm.cancel()
        return Done(words, code, out.read_text(), err.read_text())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, of_all_workers: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("typed"), of_all_workers / "plans")
    yield server
    server.child.communicate()


@pytest.fixture
def dstrain(tmp_path: Path, server: Server) -> Type:
    """Returns a function that types a command, a line and more words, in a folder of the test's own, without GPUs."""

    def type_(line: str, *more: str, cwd: Path = tmp_path, **variables: str) -> Done:
        words = (*shlex.split(line), *more)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **variables}
        if any(name.startswith(("PYTHON", "LC_", "LANG")) for name in variables):  # read when Python starts
            command = [sys.executable, "-P", "-m", "dstrain.cli", *words]
            return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        is_first = words[0] == "gen-config" and cwd == tmp_path and not any(cwd.iterdir())
        return (server.begin if is_first else server.run)(words, cwd, environment)

    return type_
