"""The TensorBoard sink: event files in the run directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dstrain.errors import EnvironmentProblem

if TYPE_CHECKING:
    from dstrain.monitor.sinks.sink import Setup, Table


class TensorboardSink:
    """One writer of event files."""

    def __init__(self, writer: Any, folder: str) -> None:
        """`folder` is for messages."""
        self._writer = writer
        self._folder = folder

    @property
    def place(self) -> str:
        """How to view the curves."""
        return f"TensorBoard: tensorboard --logdir {self._folder}"

    @property
    def facts(self) -> Mapping[str, str]:
        """The folder."""
        return {"tensorboard_dir": self._folder}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def show(self, table: Table) -> None:
        """Adds a text, which has the table, and a picture where Pillow is installed."""
        self._writer.add_text(table.name, table.text, table.step)
        if table.cells:
            with suppress(ImportError):
                self._writer.add_image(table.name, table.pixels(), table.step, dataformats="HWC")

    def finish(self, end: str, error: str | None) -> None:
        """Closes the file."""
        self._writer.close()


def open_sink(setup: Setup, say: Callable[[str], None]) -> TensorboardSink:
    """Returns a writer into `tensorboard/` of the run directory, in a folder with the run's name."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise EnvironmentProblem(
            "monitor: sinks has tensorboard, which is not installed", hint="pip install 'dstrain[tensorboard]'"
        ) from None
    folder = str(setup.run_dir / "tensorboard")
    name = re.sub(r"[^\w.-]+", "-", setup.name).strip(".-") or "run"
    return TensorboardSink(SummaryWriter(f"{folder}/{name}"), folder)
