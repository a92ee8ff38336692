"""The program of every rank: `deepspeed --no_local_rank --module dstrain.train RUN_DIR`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dstrain.errors import DstrainError
from dstrain.garbage import without_garbage_collection
from dstrain.heartbeat import SAVE_ON_TERM, Phase, Sender
from dstrain.monitor.metrics import JsonlFile, without_nonfinite
from dstrain.monitor.sinks.registry import Guarded, open_sinks
from dstrain.monitor.sinks.sink import End, Setup, decide_mode, has_login
from dstrain.paths import ignore_empty, prefer_own_programs, write_atomic
from dstrain.records import to_data
from dstrain.rundir import RunDir
from dstrain.train import rank as ranks
from dstrain.train.checkpoints.checkpoints import Resume, Verification, choose, number_of, start_of
from dstrain.train.rank import Inputs, Leaving, Rank, leave_on_sigterm, read

if TYPE_CHECKING:
    from dstrain.monitor.verdict import FirstSteps


class Monitoring(NamedTuple):
    """Sinks and comparison with the plan, on rank 0."""

    sinks: Sequence[Guarded]
    first_steps: FirstSteps | None

    def finish(self, inputs: Inputs, end: End, error: str | None) -> None:
        """Closes the sinks, with the report of a run that was not stopped: that leaves seconds."""
        if self.first_steps is not None and end is not End.ABORTED:
            from dstrain.monitor.end_report import report_to  # loads the planner

            report_to(self.sinks, inputs.run_dir, how=str(end))
        for sink in self.sinks:
            sink.finish(end, error)


def monitoring_of(inputs: Inputs, rank: Rank, *, is_resumed: bool) -> Monitoring:
    """Opens the sinks of a run on rank 0; other ranks have none."""
    if not rank.is_first:
        return Monitoring([], None)
    from dstrain.monitor.run_record import read
    from dstrain.monitor.verdict import FirstSteps  # loads the planner, which the other ranks do not need

    first_steps = FirstSteps(record=read(inputs.run_dir))
    return Monitoring(_sinks(inputs, rank, first_steps, is_resumed=is_resumed), first_steps)


def _sinks(inputs: Inputs, rank: Rank, first_steps: FirstSteps, *, is_resumed: bool) -> list[Guarded]:
    """Returns the opened sinks of rank 0."""
    from dstrain.monitor.end_report import filterable, run_card, without_secrets  # loads the planner

    job = inputs.job
    card = run_card(
        job,
        inputs.ds_config,
        num_ranks=rank.world_size,
        model=inputs.model,
        cluster=inputs.cluster,
        estimate=first_steps.record.estimate,
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


def main(run_dir: Path) -> None:
    """Trains with the inputs in a run directory; writes metrics, checkpoints, the final model and a summary to it."""
    rank = ranks.from_environment(os.environ)
    place = RunDir(run_dir.resolve())
    ranks.environment_with(ranks.read_secrets(place.secrets))
    ranks.prefer_expandable_segments(os.environ)
    prefer_own_programs(os.environ)  # mpirun over ssh gives a rank the PATH of a login
    leaving, heartbeat = Leaving(), Sender(os.environ, rank.index)
    heartbeat.send(0, Phase.START)
    inputs = read(place)
    resume, verification = _chosen(inputs, rank, heartbeat)
    monitoring = monitoring_of(inputs, rank, is_resumed=resume is not None)

    def finish(end: End, error: str | None = None) -> None:
        monitoring.finish(inputs, end, error)

    if SAVE_ON_TERM not in os.environ:
        leave_on_sigterm(lambda: finish(End.ABORTED))
    try:
        has_left = _train(inputs, rank, resume, monitoring, heartbeat, leaving)
    except KeyboardInterrupt:
        finish(End.ABORTED)
        raise
    except DstrainError as error:
        finish(End.CRASHED, str(error))
        raise
    except BaseException as error:
        if verification is not None:
            verification.note_failed_load(error)
        _report(error, place, rank)  # before the sinks finish: the agent may kill this rank meanwhile
        finish(End.CRASHED, f"{type(error).__name__}: {error}")
        raise AlreadyReported from error
    finish(End.ABORTED if has_left else End.SUCCESS)
    leaving.settle()


def _chosen(inputs: Inputs, rank: Rank, heartbeat: Sender) -> tuple[Resume | None, Verification | None]:
    """Returns the checkpoint to resume from, if any, with its verification, which is done."""
    place, wanted = inputs.run_dir, inputs.job.resume
    is_apart = number_of(place, os.environ) is not None
    resume = choose(place, wanted, world_size=rank.world_size, is_apart=is_apart)
    if wanted == "auto" and not start_of(os.environ):  # otherwise `dstrain run` has warned already
        for problem in place.newest_checkpoint(for_resume=True).skipped:
            rank.say(f"warning: {problem}: skipped")
    if resume is None:
        return None, None
    rank.say(f"resuming from {resume.checkpoint.name}")
    verification = Verification(resume, place, rank, os.environ)
    verification.run(heartbeat)
    heartbeat.send(0, Phase.START)
    return resume, verification


def _report(error: BaseException, run_dir: RunDir, rank: Rank) -> None:
    """Prints a traceback, and writes `oom.json` if an allocation failed; before torch is imported, none can."""
    traceback.print_exception(error)
    sys.stderr.flush()
    if "dstrain.train.setup" in sys.modules:
        from dstrain.train import memory

        try:
            memory.record(error, run_dir, rank.index)
        except Exception:  # of a structure of the engine that is unknown; the sinks must finish all the same
            traceback.print_exc()


class AlreadyReported(Exception):
    """An error whose traceback has been printed."""


def _train(
    inputs: Inputs, rank: Rank, resume: Resume | None, monitoring: Monitoring, heartbeat: Sender, leaving: Leaving
) -> bool:
    """Imports everything slow and trains; returns whether it saved a checkpoint and left early, as requested."""
    with without_garbage_collection():
        from dstrain.train.parts.saving import LeavingCallback
        from dstrain.train.setup import TrainingSetup

    started = time.monotonic()
    setup = TrainingSetup.prepare(inputs, rank, heartbeat)
    # said, not refused: whoever has added samples wants to go on
    if resume is not None and resume.data not in (None, setup.data.train.digest):
        where = "at the beginning" if inputs.job.streaming else f"at step {resume.step}"
        rank.say(
            f"warning: {resume.checkpoint.name} was trained on different samples or in a different order (data, chat "
            f"template, seq_len, packing or seed changed); continuing {where} of the new order"
        )
    trainer = setup.trainer(monitoring.sinks, heartbeat, monitoring.first_steps)
    callback = LeavingCallback(leaving, heartbeat, setup.group)
    trainer.add_callback(callback)
    if rank.is_first and resume is not None:
        JsonlFile(inputs.run_dir.metrics).append(resume.event(rank.world_size))
    trainer.train(resume_from_checkpoint=str(resume.checkpoint) if resume else None)
    if callback.has_left:
        rank.say(f"saved checkpoint-{trainer.state.global_step} and left, as asked")
        heartbeat.send(trainer.state.global_step, Phase.LEFT)
        return True
    heartbeat.send(trainer.state.global_step, Phase.BUSY)  # from here on there are no steps
    trainer.watch.require_usable(setup.final_eval_loss(trainer))
    final = trainer.saver.save_final()
    if rank.is_first:
        summary = setup.summary(trainer)
        summary |= {"seconds": round(time.monotonic() - started, 3), "final": str(final) if final else None}
        for sink in monitoring.sinks:
            summary |= sink.sink.facts
        write_atomic(inputs.run_dir.summary, json.dumps(without_nonfinite(summary), indent=2) + "\n")
        rank.say(f"done: {final or inputs.run_dir.path}")
    heartbeat.send(trainer.state.global_step, Phase.DONE)
    return False


_ERROR_SAID = ".dstrain-error-said"
"""File by which rank 0 tells the other ranks of its node that it has printed the error."""


def _exit_with(error: DstrainError, run_dir: Path, rank: Rank) -> int:
    """Prints an error once for all ranks, or once per rank if rank 0 has none, and returns the exit code."""
    marker = run_dir / _ERROR_SAID
    if rank.is_first:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):
            marker.write_text(f"{error}\n", encoding="utf-8")
        return error.exit_code
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if marker.exists():
            return error.exit_code
        time.sleep(0.1)
    print(f"Error on rank {rank.index}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def run(arguments: Sequence[str]) -> int:
    """Runs one rank and returns its exit code."""
    if len(arguments) != 1:
        print("usage: python -m dstrain.train RUN_DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    ignore_empty(os.environ)
    rank = ranks.from_environment(os.environ)
    if rank.is_first:
        (folder / _ERROR_SAID).unlink(missing_ok=True)
    if rank.local_index == 0:  # each node may have a disk of its own
        for path in (RunDir(folder).oom, RunDir(folder).preflight):
            path.unlink(missing_ok=True)
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
    # All files are written. Shutting the interpreter down with live process groups aborts in one of twenty runs.
    os._exit(exit_code)
