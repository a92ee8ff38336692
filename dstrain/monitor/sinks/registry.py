"""The table of sinks besides `metrics.jsonl`, and a guard that keeps their errors away from training."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from dstrain.errors import DstrainError, InvalidConfig, did_you_mean, not_installed, type_and_line
from dstrain.monitor.sinks import swanlab
from dstrain.monitor.sinks.sink import REPORT, End, Opener, Say, Setup, Sink, Table


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
        """Adds a text, which has the table, and a picture if Pillow is installed."""
        self._writer.add_text(table.name, table.text, table.step)
        if table.cells:
            with suppress(ImportError):
                self._writer.add_image(table.name, table.pixels(), table.step, dataformats="HWC")

    def finish(self, end: str, error: str | None) -> None:
        """Closes the file."""
        self._writer.close()


def open_tensorboard(setup: Setup, say: Callable[[str], None]) -> TensorboardSink:
    """Returns a writer into `tensorboard/` of the run directory, in a folder with the run's name."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise not_installed("monitor: sinks has", "tensorboard", install="pip install 'dstrain[tensorboard]'") from None
    folder = str(setup.run_dir / "tensorboard")
    name = re.sub(r"[^\w.-]+", "-", setup.name).strip(".-") or "run"
    return TensorboardSink(SummaryWriter(f"{folder}/{name}"), folder)


class WandbSink:
    """One W&B run."""

    def __init__(self, run: Any) -> None:
        """`run` is an active run."""
        self._run = run

    @property
    def place(self) -> str:
        """Where to find the curves."""
        return f"W&B: {getattr(self._run, 'url', None) or 'offline, ' + str(self._run.dir)}"

    @property
    def facts(self) -> Mapping[str, str]:
        """The folder."""
        return {"wandb_dir": str(self._run.dir)}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""
        self._run.log(dict(values), step=step)

    def show(self, table: Table) -> None:
        """Adds a table, its picture, and a report to the notes, which W&B shows as Markdown."""
        import wandb  # type: ignore[import-not-found, unused-ignore]

        rows = wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        shown: dict[str, Any] = {table.name: rows}
        if table.cells:
            with suppress(ImportError):  # it needs Pillow
                shown[f"{table.name}_picture"] = wandb.Image(table.pixels())
        self._run.log(shown, step=table.step)
        if table.name == REPORT:
            self._run.notes = "\n\n".join(filter(None, (self._run.notes, table.text)))

    def finish(self, end: str, error: str | None) -> None:
        """Uploads the rest and closes the run."""
        self._run.finish(exit_code=0 if end == "success" else 1)


def open_wandb(setup: Setup, say: Callable[[str], None]) -> WandbSink:
    """Returns a run: online with `WANDB_API_KEY`, offline without."""
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise not_installed("monitor: sinks has", "wandb", install="pip install 'dstrain[wandb]'") from None
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    run = wandb.init(
        project=setup.project,
        name=setup.name,
        notes=setup.description,
        tags=list(setup.tags),
        dir=str(setup.run_dir),
        config=dict(setup.config),
        mode=mode,
        settings=wandb.Settings(console="wrap"),  # "redirect" would upload samples that only the log may have
    )
    return WandbSink(run)


SINKS: Mapping[str, Opener] = MappingProxyType(
    {
        "swanlab": swanlab.open_sink,
        "tensorboard": open_tensorboard,
        "wandb": open_wandb,
    }
)
"""Name in `monitor: sinks` → the function that opens the sink."""


class Guarded:
    """A sink whose first failure is reported, and no failure reaches training."""

    def __init__(self, name: str, sink: Sink, say: Say) -> None:
        """`name` is for messages."""
        self.name = name
        self.sink = sink
        self._say = say
        self._has_failed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve, unless the sink has failed before."""
        self._try("log", lambda: self.sink.log(values, step))

    def show(self, table: Table) -> None:
        """Adds the report of the run, or generated texts."""
        self._try(table.name, lambda: self.sink.show(table))

    def finish(self, end: End, error: str | None = None) -> None:
        """Flushes and closes the sink."""
        self._try("finish", lambda: self.sink.finish(str(end), error))

    def _try(self, what: str, act: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            act()
        except Exception as error:
            self._has_failed = True
            why = f"{what} failed ({type_and_line(error)})"
            self._say(f"{self.name}: {why}; training continues without it, see metrics.jsonl")


def open_sinks(names: Sequence[str], setup: Setup, say: Say) -> list[Guarded]:
    """Returns the opened sinks; failures to open are reported.

    Raises InvalidConfig for an unknown sink, and DstrainError for problems that the user must fix (a missing package),
    before anything slow starts.
    """
    unknown = [name for name in names if name not in SINKS]
    if unknown:
        raise InvalidConfig(f'monitor: sinks has "{unknown[0]}"', hint=did_you_mean(unknown[0], list(SINKS)))
    opened = []
    for name in dict.fromkeys(names):
        try:
            sink = SINKS[name](setup, say)
        except DstrainError:
            raise
        except Exception as error:
            why = f"failed to start ({type_and_line(error)})"
            say(f"{name}: {why}; training continues without it, see metrics.jsonl")
            continue
        if sink is not None:
            say(sink.place)
            opened.append(Guarded(name, sink, say))
    return opened
