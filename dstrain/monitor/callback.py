"""Measures every logging window on every rank, and sends the metrics to the sinks (a Transformers callback)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.job.schema import HealthAction
from dstrain.monitor.health import nonfinite
from dstrain.monitor.health.nonfinite import Finding, check
from dstrain.monitor.health.rules import Watch
from dstrain.monitor.meter import ExpertLoads, Meter
from dstrain.monitor.metrics import Hardware, JsonlFile, Reading, current_steps, points, read_jsonl, scalars, summarize
from dstrain.monitor.outcomes import GeneratedText, table
from dstrain.monitor.sinks.registry import Guarded
from dstrain.monitor.sinks.sink import Say
from dstrain.monitor.traffic import communication
from dstrain.monitor.windows import START
from dstrain.rundir import RunDir

if TYPE_CHECKING:
    from dstrain.monitor.verdict import FirstSteps  # loads the planner, which rank 0 alone needs


class MetricsCallback(TrainerCallback):
    """Runs on every rank; gathers over a gloo group at logging steps only, and writes on rank 0."""

    def __init__(
        self,
        meter: Meter,
        *,
        group: Any,
        against: Hardware | None,
        metrics: JsonlFile | None,
        health: JsonlFile | None,
        watch: Watch,
        first_steps: FirstSteps | None = None,
        sinks: Sequence[Guarded],
        say: Say,
        experts: ExpertLoads | None = None,
    ) -> None:
        """`group` is a gloo group of all ranks; only rank 0 has files, `first_steps` and `sinks`, and sees `watch`."""
        self._expected = first_steps.link_seconds if first_steps is not None else None
        self.meter = meter
        self._experts = experts
        self._group = group
        self._against = against
        self._metrics = metrics
        self._health = health
        self._watch = watch
        self._first_steps = first_steps
        # only then must ranks agree on an action after each window, which takes a broadcast
        self._acts = any(limits.action is not HealthAction.TELL for limits in watch.limits.values())
        self._must_stop = False
        self._stop: Finding | None = None
        self._sinks = sinks
        self._say = say
        self._last_step = 0
        self._began = self._saved_at = 0.0
        self._saved: dict[str, float] = {}
        self._has_failed = False
        self._unhealthy: set[str] = set()
        self._window: dict[str, Any] = {}
        self.last_loss: float | None = None
        self.eval_loss: float | None = None
        self.peak_bytes: float | None = None
        self.total_tokens = 0
        self._tokens_before = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the first window."""
        self._last_step = state.global_step
        self._began = self._saved_at = time.monotonic()
        if self._metrics is not None:
            records = read_jsonl(self._metrics.path)
            earlier = current_steps(records)
            if records and records[-1].get("event") == "resume":
                repeats = records[-1].get("ranks") == records[-1].get("from_ranks")
                self._watch.history.resume(current_steps(records[:-1]), step=state.global_step, repeats=repeats)
            self._tokens_before = next((int(line["tokens_seen"]) for line in earlier[::-1] if "tokens_seen" in line), 0)
        self._first_step = state.global_step
        self.meter.restart()
        if self._experts is not None:
            self._experts.restart()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the step of the meter."""
        self.meter.end_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Gathers the readings of all ranks if this step is logged, as the last one always is."""
        control.should_log = control.should_log or state.global_step >= state.max_steps
        if not control.should_log:
            return
        steps, self._last_step = state.global_step - self._last_step, state.global_step
        reading = self.meter.close()
        # one gather for both: a second one would be another round trip of all ranks
        rows = self._gather([*reading.numbers(), *self.meter.traffic.numbers()])
        fields = Reading.__slots__
        readings = [Reading(**dict(zip(fields, row, strict=False))) for row in rows]
        self._window = summarize(readings, steps=steps, against=self._against)
        traffic = [row[len(fields) :] for row in rows]
        step_s = self._window["step_s"]
        self._window |= communication(self.meter.traffic, traffic, steps=steps, step_s=step_s, expected=self._expected)
        if self._experts is not None:
            self._window |= self._experts.close()
        self.total_tokens += self._window["tokens"]
        self._window["tokens_seen"] = self._tokens_before + self.total_tokens
        self._window |= self._saved
        self._saved = {}
        peak = self._window.get("peak_bytes_per_gpu")
        if peak is not None:
            self.peak_bytes = max(self.peak_bytes or 0, peak)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the load of each expert, on rank 0: with each checkpoint, since there are thousands of them."""
        record = self._experts.record(self._last_step) if self._experts is not None else None
        if self._metrics is not None and record is not None:
            self._write(self._metrics, {"time_s": round(time.time(), 3), **record})

    on_train_end = on_save

    def saved(self, seconds: float) -> None:
        """Takes the time of a checkpoint, for the next window."""
        now = time.monotonic()
        self._saved = {"checkpoint_s": seconds, "checkpoint_share": seconds / (now - self._saved_at)}
        self._saved_at = now

    def tell(self, findings: Sequence[Finding]) -> None:
        """Writes findings to `health.jsonl` and prints them, on rank 0."""
        for finding in findings:
            if self._health is not None:
                self._write(self._health, {**asdict(finding), "time_s": round(time.time(), 3)})
                self._say(f"WARNING: {finding.message}")

    def show(self, file: JsonlFile, texts: Sequence[GeneratedText]) -> None:
        """Writes generated texts to a file, and shows them in the sinks; on rank 0."""
        began = time.monotonic()
        for text in texts:
            self._write(file, asdict(text))
        for sink in self._sinks:
            sink.show(table(texts))
        self.meter.pause(time.monotonic() - began)

    def drain(self) -> dict[str, Any]:
        """Returns the metrics of the window that is being logged, and clears them."""
        window, self._window = self._window, {}
        return window

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        """Returns the numbers of every rank."""
        if self._group is None:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, mine, group=self._group)
        return [row.tolist() for row in gathered]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes one step to `metrics.jsonl` and the sinks, prints a progress line, and saves if a health rule asks."""
        if not logs or "train_runtime" in logs:
            return
        began = time.monotonic()
        action = self._report(state, logs)
        self.meter.pause(time.monotonic() - began)
        if self._acts:
            action = self._agreed(action)
        control.should_save = control.should_save or action is not HealthAction.TELL
        # raised at the next step: the checkpoint that the rule asks for is written in between
        self._must_stop = self._must_stop or action is HealthAction.STOP

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the run after the checkpoint, if a health rule with `action: stop` is broken. Raises RunFailed."""
        if self._must_stop:
            run_dir = None if self._metrics is None else RunDir(self._metrics.path.parent)
            raise nonfinite.error_of(self._stop, run_dir, state.global_step)

    def _agreed(self, action: HealthAction) -> HealthAction:
        """Returns rank 0's action, on all ranks."""
        if self._group is None:
            return action
        order = list(HealthAction)
        index = torch.tensor([order.index(action)])
        dist.broadcast(index, src=0, group=self._group)
        return order[int(index)]

    def _report(self, state: TrainerState, logs: dict[str, Any]) -> HealthAction:
        """Writes and prints a step on rank 0, and returns what health rules ask for."""
        if self._metrics is None:
            return HealthAction.TELL
        step = int(state.global_step)
        self._write(self._metrics, {"step": step, START: self._first_step, "time_s": round(time.time(), 3), **logs})
        self._remember(logs)
        findings = self._findings(step, logs)
        self._stop = next((finding for finding in findings if finding.action is HealthAction.STOP), self._stop)
        for sink in self._sinks:
            sink.log(points(scalars(logs)), step)
        self._say(self._line(step, state, logs))
        self._judge(self._metrics, step, logs)
        actions = (finding.action for finding in findings)
        return max(actions, key=list(HealthAction).index, default=HealthAction.TELL)

    def _judge(self, metrics: JsonlFile, step: int, logs: dict[str, Any]) -> None:
        """Compares the first steps of this start with the plan, once: prints the verdict and writes it."""
        if self._first_steps is None:
            return
        try:
            verdict = self._first_steps.see(
                {"step": step, START: self._first_step, **logs}, steps=step - self._first_step
            )
        except Exception as error:  # the planner searches there; it must not end training
            self._say(f"not compared with the plan ({type(error).__name__}: {error}); training continues")
            self._first_steps = None
            return
        if verdict is not None:
            self._write(metrics, {"time_s": round(time.time(), 3), **verdict.to_data()})
            self._say("\n".join(verdict.lines(self._first_steps.record.cluster)))

    def _findings(self, step: int, logs: dict[str, Any]) -> list[Finding]:
        """Writes findings to `health.jsonl`, and prints those that are new since the last window."""
        nonfinite, broken = check(step, logs), self._watch.see(step, logs)
        for finding in (*nonfinite, *broken):
            if self._health is not None:
                self._write(self._health, {**asdict(finding), "time_s": round(time.time(), 3)})
            if finding.rule not in self._unhealthy:
                self._say(f"WARNING: {finding.message}")
        self._unhealthy = {finding.rule for finding in nonfinite}
        return [*nonfinite, *broken]

    def _write(self, file: JsonlFile, record: dict[str, Any]) -> None:
        """Appends a line; a full disk is reported once and does not end training."""
        try:
            file.append(record)
        except OSError as error:
            if not self._has_failed:
                self._say(f"{file.path} cannot be written ({error.strerror or error}); training continues")
            self._has_failed = True

    def _remember(self, logs: dict[str, Any]) -> None:
        if "loss" in logs:
            self.last_loss = logs["loss"]
        self.eval_loss = logs.get("eval_loss", self.eval_loss)

    def _line(self, step: int, state: TrainerState, logs: dict[str, Any]) -> str:
        parts = [f"step {step}/{state.max_steps}"]
        for name, form in _PROGRESS.items():
            if isinstance(logs.get(name), int | float):
                parts.append(form(logs[name]))
        done = step - self._first_step
        if "loss" in logs and done and step < state.max_steps:
            left = (time.monotonic() - self._began) / done * (state.max_steps - step)
            parts.append(f"{_clock(left)} left")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_PROGRESS: dict[str, Callable[[float], str]] = {
    "loss": lambda v: f"loss {v:.4f}",
    "eval_loss": lambda v: f"evaluation loss {v:.4f}",
    "rewards/accuracies": lambda v: f"accuracy {v:.0%}",
    "eval_rewards/accuracies": lambda v: f"evaluation accuracy {v:.0%}",
    "grad_norm": lambda v: f"gradient norm {v:.3g}",
    "learning_rate": lambda v: f"learning rate {v:.2e}",
    "tokens_per_s": lambda v: f"{v:,.0f} tokens/s",
    "mfu": lambda v: f"MFU {v:.0%}",
    "data_wait_share": lambda v: f"waiting for data {v:.0%}" if v >= 0.05 and math.isfinite(v) else "data on time",
    "peak_bytes_per_gpu": lambda v: f"peak {v / 2**30:.1f} GiB",
}
"""Metric → its text in the progress line."""
