"""Carries out `dstrain gen-config`: plans, keeps hand edits and writes the files, or adopts existing ones."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dstrain import __version__
from dstrain.choices import Attention
from dstrain.cli import edits
from dstrain.cli.console import answer, answer_json, check_page, say, say_lines, write_page
from dstrain.cli.options import data_lengths, remembered
from dstrain.cli.options.question import PlanInputs, plan_inputs, uses_last
from dstrain.cli.options.remembered import ResolvedOptions
from dstrain.cli.options.typed import spelled, typed
from dstrain.cli.output import plan_page
from dstrain.cli.output.generated import diff, edited_lines, next_lines, other_lines
from dstrain.cli.output.plan import data_lines, estimate_document, plan_document, plan_lines
from dstrain.cli.types import OnConflict
from dstrain.config.edits import edit
from dstrain.config.edits.lock import GENERATED, LOCK, Lock, new_files, read_lock, standing, write_files
from dstrain.config.edits.regenerate import Regenerated, Standing, regenerate, replaced
from dstrain.config.files import generated, template_of
from dstrain.config.jsonc import dotted
from dstrain.config.templates import template_hash
from dstrain.errors import Conflict, DstrainError, InvalidConfig
from dstrain.facts.releases import installed
from dstrain.job.limits import PARTS
from dstrain.paths import alone, leftovers
from dstrain.plan.estimate_records import Plan
from dstrain.plan.request import Request
from dstrain.plan.search.decide import plan_of, survey
from dstrain.plan.search.infeasible import does_not_fit


def generate(
    out: Path,
    options: dict[str, Any],
    *,
    on_conflict: OnConflict | None,
    force: bool,
    dry_run: bool,
    as_diff: bool,
    as_json: bool,
) -> None:
    """Plans with the options of `dstrain gen-config`, and writes or shows the files in a folder."""
    _require_usable(options["data"], force=force, on_conflict=on_conflict)
    decide, verbose, is_written = edits.decider(on_conflict), options.pop("verbose"), not dry_run and not as_diff
    html = _html(options, is_written=is_written)
    with alone(out / LOCK, "writes into this folder") if is_written else nullcontext():
        before = read_lock(out)
        asked = remembered.asked(options, before, out)
        _say_repeated(asked, before)
        planned = _planned(asked, before, out, verbose=verbose, html=html)
        lock = replace(lock_of(asked, planned.asked, planned.plan, out, before), tuned=_still_tuned(asked, before))
        files = _files(out, lock, before, reopens=on_conflict is not None)
        merged = replaced(files) if force else regenerate(files, decide)
        shown = {**lock.base, **merged.files}
        lines, edited_document = _edited(planned, lock.base, shown)
        if as_json:
            extra = {"conflicts": edits.document(merged.conflicts), "files": shown, **edited_document}
            answer_json({**planned.document, **extra, **({"diff": diff(out, shown)} if as_diff else {})})
        elif as_diff:
            answer(diff(out, shown))
        elif dry_run:
            answer(shown["ds_config.json"])
        _refuse_foreign(out, merged)
        if is_written:
            # an editor may have saved one of them while this planned
            _require_unchanged(out, files)
            _write(out, replace(lock, unsettled=merged.unsettled), before, merged, planned.page)
    if is_written:
        say_lines([*other_lines(lock.base, merged.files), *lines])
        if not merged.open:
            say_lines(_next_lines(out, lock.base, merged.files, planned, edited_document))
    _show_conflicts(out, merged, asked, before, lock.base if is_written else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A plan with its inputs."""

    asked: PlanInputs
    """Model, machines and request."""
    plan: Plan
    data: data_lengths.TrainingData
    """Facts about the training data."""
    document: dict[str, Any]
    """The plan as JSON."""
    page: tuple[Path, str] | None
    """The file of `--html` and its text."""


def _require_usable(data: str | None, *, force: bool, on_conflict: OnConflict | None) -> None:
    """Raises UsageError for options that gen-config cannot follow."""
    if data is not None and data_lengths.is_job_file(data):
        raise click.UsageError("--data names no job file: write the list into job.yaml, then type dstrain gen-config.")
    if force and on_conflict is not None:
        raise click.UsageError("--force replaces every edit; --on-conflict has nothing to decide.")


def _html(options: dict[str, Any], *, is_written: bool) -> Path | None:
    """Takes the file of `--html` out of the options. Raises UsageError if nothing is to be written."""
    html: Path | None = options.pop("html")
    if html is not None and not is_written:
        raise click.UsageError("--html writes a page, and --dry-run and --diff write nothing; see dstrain plan --html.")
    if html is not None:
        check_page(html, "plan")
    return html


