"""The JSON-lines sink: every line is on disk before the next step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.monitor.metrics import without_nonfinite


class JsonlFile:
    """A file of JSON lines that is only appended to."""

    def __init__(self, path: Path) -> None:
        """The file is created with the first line."""
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one line; NaN and infinities are written as null (`without_nonfinite`)."""
        line = json.dumps(without_nonfinite(record), ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            if file.tell() and not self._ends_whole():
                file.write(b"\n")  # ends a line that was truncated by a kill
            file.write(line.encode())

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file without truncated lines; none if the file is missing."""
    records = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def current_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the logged steps of a run without those that were repeated after a resume.

    >>> current_steps([{"step": 1}, {"step": 2}, {"event": "resume", "from_step": 1}, {"step": 2, "loss": 3}])
    [{'step': 1}, {'step': 2, 'loss': 3}]
    """
    kept: list[dict[str, Any]] = []
    for record in records:
        if record.get("event") == "resume":
            kept = [old for old in kept if old["step"] <= record["from_step"]]
        elif "event" not in record and "step" in record:
            kept.append(record)
    return kept
