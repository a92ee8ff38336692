"""Writes the tables that tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_table(table: Any, path: Path, *, rows_per_group: int) -> None:
    """Writes Parquet; Arrow as `datasets` does, a stream, if the file's name begins with that, else as a file."""
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
        return
    opened = pyarrow.ipc.new_stream if path.stem == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_group)
