"""`dstrain gen-config --adopt`: what stands counts as generated, and what changes after that survives."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.conftest import Type
from tests.cli.test_gen_config import PLAN

JOB = "model: qwen3-32b  # ours\noutput_dir: output\nseed: 1\nextra_of_ours: 1\n"


def test_the_first_generation_lists_what_it_would_change_and_changes_nothing(dstrain: Type, tmp_path: Path) -> None:
    assert dstrain("gen-config", "--adopt").returncode == 3, "an empty folder"
    (tmp_path / "job.yaml").write_text(JOB)
    done = dstrain("gen-config", "--adopt", "-n", "--json")
    assert json.loads(done.stdout)["adopted"] == ["job.yaml"]
    assert not (tmp_path / ".dstrain").exists()
    done = dstrain("gen-config", "--adopt")
    assert (done.returncode, "yours stay until you decide" in done.stderr) == (0, True)
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert (lock["base"], lock["template"], lock["inputs"]) == ({"job.yaml": JOB}, None, {})
    assert lock["adopted"] == ["job.yaml"]
    done = dstrain("gen-config")
    assert (done.returncode, "adopted" in done.stderr) == (2, True), "a model is missing"
    done = dstrain(*PLAN)
    assert done.returncode == 6
    assert re.search(r"\n  seed +1 +42 +it was adopted\n", done.stderr)
    assert (tmp_path / "job.yaml").read_text() == JOB
    assert "seed: 42" in (tmp_path / "job.yaml.new").read_text()


def test_what_is_replaced_in_an_adopted_file_is_kept(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    dstrain("gen-config", "--adopt")
    assert dstrain(*PLAN, "--on-conflict", "new").returncode == 0
    text = (tmp_path / "job.yaml").read_text()
    assert ("seed: 42" in text, "# ours" in text, "extra_of_ours: 1" in text) == (True, True, True)
    assert (tmp_path / "job.yaml.bak").read_text() == JOB
    assert "adopted" not in dstrain("gen-config").stderr


def test_a_file_that_cannot_be_read_is_not_adopted(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"a": }')
    done = dstrain("gen-config", "--adopt")
    assert (done.returncode, "ds_config.json:1:7" in done.stderr) == (3, True)
    assert not (tmp_path / ".dstrain").exists()


def test_edits_of_generated_files_stay_edits(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu01 slots=8\ngpu02 slots=8\n")
    dstrain(*PLAN, "--hostfile", "hostfile")
    text = (tmp_path / "job.yaml").read_text().replace("seed: 42", "seed: 7")
    (tmp_path / "job.yaml").write_text(text)
    assert "adopted hostfile" in dstrain("gen-config", "--adopt").stderr
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert "seed: 42" in lock["base"]["job.yaml"]
    assert lock["base"]["hostfile"] == "gpu01 slots=8\ngpu02 slots=8\n"
    assert "nothing to adopt" in dstrain("gen-config", "--adopt").stderr


def test_the_next_line_can_be_typed(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "job.yaml").write_text(JOB)
    (tmp_path / "old" / "hostfile").write_text("a slots=8\nb slots=8\n")
    line = dstrain("gen-config", "--adopt", "-o", "old").stderr.splitlines()[-1]
    assert line == "next: dstrain gen-config -o old --model qwen3-32b --hostfile old/hostfile --diff"
    done = dstrain(*line.split()[2:])
    assert (done.returncode, "seed" in done.stderr) == (6, True), done.stderr
