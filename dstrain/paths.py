"""Where shipped files lie, and how files are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
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


def write_atomic(path: Path, text: str, *, mode: int | None = None) -> bool:
    """Writes `text` to `path` by a temporary file and a rename; returns whether the file changed.

    A file that already holds `text` is not touched, and the mode of an existing file is kept unless `mode` is given.
    Raises EnvironmentProblem when the folder cannot be written or the disk is full; `path` is then as it was.
    """
    try:
        exists = path.exists()
        if exists and path.read_text(encoding="utf-8", errors="surrogateescape") == text:
            if mode is not None:
                path.chmod(mode)
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text, mode if mode is not None else path.stat().st_mode & 0o777 if exists else None)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}: cannot be written: {error.strerror or error}", hint="Name another folder, or free some space."
        ) from error
    return True


def _replace(path: Path, text: str, mode: int | None) -> None:
    """Writes beside `path`, then renames over it; removes the temporary file when anything goes wrong."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        if mode is None:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        os.fchmod(handle, mode)
        with os.fdopen(handle, "w", encoding="utf-8", newline="", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
