"""Writes other choices of the planner into the files of a job, and keeps everything else that stands there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dstrain.config.edits import edit
from dstrain.config.edits.lock import LOCK, Lock, backups, read_lock, standing, write_files
from dstrain.config.edits.regenerate import Decision, Regenerated, Standing, edits_in, merge, regenerate
from dstrain.config.files import config_values, template_of
from dstrain.config.jsonc import Change, dotted
from dstrain.config.resolve_auto import BATCH_KEYS
from dstrain.config.templates import render_json, template_hash
from dstrain.errors import Conflict
from dstrain.facts.workload import Workload
from dstrain.job.schema import Job
from dstrain.paths import alone, write_together
from dstrain.plan.configuration import DEFAULTS, Configuration, choices, flat
from dstrain.plan.estimate_records import Estimate, Plan
from dstrain.plan.search.search_space import global_batch

JOB, CONFIG = "job.yaml", "ds_config.json"
_TUNED = {name: choice for name, choice in choices().items() if choice.is_tuned}
_OF_JOB = tuple(name for name, choice in _TUNED.items() if not choice.is_of_zero)
"""Choices that the job file holds; ds_config.json holds ZeRO's."""
_STRATEGY = frozenset(key.split(".")[1] for choice in _TUNED.values() for key in choice.keys)
"""Keys of `zero_optimization` that decide how ZeRO works; the others are sizes and habits."""
OPEN = tuple(name for name in _TUNED if name != "grad_accum")
"""Choices that may differ at the same global batch, by the names of requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The two files with the planner's choices."""

    paths: Mapping[str, Path]
    """`job.yaml` and `ds_config.json` → the files, which may have other names if dstrain did not generate them."""
    texts: Mapping[str, str]
    """Their texts."""
    lock: Lock | None
    """The record of their generation; None if dstrain did not generate them, or with templates of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherChoices:
    """The files with other choices."""

    estimate: Estimate
    generated: Mapping[str, str]
    """The texts as gen-config writes them with these choices."""
    merged: Regenerated
    """The same with what stands in the files."""
    overrides: tuple[str, ...]
    """`key=value` of the job by which the file differs from the present one."""
    changes: tuple[Change, ...]
    """Keys of ds_config.json likewise."""


def job_files(job: Path, ds_config: Path) -> JobFiles:
    """Returns the files of a job as they stand. Raises InvalidConfig if they or their lock cannot be read."""
    paths = {JOB: job.resolve(), CONFIG: ds_config.resolve()}
    texts = {name: standing(path.parent, [path.name])[path.name] for name, path in paths.items()}
    folder = paths[JOB].parent
    lock = read_lock(folder)
    is_generated = lock is not None and all(
        paths[name] == folder / name and name in lock.base and name not in lock.adopted for name in paths
    )
    if lock is not None and (not is_generated or lock.inputs.get("template_dir")):
        lock = None
    return JobFiles(paths=paths, texts=texts, lock=lock)


def settled_choices(files: JobFiles) -> frozenset[str]:
    """Returns the choices that are not dstrain's: those given to gen-config, and those edited by hand."""
    if files.lock is None:
        return frozenset()
    edits = [
        item
        for name, text in files.texts.items()
        for item in edits_in(name, files.lock.base[name], text, shown=str(files.paths[name]))
    ]
    edited = {str(item.pointer[-1]) for item in edits if item.file == JOB and len(item.pointer) == 1}
    of_zero = {
        item.pointer[1] for item in edits if item.pointer[:1] == ("zero_optimization",) and len(item.pointer) > 1
    }
    edited |= {name for name, choice in _TUNED.items() for key in choice.keys if key.split(".")[1] in of_zero}
    given = files.lock.inputs.keys() - {*files.lock.tuned}
    return frozenset(OPEN) & (edited | given)


def with_choices(files: JobFiles, estimate: Estimate, workload: Workload) -> OtherChoices:
    """Returns the files with the choices of an estimate.

    Generated files are merged as gen-config merges them: keys that you edited stay. In other files only the keys of
    these choices change. Raises InvalidConfig if a file cannot be changed in place.
    """
    c, lock = estimate.configuration, files.lock
    # without a lock nothing counts as edited: each file is its own base
    base = {name: lock.base[name] if lock is not None else files.texts[name] for name in files.texts}
    zero = render_json(template_of(c), config_values(_plan(estimate, workload), workload))["zero_optimization"]
    job, config = (edit.read(base[name], name) for name in (JOB, CONFIG))
    wanted = {JOB: {**job, **_job_keys(job, c)}, CONFIG: _config(config, zero, c, is_generated=lock is not None)}
    generated = {
        name: edit.apply(base[name], name, _changes(edit.read(base[name], name), wanted[name])) for name in base
    }
    merged = regenerate(
        [
            Standing(
                name=name,
                shown=str(files.paths[name]),
                base=base[name],
                yours=files.texts[name],
                new=generated[name],
                unsettled=lock.unsettled.get(name, ()) if lock is not None else (),
            )
            for name in base
        ],
        lambda file, clash: Decision.KEEP,
    )
    texts = dict(merged.files)
    job = edit.read(texts[JOB], JOB)  # the micro-batch and its accumulation belong together, edited or not
    texts[JOB] = edit.apply(texts[JOB], JOB, _changes(job, {**job, **_job_keys(job, c)}))
    changes = {name: _changes(edit.read(files.texts[name], name), edit.read(texts[name], name)) for name in texts}
    return OtherChoices(
        estimate=estimate,
        generated=generated,
        merged=replace(merged, files=texts),
        overrides=tuple(f"{dotted(change.pointer)}={json.dumps(change.value)}" for change in changes[JOB]),
        changes=tuple(changes[CONFIG]),
    )


