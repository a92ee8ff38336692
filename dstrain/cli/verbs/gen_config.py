"""`dstrain gen-config`: decides how to train, explains the decision, and writes files to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dstrain.cli.group import Sectioned
from dstrain.cli.options.planning import DATA, HTML, SECTIONS, facts_options, field_option
from dstrain.cli.options.typed import typed
from dstrain.cli.types import Choice, OnConflict
from dstrain.job.schema import Job


@click.command("gen-config", cls=Sectioned, sections=SECTIONS)
@facts_options
@DATA
@field_option("eval_data", Job, type=str, metavar="FILE")
@field_option("output_dir", Job, default="output")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    help="Folder to write into.  [default: here]",
)
@click.option("--template-dir", type=click.Path(path_type=Path), help="Folder with your own templates.")
@click.option(
    "--on-conflict",
    type=Choice(OnConflict),
    help="What stands where you and dstrain both changed a key.  [default: yours, and exit code 6]",
)
@click.option("--force", is_flag=True, help="Replace the files, hand edits too; yours are kept as .bak.")
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; print ds_config.json to stdout.")
@click.option("--diff", "as_diff", is_flag=True, help="Write nothing; print what would change as a unified diff.")
@HTML
@click.option(
    "--adopt",
    is_flag=True,
    help="Plan nothing: treat the files of the folder as generated, as they are, so that your edits in them stay.",
)
@click.option("-v", "--verbose", is_flag=True, help="Print every reason, not only the three that matter most.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON to stdout, beside writing the files.")
def command(out: Path, adopt: bool, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Decide how to train a model on these GPUs, and write the files.

    Writes ds_config.json, job.yaml and hostfile, which are yours to edit, and .dstrain/lock.json. Options that you
    give are fixed, the rest is chosen: the fastest way that fits. Without --model the options of the last time hold,
    and those that you give now replace them. Your edits stay: only keys that you did not touch follow the new plan. If
    both changed, yours stands, the new file is written as NAME.new, and the exit code is 6.

    \b
    Example:
      dstrain gen-config --gpus 16 --model qwen3-32b
      dstrain gen-config --gpus 1 --gpu 4090 --model qwen3-8b --method lora --data train.jsonl
      dstrain gen-config --seq-len 8192
    """
    from dstrain.cli.generate import adopt_files, generate  # the planner, which help and completion do not need

    if adopt:
        if given := typed(options):
            raise click.UsageError(f"--adopt plans nothing: leave out --{next(iter(given)).replace('_', '-')}.")
        adopt_files(out, dry_run=dry_run, as_json=as_json)
        return
    decisions = {name: options.pop(name) for name in ("on_conflict", "force", "as_diff")}
    generate(out, options, dry_run=dry_run, as_json=as_json, **decisions)
