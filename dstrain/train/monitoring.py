"""Opens what watches a run on rank 0, and closes it with a report."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dstrain.monitor.mode import decide_mode, has_login
from dstrain.monitor.sinks.registry import Guarded, open_sinks
from dstrain.monitor.sinks.sink import End, Setup
from dstrain.records import to_data
from dstrain.rundir import RunDir
from dstrain.train.rank import Rank
from dstrain.train.run_inputs import Inputs

if TYPE_CHECKING:
    from dstrain.monitor.verdict import FirstSteps


class Monitoring(NamedTuple):
    """What watches a run, on rank 0."""

    sinks: Sequence[Guarded]
    first_steps: FirstSteps | None

    def finish(self, inputs: Inputs, end: End, error: str | None) -> None:
        """Closes the sinks, with the report of a run that was not stopped: that leaves seconds."""
        if self.first_steps is not None and end is not End.ABORTED:
            from dstrain.monitor.end_report import report_to  # loads the planner

            report_to(self.sinks, inputs.run_dir, inputs.cluster, estimate=self.first_steps.estimate, how=str(end))
        for sink in self.sinks:
            sink.finish(end, error)


def monitoring_of(inputs: Inputs, rank: Rank, *, is_resumed: bool) -> Monitoring:
    """Returns what watches a run: on rank 0 the opened sinks, on the others nothing."""
    if not rank.is_first:
        return Monitoring([], None)
    first_steps = _first_steps(inputs)
    return Monitoring(_sinks(inputs, rank, first_steps, is_resumed=is_resumed), first_steps)


def _first_steps(inputs: Inputs) -> FirstSteps:
    """Returns what compares the first steps with the plan."""
    from dstrain.monitor.verdict import FirstSteps  # loads the planner, which the other ranks do not need

    facts: dict[str, Any] = {"model": inputs.model, "cluster": inputs.cluster}
    return FirstSteps(run_dir=inputs.run_dir, job=inputs.job, ds_config=inputs.ds_config, **facts)


def _sinks(inputs: Inputs, rank: Rank, first_steps: FirstSteps, *, is_resumed: bool) -> list[Guarded]:
    """Returns the opened sinks of rank 0."""
    from dstrain.monitor.run_card import filterable, run_card, without_secrets  # loads the planner

    job = inputs.job
    card = run_card(
        job,
        inputs.ds_config,
        num_ranks=rank.world_size,
        model=inputs.model,
        cluster=inputs.cluster,
        estimate=first_steps.estimate,
    )
    job_data = {name: value for name, value in to_data(job).items() if name != "env"}  # env may hold secrets
    config = {**card.config, "job": job_data, "ds_config": inputs.ds_config, "ranks": rank.world_size}
    setup = Setup(
        project=job.monitor.project,
        name=card.name,
        description=card.description,
        tags=card.tags,
        mode=decide_mode(job.monitor.mode, os.environ, logged_in=has_login(Path.home())),
        run_dir=inputs.run_dir.path,
        config=filterable(without_secrets(config | _edits(inputs.run_dir))),
        is_resumed=is_resumed,
    )
    return open_sinks(job.monitor.sinks, setup, rank.say)


def _edits(run_dir: RunDir) -> dict[str, Any]:
    """Returns the hand edits by file and key, for the sinks; nothing if they are not known."""
    try:
        edits = json.loads(run_dir.edits.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    by_file: dict[str, Any] = {}
    for edit in edits:
        values = {name: edit[name] for name in ("base", "yours") if name in edit}
        by_file.setdefault(edit["file"], {})[edit["key"]] = values
    return {"edits": by_file}
