"""The program of `run --sync` on other nodes, which may lack dstrain: `python -I -c TEXT VERB …`, this file's text.

Files travel as one tar stream on stdin or stdout; each is written beside its place and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# The names of dstrain.rundir, which cannot be imported there.
TOKEN, SYNCED, CODE = ".token", ".synced", ".code"
COMPLETE, PART = "complete.json", "part.json"
_BLOCK = 2**20


def pack(files: Mapping[str, Path], out: IO[bytes]) -> None:
    """Writes files as a tar stream, each under its name there, in their order."""
    with tarfile.open(fileobj=out, mode="w|", bufsize=_BLOCK, dereference=True) as tar:
        tar.copybufsize = _BLOCK  # type: ignore[attr-defined]
        for name, path in files.items():
            tar.add(path, arcname=name, recursive=False)


def unpack(source: IO[bytes], folder: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> int:
    """Writes the files of a tar stream below a folder, with their modes; returns their bytes.

    Raises ValueError for anything that is not wanted, is not a file, or lies outside the folder.
    """
    total, root = 0, folder.resolve()
    with tarfile.open(fileobj=source, mode="r|", bufsize=_BLOCK) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            place = folder / member.name
            is_inside = ".." not in Path(member.name).parts and place.parent.resolve().is_relative_to(root)
            if content is None or not is_inside or not is_wanted(member.name):
                raise ValueError(f"{member.name[:80]!r} is not a file that belongs below {folder}")
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{place.name}.new")
            try:
                beside.unlink(missing_ok=True)
                with _created(beside) as file:
                    shutil.copyfileobj(content, file, _BLOCK)
                beside.chmod(member.mode & 0o777)
                beside.replace(place)
            finally:
                beside.unlink(missing_ok=True)
            total += member.size
    return total


def _created(path: Path) -> IO[bytes]:
    """Returns a new file, open for writing; an existing file or link is an error."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def files_in(folder: Path) -> dict[str, Path]:
    """Returns all files below a folder, by their path in it, without compiled Python."""
    every = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path for path in every}


def tidy(run_dir: Path, before: int, keep: Collection[str]) -> None:
    """Deletes parts of checkpoints before a step, but for some; whole checkpoints stay."""
    for folder in run_dir.glob("checkpoint-*"):
        step = folder.name.rpartition("-")[2]
        if step.isdigit() and int(step) < before and folder.name not in keep and not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _start_of(checkpoint: Path) -> str | None:
    """Returns the mark of the start that wrote a part."""
    with suppress(ValueError, AttributeError):
        start = json.loads(_read(checkpoint / PART)).get("start")
        return str(start) if start else None
    return None


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Admits nodes that share this disk one at a time."""
    with os.fdopen(os.open(folder / ".sync.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as file:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _take(folder: str, mark: str, number: str, *gone: str) -> None:
    """Takes a run's files, unless this is the disk of `run` or another node has brought them.

    Reports the number of the node that took them, None for the disk of `run`, and which whole checkpoints are in the
    way.
    """
    run_dir = Path(folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=run_dir):  # a network file system looks at the folder anew
        pass
    whole = sorted(path.parent.name for path in run_dir.glob(f"checkpoint-*/{COMPLETE}"))
    if _read(run_dir / TOKEN) == mark:
        return _say({"disk": None, "whole": []})
    if whole:
        return _say({"disk": None, "whole": whole})
    with _alone(run_dir):
        if not _read(run_dir / SYNCED).startswith(f"{mark} "):
            for name in gone:
                (run_dir / name).unlink(missing_ok=True)
            shutil.rmtree(run_dir / CODE, ignore_errors=True)
            unpack(sys.stdin.buffer, run_dir)
            (run_dir / SYNCED).unlink(missing_ok=True)
            with _created(run_dir / SYNCED) as file:
                file.write(f"{mark} {number}".encode())
        _say({"disk": int(_read(run_dir / SYNCED).split()[1]), "whole": []})
    return None


def _put(folder: str, start: str) -> None:
    """Reports the files of a checkpoint that are here, with their sizes, and takes others.

    Those of another start are not the same, whatever their names; a complete checkpoint is reported as None and stays.
    Without a start their origin is unknown: they are replaced one by one.
    """
    checkpoint = Path(folder)
    if (checkpoint / COMPLETE).exists():
        return _say(None)
    if start and _start_of(checkpoint) != start:
        shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True, exist_ok=True)
    _say({name: path.stat().st_size for name, path in files_in(checkpoint).items()} if start else {})
    unpack(sys.stdin.buffer, checkpoint)
    return None


def _give(folder: str, start: str) -> None:
    """Sends this disk's part of a checkpoint, if a start wrote it."""
    checkpoint = Path(folder)
    if _start_of(checkpoint) != start:
        sys.exit(f"{folder}: no part of this run's checkpoint is there")
    pack({name: path for name, path in files_in(checkpoint).items() if name != PART}, sys.stdout.buffer)


def _fetch(folder: str, *names: str) -> None:
    """Sends files and folders, those that exist."""
    files = files_in(Path(folder))
    pack({name: path for name, path in files.items() if name.split("/")[0] in names}, sys.stdout.buffer)


def _tidy(folder: str, before: str, *keep: str) -> None:
    tidy(Path(folder), int(before), keep)


_VERBS: Mapping[str, Callable[..., None]] = {"take": _take, "put": _put, "give": _give, "fetch": _fetch, "tidy": _tidy}

if __name__ == "__main__":
    try:
        _VERBS[sys.argv[1]](*sys.argv[2:])
    except OSError as error:
        sys.exit(f"{error.filename or sys.argv[2]}: {error.strerror or error}")
