"""Copies files between this machine and others, through `remote_end` running there over stdin and stdout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import killpg
from pathlib import Path
from typing import IO, Any

from dstrain.errors import EnvironmentProblem
from dstrain.launch.filesync import remote_end
from dstrain.launch.nodes.launchers import remotely
from dstrain.launch.nodes.protocol import LONGEST

_SSH_FAILED = 255
_NO_PROGRAM = frozenset({126, 127})
_LAST_WORDS_S = 5.0


class CallFailed(EnvironmentProblem):
    """A host on which something could not be done."""

    def __init__(self, host: str, said: str, *, is_lost: bool) -> None:
        """`said` is its reason; `is_lost` where it could not be reached, or not to the end."""
        super().__init__(f"{host}: {said}")
        self.host = host
        self.said = said
        self.is_lost = is_lost


class Calls:
    """What is under way on other hosts."""

    def __init__(self, launcher: str) -> None:
        """`launcher` says how hosts are reached: by srun in a SLURM allocation, by ssh otherwise."""
        self._launcher = launcher
        self._text = Path(remote_end.__file__).read_text(encoding="utf-8")
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.is_over = False
        """Whether `close` was called."""

    @contextmanager
    def to(self, host: str, verb: str, *words: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Yields stdin and stdout of a verb of the far end; waits for its end. Raises CallFailed where it fails."""
        line = remotely(self._launcher, host, [sys.executable, "-I", "-c", self._text, verb, *words])
        with tempfile.TemporaryFile() as errors:
            process = self._start(line, errors)
            assert process.stdin is not None and process.stdout is not None
            broken: Exception | None = None
            try:
                with process.stdin:
                    yield process.stdin, process.stdout
            except (BrokenPipeError, tarfile.TarError, ValueError) as error:  # what the other end says tells more
                broken = error
            except OSError as error:
                self._end(process)
                raise CallFailed("here", f"{error.filename}: {error.strerror}", is_lost=False) from error
            except BaseException:
                self._end(process)
                raise
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if broken is None else _LAST_WORDS_S)
            self._end(process)
            if process.returncode or broken is not None:
                raise _failure(host, process.returncode, errors, broken)

    @staticmethod
    def answer(stdout: IO[bytes], kind: Any) -> Any:
        """Returns the line of JSON that the far end says. Raises ValueError where it is none, or of another type."""
        try:
            said = json.loads(stdout.readline(LONGEST))
        except RecursionError:
            said = None
        if not isinstance(said, kind):
            raise ValueError("its answer cannot be read")
        return said

    def _start(self, line: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a process in a session of its own: Ctrl-C is for `run`, which decides what to do."""
        with self._lock:
            if self.is_over:
                raise CallFailed("here", "ended", is_lost=False)
            try:
                process = subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
                )
            except OSError as error:
                hint = "apt-get install openssh-client" if line[0] == "ssh" else None
                raise EnvironmentProblem(f"cannot start {line[0]}: {error.strerror}", hint=hint) from error
            self._running.add(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def close(self) -> None:
        """Ends what is under way; nothing can be started any more."""
        with self._lock:
            self.is_over = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    killpg(process.pid, signal.SIGKILL)


def _failure(host: str, code: int, errors: IO[bytes], broken: Exception | None) -> CallFailed:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").strip().splitlines() if line.strip()]
    said = lines[-1] if lines else str(broken) if broken is not None else f"ended with {code}"
    if code in _NO_PROGRAM:
        said = f"{sys.executable} is not there: the ranks start with the same Python as here"
    return CallFailed(host, said, is_lost=code == _SSH_FAILED or code < 0)
