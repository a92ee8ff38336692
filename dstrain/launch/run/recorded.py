"""The inputs of a run as its first start read them: a restart reads no file that its user may be editing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dstrain.config.edits.lock import LOCK
from dstrain.facts.data.datafile import found
from dstrain.job.file import JobFile
from dstrain.launch.environment import user_files
from dstrain.launch.launch import Launch
from dstrain.paths import shown, write_atomic


class Recorded:
    """The inputs of one run: the job, and copies of its configuration and its plan in the run directory."""

    def __init__(self, launch: Launch, path: Path) -> None:
        """Copies what the launch has read; `path` is the job file. Raises EnvironmentProblem if that fails."""
        prepared = launch.prepared
        assert launch.file is not None
        self._file, self._folder = launch.file, prepared.run_dir.inputs
        job = self._file.job
        shutil.rmtree(self._folder, ignore_errors=True)
        write_atomic(self._folder / Path(job.ds_config).name, prepared.ds_text)
        with suppress(OSError, UnicodeDecodeError):
            write_atomic(self._folder / LOCK, (Path(job.ds_config).parent / LOCK).read_text(encoding="utf-8"))
        files = [path, Path(job.ds_config), *([Path(job.hostfile)] if job.hostfile else [])]
        files += [] if prepared.is_local else user_files(os.environ, home=Path.home(), folder=Path.cwd())
        self._files = {file.absolute(): _content(file) for file in files}
        self._data = {file: _stamp(file) for file in self._data_files()}

    def file(self, overrides: Sequence[str]) -> JobFile:
        """Returns the job as it was read, with more `key=value` overrides, and with the copied configuration."""
        file = self._file.changed(overrides)
        copy = self._folder / Path(file.job.ds_config).name
        return replace(file, job=replace(file.job, ds_config=str(copy)))

    def edited(self) -> list[str]:
        """Returns a line about the files, and one about the data, that changed since the last call."""
        files = [file for file, content in self._files.items() if _content(file) != content]
        now = {file: _stamp(file) for file in self._data_files()}
        data = [file for file in {**self._data, **now} if self._data.get(file) != now.get(file)]
        self._files |= {file: _content(file) for file in files}
        self._data = now
        lines = []
        if files:
            lines.append(f"note     {_listed(files)} changed since the run began: the edit is for the next run")
        if data:
            lines.append(f"warning  {_listed(data)} changed since the run began: it continues with other data")
        return lines

    def _data_files(self) -> Iterable[Path]:
        return [Path(name) for path in self._file.job.data_paths for name in found(path)]


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _listed(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{', '.join(shown(str(file)) for file in files[:3])}{more}"
