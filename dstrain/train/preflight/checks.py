"""Checks a run before its first step, on all ranks, and says what each check found and what it cost."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dstrain.choices import Interval
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.findings import LARGER_DISK, OTHER_FOLDER, too_full
from dstrain.job.schema import HealthRule, Job
from dstrain.monitor.health.history import Facts
from dstrain.monitor.health.rules import Watch
from dstrain.monitor.outcomes import Check, CheckName, Preflight, finite
from dstrain.paths import flush, write_atomic
from dstrain.records import to_json
from dstrain.rundir import RunDir
from dstrain.train.loss import trial
from dstrain.train.memory import numel
from dstrain.train.parts.training import Training
from dstrain.train.preflight import samples
from dstrain.train.preflight.worst_batch import (
    can_discard,
    finiteness,
    heaviest,
    loss_scale,
    num_passes,
    run_worst_batch,
)
from dstrain.train.rank import Rank, of_all_ranks
from dstrain.units import MIB, counted, format_bytes, format_seconds

LIMIT_S, LIMIT_SHARE = 60.0, 0.03
"""Seconds, and the share of the planned run, after which no further check begins; the larger one counts."""
_NUM_EXAMPLES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One check before the first step, which may find several things at once."""

    name: CheckName
    find: Callable[[Checks, Training], Iterable[Check | None]]
    needs: Callable[[Checks, Training], Any] = lambda checks, trainer: True
    """Whether a run has what it judges."""
    passes: Callable[[Training], float] | None = lambda trainer: 0
    """Returns its cost in forward and backward passes of a micro-batch; None: it runs at any cost."""
    repeats: bool = False
    """Whether a run that goes on from a checkpoint repeats it, because it depends on memory."""
    error: Callable[[Training, Check], DstrainError | None] = lambda trainer, check: None
    """Returns the error of a check that has failed, if that ends the run."""