def _planned(asked: ResolvedOptions, before: Lock | None, out: Path, *, verbose: bool, html: Path | None) -> _Planned:
    """Makes, prints and returns the plan, and its page."""
    last = before.cluster if before and asked.is_repeated else None
    facts = plan_inputs(dict(asked.options), last=last)
    # data sets with weights are a list in job.yaml, which no option can say: it holds until --data is typed anew
    keeps_list = asked.is_repeated and "data" not in typed(asked.options)
    data = data_lengths.read(asked.options, facts.workload.model, job=out / "job.yaml", keeps_list=keeps_list)
    facts = data.decide(facts)
    if last and uses_last(dict(asked.options), last):
        say(f"no GPUs are found here: planning for the {last.num_gpus} × {last.gpu.name} of the last time")
    surveyed = survey(facts.workload, facts.request)
    question = plan_page.Question(verb="gen-config", typed=asked.inputs, inputs=facts)
    if not surveyed.fits:
        ways = data_lengths.ways(asked.options, facts, data, last=last)
        # the page is of most use here: its sliders show what would fit
        if html is not None:
            write_page(html, plan_page.page(surveyed, question, ways, name=html.name))
        raise does_not_fit(facts.workload, facts.request, surveyed.first, ways)
    trained = data.run_time(facts.workload, surveyed.first)
    say_lines(plan_lines(surveyed, facts.workload, verbose=verbose, data=data_lines(data, trained, facts)))
    document = {**plan_document(surveyed, facts.workload), "notes": list(surveyed.notes)}
    document |= data.document(trained)
    return _Planned(
        asked=facts,
        plan=plan_of(surveyed, facts.workload.cluster, facts.request),
        data=data,
        document=document,
        page=(html, plan_page.page(surveyed, question, name=html.name)) if html is not None else None,
    )


def _edited(
    planned: _Planned, generated: Mapping[str, str], files: Mapping[str, str]
) -> tuple[list[str], dict[str, Any]]:
    """Returns the training that files with edits describe, in lines and as JSON; nothing if it is the plan.

    `fits` is None in JSON if no plan can be made of them.
    """
    if all(files[name] == text for name, text in generated.items()):
        return [], {}
    from dstrain.launch.prepare.edit_effects import edited  # only where somebody edited

    workload = planned.asked.workload
    try:
        found = edited(workload, generated, files)
    except DstrainError as error:
        document = {"with_edits": {"fits": None, "problem": error.problem}}
        return [f"edits    yours stay, and no plan can be made of them: {error.problem}"], document
    if found is None:
        return [], {}
    trained = replace(planned.data, job=found.job).run_time(workload, found.estimate)
    document = {**estimate_document(found.estimate), **planned.data.document(trained)}
    return edited_lines(found, trained, workload.cluster), {"with_edits": document}


def _next_lines(
    out: Path, generated: Mapping[str, str], files: Mapping[str, str], planned: _Planned, edited: Mapping[str, Any]
) -> list[str]:
    """Returns the next command; edits that stay may have errors that `dstrain run` refuses."""
    errors = any(files[name] != text for name, text in generated.items()) and _has_errors(out)
    return next_lines(out, files, planned.asked, planned.plan, **edited, has_errors=errors)


def _has_errors(out: Path) -> bool:
    """Returns whether lint finds errors in the written files."""
    from dstrain.config.lint import engine  # only where somebody edited
    from dstrain.job.file import read_job
    from dstrain.launch.prepare.lint_job import lint_job

    try:
        job = read_job(out / "job.yaml", is_only_read=True)
        return bool(engine.errors_of_settings(lint_job(job, Path(job.job.ds_config)).findings))
    except DstrainError:
        return True


def _say_repeated(asked: ResolvedOptions, before: Lock | None) -> None:
    if not asked.is_repeated or before is None:
        return
    changed = spelled({name: value for name, value in asked.inputs.items() if before.inputs.get(name) != value})
    say(f"as the last time: {spelled(before.inputs)}{f'; now with {changed}' if changed else ''}")


def _still_tuned(asked: ResolvedOptions, before: Lock | None) -> tuple[str, ...]:
    """Returns the options that `dstrain tune` chose and that hold as they were."""
    names = before.tuned if before is not None and asked.is_repeated else ()
    return tuple(name for name in names if before and asked.inputs.get(name) == before.inputs.get(name))


def _files(out: Path, lock: Lock, before: Lock | None, *, reopens: bool) -> list[Standing]:
    """Returns the state of each file; `reopens`: earlier conflicts that are open are to be decided now."""
    there = standing(out, lock.base)
    return [
        Standing(
            name=name,
            shown=str(out / name),
            base=before.base.get(name) if before else None,
            yours=there.get(name),
            new=new,
            is_adopted=before is not None and name in before.adopted,
            unsettled=before.unsettled.get(name, ()) if before else (),
            reopens=reopens,
        )
        for name, new in lock.base.items()
    ]


