"""The program of every rank: `deepspeed --no_local_rank --module dstrain.train RUN_DIR`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.heartbeat import SAVE_ON_TERM, Phase, Sender
from dstrain.job.schema import Job
from dstrain.monitor.metrics import without_nonfinite
from dstrain.monitor.mode import decide_mode, has_login
from dstrain.monitor.run_card import run_card, without_secrets
from dstrain.monitor.signals import leave_on_sigterm
from dstrain.monitor.sinks.jsonl import JsonlFile
from dstrain.monitor.sinks.registry import Guarded, open_sinks
from dstrain.monitor.sinks.sink import End, Setup
from dstrain.paths import write_atomic
from dstrain.plan.estimate_records import Estimate
from dstrain.records import from_data, load_json, to_data
from dstrain.rundir import RunDir
from dstrain.train import rank as ranks
from dstrain.train.checkpoints.checkpoints import Resume, choose
from dstrain.train.checkpoints.node_storage import number_of, start_of
from dstrain.train.rank import Leaving, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the run directory says."""

    run_dir: RunDir
    """Where it says it."""
    job: Job
    ds_config: dict[str, Any]
    """The DeepSpeed configuration."""
    model: ModelFacts | None
    """Facts about the model; without them there is no MFU."""
    cluster: Cluster | None
    """Facts about the machines."""


