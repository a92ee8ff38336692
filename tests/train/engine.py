"""The process that forks ranks for the tests: `forked_ranks.py`, as those see it who ask."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from dstrain.monitor.metrics import read_jsonl
from tests.train.launching import CHECKOUT, QLORA, VIDEOS, environment


class Engine:
    """Starts ranks without the imports that are most of what a start costs; nothing outlives it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        """Home and current folder of all ranks."""
        self.pids: list[int] = []
        """Process ids of the ranks that were started last."""
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, QLORA, VIDEOS)))}
        line = [sys.executable, "-m", "tests.train.forked_ranks"]
        options: dict[str, Any] = {"cwd": home, "env": environment(home) | paths, "start_new_session": True}
        with (home / "log").open("w") as log:
            self._server = subprocess.Popen(
                line, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, **options
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._requests, self._answers = self._server.stdin, self._server.stdout

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def run(
        self,
        *program: object,
        log: Path,
        ranks: int = 2,
        timeout_s: float = 280,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Returns the exit codes of ranks that run a module with arguments; each adds to its log, `LOG.RANK`.

        They are killed when time or `is_over` says so.
        """
        request = {"program": [str(word) for word in program], "ranks": ranks, "log": str(log)}
        self._requests.write(json.dumps(request).encode() + b"\n")
        self.pids, deadline = self._answer(), time.monotonic() + timeout_s
        while not select.select([self._answers], [], [], 0.01)[0]:
            if is_over() or time.monotonic() > deadline:
                for pid in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                break
        return self._answer()

    def train(self, folder: Path, *, ranks: int = 2, kill_at: int | None = None) -> None:
        """Trains a run directory; with `kill_at` SIGKILL ends it once that step is in its metrics."""

        def is_over() -> bool:
            return kill_at is not None and any(
                line.get("step", 0) >= kill_at for line in read_jsonl(folder / "metrics.jsonl")
            )

        log = Path(f"{folder}.log")
        found = self.run("dstrain.train", folder, log=log, ranks=ranks, is_over=is_over)
        with Path(f"{folder}.codes").open("a") as codes:
            codes.write(f"{found}\n")

    def export(self, source: Path, out: Path, *options: str) -> int:
        """Returns the exit code of the export program, whose log is that of a run directory `out`."""
        program = ("dstrain.train.checkpoints.export", source, out, *options)
        (code,) = self.run(*program, log=Path(f"{out}.log"), ranks=1)
        return code

    def _answer(self) -> list[int]:
        line = self._answers.readline()
        assert line, (self.home / "log").read_text()[-4000:]
        found: Any = json.loads(line)
        return list(found)
