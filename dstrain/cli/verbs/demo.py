"""`dstrain demo`: a smoke test of an installation with a tiny model, real data and the commands a user types."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from dstrain.choices import Task
from dstrain.cli.console import answer_json, say
from dstrain.cli.output.run import summary, summary_rows
from dstrain.cli.types import Choice
from dstrain.config.edits import edit
from dstrain.config.jsonc import Change
from dstrain.errors import EnvironmentProblem, RunFailed
from dstrain.facts import probe
from dstrain.facts.data.media import require_pillow
from dstrain.paths import python, write_atomic
from dstrain.rundir import RunDir
from dstrain.wrapping import aligned

RANKS = 2
"""Ranks where the machine has no GPU."""
EXPERTS = 8
"""Experts of each layer with `--moe`."""
PATCHES = 48
"""Patches of a picture with `--images`."""
SETTINGS = {
    "logging_steps": "10",
    "save_total_limit": "1",
    "dataloader_num_workers": "0",
}
"""Settings that the demo overrides in its job."""
RATE = 5e-3
"""The rate at which a tiny model learns something in a minute."""
RATE_OF_IMAGES = 2e-3
"""The same with images."""
ALL_PARTS = ("--no-freeze-vision-tower", "--no-freeze-multi-modal-projector")
"""With images, what gen-config plans and writes: a tower with random weights has everything to learn."""


@click.command("demo")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default="dstrain-demo")
@click.option("--zero-stage", type=click.IntRange(1, 3), default=2, show_default=True, help="ZeRO stage.")
@click.option("--offload", type=click.Choice(["none", "optimizer", "params"]), help="What leaves GPU memory.")
@click.option("--hostfile", type=click.Path(path_type=Path, exists=True), help="Train over these hosts.")
@click.option(
    "--steps",
    type=click.IntRange(2),
    default=150,
    show_default=True,
    help="Optimizer steps; after a few, nothing is learned yet, which ends with exit code 1.",
)
@click.option("--task", type=Choice(Task), default=Task.SFT.value, show_default=True, help="What is trained.")
@click.option("--moe", is_flag=True, help=f"Train a mixture of {EXPERTS} experts, with the loss that balances them.")
@click.option("--images", is_flag=True, help="Train a vision-language model to say what is in pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON to stdout.")
def command(
    folder: Path,
    zero_stage: int,
    offload: str | None,
    hostfile: Path | None,
    steps: int,
    task: Task,
    moe: bool,
    images: bool,
    as_json: bool,
) -> None:
    """Train a tiny model on this machine: no network and no GPU needed, about two minutes.

    Builds a Qwen3 model of a million random weights in FOLDER, and an instruction data set from the docstrings of
    Python's standard library. Then runs the commands of a user: gen-config, run.

    \b
    Example:
      dstrain demo
      dstrain demo demo3 --zero-stage 3
      dstrain demo pictures --images --zero-stage 3
    """
    if images and (moe or task is not Task.SFT):
        raise click.UsageError(f"--images does not go with {'--moe' if moe else f'--task {task}'}")
    folder = folder.resolve()
    kinds = (f"output-zero{zero_stage}", offload, moe and "moe", images and "images", task is not Task.SFT and task)
    output = _free_name(folder, "-".join(kind for kind in kinds if kind))
    made = _build(folder, [] if images else ["--experts", str(EXPERTS if moe else 0), "--task", task], images=images)
    gpus = len(probe.local_gpus())
    # from here on, commands as a person types them
    where = ["--hostfile", str(hostfile.resolve())] if hostfile else ["--gpus", str(gpus or RANKS)]
    where += [] if gpus else ["--gpu", "cpu"]
    choice = ["--zero-stage", str(zero_stage), *(["--offload", offload] if offload else [])]
    data = ["--data", "train.jsonl", "--eval-data", "eval.jsonl", "--output-dir", output]
    sizes = ["--global-batch", str(8 * (gpus or RANKS)), *_sizes(task, images=images)]
    _type(["gen-config", "--model", "./model", *where, *choice, *sizes, *data], folder)
    _set_rate(folder / "job.yaml", RATE_OF_IMAGES if images else RATE)
    settings = _settings(steps, balances=moe and task is not Task.DPO)
    _type(["run", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))], folder)
    _tell(_bar(task, made["loss_to_beat"], images=images), RunDir(folder / output), folder, as_json=as_json)


def _bar(task: Task, entropy: float, *, images: bool) -> tuple[str, float]:
    """Returns the name of the loss to beat, and the loss; `entropy` is the data's."""
    if task is Task.DPO:
        return "loss of a model without preference", math.log(2)
    if images:
        return "loss of a model without pictures", entropy
    return f"unigram entropy of its {'texts' if task is Task.PRETRAIN else 'answers'}", entropy