def read(run_dir: RunDir) -> Given:
    """Returns what the run directory says. Raises InvalidConfig for what is missing or damaged."""
    job = dataclasses.replace(load_json(Job, run_dir.request), output_dir=str(run_dir.path))
    if job.data is None:
        raise InvalidConfig(f'{run_dir.request}: "data" is missing: nothing to train on')
    facts = _json(run_dir.facts) if run_dir.facts.exists() else {}

    def fact(kind: Any, name: str) -> Any:
        if facts.get(name) is None:
            return None
        return from_data(
            kind, facts[name], locate=lambda place: f"{run_dir.facts}: /{name}/{'/'.join(map(str, place))}"
        )

    return Given(
        run_dir=run_dir,
        job=job,
        ds_config=_json(run_dir.ds_config),
        model=fact(ModelFacts, "model"),
        cluster=fact(Cluster, "cluster"),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig(f"{path}: no such file", hint="dstrain run makes a run directory.") from None
    except ValueError as error:
        raise InvalidConfig(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise InvalidConfig(f"{path}: is not a JSON object")
    return found


def _sinks(given: Given, rank: Rank, resume: Resume | None) -> list[Guarded]:
    """Returns the opened sinks of rank 0; none on the other ranks."""
    if not rank.is_first:
        return []
    job = given.job
    found = run_card(
        job,
        given.ds_config,
        num_ranks=rank.world_size,
        model=given.model,
        cluster=given.cluster,
        estimate=_planned(given.run_dir),
    )
    asked = {name: value for name, value in to_data(job).items() if name != "env"}  # people put secrets there
    config = {**found.config, "job": asked, "ds_config": given.ds_config, "ranks": rank.world_size}
    setup = Setup(
        project=job.monitor.project,
        name=found.name,
        description=found.description,
        tags=found.tags,
        mode=decide_mode(job.monitor.mode, os.environ, logged_in=has_login(Path.home())),
        run_dir=given.run_dir.path,
        config=without_secrets(config | _edits(given.run_dir)),
        is_resumed=resume is not None,
    )
    return open_sinks(job.monitor.sinks, setup, rank.say)


def _planned(run_dir: RunDir) -> Estimate | None:
    """Returns what was predicted of the run; None where nothing was, or it cannot be read."""
    with suppress(DstrainError, OSError):
        return load_json(Estimate, run_dir.plan)
    return None


def _edits(run_dir: RunDir) -> dict[str, Any]:
    """Returns what was edited by hand, as the sinks have it: by file and key; nothing where that is not known."""
    try:
        edits = json.loads(run_dir.edits.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for each in edits:
        values = {name: each[name] for name in ("base", "yours") if name in each}
        found.setdefault(each["file"], {})[each["key"]] = values
    return {"edits": found}


def main(run_dir: Path) -> None:
    """Trains as the run directory says, and leaves metrics, checkpoints, the final model and a summary in it."""
    rank = ranks.from_environment(os.environ)
    place = RunDir(run_dir.resolve())
    ranks.environment_with(ranks.read_secrets(place.secrets))
    ranks.prefer_expandable_segments(os.environ)
    leaving, heartbeat = Leaving(), Sender(os.environ, rank.index)
    heartbeat.send(0, Phase.START)
    given = read(place)
    is_apart = number_of(place, os.environ) is not None
    resume = choose(place, given.job.resume, world_size=rank.world_size, is_apart=is_apart)
    if given.job.resume == "auto" and not start_of(os.environ):  # `dstrain run` has said it
        for problem in place.newest_checkpoint().skipped:
            rank.say(f"warning: {problem}: skipped")
    if resume is not None:
        rank.say(f"going on from {resume.checkpoint.name}")
    sinks = _sinks(given, rank, resume)

    def finish(end: End, error: str | None = None) -> None:
        for sink in sinks:
            sink.finish(end, error)

    if SAVE_ON_TERM not in os.environ:
        leave_on_sigterm(lambda: finish(End.ABORTED))
    try:
        has_left = _train(given, rank, resume, sinks, heartbeat, leaving)
    except KeyboardInterrupt:
        finish(End.ABORTED)
        raise
    except DstrainError as error:
        finish(End.CRASHED, str(error))
        raise
    except BaseException as error:
        traceback.print_exc()  # first of all: while the sinks end, another rank's failure may have this one ended
        sys.stderr.flush()
        finish(End.CRASHED, f"{type(error).__name__}: {error}")
        raise AlreadyReported from error
    finish(End.ABORTED if has_left else End.SUCCESS)


class AlreadyReported(Exception):
    """An error whose traceback has been printed."""


def _train(
    given: Given, rank: Rank, resume: Resume | None, sinks: Sequence[Guarded], heartbeat: Sender, leaving: Leaving
) -> bool:
    """Trains, with everything slow to import; returns whether it left early, with a checkpoint, as it was asked to."""
    from dstrain.train.checkpoints.save_and_exit import LeavingCallback
    from dstrain.train.setup import TrainingSetup

    started = time.monotonic()
    session = TrainingSetup.prepare(
        given.job, given.ds_config, given.run_dir, rank, heartbeat, model=given.model, cluster=given.cluster
    )
    if resume is not None and resume.data not in (None, session.train_data.digest):
        rank.say(
            f"warning: {resume.checkpoint.name} was trained on other samples, or in another order: the data, their "
            f"chat template, seq_len, packing or seed have changed; going on at step {resume.step} of the new order"
        )
    trainer = session.trainer(sinks, heartbeat)
    callback = LeavingCallback(leaving, heartbeat, session.group)
    trainer.add_callback(callback)
    if rank.is_first and resume is not None:
        JsonlFile(given.run_dir.metrics).append({"event": "resume", "from_step": resume.step})
    trainer.train(resume_from_checkpoint=str(resume.checkpoint) if resume else None)
    if callback.has_left:
        rank.say(f"saved checkpoint-{trainer.state.global_step} and left, as asked")
        heartbeat.send(trainer.state.global_step, Phase.LEFT)
        return True
    heartbeat.send(trainer.state.global_step, Phase.BUSY)  # what follows has no steps
    if session.has_eval and not session.was_evaluated(trainer):
        trainer.evaluate()
    final = trainer.save_final()
    if rank.is_first:
        facts = {name: value for sink in sinks for name, value in sink.sink.facts.items()}
        summary = session.summary(trainer) | {
            "seconds": round(time.monotonic() - started, 3),
            "final": str(final) if final else None,
            **facts,
        }
        write_atomic(given.run_dir.summary, json.dumps(without_nonfinite(summary), indent=2) + "\n")
        rank.say(f"done: {final or given.run_dir.path}")
    heartbeat.send(trainer.state.global_step, Phase.DONE)
    return False


_ERROR_SAID = ".dstrain-error-said"
"""File by which rank 0 tells the others of its node that the error has been said."""


def _exit_with(error: DstrainError, run_dir: Path, rank: Rank) -> int:
    """Says a problem once for all ranks and returns the exit code; what only other ranks have is said too."""
    said = run_dir / _ERROR_SAID
    if rank.is_first:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):
            said.write_text(f"{error}\n", encoding="utf-8")
        return error.exit_code
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if said.exists():
            return error.exit_code
        time.sleep(0.1)
    print(f"Error on rank {rank.index}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code of one rank."""
    if len(arguments) != 1:
        print("usage: python -m dstrain.train RUN_DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    is_mpi = ranks.adopt_mpi(os.environ)
    rank = ranks.from_environment(os.environ)
    if is_mpi:
        ranks.write_to_log(RunDir(folder).logs, rank.index)
    if rank.is_first:
        (folder / _ERROR_SAID).unlink(missing_ok=True)
    try:
        main(folder)
    except DstrainError as error:
        return _exit_with(error, folder, rank)
    except AlreadyReported:
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    exit_code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. Tearing the interpreter down with process groups alive aborts about once in twenty runs.
    os._exit(exit_code)
