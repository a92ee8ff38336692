"""The SwanLab sink; the only importer of swanlab, inside functions."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.choices import SwanLabMode
from dstrain.errors import EnvironmentProblem, type_and_line
from dstrain.monitor.mode import upload_command
from dstrain.paths import write_atomic

if TYPE_CHECKING:
    from dstrain.monitor.sinks.sink import Setup, Table

RUN_RECORD = ".dstrain-run.json"
"""File in the run directory with the run's id, so that a resumed run continues its curves, and with the folders of its
offline parts."""


class SwanlabSink:
    """One SwanLab run."""

    def __init__(self, swanlab: Any, *, mode: SwanLabMode, folder: Path, run_id: str, to_upload: Sequence[str]) -> None:
        """`swanlab` is the module with an active run; `to_upload` are the folders of all offline parts."""
        self._swanlab = swanlab
        self._mode = mode
        self._folder = folder
        self._id = run_id
        self._to_upload = to_upload

    @property
    def place(self) -> str:
        """Where to find the curves."""
        where = f"{self._mode} in {self._folder}"
        if self._mode is SwanLabMode.ONLINE:
            where = getattr(self._swanlab.get_run(), "url", None) or "online"
        return f"SwanLab: {where}{f'; to upload: {upload_command(self._to_upload)}' if self._to_upload else ''}"

    @property
    def facts(self) -> Mapping[str, Any]:
        """Mode, folder, id, and the folders to upload."""
        return {
            "swanlab_mode": str(self._mode),
            "swanlab_dir": str(self._folder),
            "swanlab_id": self._id,
            "swanlab_to_upload": list(self._to_upload),
        }

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""
        self._swanlab.log(dict(values), step=int(step))

    def show(self, table: Table) -> None:
        """Adds a text, and a table and a picture where what SwanLab needs for them is installed."""
        self._swanlab.log({f"{table.name}/text": self._swanlab.Text(table.text)}, step=table.step)
        with suppress(ImportError):
            chart = self._swanlab.echarts.Table()
            chart.add(list(table.columns), [list(row) for row in table.rows])
            self._swanlab.log({f"{table.name}/figures": chart}, step=table.step)
        if table.cells:
            with suppress(ImportError):
                self._swanlab.log({f"{table.name}/picture": self._swanlab.Image(table.pixels())}, step=table.step)

    def finish(self, end: str, error: str | None) -> None:
        """Closes the run: SwanLab flushes its file only then."""
        if self._swanlab.has_run():
            try:
                self._swanlab.finish(state=end, error=error if end == "crashed" else None)
            except ValueError:
                # finally it restores a signal handler, which only the main thread may do
                if threading.current_thread() is threading.main_thread():
                    raise


def open_sink(setup: Setup, say: Callable[[str], None]) -> SwanlabSink | None:
    """Returns a SwanLab run in the mode of `setup`, else in `offline`, else None.

    The mode is always passed, so SwanLab never prompts. Each failure is one line.
    """
    if setup.mode is SwanLabMode.DISABLED:
        return None
    os.environ["SWANLAB_INTERACTIVE"] = "false"
    try:
        import swanlab  # type: ignore[import-untyped]
    except ImportError:
        raise EnvironmentProblem(
            "monitor: sinks has swanlab, which is not installed", hint="pip install 'swanlab>=0.10,<0.11'"
        ) from None
    run_id = _run_id(setup)
    folder = setup.run_dir / "swanlog"
    for mode in dict.fromkeys((setup.mode, SwanLabMode.OFFLINE)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _init(swanlab, setup, mode, folder, run_id)
            made = sorted(folder.glob(f"run-*{run_id}*"))  # named by time; one per part of a resumed run
            part = made[-1] if made else folder
            to_upload = _note_part(setup, part.name if mode is SwanLabMode.OFFLINE else None)
            return SwanlabSink(swanlab, mode=mode, folder=part, run_id=run_id, to_upload=to_upload)
        except Exception as error:
            rest = (
                "continuing offline"
                if mode is not SwanLabMode.OFFLINE
                else "training continues without it, see metrics.jsonl"
            )
            say(f"SwanLab: {mode} failed to start ({type_and_line(error)}); {rest}")
    return None


def _init(swanlab: Any, setup: Setup, mode: SwanLabMode, folder: Path, run_id: str) -> None:
    if swanlab.has_run():
        swanlab.finish()
    swanlab.init(
        mode=str(mode),
        project=setup.project,
        name=setup.name,
        description=setup.description,
        tags=list(setup.tags),
        log_dir=str(folder),
        config=dict(setup.config),
        id=run_id,
        resume="allow",
        parallel="none",
    )


def _run_id(setup: Setup) -> str:
    """Returns the id of the earlier part of a resumed run, else a new one, which is recorded."""
    known = _record(setup).get("swanlab_id") if setup.is_resumed else None
    if isinstance(known, str) and known:
        return known
    run_id = uuid.uuid4().hex[:21]
    write_atomic(setup.run_dir / RUN_RECORD, json.dumps({"swanlab_id": run_id}) + "\n")
    return run_id


def _note_part(setup: Setup, name: str | None) -> list[str]:
    """Records an offline part; returns the existing folders of all parts."""
    record = _record(setup)
    names = [*record.get("offline", []), *([name] if name else [])]
    write_atomic(setup.run_dir / RUN_RECORD, json.dumps({**record, "offline": names}) + "\n")
    folders = [setup.run_dir / "swanlog" / name for name in names]
    return [str(folder) for folder in folders if folder.is_dir()]


def _record(setup: Setup) -> dict[str, Any]:
    """Returns the record of this run's parts; an empty one if it is missing or damaged."""
    try:
        record = json.loads((setup.run_dir / RUN_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
