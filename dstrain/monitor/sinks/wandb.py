"""The Weights & Biases sink."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dstrain.errors import EnvironmentProblem
from dstrain.monitor.sinks.sink import REPORT

if TYPE_CHECKING:
    from dstrain.monitor.sinks.sink import Setup, Table


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


def open_sink(setup: Setup, say: Callable[[str], None]) -> WandbSink:
    """Returns a run: online with `WANDB_API_KEY`, offline without."""
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise EnvironmentProblem(
            "monitor: sinks has wandb, which is not installed", hint="pip install 'dstrain[wandb]'"
        ) from None
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
