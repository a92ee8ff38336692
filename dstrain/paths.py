"""Locates shipped files, and writes files atomically."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dstrain.errors import Conflict, EnvironmentProblem

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """Returns the folder of shipped text files (`ds_templates`, `launch` or `hostfiles`).

    An installed package carries them in `_data`; a checkout and an editable install have them beside the package.
    """
    for candidate in (_PACKAGE / "_data" / folder, _PACKAGE.parent / folder):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"dstrain was installed without its {folder}/ files")


def python(*words: str, program: str = sys.executable) -> list[str]:
    """Returns the command of a child that is Python itself; it never takes modules from the current folder.

    >>> python("-m", "dstrain.cli", program="/usr/bin/python3")
    ['/usr/bin/python3', '-P', '-m', 'dstrain.cli']
    """
    return [program, "-P", *words]


def shown(path: str) -> str:
    """Returns a path as people should see it: relative where it lies below the current folder."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def write_atomic(path: Path, text: str, *, mode: int | None = None) -> bool:
    """Writes `text` to `path` by a temporary file and a rename; returns whether the file changed.

    A file that already holds `text` is not touched, and the mode of an existing file is kept unless `mode` is given.
    Raises EnvironmentProblem when the folder cannot be written or the disk is full; `path` is then as it was.
    """
    return bool(write_together({path: text}, mode=mode))


def write_together(
    files: Mapping[Path, str],
    *,
    backups: Mapping[Path, str] | None = None,
    mode: int | None = None,
    like: Mapping[Path, Path] | None = None,
) -> list[Path]:
    """Writes several files: all texts are on the disk before the first is renamed; returns the files that changed.

    Every one of `backups` is in its place before any of `files` is replaced, so what they keep is never without a name.
    The mode of an existing file is kept; a file of `like` gets that of the other one, as a copy of it would.
    Raises EnvironmentProblem when one of them cannot be written: what was replaced by then is put back, and where that
    fails too, nothing is removed and the message says where every text is.
    """
    writing = _Writing()
    phases = (backups or {}, files)
    written: dict[Path, Path] = {}
    path = Path()
    try:
        for path, text in {**phases[0], **phases[1]}.items():
            if not _holds(path, text):
                path.parent.mkdir(parents=True, exist_ok=True)
                written[path] = writing.beside(_real(path), _raw(text), _mode(path, like) if mode is None else mode)
            elif mode is not None:
                path.chmod(mode)
        for phase in phases:
            for path in [path for path in written if path in phase]:
                writing.replace(_real(path), written[path])
            writing.settle()
    except BaseException as error:
        stuck = writing.put_back()
        if isinstance(error, OSError):
            raise writing.problem(path, error, stuck) from error
        raise
    writing.clean()
    return list(written)