class Checks:
    """The checks of one rank; all ranks run them together."""

    def __init__(
        self,
        *,
        job: Job,
        run_dir: RunDir,
        rank: Rank,
        group: Any,
        tokenizer: Any,
        facts: Facts,
        step_s: float | None,
        checkpoint_bytes: int | None = None,
    ) -> None:
        """`group` is a gloo group of all ranks or None with one; `step_s` are the planned seconds of a step, and
        `checkpoint_bytes` the planned size of a checkpoint, which rank 0 knows if the plan does.
        """
        self.job = job
        self.facts = facts
        self._run_dir = run_dir
        self._rank = rank
        self.group = group
        self._tokenizer = tokenizer
        self._step_s = step_s
        self._checkpoint_bytes = checkpoint_bytes
        self._batches: Any = None
        self._pass_s = 0.0
        self._done: list[Check] = []

    def run(self, trainer: Training, batches: Any) -> None:
        """Checks, prints a line for each check, and writes `preflight.json`. `batches` is the data loader.

        Raises InvalidConfig if a packed row has another loss than its samples, or the model cannot generate the texts
        of the job, and EnvironmentProblem if the first checkpoint cannot be written.
        """
        self.begin(planned_steps=trainer.state.max_steps)
        self._batches = batches
        is_new = trainer.state.global_step == 0
        self._rank.say("checks before the first step (`preflight: false` omits them):")
        try:
            for row in ROWS:
                if (is_new or row.repeats) and row.needs(self, trainer):
                    self.check(row, trainer)
        finally:
            self.write(step=trainer.state.global_step)
        trainer.forget_losses()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the allocator begins the run as it would without checks
        spent, limit = (format_seconds(seconds) for seconds in (time.monotonic() - self._began, self._limit_s))
        self._rank.say(f"the checks took {spent} of at most {limit}")

    def begin(self, *, planned_steps: int) -> float:
        """Starts the clock, and returns the limit of all checks in seconds."""
        self._began = time.monotonic()
        self._limit_s = max(LIMIT_S, LIMIT_SHARE * planned_steps * (self._step_s or 0.0))
        return self._limit_s

    def check(self, row: Row, trainer: Training) -> None:
        """Runs a check, unless it would exceed the limit: rank 0 decides for all.

        Raises on all ranks the error of a check that has failed, if that ends the run.
        """
        before = time.monotonic()
        if row.passes is not None:
            is_late = before - self._began + self._pass_s * row.passes(trainer) > self._limit_s
            if of_all_ranks(is_late, self.group)[0]:
                reason = f"skipped: all checks together would take more than {format_seconds(self._limit_s)}"
                self._note(Check(name=row.name, passed=None, text=reason))
                return
        found = [check for check in row.find(self, trainer) if check is not None]
        spent = round(time.monotonic() - before, 4)
        for check in found:
            # the later ones follow from what the first one measured
            self._note(replace(check, seconds=spent) if check is found[0] else check)
            if not check.passed and (ends := row.error(trainer, check)) is not None:
                raise ends

    def _note(self, check: Check) -> None:
        check = replace(check, figures=finite(check.figures))
        self._done.append(check)
        self._rank.say(check.line)
        for example in check.examples:
            self._rank.log_data(f"    {example}")

    def write(self, *, step: int) -> None:
        """Writes `preflight.json` on rank 0; `step` are the optimizer steps done before."""
        if self._rank.is_first:
            spent = round(time.monotonic() - self._began, 4)
            record = Preflight(step=step, checks=tuple(self._done), seconds=spent, limit_s=self._limit_s)
            with suppress(DstrainError):  # a full disk does not end a run that can train
                write_atomic(self._run_dir.preflight, to_json(record))

    def labels(self, trainer: Training) -> Iterator[Check]:
        """Shows the text that has loss in the first samples."""
        try:
            shown = tuple(samples.examples(trainer.first_rows, self._tokenizer, _NUM_EXAMPLES))
        except Exception as error:  # a tokenizer may be a program of the model's author, which need not decode
            why = f"cannot be shown: {type(error).__name__}: {error}"
            yield Check(name=CheckName.LABELS, passed=False, text=why)
            return
        text = "text between ⟦ and ⟧ has loss, in the first samples"
        passed = all(has_loss for _, has_loss in shown)
        yield Check(name=CheckName.LABELS, passed=passed, text=text, examples=tuple(example for example, _ in shown))

    def gradients(self, trainer: Training) -> Iterator[Check]:
        """Runs the heaviest micro-batch, and judges its memory, its loss and its gradients."""
        before = time.monotonic()
        ranks, worst = run_worst_batch(trainer, self._batches, group=self.group)
        self._pass_s = (time.monotonic() - before) / num_passes(trainer)
        yield worst
        loss = sum(each.loss for each in ranks) / len(ranks)
        is_new, vocab_size = trainer.state.global_step == 0, self.facts.vocab_size
        if is_new and self.facts.is_cross_entropy and vocab_size and math.isfinite(loss):
            yield self._first_loss(loss, vocab_size)
        yield finiteness(ranks, scale=loss_scale(trainer.model_wrapped))

    def _first_loss(self, loss: float, vocab_size: int) -> Check:
        """Compares the loss with a guessing model's, by the health rule `first_loss` and its limits."""
        broken = Watch(self.job.health, self.facts).see(1, {"loss": loss})
        messages = [finding.message for finding in broken if finding.rule == HealthRule.FIRST_LOSS]
        guessing = math.log(vocab_size)
        text = f"{loss:.4g}; a model that guesses has ln({vocab_size:,}) = {guessing:.4g}"
        return Check(
            name=CheckName.FIRST_LOSS,
            passed=not messages,
            text=": ".join([text, *messages]),
            figures={"loss": loss, "guessing": guessing},
        )

    def packing(self, trainer: Training) -> Iterator[Check]:
        """Compares the loss of a packed row with its samples' own."""
        engine: Any = trainer.model_wrapped
        members = samples.some_samples(trainer.first_rows)
        with trial(engine):
            pair = samples.compare_samples(
                trainer.first_rows,
                members,
                batch_of=lambda row: trainer.data_collator([row] * trainer.trial_size()),
                totals_of=lambda batch: trainer.totals(engine, batch),
                group=self.group,
            )
        dtype = engine.module.dtype
        bound = samples.tolerance(dtype, tf32=self.job.tf32)
        yield pair.found(len(members), bound, str(dtype).removeprefix("torch."))

    def evaluation(self, trainer: Training) -> Iterator[Check]:
        """Evaluates the heaviest micro-batch, the same one on all ranks."""
        data: Any = trainer.eval_dataset
        rows = heaviest(data, trainer.args.per_device_eval_batch_size)
        batches = trainer.get_eval_dataloader([data[row] for row in rows for _ in range(trainer.num_shares)])
        with trial(trainer.model_wrapped):
            metrics: Any = trainer.evaluation_loop(batches, "preflight").metrics
        loss, batch = float(metrics["eval_loss"]), trainer.batch
        assert batch is not None
        text = f"{batch.rows} × {batch.tokens_per_row:,} tokens, forward, loss {loss:.4g}"
        yield Check(name=CheckName.EVALUATION, passed=math.isfinite(loss), text=text, figures={"loss": loss})

    def saving(self, trainer: Training) -> Iterator[Check]:
        """Writes and removes a checkpoint."""
        left_s = self._limit_s - (time.monotonic() - self._began)
        yield try_saving(trainer, planned_bytes=self._checkpoint_bytes, left_s=left_s, step_s=self._step_s)


