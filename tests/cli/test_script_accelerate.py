"""`dstrain script accelerate`: a job's files for those who train without dstrain."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dstrain.launch.scripts.exports import ExportEngine
from tests.cli.conftest import Type
from tests.train.launching import environment

PLAN = ("gen-config", "--gpus", "8", "--gpu", "h100", "--model", "qwen3-8b", "--data", "train.jsonl")


def test_the_files_are_written_with_what_they_need_by_the_plan(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    done = dstrain("script", "accelerate", "--engine", "fsdp2")
    assert done.returncode == 0, done.stderr
    assert "next: cd fsdp2 && accelerate launch --config_file accelerate.yaml train.py" in done.stderr
    assert "GiB on each GPU by the plan" in done.stderr
    arguments = json.loads((tmp_path / "fsdp2" / "train.json").read_text())
    assert (arguments["bf16"], arguments["dtype"], arguments["output_dir"]) == (True, "float32", "output")


def test_a_job_that_lint_refuses_and_one_without_counterpart_are_not_exported(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN, "--method", "qlora")
    done = dstrain("script", "accelerate", "--engine", "ddp")
    assert (done.returncode, "no counterpart of method: qlora" in done.stderr) == (3, True)
    path = tmp_path / "ds_config.json"
    path.write_text(path.read_text().replace('"zero_optimization"', '"zero_optimisation"'))
    done = dstrain("script", "accelerate", "--engine", "ddp")
    assert (done.returncode, "DS101" in done.stderr) == (3, True)
    assert not (tmp_path / "ddp").exists()


def test_other_files_are_not_overwritten_without_force(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.py").write_text("mine\n")
    done = dstrain("script", "accelerate", "--engine", "ddp", "-o", "out")
    assert (done.returncode, "out/train.py: exists already and differs" in done.stderr) == (6, True)
    assert not (tmp_path / "out" / "train.json").exists()
    assert dstrain("script", "accelerate", "--engine", "ddp", "-o", "out", "--force").returncode == 0
    assert (tmp_path / "out" / "train.py.bak").read_text() == "mine\n"


def test_json_and_dry_run_write_nothing(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    document = json.loads(dstrain("script", "accelerate", "-n", "--json").stdout)
    assert set(document["files"]) == {"train.py", "train.json", "accelerate.yaml", "ds_config.json"}
    assert "# accelerate.yaml" in dstrain("script", "accelerate", "--dry-run").stdout
    assert not (tmp_path / "deepspeed").exists()


@pytest.mark.engine
@pytest.mark.parts(3)
@pytest.mark.parametrize("engine", [ExportEngine.DDP, ExportEngine.FSDP2, ExportEngine.DEEPSPEED])
def test_the_next_line_trains_the_default_job(
    dstrain: Type, tmp_path: Path, made_demo: Path, engine: ExportEngine
) -> None:
    shutil.copytree(made_demo, tmp_path, dirs_exist_ok=True)
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]))
    asked = ("--gpus", "2", "--gpu", "cpu", "--seq-len", "64", "--global-batch", "8")
    dstrain("gen-config", *asked, "--model", "./model", "--data", "train.jsonl")
    done = dstrain("script", "accelerate", "--engine", engine)
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[-1].removeprefix("next: ")
    ran = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "train_loss" in ran.stdout
    assert list((tmp_path / engine / "output").glob("*.safetensors"))
    assert list((tmp_path / engine / "swanlog").glob("run-*"))
