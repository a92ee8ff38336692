"""Lists the files that running processes have open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def open_files(processes: Iterable[int] | None = None, proc: Path = Path("/proc")) -> Iterator[Path]:
    """Yields the files that these processes have open, by default all processes that this user may look into.

    Processes that end meanwhile are left out: `Path.glob` raises an error there in Python 3.11 and 3.12.
    """
    folders = proc.iterdir() if processes is None else (proc / str(number) for number in processes)
    for folder in folders:
        descriptors: list[Path] = []
        with suppress(OSError):
            descriptors = list((folder / "fd").iterdir()) if folder.name.isdigit() else []
        for descriptor in descriptors:
            with suppress(OSError):
                yield descriptor.readlink()
