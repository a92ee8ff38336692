"""`dstrain export`: writes a folder that `from_pretrained` loads, from an adapter or a ZeRO checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click

from dstrain.choices import Hub, Precision
from dstrain.cli.console import say
from dstrain.cli.types import Choice
from dstrain.errors import InvalidConfig
from dstrain.facts.model import hub_config
from dstrain.job.model_changes import CONFIG
from dstrain.paths import python


@click.command("export")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--precision", type=Choice(Precision), help="Dtype of the weights.  [default: as the base model]")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be read and written; write nothing.")
def command(source: Path, out: Path, precision: Precision | None, dry_run: bool) -> None:
    """Merge an adapter into its base, or gather a ZeRO checkpoint, into a folder that from_pretrained loads.

    SOURCE is a run directory (its best checkpoint if the job keeps one, its newest complete one, or its final model), a
    checkpoint, or an adapter. OUT is a new folder. Runs in one process on the CPU; the weights must fit into RAM.

    \b
    Example:
      dstrain export output merged
      dstrain export output/checkpoint-500 model-500 --precision bf16
    """
    if not source.is_dir():
        raise InvalidConfig(f"{source}: no such folder", hint="Name a run directory, such as output.")
    words = [str(source.resolve()), str(out.resolve())]
    if precision is not None:
        words += ["--dtype", precision.value]
    if dry_run:
        words.append("--dry-run")
    say(f"reading {source}")
    environment, note = hub_config.for_child(_base(source), Hub.HF)
    if note is not None:
        say(note)
    # another process: the command line does not import torch
    done = subprocess.run(python("-m", "dstrain.train.checkpoints.export", *words), env=environment, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode if done.returncode > 0 else 1)
    if not dry_run:
        say(f"next: python -c \"import transformers; transformers.AutoModelForCausalLM.from_pretrained('{out}')\"")


def _base(source: Path) -> str:
    """Returns the model that an adapter in a folder, or in a run's folders, is merged into; the folder without one."""
    for path in (*source.glob(CONFIG), *source.glob(f"*/{CONFIG}")):
        with suppress(OSError, ValueError, AttributeError):
            return str(json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") or source)
    return str(source)
