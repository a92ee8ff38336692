"""Explains a run that ran out of GPU memory: measured and predicted memory, and changes that fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dstrain.config import jsonc
from dstrain.config.remedy import remedy
from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.workload import Workload
from dstrain.launch.prepare.lint_job import read_text
from dstrain.launch.prepare.prepare import PreparedRun
from dstrain.oom import Allocator, NamedTensors, OutOfMemory, Part, PartBytes, Phase, Predicted, ProposedChange
from dstrain.paths import write_atomic
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.deepspeed.engine import peak_tensors
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.layers.attention import as_attended
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.zero import sharing_ranks
from dstrain.plan.search.out_of_memory import Shortage, evaluated_at_once, fixes, shortage
from dstrain.records import load_json, to_data, to_json
from dstrain.rundir import RUN, RunDir, line_of, read_record
from dstrain.units import GIB, counted, format_bytes

_UNEXPLAINED_BYTES = GIB
"""Memory outside of PyTorch and beyond the plan's that is worth a word: another process, or a context."""

NUM_LARGEST = 8
"""Predicted tensors that are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a run ran out of memory, and what would fit."""

    run_dir: RunDir
    evidence: tuple[str, ...]
    """Lines of the report."""
    others_bytes: int
    """GPU memory of other programs, if it exceeds the error of the plan; else 0."""
    record: OutOfMemory
    """The contents of `oom.json`."""

    def hint(self, *, resumes: bool, command: Sequence[str] = RUN) -> list[str]:
        """Returns the lines that say what to type, given the words that start the run."""
        lines = []
        if self.others_bytes:
            lines.append(
                f"Other programs hold {format_bytes(self.others_bytes)} of the GPU: end them (`nvidia-smi` lists them),"
                " or name free GPUs in CUDA_VISIBLE_DEVICES."
            )
        if not self.record.fixes:
            return lines
        lines += ["Changes that fit, by the plan and by what was measured:"]
        for number, one in enumerate(self.record.fixes, 1):
            lines += [f"  {number}. {one.text}", f"     {one.typed(resumes=resumes, command=line_of(command))}"]
        if self.record.fixes[0].keeps_batch:
            lines.append(f"`{line_of(command, '--on-oom', 'adapt')}` takes the first by itself.")
        return lines


def diagnose(prepared: PreparedRun) -> Diagnosis | None:
    """Returns why the last start ran out of GPU memory, and completes `oom.json`; None if it did not."""
    run_dir = prepared.run_dir
    try:
        record = load_json(OutOfMemory, run_dir.oom)
    except DstrainError:  # no rank wrote one, or not to its end
        return None
    estimate, measured = prepared.estimate, record.measured
    short, workload = None, prepared.workload
    if workload is not None and estimate is not None and measured is not None:
        short = shortage(workload, estimate, record.phase, measured)
    remedies: tuple[ProposedChange, ...] = ()
    if workload is not None and estimate is not None and short is not None:
        with suppress(DstrainError):  # ds_config.json was removed or damaged meanwhile; the report comes first
            remedies = _remedies(prepared, workload, estimate, short)
    evidence = [f"Out of GPU memory: {record.where}"]
    evidence += [f"  measured: {measured.words}"] if measured is not None else []
    if workload is not None and estimate is not None and short is not None:
        evidence.append(_planned(estimate, short))
    predicted = None if estimate is None else _predicted(workload, estimate)
    record = replace(
        record,
        predicted=predicted,
        ledger=() if predicted is None else tuple(_ledger(predicted.parts, record)),
        fixes=remedies,
    )
    with suppress(DstrainError):  # a full disk: the report says the same
        write_atomic(run_dir.oom, to_json(record))
    others = _held_by_others(workload, estimate, measured) if workload and estimate and measured else 0
    return Diagnosis(run_dir=run_dir, evidence=tuple(evidence), others_bytes=others, record=record)


def _remedies(
    prepared: PreparedRun, workload: Workload, estimate: Estimate, short: Shortage
) -> tuple[ProposedChange, ...]:
    """Returns changes that fit, with what to type; those that a checkpoint survives, if there is one."""
    job = prepared.job
    if short.phase is Phase.EVALUATION:
        size = evaluated_at_once(short, estimate, job.eval_micro_batch or job.micro_batch)
        if size is None:
            return ()
        words = f"{counted(size, 'row')} evaluated at once"
        return (ProposedChange(change=words, set=(f"eval_micro_batch={size}",)),)
    written = jsonc.read(read_text(Path(job.ds_config)), job.ds_config).value
    moe = workload.model.moe if job.ep == 1 else None  # AutoEP has blocks of its own
    stages = _stages(prepared.run_dir)
    found = fixes(workload, estimate, short, stages=stages)
    if workload.cluster.gpu_origin is Origin.ASSUMED:  # its memory was measured, its speed was not
        found = tuple(replace(fix, step_ratio=None) for fix in found)
    return tuple(
        remedy(fix, estimate.configuration, written, moe_block=moe.block_class if moe else None) for fix in found
    )


