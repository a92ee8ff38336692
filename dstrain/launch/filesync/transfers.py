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

from dstrain import child_process
from dstrain.errors import EnvironmentProblem
from dstrain.launch import remote
from dstrain.launch.filesync import remote_end
from dstrain.launch.nodes.protocol import LONGEST

_SSH_FAILED = 255
_LAST_WORDS_S = 5.0


class TransferFailed(EnvironmentProblem):
    """A transfer to or from a host failed."""

    def __init__(self, host: str, said: str, *, is_lost: bool) -> None:
        """`said` is the reason; `is_lost` if the host could not be reached, or the connection broke."""
        super().__init__(f"{host}: {said}")
        self.host = host
        self.said = said
        self.is_lost = is_lost


class Transfers:
    """The transfers in progress."""

    def __init__(self, *, by_srun: bool) -> None:
        """Reaches hosts by srun or ssh."""
        self._by_srun = by_srun
        self._text = Path(remote_end.__file__).read_text(encoding="utf-8")
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.is_over = False
        """Whether `close` was called."""

    @contextmanager
    def to(self, host: str, verb: str, *words: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Yields stdin and stdout of a command of `remote_end`, and waits for its end. Raises TransferFailed."""
        program = [sys.executable, "-I", "-c", self._text, verb, *words]
        line = remote.on_host(host, program, by_srun=self._by_srun)
        with tempfile.TemporaryFile() as errors:
            process = self._start(line, errors)
            assert process.stdin is not None and process.stdout is not None
            broken: Exception | None = None
            try:
                with process.stdin:
                    yield process.stdin, process.stdout
            except (
                BrokenPipeError,
                tarfile.TarError,
                ValueError,
            ) as error:  # the error message of the other end says more
                broken = error
            except OSError as error:
                self._end(process)
                raise TransferFailed("here", f"{error.filename}: {error.strerror}", is_lost=False) from error
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
        """Returns the JSON line of the remote end. Raises ValueError if it is invalid or has another type."""
        try:
            said = json.loads(stdout.readline(LONGEST))
        except RecursionError:
            said = None
        if not isinstance(said, kind):
            raise ValueError("its answer cannot be read")
        return said

    def _start(self, line: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a process, unless `close` was called."""
        with self._lock:
            if self.is_over:
                raise TransferFailed("here", "ended", is_lost=False)
            process = remote.start(line, errors)
            self._running.add(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)
        child_process.end(process)
        if process.stdout is not None:
            process.stdout.close()

    def close(self) -> None:
        """Ends all transfers; no more can be started."""
        with self._lock:
            self.is_over = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    killpg(process.pid, signal.SIGKILL)


def _failure(host: str, code: int, errors: IO[bytes], broken: Exception | None) -> TransferFailed:
    errors.seek(0)
    refusal = remote.refusal(code, f"{broken or ''}\n{errors.read().decode(errors='replace')}")
    return TransferFailed(host, refusal.text, is_lost=code == _SSH_FAILED or code < 0)
