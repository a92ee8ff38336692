"""Locates shipped files, and writes files atomically."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dstrain.errors import Conflict, EnvironmentProblem

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """Returns the folder of shipped text files (`ds_templates`, `launch` or `hostfiles`).

    They are in `_data` of an installed package, and next to the package in a checkout or an editable install.
    """
    for candidate in (_PACKAGE / "_data" / folder, _PACKAGE.parent / folder):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"dstrain was installed without its {folder}/ files")


def python(*words: str, program: str = sys.executable) -> list[str]:
    """Returns the command of a Python child process, which never imports modules from the current folder.

    >>> python("-m", "dstrain.cli", program="/usr/bin/python3")
    ['/usr/bin/python3', '-P', '-m', 'dstrain.cli']
    """
    return [program, "-P", *words]


_EMPTY_IS_UNSET = (
    *("DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS", "NO_COLOR", "HF_HOME", "HF_HUB_CACHE"),
    *("SLURM_JOB_ID", "LOCAL_WORLD_SIZE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MASTER_ADDR"),
)
"""Variables to drop if empty: libraries take "" for a value: DeepSpeed knows no accelerator
of that name, PyTorch builds its extensions in the current folder. An empty CUDA_VISIBLE_DEVICES hides all GPUs."""


def ignore_empty(environ: MutableMapping[str, str]) -> None:
    """Removes variables that are set to nothing, as `export DS_ACCELERATOR=` leaves them.

    >>> environ = {"DS_ACCELERATOR": "", "CUDA_VISIBLE_DEVICES": ""}
    >>> ignore_empty(environ)
    >>> environ
    {'CUDA_VISIBLE_DEVICES': ''}
    """
    for name in _EMPTY_IS_UNSET:
        if environ.get(name) == "":
            del environ[name]


def prefer_own_programs(environ: MutableMapping[str, str]) -> None:
    """Puts the programs beside this Python, such as ninja, on PATH; a virtual environment's come first.

    Two releases of ninja do not read each other's log, and each compiles DeepSpeed's extensions anew.
    """
    own, entries = str(Path(sys.executable).parent), environ.get("PATH", os.defpath).split(os.pathsep)
    if sys.prefix != sys.base_prefix:
        entries = [own, *(entry for entry in entries if entry != own)]
    elif own not in entries:
        entries = [own, *entries]
    environ["PATH"] = os.pathsep.join(entries)


def shown(path: str) -> str:
    """Returns a path for messages: relative if it is below the current folder."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def write_atomic(path: Path, text: str, *, mode: int | None = None) -> bool:
    """Writes `text` to `path` by a temporary file and a rename; returns whether the file changed.

    A file that already holds `text` is not touched; an existing file keeps its mode unless `mode` is given. Raises
    EnvironmentProblem if the folder is not writable or the disk is full; `path` is then unchanged.
    """
    return bool(write_together({path: text}, mode=mode))


def write_together(
    files: Mapping[Path, str],
    *,
    backups: Mapping[Path, str] | None = None,
    mode: int | None = None,
    like: Mapping[Path, Path] | None = None,
) -> list[Path]:
    """Writes several files: all texts are on disk before the first rename; returns the files that changed.

    All `backups` are in place before any of `files` is replaced, so their content always has a name. Existing files
    keep their mode; a file in `like` gets the mode of the other file. Raises EnvironmentProblem if a file cannot be
    written: replaced files are then restored, and if that fails too, nothing is removed and the message lists all
    temporary files.
    """
    writing = _Writing()
    phases = (backups or {}, files)
    written: dict[Path, Path] = {}
    path = Path()
    try:
        # a full disk or a missing right shows while the temporary files are written, before any file is replaced
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
    except BaseException as error:  # Ctrl-C between two renames, too
        stuck = writing.put_back()
        if isinstance(error, OSError):
            raise writing.problem(path, error, stuck) from error
        raise
    writing.clean()
    return list(written)


class _Writing:
    """Files that are being replaced, and their previous contents."""

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
        if path.exists():  # before any change: writing in place may leave half of a text
            self._before[path] = path.read_bytes(), path.stat().st_mode & 0o777
        self._put(path, temporary)
        self._before.setdefault(path)

    def _put(self, path: Path, temporary: Path) -> None:
        try:
            temporary.replace(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            # a bind-mounted file cannot be replaced by a rename; a copy exists until it is written
            raw = temporary.read_bytes()
            self.beside(path, path.read_bytes(), path.stat().st_mode & 0o777)
            with path.open("r+b") as file:
                file.write(raw)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())

    def settle(self) -> None:
        """Flushes the renames to disk, if the file system supports it for folders; they are final."""
        for folder in {path.parent for path in self._before}:
            with suppress(OSError):
                _flush(folder)
        self._before.clear()

    def put_back(self) -> list[Path]:
        """Restores replaced files; returns those for which it failed."""
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
        """Returns the error for a file that cannot be written, with the resulting state."""
        reason = f"{path}: cannot be written: {error.strerror or error}"
        if not stuck:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "Free some space, or use another folder." if is_full else "Use another folder."
            return EnvironmentProblem(f"{reason}; nothing was changed", hint=hint)
        texts = ", ".join(str(temporary) for temporary in self._temporaries if temporary.exists())
        return EnvironmentProblem(
            f"{reason}\nalready replaced, and cannot be restored: {', '.join(map(str, stuck))}",
            hint=f"Nothing was removed. Besides the files and their .bak copies, all texts are in: {texts}",
        )


_TEMPORARY = ".tmp"
"""Suffix of temporary files, which begin with a dot and the file's name."""


def leftovers(folder: Path) -> list[Path]:
    """Returns temporary files of killed writers."""
    return sorted(folder.glob(f".*.????????{_TEMPORARY}"))


@contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Holds the lock file `PATH.lock`, which the system releases when the process ends.

    Raises Conflict if another process holds it; `doing` says what that process does.
    """
    import filelock  # needed only where something is written

    lock = filelock.FileLock(f"{path}.lock", blocking=False)
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        problem = f"{path.parent.parent}: another dstrain {doing}; nothing was changed"
        raise Conflict(problem, hint="Repeat the command when the other one has ended.") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(f"{path}: cannot be written: {reason}", hint="Use another folder.") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: the next process checks that it still exists
        lock.release()
        with suppress(OSError):
            for folder in made:
                folder.rmdir()  # if nothing was written


def flush(path: Path) -> None:
    """Flushes a file, or every file below a folder, and its directory entry to disk.

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
    """Returns the mode of the file to imitate or of the existing file, else a new file's."""
    model = next((file for file in ((like or {}).get(path, path), path) if file.exists()), None)
    return model.stat().st_mode & 0o777 if model else 0o666 & ~_umask()


def _real(path: Path) -> Path:
    """Returns the target of a link, or the path itself. Raises EnvironmentProblem for a dangling link."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise EnvironmentProblem(f"{path}: a link to itself", hint=f"Remove it: rm {path}")
    if not target.parent.is_dir():
        problem = f"{path}: a link to {target}, but {target.parent} does not exist"
        raise EnvironmentProblem(problem, hint=f"Create the folder (mkdir -p {target.parent}), or rm {path}")
    return target


def _umask() -> int:
    """Returns the umask, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def existing(folder: Path) -> Path:
    """Returns a folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
