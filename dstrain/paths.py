"""Where shipped files lie, and how files are written whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dstrain.errors import EnvironmentProblem

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
    files: Mapping[Path, str], *, mode: int | None = None, like: Mapping[Path, Path] | None = None
) -> list[Path]:
    """Writes several files: all are on the disk before the first is renamed; returns those that changed.

    The mode of an existing file is kept; a file of `like` gets that of the other one, as a copy of it would.
    Raises EnvironmentProblem when one of them cannot be written; then none has changed.
    """
    written: dict[Path, Path] = {}
    path = Path()
    try:
        for path, text in files.items():
            if not _holds(path, text):
                path.parent.mkdir(parents=True, exist_ok=True)
                written[path] = _write_beside(_real(path), text, _mode(path, like) if mode is None else mode)
            elif mode is not None:
                path.chmod(mode)
        for path, temporary in written.items():
            temporary.replace(_real(path))
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "Name another folder, or free some space."
        raise EnvironmentProblem(f"{path}: cannot be written: {reason}", hint=hint) from error
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
    return list(written)


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() == text.encode("utf-8", errors="surrogateescape")


def _mode(path: Path, like: Mapping[Path, Path] | None) -> int:
    """Returns the mode of the file that stands there or of the one it is a copy of, else that of a new file."""
    known = next((each for each in ((like or {}).get(path, path), path) if each.exists()), None)
    return known.stat().st_mode & 0o777 if known else 0o666 & ~_umask()


def _real(path: Path) -> Path:
    """Returns the file that a link stands for: the link stays one."""
    return path.resolve() if path.is_symlink() else path


def _write_beside(path: Path, text: str, mode: int) -> Path:
    """Returns a temporary file beside `path` with the text and the mode that `path` shall have."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, mode)
        with os.fdopen(handle, "w", encoding="utf-8", newline="", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _umask() -> int:
    """Returns the umask, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
