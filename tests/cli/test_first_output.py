"""The first output of each verb fits a terminal of 80 × 24 with its prompt; exceptions have reasons."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Type
from tests.cli.test_options import commands

COLUMNS, ROWS = 80, 24
MODEL = ("--gpus", "16", "--model", "qwen3-32b")
FITS: dict[str, tuple[tuple[str, ...], ...]] = {
    "doctor": ((),),
    "explain": (("overlap_comm",), ("zero_optimization.stage",)),
    "gen-config": (MODEL, ("--seq-len", "8192"), ("--gpus", "1", "--gpu", "4090", "--model", "qwen3-32b")),
    "hostfile check": ((),),
    "hostfile show": ((),),
    "hostfile write": (("gpu[01-02]:8", "-n"),),
    "lint": ((),),
    "plan": (MODEL, ("--gpus", "1", "--gpu", "4090", "--model", "qwen3-30b-a3b")),
    "report": ((),),
    "run": (("-n", "--set", "hostfile=null", "--set", "data=train.jsonl"),),
    **{f"script {kind}": ((),) for kind in ("slurm", "bash")},
    "script k8s": (("--image", "train:1"),),
    "script prepare": ((),),
    "status": ((),),
    "stop": ((),),
    "show template": ((),),
    "tune": (("-n", "--candidates", "3"),),
}
"""Command → what is typed after it, in the folder of a plan for 16 GPUs whose batch was edited."""
LONGER = {
    "show completion": "a script for a shell",
    "data prepare": "the counts of every data set",
    "data show": "a sample as long as it is",
    "explain ds_config.json": "every key of the file, with what it does",
    "demo": "the log of a training run",
    "export": "the log of Transformers, which merges",
    "script accelerate": "the files, where nothing is written",
    "import": "every key of another tool's file that has no counterpart",
    "logs": "the log of a training run",
    "show schema": "a JSON document for editors",
}
"""Command, or a command line → what it prints that no screen holds."""


@pytest.fixture
def job(dstrain: Type, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A job that gen-config wrote, once for all tests, and a person edited."""
    planned = tmp_path_factory.getbasetemp() / "first"
    if not planned.exists():
        planned.mkdir()
        assert dstrain("gen-config", *MODEL, "--hosts", "gpu[01-02]", cwd=planned).returncode == 0
    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "job.yaml"
    path.write_text(path.read_text().replace("micro_batch: 1", "micro_batch: 2"))


def test_every_command_is_held_to_the_screen_or_has_a_reason() -> None:
    assert {name for name, _ in commands()} == FITS.keys() | (LONGER.keys() - {"explain ds_config.json"})


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, typed in FITS.items() for words in typed])
def test_the_first_output_fits_a_terminal(dstrain: Type, job: None, name: str, words: tuple[str, ...]) -> None:
    done = dstrain(*name.split(), *words, COLUMNS=str(COLUMNS), LINES=str(ROWS))
    assert "Traceback" not in done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    rows = sum(max(1, math.ceil(len(line) / COLUMNS)) for line in lines)
    assert 0 < rows < ROWS, done.stdout + done.stderr


def test_verbose_prints_the_reasons_that_are_left_out(dstrain: Type) -> None:
    document = json.loads(dstrain("plan", *MODEL, "--json").stdout)
    reasons = document["plans"][0]["reasons"]
    for verb in ("plan", "gen-config"):
        brief, verbose = (dstrain(verb, *MODEL, *more) for more in ((), ("-v",)))
        texts = [" ".join((done.stdout + done.stderr).split()) for done in (brief, verbose)]
        printed = [[reason for reason in reasons if reason in text] for text in texts]
        assert [len(printed[0]), f"-v prints all {len(reasons)} reasons" in texts[0]] == [3, True]
        assert printed[1] == reasons