def _sizes(task: Task, *, images: bool) -> list[str]:
    """Returns the options of gen-config for the samples of a task."""
    if images:
        return ["--seq-len", "64", "--image-patches", str(PATCHES), *ALL_PARTS]
    return ["--seq-len", "256", "--task", task, *([] if task is Task.DPO else ["--packing"])]


def _set_rate(path: Path, rate: float) -> None:
    """Writes the learning rate into the job, as its user would, so that the next run in the folder has it too."""
    change = Change(pointer=("learning_rate",), value=rate, comment="set by dstrain demo: of a tiny, untrained model")
    write_atomic(path, edit.apply_yaml(path.read_text(encoding="utf-8"), path.name, [change]))
    say(f"{path.name}: learning_rate: {rate:g}, at which a tiny model learns something in a minute")


def _settings(steps: int, *, balances: bool) -> dict[str, object]:
    """Returns the settings that the demo overrides in its job."""
    half = {"save_steps": max(1, steps // 2), "eval_steps": max(1, steps // 2)}
    balanced = {"router_aux_loss_coef": "0.01"} if balances else {}
    return {**SETTINGS, "max_steps": steps, **half, **balanced}


def _free_name(folder: Path, name: str) -> str:
    """Returns the name, with a number if an earlier demo has it."""
    number, free = 1, name
    while (folder / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def _build(folder: Path, options: list[str], *, images: bool) -> dict[str, Any]:
    """Builds model and data; returns their sizes and the entropy to beat."""
    if images:
        require_pillow()
        say(f"building a tiny Qwen3-VL model and pictures of shapes with questions in {folder}")
    else:
        say(f"building a tiny Qwen3 model and data from Python's standard library in {folder}")
    words = python("-m", "dstrain.train.demo", str(folder), *options, *(["--images"] if images else []))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentProblem(f"the demo's model cannot be built:\n{done.stderr.strip()[-2000:]}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    say(
        f"built {made['params']:,} parameters, {made['vocab_size']:,} tokens of vocabulary,"
        f" {made['train_samples']:,} samples to train on and {made['eval_samples']} to evaluate"
    )
    return made


def _type(words: list[str], folder: Path) -> None:
    """Runs a dstrain command in the demo's folder, as a user would; its output goes to stderr."""
    say()
    say(f"$ dstrain {shlex.join(words)}", style="bold")
    done = subprocess.run(python("-m", "dstrain.cli", *words), cwd=folder, check=False, stdout=sys.stderr)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode != 0:
        failure = RunFailed(
            f"dstrain {words[0]} ended with exit code {done.returncode}", hint=f"Its files are in {folder}."
        )
        failure.exit_code = done.returncode
        raise failure


def _tell(bar: tuple[str, float], run_dir: RunDir, folder: Path, *, as_json: bool) -> None:
    """Prints the table; `bar` is a loss to beat, with its name. Raises RunFailed if the model learned nothing."""
    figures, (name_of_bar, least) = summary(run_dir), bar
    beaten = figures["eval_loss"] is not None and figures["eval_loss"] < least
    if as_json:
        answer_json({**figures, "loss_to_beat": least, "is_beaten": beaten})
    rows = summary_rows(figures)
    place = next(index for index, (name, _) in enumerate(rows) if name == "evaluation loss") + 1
    verdict = "beaten" if beaten else "NOT beaten"
    rows.insert(place, (name_of_bar, f"{least:.3f} ({verdict})"))
    say()
    say("the demo", style="bold")
    for line in aligned(rows):
        say(f"  {line}")
    if not beaten:
        raise RunFailed(f"the model did not learn: its evaluation loss is not below the {name_of_bar}")
    say()
    here = os.path.relpath(folder)
    say(f"next: dstrain report {shlex.quote(os.path.relpath(run_dir.path))}")
    say(f"      look at {here}/ds_config.json and {here}/job.yaml, then plan a model of your own:")
    say("      dstrain gen-config --gpus 8 --gpu h100 --model qwen3-8b --data your.jsonl -o my-run")