_BLOCK = 8 * MIB
"""Bytes that are written and flushed at once."""
_PROBE_BYTES, _PROBE_S = 64 * MIB, 2.0
"""Bytes and seconds after which a rank has measured its disk."""
_SLOWER = 1.5
"""How much longer a checkpoint may take than its bytes alone, as a bound: tensors are copied and packed on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disk:
    """Facts about the disk that a rank writes to."""

    bytes_per_s: float = 0.0
    """While all ranks write."""
    free_bytes: int = 0
    error: str | None = None
    """Why it cannot be written."""
    is_full: bool = False
    """Whether that is want of room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lack:
    """Space that checkpoints need on a rank's disk, and its free space."""

    rank: int
    needed_bytes: int
    free_bytes: int


def try_saving(trainer: Training, *, planned_bytes: int | None, left_s: float, step_s: float | None) -> Check:
    """Returns whether checkpoints can be written, fit, and how long one takes; all ranks run it together.

    `planned_bytes`: size of a checkpoint, and `step_s`: seconds of a step, of rank 0, if they are planned; `left_s`:
    seconds of rank 0 for a whole checkpoint. A first checkpoint without room ends the run, a later one does not: others
    may make room until then. Raises EnvironmentProblem if a rank cannot write.
    """
    planned, left_s = of_all_ranks((planned_bytes, left_s), trainer.group)[0]
    size = planned or _size(trainer)
    with _scratch(trainer) as folder:
        disks = _probed(trainer, folder, size)
        # a disk that cannot be written ends the run; a full one first gets to say how much is missing
        _refuse([disk for disk in disks if not disk.is_full])
        if (first := _lack(trainer, size, 1, disks)) is not None:
            return _without_room(first)
        _refuse(disks)
        rate = sum(disk.bytes_per_s for disk in disks)
        takes_s = _SLOWER * size / rate
        if can_discard(trainer.model_wrapped) and takes_s <= left_s:
            written, seconds = _saved(trainer, folder)
            save_s = seconds * max(1.0, size / written)
            text = f"a checkpoint of {format_bytes(written)} was written and removed in {format_seconds(seconds)}"
            if size > 1.1 * written and not trainer.job.save_only_model:
                text += f"; with the states of the optimizer {format_bytes(size)}, about {format_seconds(save_s)}"
        else:
            written, save_s = 0, size / rate
            why = "which is too long to try" if takes_s > left_s else "untried: the optimizer's states are on NVMe"
            ranks, rate_text = counted(len(disks), "rank"), f"{format_bytes(round(rate))}/s"
            text = f"{ranks} wrote {rate_text}: a checkpoint of {format_bytes(size)} takes "
            text += f"at least {format_seconds(save_s)}, {why}"
    count = _num_saves(trainer)
    figures = {"written_bytes": float(written), "checkpoint_bytes": float(size), "save_s": save_s, "bytes_per_s": rate}
    text += _share(count, save_s, trainer.state.max_steps * (step_s or 0.0))
    limit = trainer.job.save_total_limit
    # the oldest checkpoint goes when the next one is complete
    most = count if limit is None else min(count, limit + 1 + trainer.job.keeps_best)
    lack = _lack(trainer, size, most, disks)
    if lack is not None:
        text += f"; but {_says(lack, f'{most} checkpoints that exist at once take')}: lower save_total_limit"
    return Check(name=CheckName.SAVING, passed=lack is None, text=text, figures=figures)