def _refuse_foreign(out: Path, merged: Regenerated) -> None:
    """Raises Conflict if dstrain did not generate an existing file."""
    if merged.foreign:
        names = ", ".join(str(out / name) for name in merged.foreign)
        raise Conflict(
            f"{names}: not written by dstrain; nothing was changed",
            hint=f"{_again(out)} --adopt takes the files as they are as generated; or write elsewhere with -o DIR.",
        )


def _again(out: Path) -> str:
    """Returns the command that writes into this folder."""
    return f"dstrain gen-config{f' -o {out}' if out != Path() else ''}"


def _require_unchanged(out: Path, files: Sequence[Standing]) -> None:
    """Raises Conflict if a file was saved since it was read: it would be overwritten."""
    there = standing(out, [file.name for file in files])
    changed = [file.shown for file in files if there.get(file.name) != file.yours]
    if changed:
        problem = f"{', '.join(changed)}: changed while this was being planned; nothing was written"
        raise Conflict(problem, hint="Type it again.")


def _write(out: Path, lock: Lock, before: Lock | None, merged: Regenerated, html: tuple[Path, str] | None) -> None:
    """Writes the files, and prints which changed; then the page."""
    left = [str(path) for folder in (out, out / LOCK.parent) for path in leftovers(folder)]
    if left:
        say(f"left by a dstrain that was killed while it wrote: rm {' '.join(map(shlex.quote, left))}")
    changed = [str(out / name) for name in write_files(out, lock, merged.files, merged.beside, before=before)]
    say()
    say(f"wrote {', '.join(changed)}" if changed else "nothing changed: the files are the same")
    for name in before.unsettled if before else ():
        if name not in lock.unsettled and (out / f"{name}.new").exists():
            say(f"kept: {out / name}.new, which is not as dstrain wrote it")
    if html is not None:
        write_page(*html)


def _show_conflicts(
    out: Path, merged: Regenerated, asked: ResolvedOptions, before: Lock | None, base: Mapping[str, str] | None
) -> None:
    """Prints the keys that both sides changed. Raises Conflict if one of them is unresolved."""
    if not merged.conflicts:
        for name, opened in merged.unsettled.items():
            keys = ", ".join(dotted(clash.pointer) for clash in opened)
            say(f"open since an earlier conflict, yours stands: {keys} ({out / name})")
        return
    say()
    # options that differ from the last time are why dstrain's values changed
    was = before.inputs if before else {}
    changed = {name: value for name, value in asked.inputs.items() if was.get(name) != value}
    gone = [name for name in was if name not in asked.inputs]
    cause = [spelled(changed), *(f"without --{name.replace('_', '-')}" for name in gone)]
    if any(cause):
        say(f"because this time it is {', '.join(filter(None, cause))}:")
    for line in edits.table_lines(merged.conflicts):
        say(line)
    if not merged.open:
        return
    keys = ", ".join(dotted(conflict.clash.pointer) for conflict in merged.open)
    # nothing was written without a base, so the names are those that a writing command gives
    written = new_files(out, {conflict.file: base[conflict.file] for conflict in merged.open}) if base else ()
    files = ", ".join(map(str, written)) or ", ".join(
        f"{out / name}.new" for name in dict.fromkeys(conflict.file for conflict in merged.open)
    )
    again = f"{_again(out)} --on-conflict"
    raise Conflict(
        f"changed by you and by dstrain: {keys}; yours {'stands' if base else 'would stand'}",
        hint=f"All that dstrain would write: {files}. To take its values: {again} new; to be asked: {again} ask;"
        f" to settle for yours: {again} keep.",
    )


def lock_of(asked: ResolvedOptions, facts: PlanInputs, plan: Plan, out: Path, before: Lock | None = None) -> Lock:
    """Returns the generated files of a plan with their inputs; `out` is the folder they are for, `before` its lock."""
    options = asked.options
    template, template_dir = template_of(plan.chosen.configuration), options["template_dir"]
    job = {
        "model": _model(facts.workload.model.source, out),
        "data": remembered.relative(options["data"], out),
        "eval_data": remembered.relative(options["eval_data"], out),
        "hub": options["hub"],
        "output_dir": options["output_dir"],
        **{name: options[name] for name in PARTS},
        "attn": _attention(facts.request, plan, before),
    }
    files = generated(plan, facts.workload, facts.hosts, template_dir=template_dir, job=job)
    if options["hostfile"] and options["hostfile"].resolve() == (out / "hostfile").resolve():
        del files["hostfile"]  # it is the user's own, comments and all
    return Lock(
        dstrain=__version__,
        deepspeed=installed("deepspeed") or "none",
        template=template,
        template_sha256=template_hash(template, override=template_dir),
        inputs=asked.inputs,
        cluster=facts.workload.cluster,
        contents=facts.workload.contents,
        base=files,
    )


