"""Compares `dstrain tune` with an exhaustive search over 24 configurations on two CPU ranks: regret, and share of time.

Regret is by how much a step of the configuration that tune leaves in the files is slower than one of the fastest of all
24. Both are measured again in turn at the end, since the fastest of 24 noisy measurements looks faster than it is.

    python -m benchmarks.tune [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from dstrain.cli.output import tune
from dstrain.cli.verbs import run
from dstrain.config.edits.other_choices import job_files, with_choices
from dstrain.config.remedy import Adaptation
from dstrain.facts.workload import measured_workload
from dstrain.launch.run.trial import Limits, Trial, run_trial, title_of
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.paths import python
from dstrain.plan.configuration import Configuration, changed
from dstrain.plan.estimate import assess
from dstrain.rundir import RunDir

STEPS = 20
QUESTION = ("--gpus", "2", "--gpu", "cpu", "--seq-len", "128", "--global-batch", "8", "--packing", "--no-torch-compile")
POINTS = tuple(product((0, 1, 2, 3), (False, True), (1, 2, 4)))
"""ZeRO stage, checkpointing, micro-batch; the accumulation keeps eight samples in a step."""
ROUNDS = 3
"""How often the two are measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One of the points, measured to its end."""

    title: str
    configuration: Configuration
    trial: Trial


def make_job(folder: Path) -> None:
    """Makes the demo's model and data, and the job that gen-config writes for them."""
    subprocess.run(python("-m", "dstrain.train.demo", str(folder)), check=True, capture_output=True)
    words = ["gen-config", "--model", "./model", "--data", "train.jsonl", *QUESTION]
    subprocess.run(python("-m", "dstrain.cli", *words), check=True, capture_output=True, cwd=folder)


def tuned(folder: Path) -> tuple[dict[str, Any], float]:
    """Returns the output of `dstrain tune` in a folder, and its seconds."""
    began = time.monotonic()
    words = ["tune", "--no-doctor", "--json", "--steps", str(STEPS)]
    done = subprocess.run(
        python("-m", "dstrain.cli", *words), check=True, stdout=subprocess.PIPE, cwd=folder, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found, time.monotonic() - began


def measure(points: Sequence[tuple[int, bool, int]], folder: Path) -> Iterator[Measured]:
    """Runs each point to its end, in a folder of its own."""
    options = tune.Options(job=Path("job.yaml"), steps=STEPS)
    present = run.launch_of(tune.run_options(options), None).prepared
    assert present.model is not None
    assert present.estimate is not None
    files, workload = (
        job_files(options.job, Path(present.job.ds_config)),
        measured_workload(present.model, present.cluster),
    )
    for stage, is_on, micro_batch in points:
        choices = {"zero_stage": stage, "grad_ckpt": is_on, "micro_batch": micro_batch, "grad_accum": 4 // micro_batch}
        estimate = assess(workload, changed(present.estimate.configuration, **choices))
        chosen = with_choices(files, estimate, workload)
        adaptation = Adaptation(overrides=chosen.overrides, changes=chosen.changes)
        launch = tune.launch_at(options, estimate, RunDir(folder), adaptation)
        limits = Limits(steps=STEPS, until=float("inf"))
        trial = run_trial(launch, limits, timeouts=TIMEOUTS, tell=lambda phase, done, total: None)
        print(f"{title_of(estimate.configuration):<45} {trial.step_s:.3f} s a step, {trial.seconds:.0f} s", flush=True)
        yield Measured(title=title_of(estimate.configuration), configuration=estimate.configuration, trial=trial)


def point(one: Configuration) -> tuple[int, bool, int]:
    """Returns a configuration as a point."""
    return one.zero.stage, one.checkpointing.enabled, one.batch.micro_batch


def compare(folder: Path) -> dict[str, Any]:
    """Returns both searches, and the two configurations measured again in turn."""
    before = {name: (folder / name).read_text() for name in ("job.yaml", "ds_config.json", ".dstrain/lock.json")}
    found, tune_s = tuned(folder)
    for name, text in before.items():
        (folder / name).write_text(text)
    began = time.monotonic()
    everything = list(measure(POINTS, folder / "all"))
    all_s = time.monotonic() - began
    best = min(everything, key=lambda one: one.trial.step_s or float("inf"))
    chosen = next(one for one in everything if one.title == found["winner"])
    pairs = [(chosen.trial.step_s, best.trial.step_s)]
    if chosen is not best:
        again = [point(one.configuration) for one in (chosen, best)]
        pairs = [
            tuple(one.trial.step_s for one in measure(again, folder / f"again{number}"))  # type: ignore[misc]
            for number in range(ROUNDS)
        ]
    first = (chosen.trial.step_s or 0.0) / (best.trial.step_s or 1.0) - 1
    return {
        "winner": found["winner"],
        "best": best.title,
        "regret": first,
        "regret_again": median((one or 0.0) / (other or 1.0) for one, other in pairs) - 1,
        "tune_s": tune_s,
        "all_s": all_s,
        "error_ratio": median(one.trial.measured.error_ratio for one in everything if one.trial.measured),
        "load": os.getloadavg()[2],
        "points": {one.title: one.trial.step_s for one in everything},
        "tune": found,
    }


def table(result: dict[str, Any]) -> str:
    """Returns the comparison for people."""
    times = sorted(result["points"].values())
    return "\n".join(
        (
            "| | |",
            "|---|---|",
            f"| tune leaves | {result['winner']} |",
            f"| fastest of {len(times)} | {result['best']} |",
            f"| steps, fastest to slowest | {times[0]:.3f} s to {times[-1]:.3f} s |",
            f"| standard error of a median | {100 * result['error_ratio']:.1f} % |",
            f"| regret in the exhaustive search | {100 * result['regret']:.1f} % |",
            f"| regret, both measured again {ROUNDS} times in turn | {100 * result['regret_again']:.1f} % |",
            f"| time | {result['tune_s']:.0f} s of {result['all_s']:.0f} s: {result['tune_s'] / result['all_s']:.2f} |",
            f"| load of the machine (15 min) | {result['load']:.1f} on {os.cpu_count()} cores |",
        )
    )


def main() -> None:
    """Runs the comparison, prints the table and writes `tune.json` into the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="An empty folder; default: a temporary one.")
    asked = parser.parse_args().folder
    folder = (asked or Path(tempfile.mkdtemp(prefix="tune-"))).resolve()
    make_job(folder)
    with chdir(folder):
        result = compare(folder)
    (folder / "tune.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
