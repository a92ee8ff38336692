"""The files of a run directory that every rank reads."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.schema import Job
from dstrain.records import from_data, load_json
from dstrain.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files of a run directory that a rank reads."""

    run_dir: RunDir
    job: Job
    ds_config: dict[str, Any]
    model: ModelFacts | None
    """None: no MFU is computed."""
    cluster: Cluster | None


def read(run_dir: RunDir) -> Inputs:
    """Returns the inputs of a run. Raises InvalidConfig if a file is missing or damaged."""
    job = dataclasses.replace(load_json(Job, run_dir.request), output_dir=str(run_dir.path))
    if not job.train_sources:
        raise InvalidConfig(f'{run_dir.request}: "data" is missing')
    facts = _json(run_dir.facts) if run_dir.facts.exists() else {}

    def fact(kind: Any, name: str) -> Any:
        if facts.get(name) is None:
            return None
        return from_data(
            kind, facts[name], locate=lambda place: f"{run_dir.facts}: /{name}/{'/'.join(map(str, place))}"
        )

    return Inputs(
        run_dir=run_dir,
        job=job,
        ds_config=_json(run_dir.ds_config),
        model=fact(ModelFacts, "model"),
        cluster=fact(Cluster, "cluster"),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig(f"{path}: no such file", hint="Create the run directory with `dstrain run`.") from None
    except ValueError as error:
        raise InvalidConfig(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise InvalidConfig(f"{path}: not a JSON object")
    return data
