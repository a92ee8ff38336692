"""Checksums of files: 128 bits of XXH3, which is as fast as memory and changes with every bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import xxhash

_BLOCK = 2**22


def checksum(path: Path, report: Callable[[int], None] = lambda count: None) -> str:
    """Returns the checksum of a file; `report` gets the bytes of each block. Raises OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        return of_next(file, None, report=report)


def of_next(file: Any, count: int | None, *also: Any, report: Callable[[int], None] = lambda count: None) -> str:
    """Returns the checksum of the next `count` bytes of a file (None: all); the digests `also` get them too."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK if count is None else max(1, min(_BLOCK, count))))
    while count is None or count > 0:
        read = file.readinto(block[:count])
        if not read:
            break
        for each in (digest, *also):
            each.update(block[:read])
        report(read)
        count = None if count is None else count - read
    return digest.hexdigest()


class HashingFile:
    """A file that is written once, from its beginning to its end, and its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        """Writes to `file`."""
        self._file = file
        self._digest = xxhash.xxh3_128()

    @property
    def checksum(self) -> str:
        """The checksum of all that was written."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:
        """Writes bytes, and returns their number."""
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flushes Python's buffer."""
        self._file.flush()