def _share(count: int, save_s: float, run_s: float) -> str:
    """Returns the share of all checkpoints in a run of `run_s` seconds, if it is known and above a hundredth.

    >>> _share(10, 30.0, 5000.0)
    '; all 10 take 6 % of the run'
    >>> _share(10, 30.0, 0.0)
    ''
    """
    share = count * save_s / (run_s + count * save_s) if run_s else 0.0
    return f"; all {count} take {share:.0%} of the run".replace("%", " %") if share > 0.01 else ""


def _lack(trainer: Training, size: int, count: int, disks: list[_Disk]) -> _Lack | None:
    """Returns the shortage if `count` checkpoints of `size` do not fit on a disk; a disk apart has its ranks' part.

    Of several disks that where the most is missing, the same on all ranks.
    """
    needed = count * size * len(trainer.disk.ranks) // len(disks)
    own = _Lack(rank=trainer.rank.index, needed_bytes=needed, free_bytes=disks[trainer.rank.index].free_bytes)
    least = max(of_all_ranks(own, trainer.group), key=lambda lack: lack.needed_bytes - lack.free_bytes)
    return least if least.needed_bytes > least.free_bytes else None


def _without_room(lack: _Lack) -> Check:
    """Returns that the first checkpoint does not fit."""
    figures = {"checkpoint_bytes": float(lack.needed_bytes), "free_bytes": float(lack.free_bytes)}
    return Check(name=CheckName.SAVING, passed=False, text=_says(lack, "one checkpoint takes"), figures=figures)


def _says(lack: _Lack, what_takes: str) -> str:
    return too_full(what_takes, lack.needed_bytes, lack.free_bytes, f"on the disk of rank {lack.rank}")


def no_room(trainer: Training, check: Check) -> EnvironmentProblem | None:
    """Returns the error of a first checkpoint that does not fit; None if only later ones do not."""
    if "free_bytes" not in check.figures:
        return None
    missing = int(check.figures["checkpoint_bytes"] - check.figures["free_bytes"])  # type: ignore[operator]
    smaller = "" if trainer.job.save_only_model else "save_only_model: true leaves out the optimizer's states, or "
    hint = f"{LARGER_DISK} ({format_bytes(missing)} are missing), or "
    hint += f"change the job: {smaller}preflight: false omits this check."
    return EnvironmentProblem(f"no checkpoint can be written to {trainer.run_dir.path}: {check.text}", hint=hint)


def _num_saves(trainer: Training) -> int:
    """Returns the number of checkpoints of the run; Transformers writes one after its last step, too."""
    if trainer.job.save_strategy is Interval.EPOCH:
        return max(1, math.ceil(float(trainer.state.num_train_epochs)))
    return math.ceil(int(trainer.state.max_steps) / max(1, int(trainer.state.save_steps)))


def _size(trainer: Training) -> int:
    """Returns the bytes of a checkpoint without a plan: at most 4 for each parameter that is saved, and 14 for one that
    trains: its master copy, two states, and the weight in DeepSpeed's files. The base of an adapter is not saved."""
    every = [(numel(each), each.requires_grad) for each in trainer.model_wrapped.parameters()]
    trained = sum(count for count, is_trained in every if is_trained)
    saved = trained if trainer.is_adapter else sum(count for count, _ in every)
    return 4 * saved + (0 if trainer.job.save_only_model else 14 * trained)


