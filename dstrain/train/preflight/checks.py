"""Checks a run before its first step, on all ranks, and says what each check found and what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.job.monitor import HealthRule
from dstrain.job.schema import Job
from dstrain.monitor.health.history import Facts
from dstrain.monitor.health.watch import Watch
from dstrain.paths import write_atomic
from dstrain.preflight import Check, CheckName, Preflight
from dstrain.records import to_json
from dstrain.rundir import RunDir
from dstrain.train.data.packing import PackedRows
from dstrain.train.loss import trial
from dstrain.train.preflight import packed_loss, template
from dstrain.train.preflight.found import Found
from dstrain.train.preflight.generation import samples_of, try_generation
from dstrain.train.preflight.labels import examples
from dstrain.train.preflight.saving import try_saving
from dstrain.train.preflight.worst_batch import finiteness, heaviest, loss_scale, num_passes, run_worst_batch
from dstrain.train.rank import Rank, of_all_ranks
from dstrain.train.training import Training
from dstrain.units import format_seconds

LIMIT_S, LIMIT_SHARE = 60.0, 0.03
"""Seconds, and the share of the planned run, after which no further check begins; the larger one counts."""
_NUM_EXAMPLES = 2


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
        self._job = job
        self._run_dir = run_dir
        self._rank = rank
        self._group = group
        self._tokenizer = tokenizer
        self._facts = facts
        self._step_s = step_s
        self._checkpoint_bytes = checkpoint_bytes
        self._done: list[Check] = []

    def run(self, trainer: Training, batches: Any) -> None:
        """Checks, prints a line for each check, and writes `preflight.json`. `batches` is the data loader.

        A run that goes on from a checkpoint repeats those that depend on memory. The heaviest micro-batch always runs;
        its cost is at most one step. Raises InvalidConfig if a packed row has another loss than its samples, or
        the model cannot generate the texts of the job, and EnvironmentProblem if the first checkpoint cannot be
        written.
        """
        self.begin(planned_steps=trainer.state.max_steps)
        is_new = trainer.state.global_step == 0
        self._rank.say("checks before the first step (`preflight: false` omits them):")
        try:
            if is_new:
                self.check(CheckName.LABELS, lambda: self._labels(trainer))
            self._gradients(trainer, batches, is_new=is_new)
            if is_new and template.has_choice(self._job):
                self._template(trainer)
            if is_new and isinstance(trainer.first_rows, PackedRows):
                self._packing(trainer)
            if trainer.eval_dataset is not None:
                self.check(CheckName.EVALUATION, lambda: self._evaluation(trainer), cost_s=self._pass_s)
            if (samples := samples_of(trainer)) is not None:
                work = partial(try_generation, trainer, samples, self._group)
                self.check(CheckName.GENERATION, work, cost_s=self._pass_s)
            if is_new:
                self.check(CheckName.SAVING, lambda: self._saving(trainer))
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

    def check(self, name: CheckName, work: Callable[[], Found | None], *, cost_s: float = 0.0) -> Found | None:
        """Runs a check, unless it would exceed the limit: rank 0 decides for all. Returns what it found, if it did.

        Raises the error of a finding that ends the run, on all ranks.
        """
        before = time.monotonic()
        is_late = before - self._began + cost_s > self._limit_s
        if of_all_ranks(is_late, self._group)[0]:
            reason = f"skipped: all checks together would take more than {format_seconds(self._limit_s)}"
            self._note(Check(name=name, passed=None, text=reason))
            return None
        found = work()
        if found is not None:
            self._note(found.check(name, time.monotonic() - before))
            if found.ends is not None:
                raise found.ends
        return found

    def _note(self, check: Check) -> None:
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

    def _labels(self, trainer: Training) -> Found:
        try:
            shown = tuple(examples(trainer.first_rows, self._tokenizer, _NUM_EXAMPLES))
        except Exception as error:  # a tokenizer may be a program of the model's author, which need not decode
            return Found(passed=False, text=f"cannot be shown: {type(error).__name__}: {error}")
        text = "text between ⟦ and ⟧ has loss, in the first samples"
        passed = all(has_loss for _, has_loss in shown)
        return Found(passed=passed, text=text, examples=tuple(example for example, _ in shown))

    def _gradients(self, trainer: Training, batches: Any, *, is_new: bool) -> None:
        """Notes the worst batch, and the first loss and gradients, which come from its passes."""
        before = time.monotonic()
        ranks, found = run_worst_batch(trainer, batches, group=self._group)
        seconds = time.monotonic() - before
        self._pass_s = seconds / num_passes(trainer)
        self._note(found.check(CheckName.WORST_BATCH, seconds))
        loss = sum(each.loss for each in ranks) / len(ranks)
        if is_new and self._facts.is_cross_entropy and self._facts.vocab_size and math.isfinite(loss):
            self._note(self._first_loss(loss, self._facts.vocab_size).check(CheckName.FIRST_LOSS, 0.0))
        gradients = finiteness(ranks, scale=loss_scale(trainer.model_wrapped))
        self._note(gradients.check(CheckName.GRADIENTS, 0.0))

    def _first_loss(self, loss: float, vocab_size: int) -> Found:
        """Compares the loss with a guessing model's, by the health rule `first_loss` and its limits."""
        broken = Watch(self._job.health, self._facts).see(1, {"loss": loss})
        messages = [finding.message for finding in broken if finding.rule == HealthRule.FIRST_LOSS]
        guessing = math.log(vocab_size)
        text = f"{loss:.4g}; a model that guesses has ln({vocab_size:,}) = {guessing:.4g}"
        return Found(
            passed=not messages, text=": ".join([text, *messages]), figures={"loss": loss, "guessing": guessing}
        )

    def _template(self, trainer: Training) -> None:
        """Notes whether the model knows the job's chat template as well as its own."""
        cost_s = self._pass_s * 2 * template.MOST_CONVERSATIONS / 3  # a forward pass is a third of both
        self.check(
            CheckName.TEMPLATE, lambda: template.compare(trainer, vocab_size=self._facts.vocab_size), cost_s=cost_s
        )

    def _packing(self, trainer: Training) -> None:
        """Notes whether a packed row has the loss of its samples. Raises InvalidConfig if it has not."""
        data = trainer.first_rows
        members = packed_loss.some_samples(data)
        if members is None:
            return
        cost_s = self._pass_s * (1 + len(members)) / 3  # a forward pass is a third of both
        found = self.check(CheckName.PACKING, lambda: self._packed(trainer, data, members), cost_s=cost_s)
        if found is not None and not found.passed:
            raise InvalidConfig(f"packing: {found.text}", hint="packing: false")

    def _packed(self, trainer: Training, data: PackedRows, members: list[int]) -> Found:
        engine: Any = trainer.model_wrapped
        with trial(engine):
            pair = packed_loss.compare(
                data,
                members,
                batch_of=lambda row: trainer.data_collator([row] * trainer.trial_size()),
                totals_of=lambda batch: trainer.totals(engine, batch),
                group=self._group,
            )
        dtype = engine.module.dtype
        bound = packed_loss.tolerance(dtype, tf32=self._job.tf32)
        return pair.found(len(members), bound, str(dtype).removeprefix("torch."))

    def _saving(self, trainer: Training) -> Found:
        left_s = self._limit_s - (time.monotonic() - self._began)
        return try_saving(trainer, planned_bytes=self._checkpoint_bytes, left_s=left_s, step_s=self._step_s)

    def _evaluation(self, trainer: Training) -> Found:
        """Evaluates the heaviest micro-batch, the same one on all ranks."""
        data: Any = trainer.eval_dataset
        rows = heaviest(data, trainer.args.per_device_eval_batch_size)
        batches = trainer.get_eval_dataloader([data[row] for row in rows for _ in range(trainer.num_shares)])
        with trial(trainer.model_wrapped):
            metrics: Any = trainer.evaluation_loop(batches, "preflight").metrics
        loss, batch = float(metrics["eval_loss"]), trainer.batch
        assert batch is not None
        text = f"{batch.rows} × {batch.tokens_per_row:,} tokens, forward, loss {loss:.4g}"
        return Found(passed=math.isfinite(loss), text=text, figures={"loss": loss})