def _plan(estimate: Estimate, workload: Workload) -> Plan:
    """Returns an estimate as the plan that templates are filled from."""
    batch = global_batch(workload.cluster, estimate.configuration)
    return Plan(
        chosen=estimate, rejected=(), num_estimated=1, global_batch=batch, learning_rate=0.0, reasons=(), notes=()
    )


def _changes(before: Any, after: Any) -> Sequence[Change]:
    return merge(before, before, after).changes


def _job_keys(job: Mapping[str, Any], c: Configuration) -> dict[str, Any]:
    """Returns the choices that the job file holds; one that has its default needs no key."""
    values = flat(c)
    defaults = {field.name: field.default for field in fields(Job)}
    return {name: values[name] for name in _OF_JOB if values[name] != job.get(name, defaults[name])}


def _config(
    config: Mapping[str, Any], zero: Mapping[str, Any], c: Configuration, *, is_generated: bool
) -> dict[str, Any]:
    """Returns the configuration with another section `zero_optimization`.

    In a file that dstrain did not generate, sizes and habits stay, and so does an offload that is the same.
    """
    values = flat(c)
    literals = {key: values[name] for key, name in BATCH_KEYS.items() if isinstance(config.get(key), int)}
    section = dict(zero)
    if not is_generated:
        yours = config.get("zero_optimization") or {}
        is_kept = {key: key not in _STRATEGY or _is_alike(yours[key], zero.get(key)) for key in yours}
        section |= {key: value for key, value in yours.items() if is_kept[key]}
    return {**config, **literals, "zero_optimization": section}


def _is_alike(yours: Any, planned: Any) -> bool:
    """Returns whether an offload, or another strategy, is the one that is planned."""
    if isinstance(yours, Mapping) and isinstance(planned, Mapping):
        return bool(yours.get("device") == planned.get("device"))
    return bool(yours == planned)


def inputs_of(estimate: Estimate, workload: Workload) -> dict[str, Any]:
    """Returns the options of gen-config that make these choices; those that it makes anyway are left out."""
    values = flat(estimate.configuration)
    options: dict[str, Any] = {name: values[name] for name in ("zero_stage", "micro_batch", "grad_ckpt")}
    options["global_batch"] = global_batch(workload.cluster, estimate.configuration)
    usual = flat(DEFAULTS)
    return options | {name: values[name] for name in OPEN if values[name] != usual[name]}


def write(files: JobFiles, chosen: OtherChoices, workload: Workload) -> list[Path]:
    """Writes the files with other choices, all or none; returns those that changed.

    Files that dstrain did not generate are kept as `.bak`. Raises Conflict if one was changed since it was read.
    """
    with alone(files.paths[JOB].parent / LOCK, "writes into this folder"):
        for name, path in files.paths.items():
            if standing(path.parent, [path.name]).get(path.name) != files.texts[name]:
                raise Conflict(f"{path}: changed meanwhile; nothing was written", hint="Type it again.")
        if files.lock is not None:
            return _write_generated(files, files.lock, chosen, workload)
        texts = {path: chosen.merged.files[name] for name, path in files.paths.items()}
        before = {path: files.texts[name] for name, path in files.paths.items() if files.texts[name] != texts[path]}
        return write_together(texts, backups=backups(before))


def _write_generated(files: JobFiles, before: Lock, chosen: OtherChoices, workload: Workload) -> list[Path]:
    template, folder = template_of(chosen.estimate.configuration), files.paths[JOB].parent
    others = {name: value for name, value in before.unsettled.items() if name not in files.paths}
    given = {name: value for name, value in before.inputs.items() if name not in before.tuned}
    chosen_now = {name: value for name, value in inputs_of(chosen.estimate, workload).items() if name not in given}
    lock = replace(
        before,
        base={**before.base, **chosen.generated},
        inputs={**given, **chosen_now},
        tuned=tuple(chosen_now),
        template=template,
        template_sha256=template_hash(template),
        unsettled={**others, **chosen.merged.unsettled},
    )
    names = write_files(folder, lock, chosen.merged.files, chosen.merged.beside, before=before)
    return [folder / name for name in names]
