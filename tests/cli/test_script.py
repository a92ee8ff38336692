"""`dstrain script`: where scripts go, what is said, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.cli.conftest import Type
from tests.train.launching import environment

TOKENS = {"HF_TOKEN": "hf-do-not-tell", "SWANLAB_API_KEY": "swan-do-not-tell"}
KINDS = {
    "slurm": "job.sbatch",
    "bash": "job.sh",
    "k8s": "job.trainjob.yaml",
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job for two nodes."""
    (tmp_path / "hostfile").write_text("gpu01 slots=8\ngpu02 slots=8\n")
    path = tmp_path / "job.yaml"
    path.write_text("model: a/b\ndata: a/c\noutput_dir: out\nhostfile: hostfile\n")
    return path


def words(kind: str) -> list[str]:
    return ["script", kind, *(["--image", "train:1"] if kind == "k8s" else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_lies_beside_its_job_and_says_what_to_type(dstrain: Type, job: Path, kind: str) -> None:
    done = dstrain(*words(kind), **TOKENS)
    assert done.returncode == 0, done.stderr
    path = job.parent / KINDS[kind]
    assert path.is_file()
    assert os.access(path, os.X_OK) == (kind != "k8s")
    assert f"wrote {KINDS[kind]}: 2 nodes of 8 GPUs" in done.stderr
    assert f"next: read it, then {'kubectl apply -f' if kind == 'k8s' else ''}" in done.stderr
    assert (job.parent / "out" / "logs").is_dir() == (kind == "slurm")


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_in_any_script_or_answer(dstrain: Type, job: Path, kind: str) -> None:
    done = dstrain(*words(kind), "--json", **TOKENS)
    text = (job.parent / KINDS[kind]).read_text()
    assert "do-not-tell" not in text + done.stdout + done.stderr
    assert "HF_TOKEN" in text
    assert set(json.loads(done.stdout)["secrets"]) >= set(TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_dry_run_prints_and_writes_nothing(dstrain: Type, job: Path, kind: str) -> None:
    before = set(job.parent.iterdir())
    done = dstrain(*words(kind), "--dry-run", **TOKENS)
    assert done.stdout.startswith(("#!/usr/bin/env bash\n", "# "))
    assert set(job.parent.iterdir()) == before


def test_an_edited_script_stays(dstrain: Type, job: Path) -> None:
    dstrain("script", "slurm")
    path = job.parent / "job.sbatch"
    path.write_text(path.read_text() + "# mine\n")
    done = dstrain("script", "slurm", "--partition", "gpu")
    assert (done.returncode, "job.sbatch: exists already and differs" in done.stderr) == (6, True)
    assert path.read_text().endswith("# mine\n")
    assert dstrain("script", "slurm", "--partition", "gpu", "--force").returncode == 0
    assert "#SBATCH --partition=gpu\n" in path.read_text()
    assert (job.parent / "job.sbatch.bak").read_text().endswith("# mine\n")
    assert dstrain("script", "slurm", "--partition", "gpu").returncode == 0


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (("script", "slrum"), 2, 'Did you mean "slurm"'),
        (("script", "slurm", "nowhere.yaml"), 3, "nowhere.yaml: no such file"),
        (("script", "slurm", "--time", "soon"), 3, '--time "soon" is not a time'),
        (("script", "slurm", "--set", "learnin_rate=1"), 3, "learning_rate"),
        (("script", "k8s"), 2, "Missing option '--image'"),
        (("script", "k8s", "--image", "a", "--memory", "64"), 3, "Write --memory 64Gi."),
        (("script", "slurm", "--memory", "64"), 2, '"64" has no unit: it would be bytes. Write 64GiB.'),
    ],
)
def test_a_wrong_wish_is_one_clear_error(
    dstrain: Type, job: Path, typed: tuple[str, ...], code: int, said: str
) -> None:
    before = set(job.parent.iterdir())
    done = dstrain(*typed)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert set(job.parent.iterdir()) == before


def test_machines_that_nobody_named_are_asked_for(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: a/b\noutput_dir: out\n")
    done = dstrain("script", "slurm")
    assert (done.returncode, "Give it: --nodes 2 --gpus 16" in done.stderr) == (3, True)
    assert dstrain("script", "slurm", "--nodes", "2", "--gpus", "16").returncode == 0


def test_what_was_planned_says_how_many_machines(dstrain: Type, tmp_path: Path) -> None:
    words = ("--model", "qwen3-8b", "--data", "train.jsonl", "--gpu", "h100", "--gpus", "16")
    assert dstrain("gen-config", *words).returncode == 0
    assert "wrote job.sbatch: 2 nodes of 8 GPUs" in dstrain("script", "slurm").stderr


def test_what_pods_would_not_find_is_said(dstrain: Type, job: Path) -> None:
    done = dstrain("script", "k8s", "--image", "train:1", "--pvc", f"training:{job.parent}")
    assert "note" not in done.stderr
    done = dstrain("script", "k8s", "--image", "train:1", "--pvc", "training:/elsewhere", "--force")
    assert "not on a --pvc" in done.stderr


def test_a_script_is_json_for_programs(dstrain: Type, job: Path) -> None:
    done = dstrain("script", "slurm", "--json", "--dry-run")
    found = json.loads(done.stdout)
    assert (found["kind"], found["nodes"], found["gpus_per_node"]) == ("slurm", 2, 8)
    assert found["submit"] == "sbatch job.sbatch"
    assert found["text"].startswith("#!/usr/bin/env bash\n#SBATCH ")


# `dstrain script prepare`, and the scripts that need it


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, made_demo: Path) -> Path:
    """A job that trains the demo's model on two CPU ranks, in a folder whose name has a space."""
    return shutil.copytree(made_demo, tmp_path_factory.mktemp("a run"), dirs_exist_ok=True)


def _on_cpu(home: Path) -> dict[str, str]:
    return environment(home) | {"HF_TOKEN": "hf-do-not-tell"}


@pytest.fixture
def trained(demo: Path, dstrain: Type) -> Path:
    """The folder of the demo with a job, as gen-config writes it."""
    words = ("gen-config", "--gpus", "2", "--gpu", "cpu", "--model", "./model", "--data", "train.jsonl", "--force")
    done = dstrain(*words, "--seq-len", "64", cwd=demo)
    assert done.returncode == 0, done.stderr
    job = demo / "job.yaml"
    job.write_text(job.read_text().replace("[swanlab]", "[]").replace("logging_steps: 10", "logging_steps: 1"))
    return demo


@pytest.mark.cluster
def test_prepare_writes_what_ranks_read_and_starts_nothing(dstrain: Type, trained: Path) -> None:
    typed = ("script", "prepare", "--nodes", "2", "--gpus", "16", "--set", "output_dir=prepared")
    done = dstrain(*typed, cwd=trained, DS_ACCELERATOR="cpu", **TOKENS)
    assert done.returncode == 0, done.stderr
    place = trained / "prepared"
    assert {path.name for path in place.iterdir()} == {
        *("request.json", "facts.json", "ds_config.resolved.json", "plan.json", "hostfile", ".secrets")
    }
    assert (place / ".secrets").stat().st_mode & 0o777 == 0o600
    assert (place / "hostfile").read_text() == "node-0 slots=8\nnode-1 slots=8\n"
    assert "prepared" in done.stderr
    before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    dstrain(*typed, cwd=trained, DS_ACCELERATOR="cpu", **TOKENS)
    assert {path: path.stat().st_mtime_ns for path in place.iterdir()} == before
    (place / "checkpoint-3").mkdir()
    assert dstrain(*typed, cwd=trained, DS_ACCELERATOR="cpu").returncode == 6


@pytest.mark.cluster
@pytest.mark.parts(6, at=2)
def test_a_pod_leaves_with_a_checkpoint_and_bash_goes_on_to_the_end(dstrain: Type, trained: Path) -> None:
    variables = _on_cpu(trained)
    with (trained / "job.yaml").open("a") as job:
        job.write("max_steps: 12\n")
    done = dstrain("script", "k8s", "--image", "a", "--python", sys.executable, cwd=trained, **variables)
    assert done.returncode == 0, done.stderr
    assert dstrain("script", "bash", "--port", _free_port(), cwd=trained, **variables).returncode == 0
    # the pod of a TrainJob, with the variables that its runtime gives torchrun
    trainer = YAML(typ="safe").load(trained / "job.trainjob.yaml")["spec"]["trainer"]
    runtime = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": _free_port()}
    pod = variables | runtime | {each["name"]: each["value"] for each in trainer["env"] if "value" in each}
    words = [*trainer["command"], *trainer["args"]]
    with (trained / "log").open("wb") as log:
        run = subprocess.Popen(words, cwd=trained, env=pod, stdout=log, stderr=log)
    try:
        metrics = trained / "output" / "metrics.jsonl"
        while not (metrics.exists() and '"step": 2' in metrics.read_text()):
            assert run.poll() is None, (trained / "log").read_text()[-3000:]
            time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 75, (trained / "log").read_text()[-3000:]
    finally:
        run.kill()
        run.wait()
    assert len(list((trained / "output").glob("checkpoint-*/complete.json"))) == 1
    done = subprocess.run(["bash", "job.sh"], cwd=trained, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"event": "resume"' in metrics.read_text()
    assert json.loads((trained / "output" / "summary.json").read_text())["steps"] == 12


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])
