"""Checks a run before its first step, on all ranks, and says what each check found and what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.job.monitor import HealthRule
from dstrain.job.schema import Job
from dstrain.monitor.health.history import Facts
from dstrain.monitor.health.rules import Watch
from dstrain.monitor.outcomes import Check, CheckName, Preflight, finite
from dstrain.paths import write_atomic
from dstrain.records import to_json
from dstrain.rundir import RunDir
from dstrain.train.loss import trial
from dstrain.train.parts.training import Training
from dstrain.train.preflight import samples
from dstrain.train.preflight.saving import no_room, try_saving
from dstrain.train.preflight.worst_batch import finiteness, heaviest, loss_scale, num_passes, run_worst_batch
from dstrain.train.rank import Rank, of_all_ranks
from dstrain.units import format_seconds

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