def _stages(run_dir: RunDir) -> tuple[int, ...]:
    """Returns the stages under which the newest checkpoint can be loaded; all of them without one."""
    newest = run_dir.newest_checkpoint(for_resume=True).folder
    stage = read_record(newest)["zero_stage"] if newest is not None else None
    return (0, 1, 2, 3) if stage is None else (1, 2) if stage in (1, 2) else (stage,)


def _planned(estimate: Estimate, short: Shortage) -> str:
    """Returns the plan's figures, to stand below the measured ones."""
    parts = estimate.memory.breakdown_bytes
    largest = sorted(((getattr(parts, field.name), field.name) for field in fields(parts)), reverse=True)[:4]
    named = ", ".join(f"{name} {format_bytes(count)}" for count, name in largest if count)
    at_peak = "" if short.phase is Phase.LOAD else f" ({named})"
    excess = f"; at least {format_bytes(short.excess_bytes)} more were needed" if short.excess_bytes else ""
    return f"  planned: {format_bytes(short.predicted_bytes)} in PyTorch{at_peak}{excess}"


def _held_by_others(workload: Workload, estimate: Estimate, measured: Allocator) -> int:
    """Returns the bytes outside of PyTorch beyond the plan's, if they are more than it can be off by; else 0."""
    if workload.cluster.gpu.is_cpu:
        return 0
    expected = outside_bytes(workload.cluster, estimate.configuration, workload.measured)
    held = measured.device_bytes - measured.limit_bytes - expected
    return held if held > _UNEXPLAINED_BYTES else 0


def _predicted(workload: Workload | None, estimate: Estimate) -> Predicted:
    memory, configuration = estimate.memory, estimate.configuration
    largest: Sequence[NamedTensors] = ()
    if workload is not None and has_layer_code(workload.model):
        largest = peak_tensors(
            workload.model,
            as_attended(configuration, workload.cluster.gpu),
            sharing_ranks(workload.cluster, configuration),
            kernel_workspaces=not workload.cluster.gpu.is_cpu,
        )
    return Predicted(
        device_bytes_per_gpu=memory.device_bytes_per_gpu,
        live_bytes_per_gpu=memory.live_bytes_per_gpu,
        reserved_bytes_per_gpu=memory.reserved_bytes_per_gpu,
        peak_instant=memory.peak_instant,
        parts=to_data(memory.breakdown_bytes),
        largest=tuple(largest[:NUM_LARGEST]),
    )


def _ledger(planned: Mapping[str, int], record: OutOfMemory) -> Iterator[PartBytes]:
    """Yields each part as predicted and as measured: states counted on the rank, all else by difference."""
    held, states = record.measured, record.states
    if held is None:
        return
    counted = None if states is None else (states.params, states.grads, states.optimizer)
    rest = None if counted is None else max(0, held.allocated_bytes - sum(counted))
    other = sum(planned[name] for name in ("activations", "logits", "buffers", "workspace"))
    params, grads, optimizer = counted or (None, None, None)
    for part, predicted, measured in (
        (Part.PARAMS, planned["params"] + planned["gathered"], params),
        (Part.GRADS, planned["grads"], grads),
        (Part.OPTIMIZER, planned["optimizer"], optimizer),
        (Part.OTHER, other, rest),
        (Part.CACHED, planned["fragmentation"], held.reserved_bytes - held.allocated_bytes),
        (Part.OUTSIDE, planned["context"], max(0, held.device_bytes - held.limit_bytes)),
    ):
        yield PartBytes(part=part, predicted_bytes=predicted, measured_bytes=measured)


def note_adaptation(diagnosis: Diagnosis, chosen: ProposedChange, *, attempt: int) -> None:
    """Appends a line to `adaptations.jsonl`: a change that a run makes by itself, and the failure of that start."""
    line = {"attempt": attempt, **to_data(chosen), "oom": to_data(diagnosis.record)}
    with suppress(OSError), diagnosis.run_dir.adaptations.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