@contextmanager
def _scratch(trainer: Training) -> Iterator[Path]:
    """Yields an empty folder of the run directory, which is gone afterwards."""
    folder = trainer.run_dir.save_trial
    is_first = trainer.rank.index == trainer.disk.ranks[0]
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
    try:
        trainer.wait()
        yield folder
        trainer.wait()
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _probed(trainer: Training, folder: Path, size: int) -> list[_Disk]:
    """Returns the disk of each rank, measured while all of them write."""
    most = min(_PROBE_BYTES, max(MIB, size // trainer.rank.world_size))
    disks: list[_Disk] = of_all_ranks(_written(folder, trainer.rank.index, most), trainer.group)
    return disks


def _refuse(disks: list[_Disk]) -> None:
    """Raises EnvironmentProblem if a rank cannot write."""
    trouble = next((disk.error for disk in disks if disk.error), None)
    if trouble is not None:
        raise EnvironmentProblem(f"no checkpoint can be written: {trouble}", hint=OTHER_FOLDER)


def _written(folder: Path, index: int, most: int) -> _Disk:
    """Writes a file of at most so many bytes, flushes and removes it, and returns what that says of the disk."""
    path, block, count, free = folder / f"probe-{index}", os.urandom(min(_BLOCK, most)), 0, 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        began = time.monotonic()
        with path.open("wb", buffering=0) as file:
            while count < most and time.monotonic() - began < _PROBE_S:
                count += file.write(block)
                os.fsync(file.fileno())
        seconds = time.monotonic() - began
        path.unlink()
        return _Disk(bytes_per_s=count / max(seconds, 1e-6), free_bytes=shutil.disk_usage(folder).free)
    except OSError as error:
        why = f"rank {index}: {folder}: {error.strerror or error}"
        return _Disk(free_bytes=free, error=why, is_full=error.errno == errno.ENOSPC)


def _saved(trainer: Training, folder: Path) -> tuple[int, float]:
    """Writes the contents of a checkpoint, and returns its bytes and seconds, the longest of all ranks.

    Raises EnvironmentProblem on the rank that the system refuses.
    """
    began = time.monotonic()
    try:
        trainer.write_parts(str(folder))
        if trainer.rank.local_index == 0:
            flush(folder)
    except OSError as error:
        raise EnvironmentProblem(f"no checkpoint can be written: {error}", hint=OTHER_FOLDER) from error
    seconds = max(of_all_ranks(time.monotonic() - began, trainer.group))
    is_first = trainer.rank.index == trainer.disk.ranks[0]
    files = folder.rglob("*") if is_first else ()
    sizes: list[Any] = of_all_ranks(sum(file.stat().st_size for file in files if file.is_file()), trainer.group)
    return max(1, sum(sizes)), seconds


# fmt: off
ROWS = (
    Row(CheckName.LABELS, Checks.labels),
    Row(CheckName.WORST_BATCH, Checks.gradients, passes=None, repeats=True),  # its cost is at most one step
    Row(CheckName.TEMPLATE, lambda c, t: [samples.compare_template(t, vocab_size=c.facts.vocab_size)],
        needs=lambda c, t: samples.has_choice(c.job),
        passes=lambda t: 2 * samples.MOST_CONVERSATIONS / 3),  # a forward pass is a third of both
    Row(CheckName.PACKING, Checks.packing, needs=lambda c, t: samples.some_samples(t.first_rows),
        passes=lambda t: (1 + len(samples.some_samples(t.first_rows))) / 3,
        error=lambda t, check: InvalidConfig(f"packing: {check.text}", hint="packing: false")),
    Row(CheckName.EVALUATION, Checks.evaluation, needs=lambda c, t: t.eval_dataset is not None, passes=lambda t: 1,
        repeats=True),
    Row(CheckName.GENERATION, lambda c, t: [samples.try_generation(t, each, c.group) for each in samples.samples_of(t)],
        needs=lambda c, t: samples.samples_of(t), passes=lambda t: 1, repeats=True,
        error=lambda t, check: InvalidConfig(check.text, hint="Remove samples from the job.")),
    Row(CheckName.SAVING, Checks.saving, error=no_room),
)
"""The checks before the first step, in this order."""
# fmt: on
