"""`dstrain adopt`: what stands counts as generated, and what changes after that survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Type = Callable[..., Any]
PLAN = ("gen-config", "--gpus", "16", "--model", "qwen3-32b")
JOB = "model: qwen3-32b  # ours\noutput_dir: output\nseed: 1\nextra_of_ours: 1\n"


def test_the_lock_has_the_texts_and_no_template(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = dstrain("adopt")
    assert done.returncode == 0
    assert "What stands now counts as generated" in done.stderr
    assert "survives" in done.stderr
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert (lock["base"], lock["template"], lock["inputs"]) == ({"job.yaml": JOB}, None, {})


def test_what_is_changed_after_it_survives(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    dstrain("adopt")
    (tmp_path / "job.yaml").write_text(JOB + "save_steps: 500\nlogging_steps: 3\n")
    done = dstrain(*PLAN)
    text = (tmp_path / "job.yaml").read_text()
    assert done.returncode == 6  # logging_steps is dstrain's too
    assert "logging_steps  3 " in done.stderr
    assert ("logging_steps: 3" in text, "seed: 42" in text, "extra_of_ours" in text) == (True, True, False)


def test_gen_config_asks_for_a_model_after_it(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    dstrain("adopt")
    done = dstrain("gen-config")
    assert (done.returncode, "adopted" in done.stderr) == (2, True)


def test_dry_run_writes_nothing(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = dstrain("adopt", "-n", "--json")
    assert json.loads(done.stdout)["adopted"] == ["job.yaml"]
    assert not (tmp_path / ".dstrain").exists()


def test_a_file_that_cannot_be_read_is_not_adopted(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"a": }')
    done = dstrain("adopt")
    assert (done.returncode, "ds_config.json:1:7" in done.stderr) == (3, True)
    assert not (tmp_path / ".dstrain").exists()


def test_an_empty_folder_has_nothing_to_adopt(dstrain: Type) -> None:
    assert dstrain("adopt").returncode == 3


def test_edits_of_generated_files_stay_edits(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu01 slots=8\ngpu02 slots=8\n")
    dstrain(*PLAN, "--hostfile", "hostfile")
    text = (tmp_path / "job.yaml").read_text().replace("seed: 42", "seed: 7")
    (tmp_path / "job.yaml").write_text(text)
    assert "adopted hostfile" in dstrain("adopt").stderr
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert "seed: 42" in lock["base"]["job.yaml"]
    assert lock["base"]["hostfile"] == "gpu01 slots=8\ngpu02 slots=8\n"
    assert "nothing to adopt" in dstrain("adopt").stderr