class _Writing:
    """Files that are being replaced, with what is needed to put them back."""

    def __init__(self) -> None:
        self._temporaries: list[Path] = []
        self._before: dict[Path, tuple[bytes, int] | None] = {}

    def beside(self, path: Path, raw: bytes, mode: int) -> Path:
        """Returns a temporary file beside `path` with the content and the mode that `path` shall have."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
        self._temporaries.append(Path(name))
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(raw)
            file.flush()
            os.fsync(handle)
        return Path(name)

    def replace(self, path: Path, temporary: Path) -> None:
        """Puts a temporary file in the place of `path`."""
        if path.exists():  # before it is touched: a file that is written in place may end up with half of a text
            self._before[path] = path.read_bytes(), path.stat().st_mode & 0o777
        self._put(path, temporary)
        self._before.setdefault(path)

    def _put(self, path: Path, temporary: Path) -> None:
        try:
            temporary.replace(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            # a file that is mounted by itself cannot be renamed over; a copy stands beside it until it is written
            raw = temporary.read_bytes()
            self.beside(path, path.read_bytes(), path.stat().st_mode & 0o777)
            with path.open("r+b") as file:
                file.write(raw)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())

    def settle(self) -> None:
        """Lets the renames reach the disk, where the file system can do that for folders; they are not put back."""
        for folder in {path.parent for path in self._before}:
            with suppress(OSError):
                _flush(folder)
        self._before.clear()

    def put_back(self) -> list[Path]:
        """Restores what was replaced; returns the files for which that failed."""
        stuck = []
        for path, before in self._before.items():
            try:
                if before is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != before[0]:
                    self._put(path, self.beside(path, *before))
            except OSError:
                stuck.append(path)
        if not stuck:
            self.clean()
        return stuck

    def clean(self) -> None:
        """Removes the temporary files."""
        for temporary in self._temporaries:
            temporary.unlink(missing_ok=True)

    def problem(self, path: Path, error: OSError, stuck: Sequence[Path]) -> EnvironmentProblem:
        """Returns the error that says what could not be written, and what that leaves."""
        reason = f"{path}: cannot be written: {error.strerror or error}"
        if not stuck:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "Free some space, or name another folder." if is_full else "Name another folder."
            return EnvironmentProblem(f"{reason}; nothing was changed", hint=hint)
        texts = ", ".join(str(temporary) for temporary in self._temporaries if temporary.exists())
        return EnvironmentProblem(
            f"{reason}\nreplaced before that, and cannot be put back: {', '.join(map(str, stuck))}",
            hint=f"Nothing was removed. Beside the files and their .bak copies, every text is in: {texts}",
        )


_TEMPORARY = ".tmp"
"""How the names of temporary files end; they begin with a dot and the name of the file."""


def leftovers(folder: Path) -> list[Path]:
    """Returns the temporary files of writers that were killed."""
    return sorted(folder.glob(f".*.????????{_TEMPORARY}"))


@contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Keeps other processes out while it lasts, by the file `PATH.lock`, which the system lets go of with the process.

    Raises Conflict where another process is in already; `doing` says what it does.
    """
    import filelock  # needed only where something is written

    lock = filelock.FileLock(f"{path}.lock", blocking=False)
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        problem = f"{path.parent.parent}: another dstrain {doing}; nothing was changed"
        raise Conflict(problem, hint="Type it again when that one has ended.") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(f"{path}: cannot be written: {reason}", hint="Name another folder.") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: the next one looks whether it is still there
        lock.release()
        with suppress(OSError):
            for folder in made:
                folder.rmdir()  # where nothing was written


def flush(path: Path) -> None:
    """Returns when a file, or every file below a folder, is on the disk, with its entry in the folder that holds it.

    Raises EnvironmentProblem if the disk refuses.
    """
    places = [path, *path.rglob("*")] if path.is_dir() else [path]
    for place in (*places, path.parent):
        try:
            _flush(place)
        except OSError as error:
            if place.is_file():  # some file systems cannot flush folders
                raise EnvironmentProblem(f"{place}: cannot be written: {error.strerror}") from error


def _flush(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() == _raw(text)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def _mode(path: Path, like: Mapping[Path, Path] | None) -> int:
    """Returns the mode of the file that stands there or of the one it is a copy of, else that of a new file."""
    known = next((each for each in ((like or {}).get(path, path), path) if each.exists()), None)
    return known.stat().st_mode & 0o777 if known else 0o666 & ~_umask()


def _real(path: Path) -> Path:
    """Returns the file that a link stands for: the link stays one. Raises EnvironmentProblem for one to nowhere."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise EnvironmentProblem(f"{path}: is a link that leads back to itself", hint=f"Remove it: rm {path}")
    if not target.parent.is_dir():
        problem = f"{path}: is a link to {target}, and there is no folder {target.parent}"
        raise EnvironmentProblem(problem, hint=f"Make the folder (mkdir -p {target.parent}), or rm {path}")
    return target


def _umask() -> int:
    """Returns the umask, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