def _attention(request: Request, plan: Plan, before: Lock | None) -> Attention:
    """Returns the attention of a job: `auto` if it is open, unless the files of before name the planned one."""
    planned = plan.chosen.configuration.kernels.attn
    text = before.base.get("job.yaml") if before is not None and request.attn is None else None
    is_kept = text is not None and edit.read(text, "job.yaml").get("attn") == planned
    return planned if is_kept or not request.has_open_attention else Attention.AUTO


def _model(source: str, out: Path) -> str | None:
    """Returns the model as job.yaml must name it; a relative folder begins with `./`, so that it is no hub id."""
    named = remembered.relative(source, out)
    return f"./{named}" if Path(source).exists() and named and not Path(named).is_absolute() else named


def adopt_files(folder: Path, *, dry_run: bool, as_json: bool) -> None:
    """Records the files of a folder in its lock as they are, and does not change them."""
    with nullcontext() if dry_run else alone(folder / LOCK, "writes into this folder"):
        files = _adopted(folder, dry_run=dry_run)
    if as_json:
        answer_json(
            {"schema": 1, "folder": str(folder), "dry_run": dry_run, "adopted": [str(folder / name) for name in files]}
        )
    _say_adopted(folder, files, dry_run=dry_run)


def _adopted(folder: Path, *, dry_run: bool) -> list[str]:
    """Writes the lock; returns the names of the adopted files."""
    before = read_lock(folder)
    base = before.base if before else {}
    files = {name: text for name, text in standing(folder, GENERATED).items() if name not in base}
    if not files and not base:
        raise InvalidConfig(
            f"{folder}: has none of {', '.join(GENERATED)}",
            hint="dstrain gen-config --model NAME writes them; or name another folder.",
        )
    _lint_adopted(folder)
    if files and not dry_run:
        write_files(folder, _with_adopted(before, files), {}, {}, before=before)
    return list(files)


def _lint_adopted(folder: Path) -> None:
    """Prints the findings of lint. Raises InvalidConfig for errors, and for a file that cannot be read."""
    from dstrain.findings import errors, lines  # a plan lints nothing
    from dstrain.job.file import read_job
    from dstrain.launch.prepare.lint_job import lint_job, refused

    problems = []
    for name, text in standing(folder, GENERATED).items():
        try:
            edit.read(text, str(folder / name))
        except InvalidConfig as error:
            problems.append(error.problem)
    if problems:
        raise InvalidConfig("\n".join(problems), hint="Correct the files, then adopt them.")
    path, job = folder / "ds_config.json", folder / "job.yaml"
    if not path.is_file():
        return
    result = lint_job(read_job(job, is_only_read=True) if job.is_file() else None, path)
    if errors(result.findings):
        raise refused(result.findings)
    for finding in result.findings:
        say("\n".join(lines(finding)))


def _with_adopted(before: Lock | None, files: dict[str, str]) -> Lock:
    """Returns the lock with the files added to its base."""
    if before is not None:
        return replace(before, base={**before.base, **files}, adopted=(*before.adopted, *files))
    return Lock(dstrain=__version__, deepspeed=installed("deepspeed") or "none", base=files, adopted=tuple(files))


def _say_adopted(folder: Path, names: list[str], *, dry_run: bool) -> None:
    """Prints the adopted files and the next command."""
    if not names:
        say("nothing to adopt: the files are recorded already")
        return
    verb = "would adopt" if dry_run else "adopted"
    say(f"{verb} {', '.join(str(folder / name) for name in names)}")
    if dry_run:
        return
    say(f"recorded in {folder / LOCK}: the next gen-config lists what it would change; yours stay until you decide")
    place = "" if folder == Path() else f" -o {shlex.quote(str(folder))}"
    say(f"next: dstrain gen-config{place} {_machines_and_model(folder)} --diff")


def _machines_and_model(folder: Path) -> str:
    """Returns the options that name the model and the hosts of adopted files; words in their place if these do not."""
    job, hosts = folder / "job.yaml", folder / "hostfile"
    given = edit.read(job.read_text(encoding="utf-8"), str(job)).get("model") if job.is_file() else None
    model = str(folder / given if given and (folder / given).exists() else given or "NAME")
    machines = f"--hostfile {shlex.quote(str(hosts))}" if hosts.is_file() else "--gpus N"
    return f"--model {shlex.quote(model)} {machines}"
