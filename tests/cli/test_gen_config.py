"""`dstrain gen-config`: what it writes, what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.edits.lock import LOCK
from dstrain.facts.model import aliases
from dstrain.job.yaml_source import parse_yaml
from dstrain.paths import alone
from dstrain.units import format_count
from tests.cli.conftest import ROOT, Type, edit

PLAN = ("gen-config", "--gpus", "16", "--model", "qwen3-32b")

OWN = {".dstrain/lock.json", ".dstrain/ds_config.schema.json", ".dstrain/job.schema.json"}
WRITTEN = {"ds_config.json", "job.yaml", "hostfile", *OWN}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_writes_three_files_to_edit_and_three_of_its_own_and_says_what_follows(
    dstrain: Type, tmp_path: Path
) -> None:
    done = dstrain(*PLAN)
    assert (done.returncode, done.stdout, files(tmp_path)) == (0, "", WRITTEN)
    for said in ("ZeRO-3", "assumed: a100-80g", "next 1: put the names of your nodes into hostfile"):
        assert said in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 80
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert lock["inputs"] == {"model": "qwen3-32b", "gpus": 16}
    assert lock["cluster"]["gpu"]["name"] == "a100-80g"
    assert "nothing changed" in dstrain(*PLAN).stderr


def test_dry_run_prints_the_configuration_and_writes_nothing(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain(*PLAN, "--dry-run")
    assert json.loads(done.stdout)["zero_optimization"]["stage"] == 3
    assert "+seq_len: 4096" in json.loads(dstrain(*PLAN, "--json", "--diff").stdout)["diff"]
    assert files(tmp_path) == set()


def test_json_is_the_document_of_plan_with_the_files(dstrain: Type) -> None:
    found = json.loads(dstrain(*PLAN, "--json", "--dry-run").stdout)
    memory = found["plans"][found["chosen"]]["memory"]
    assert sum(memory["breakdown_bytes"].values()) == memory["device_bytes_per_gpu"]
    assert found["model"]["num_params"] == 32_762_123_264
    assert json.loads(found["files"]["ds_config.json"])["zero_optimization"]["stage"] == 3
    assert len(found["plans"]) > 1
    assert all("plan 1" in each["reasons"][0] for each in found["plans"][1:])
    assert all((each["tp"], each["zero_stage"] > 0) == (1, True) for each in found["plans"]), "what it can write"
    assert found["considered"]["estimated"] + found["considered"]["excluded_by_bound"] > 50
    planned = json.loads(dstrain("plan", *PLAN[1:], "--json").stdout)
    assert set(found) - set(planned) == {"notes", "files", "conflicts"}
    assert set(planned) <= set(found)
    assert {*planned["plans"][0]} == {*found["plans"][0]}


@pytest.mark.parametrize(
    ("asked", "field", "value", "title", "written"),
    [
        (
            "--grad-ckpt --grad-ckpt-every-n-layers 2 --activation-offload",
            "grad_ckpt_every_n_layers",
            2,
            "checkpointing of every 2 layers with inputs in RAM",
            "\ngrad_ckpt: true\nactivation_offload: true\ngrad_ckpt_every_n_layers: 2\n",
        ),
        ("--liger", "liger", True, "Liger", "\nliger: true  #"),
    ],
)
def test_what_is_asked_for_is_planned_and_written(
    dstrain: Type, asked: str, field: str, value: object, title: str, written: str
) -> None:
    found = json.loads(dstrain(*PLAN, *asked.split(), "--json", "--dry-run").stdout)
    assert found["plans"][0][field] == value
    assert title in found["plans"][0]["title"]
    assert written in found["files"]["job.yaml"]


SEEING = ("gen-config", "--gpus", "8", "--gpu", "h100", "--model", "qwen3-vl-8b", "--image-patches", "1024")


def test_parts_that_train_are_planned_written_and_repeated(dstrain: Type, tmp_path: Path) -> None:
    frozen = dstrain(*SEEING, "--zero-stage", "3", "--json")
    trained = dstrain(*SEEING, "--zero-stage", "3", "--json", "--no-freeze-vision-tower", "--force")
    params = [json.loads(done.stdout)["model"]["num_trainable_params"] for done in (frozen, trained)]
    assert params[1] - params[0] > 400e6
    again = dstrain("gen-config", "--seq-len", "2048")
    assert "--no-freeze-vision-tower" in again.stderr
    job, _ = parse_yaml((tmp_path / "job.yaml").read_text(), "job.yaml")
    assert job["freeze_vision_tower"] is False
    assert "freeze_language_model" not in job
    assert job["dataloader_num_workers"] == 4
    assert "dataloader_num_workers" not in dstrain(*PLAN, "--force", "--json").stdout


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ((*PLAN, "--no-freeze-vision-tower"), "--no-freeze-vision-tower: qwen3-32b has no vision tower"),
        ((*SEEING, "--freeze-language-model"), "--freeze-language-model: nothing is left to train"),
        ((*PLAN, "--image-patches", "64"), "--image-patches: qwen3-32b has no vision tower"),
        ((*SEEING, "--image-patches", "40000", "--seq-len", "4096"), "40,000 patches are 10,000 tokens, more than the"),
        ((*SEEING, "--image-patches", "0", "--no-freeze-vision-tower"), "it needs image_patches"),
        ((*SEEING, "--method", "lora", "--no-freeze-vision-tower"), "which method lora does not support"),
    ],
)
def test_parts_that_cannot_train_are_refused(dstrain: Type, asked: tuple[str, ...], problem: str) -> None:
    done = dstrain(*asked)
    assert done.returncode == 3
    assert problem in done.stderr


def test_what_is_sent_in_few_bits_is_planned_written_and_read_back(dstrain: Type, tmp_path: Path) -> None:
    sizes = []
    for asked in (("--qwz",), ()):
        plan = json.loads(dstrain(*PLAN, *asked, "--json").stdout)["plans"][0]
        zero = json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]
        assert (plan["qwz"], zero.get("zero_quantized_weights")) == ((True, True) if asked else (False, None))
        checked = json.loads(dstrain("lint", "--json").stdout)
        assert not [finding for finding in checked["findings"] if "quantized" in finding["problem"]]
        sizes.append(plan["memory"]["device_bytes_per_gpu"])
    assert sizes[0] != sizes[1]  # buffers grow into what is left, so either may be larger


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--liger", "--liger: Triton compiles kernels for GPUs only\nWrite --no-liger."),
        ("--qwz", "--qwz: DeepSpeed's quantizer is a CUDA kernel\nWrite --no-qwz."),
        ("--activation-offload", "a CPU are in host RAM already\nWrite --no-activation-offload."),
    ],
)
def test_a_cpu_has_no_memory_and_no_kernel_of_a_gpu(dstrain: Type, asked: str, said: str) -> None:
    done = dstrain("gen-config", "--gpus", "2", "--gpu", "cpu", "--model", "qwen3-0.6b", asked)
    assert done.returncode == 3
    assert said in done.stderr


def test_diff_shows_what_would_change_and_writes_nothing(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    before = (tmp_path / "job.yaml").read_text()
    done = dstrain(*PLAN, "--seq-len", "2048", "--diff")
    assert "-seq_len: 4096\n+seq_len: 2048\n" in done.stdout
    assert (tmp_path / "job.yaml").read_text() == before


def test_edits_stay_and_the_rest_follows(dstrain: Type, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    dstrain(*PLAN)
    assert 'attn: "auto"  # the best kernel that every node has' in job.read_text()
    edit(tmp_path / "ds_config.json", "{\n", "{\n  // mine\n")
    edit(tmp_path / "ds_config.json", '"overlap_comm": true,', '"overlap_comm": false,  // mine')
    edit(job, "seed: 42", "seed: 7  # mine")
    edit(job, "num_train_epochs: 3\n", "")
    edit(job, 'attn: "auto"', 'attn: "sdpa"')
    job.chmod(0o640)
    assert dstrain(*PLAN, "--seq-len", "2048").returncode == 0
    assert '"overlap_comm": false,  // mine' in (tmp_path / "ds_config.json").read_text()
    text = job.read_text()
    assert all(line in text for line in ("seed: 7  # mine", "seq_len: 2048", 'attn: "sdpa"'))
    assert "num_train_epochs" not in text
    assert stat.S_IMODE(job.stat().st_mode) == 0o640
    assert dstrain("gen-config", "-n").stdout.startswith("{\n  // mine\n")


def test_positions_beyond_the_models_own_come_and_go_with_the_length(dstrain: Type, tmp_path: Path) -> None:
    words = ("gen-config", "--gpus", "8", "--gpu", "h200", "--model", "qwen3-0.6b")
    done = dstrain(*words, "--seq-len", "45056")
    assert "assumed: yarn × 2 over 32768 positions" in done.stderr
    scaling = parse_yaml((tmp_path / "job.yaml").read_text(), "job.yaml")[0]["rope_scaling"]
    assert scaling == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
    assert dstrain("lint", "ds_config.json").returncode == 0
    dstrain(*words, "--seq-len", "4096")
    assert "rope" not in (tmp_path / "job.yaml").read_text()


def conflict(dstrain: Type, tmp_path: Path, *words: str) -> Any:
    """Returns the result of gen-config for a conflict: seq_len is 3000 by hand and 2048 by dstrain."""
    dstrain(*PLAN)
    edit(tmp_path / "job.yaml", "seq_len: 4096", "seq_len: 3000  # mine")
    return dstrain("gen-config", "--seq-len", "2048", *words)


def test_a_conflict_keeps_yours_until_it_is_settled(dstrain: Type, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    done = conflict(dstrain, tmp_path)
    assert (done.returncode, "next:" in done.stderr) == (6, False)
    assert "because this time it is --seq-len 2048" in done.stderr
    assert "  seq_len  3000   2048  it was 4096\n" in done.stderr
    assert "seq_len: 3000  # mine" in job.read_text()
    assert "seq_len: 2048" in (tmp_path / "job.yaml.new").read_text()
    again = dstrain("gen-config")
    assert (again.returncode, "open since an earlier conflict" in again.stderr) == (0, True)
    assert "seq_len: 3000" in job.read_text()
    assert "  seq_len  3000   8192  it was 4096\n" in dstrain("gen-config", "--seq-len", "8192").stderr
    assert dstrain("gen-config", "--seq-len", "2048", "--on-conflict", "new").returncode == 0
    assert "seq_len: 2048  # mine" in job.read_text()
    assert not (tmp_path / "job.yaml.new").exists()
    assert "open" not in dstrain("gen-config").stderr.split("wrote")[-1].split("nothing changed")[-1]


@pytest.mark.parametrize(
    ("words", "text", "copy"),
    [
        (("--on-conflict", "keep"), "seq_len: 3000", None),
        (("--on-conflict", "new"), "seq_len: 2048", "job.yaml.bak"),
        (("--force",), "seq_len: 2048", "job.yaml.bak"),
    ],
)
def test_a_conflict_can_be_decided_beforehand(
    dstrain: Type, tmp_path: Path, words: tuple[str, ...], text: str, copy: str | None
) -> None:
    assert conflict(dstrain, tmp_path, *words).returncode == 0
    assert text in (tmp_path / "job.yaml").read_text()
    assert {path.name for path in tmp_path.glob("job*")} == {"job.yaml", *([copy] if copy else [])}
    if copy:
        assert "seq_len: 3000  # mine" in (tmp_path / copy).read_text()


def test_nothing_is_asked_where_nobody_can_answer(dstrain: Type, tmp_path: Path) -> None:
    done = conflict(dstrain, tmp_path, "--on-conflict", "ask")
    assert (done.returncode, "needs a terminal" in done.stderr) == (2, True)


def test_a_second_force_keeps_the_first_copy(dstrain: Type, tmp_path: Path) -> None:
    conflict(dstrain, tmp_path, "--force")
    edit(tmp_path / "job.yaml", "seed: 42", "seed: 7")
    assert dstrain("gen-config", "--force").returncode == 0
    assert "seq_len: 3000  # mine" in (tmp_path / "job.yaml.bak").read_text()
    assert "seed: 7" in (tmp_path / "job.yaml.bak2").read_text()


@pytest.mark.parametrize(
    ("typed", "text"), [("new", "seq_len: 2048"), ("keep", "seq_len: 3000"), ("", "seq_len: 3000")]
)
def test_a_terminal_is_asked(dstrain: Type, tmp_path: Path, typed: str, text: str) -> None:
    conflict(dstrain, tmp_path, "-n")
    mine, theirs = pty.openpty()
    words = ["gen-config", "--seq-len", "2048", "--on-conflict", "ask"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dstrain.cli", *words],
        cwd=tmp_path,
        env=environment,
        stdin=theirs,
        stderr=subprocess.PIPE,
    )
    os.write(mine, f"{typed}\n".encode())
    _, said = process.communicate(timeout=120)
    os.close(mine)
    os.close(theirs)
    assert process.returncode == 0
    assert "seq_len: yours is 3000, dstrain's is 2048" in said.decode()
    assert text in (tmp_path / "job.yaml").read_text()


def test_a_dry_run_shows_a_conflict_and_writes_nothing(dstrain: Type, tmp_path: Path) -> None:
    done = conflict(dstrain, tmp_path, "--json", "--diff")
    found = json.loads(done.stdout)
    assert done.returncode == 6
    assert [(each["file"], each["key"], each["yours"], each["new"]) for each in found["conflicts"]] == [
        ("job.yaml", "seq_len", 3000, 2048)
    ]
    assert "seq_len: 3000  # mine" in found["files"]["job.yaml"]
    assert files(tmp_path) == WRITTEN


def test_edits_that_do_not_fit_are_named_with_what_they_need(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    job = tmp_path / "job.yaml"
    job.write_text(re.sub(r"(?m)^seq_len: .*", "seq_len: 1048576", job.read_text()))
    done = dstrain("gen-config", "--json")
    told = r"edits    the files keep yours, too large: [\d.]+ [GT]iB per GPU, [\d.]+ [GT]iB usable\n"
    assert re.search(told, done.stderr), done.stderr
    assert json.loads(done.stdout)["with_edits"]["fits"] is False
    assert done.stderr.endswith("dstrain explain --edits\n")
    job.write_text(re.sub(r"(?m)^seq_len: .*", "seq_len: -1", job.read_text()))
    done = dstrain("gen-config", "--json")
    found = json.loads(done.stdout)["with_edits"]
    assert (found["fits"], "seq_len is -1" in found["problem"]) == (None, True)
    assert done.stderr.endswith("dstrain lint\n")


@pytest.mark.parametrize(
    ("name", "text", "place"), [("ds_config.json", '{"a": }', "1:7"), ("job.yaml", "a: 1\nb: [\n", "3:1")]
)
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_written(
    dstrain: Type, tmp_path: Path, name: str, text: str, place: str
) -> None:
    dstrain(*PLAN)
    (tmp_path / name).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = dstrain("gen-config", "--seq-len", "2048")
    assert (done.returncode, f"{name}:{place}: " in done.stderr) == (3, True), done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_without_a_lock_is_not_overwritten(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: mine\n")
    done = dstrain(*PLAN)
    assert (done.returncode, "dstrain gen-config --adopt" in done.stderr) == (6, True)
    assert files(tmp_path) == {"job.yaml"}


def test_without_a_model_the_last_inputs_are_repeated(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN, "--seq-len", "2048", "--method", "lora", "--no-grad-ckpt")
    done = dstrain("gen-config")
    assert "as the last time: --gpus 16 --seq-len 2048 --method lora --no-grad-ckpt" in done.stderr.replace(
        " --model qwen3-32b", ""
    )
    assert "nothing changed" in done.stderr


def test_what_is_typed_replaces_an_input_of_the_last_time_and_a_model_all_of_them(
    dstrain: Type, tmp_path: Path
) -> None:
    done = dstrain("gen-config", "--gpus", "16")
    assert (done.returncode, "--model" in done.stderr) == (2, True)
    dstrain(*PLAN, "--seq-len", "2048")
    dstrain("gen-config", "--seq-len", "1024")
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert lock["inputs"] == {"model": "qwen3-32b", "gpus": 16, "seq_len": 1024}
    dstrain(*PLAN)
    assert "seq_len: 4096" in (tmp_path / "job.yaml").read_text()


def test_paths_of_the_last_time_are_found_from_another_folder(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "nodes").write_text("gpu01 slots=8\ngpu02 slots=8\n")
    (tmp_path / "runs" / "train.jsonl").write_text('{"text": "a"}\n')
    dstrain(*PLAN, "--hostfile", "runs/nodes", "--data", "runs/train.jsonl", "-o", "runs")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = dstrain("gen-config", "-o", "../runs", cwd=elsewhere)
    assert (done.returncode, "nothing changed" in done.stderr) == (0, True), done.stderr
    assert 'data: "train.jsonl"' in (tmp_path / "runs" / "job.yaml").read_text()


def test_the_gpus_of_the_last_time_are_used_where_none_are_found_now(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "4", "--gpu", "h100", "--model", "qwen3-8b", "--host-memory", "512GiB")
    path = tmp_path / ".dstrain" / "lock.json"
    lock = json.loads(path.read_text())
    lock["cluster"]["gpu_origin"] = "measured"
    lock["inputs"] = {"model": "qwen3-8b"}
    path.write_text(json.dumps(lock))
    done = dstrain("gen-config")
    assert "planning for the 4 × h100" in done.stderr
    again = json.loads(path.read_text())["cluster"]
    assert again == lock["cluster"]


def test_data_is_named_relative_to_the_job(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    for name in ("train", "later"):
        dstrain(*PLAN, "--data", f"{name}.jsonl", "-o", "runs")
        assert f'data: "{tmp_path}/{name}.jsonl"' in (tmp_path / "runs" / "job.yaml").read_text()
    dstrain(*PLAN, "--data", "train.jsonl")
    assert 'data: "train.jsonl"' in (tmp_path / "job.yaml").read_text()


@pytest.fixture
def tuned(made_demo: Path, tmp_path: Path) -> tuple[str, ...]:
    """A question about a model folder and 400 short conversations."""
    rows = (made_demo / "train.jsonl").read_text().splitlines(keepends=True)[:400]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    return ("gen-config", "--gpus", "8", "--gpu", "a100", "--model", str(made_demo / "model"), "--data", "train.jsonl")


def test_the_samples_of_a_large_file_are_estimated_and_it_says_so(
    dstrain: Type, tuned: tuple[str, ...], tmp_path: Path
) -> None:
    rows = (tmp_path / "train.jsonl").read_bytes()
    times = 300 * 2**20 // len(rows)
    with (tmp_path / "train.jsonl").open("wb") as file:
        for _ in range(times):
            file.write(rows)
    done = dstrain(*tuned, "--dry-run", "--json")
    known = json.loads(done.stdout)["data"]
    assert known["samples"] == pytest.approx(400 * times, rel=known["samples_estimated_from"]["error_ratio"])
    assert f"about {format_count(known['samples'])} samples; tokens: half" in done.stderr, done.stderr
    told = r"\n         samples are estimated \(± [\d.e-]+ %\) from 64.0 MiB of (299|300)\.\d MiB\n"
    assert re.search(told, done.stderr), done.stderr


def test_lengths_of_the_data_choose_packing_and_tell_the_time(
    dstrain: Type, tuned: tuple[str, ...], tmp_path: Path
) -> None:
    done = dstrain(*tuned, "--global-batch", "8")
    assert re.search(r"data     400 samples; tokens: half ≤ \d+, 95 % ≤ \d+, longest \d+\n", done.stderr), done.stderr
    assert "of a step is padding, or waiting for the longest sample" in done.stderr
    told = r"         (--packing --seq-len 512): \d\.\d × fewer tokens, (\d+) steps in place of 150\n"
    proposed = re.search(told, done.stderr)
    assert proposed, done.stderr
    packed = dstrain(*tuned, "--global-batch", "8", *proposed[1].split(), "--dry-run", "--json")
    assert json.loads(packed.stdout)["run"]["steps"] == int(proposed[2])
    assert re.search(r"         longer than (\d+: \d+ %(, )?)+\n", done.stderr), done.stderr
    assert re.search(r"time     [\d.]+ s ± \d+ %, 0.0 GPU-hours: 150 steps, 3 epochs of", done.stderr), done.stderr
    job = (tmp_path / "job.yaml").read_text()
    assert ("packing: false" in job, "seq_len: 512" in job) == (True, True)
    (tmp_path / "job.yaml").write_text(job.replace("grad_accum: 1 ", "grad_accum: 4 "))
    done = dstrain("gen-config", "--json")
    told = r"edits    the files keep yours: [\d.]+ of 72.0 GiB per GPU, [\d.]+ s a step\n"
    assert re.search(told, done.stderr), done.stderr
    assert re.search(r"time     [\d.]+ s ± \d+ %, 0.0 GPU-hours: 39 steps, 3 epochs of", done.stderr), done.stderr
    edited = json.loads(done.stdout)["with_edits"]
    assert (edited["grad_accum"], edited["run"]["steps"]) == (4, 39)
    (tmp_path / "job.yaml").write_text(job.replace("num_train_epochs: 3", "num_train_epochs: 20"))
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() * 30)
    done = dstrain("gen-config", "--json")
    assert re.search(r"packed: \d+\.\d samples in a row", done.stderr), done.stderr
    run = json.loads(done.stdout)["run"]
    assert run["steps"] == pytest.approx(20 * run["rows_per_epoch"] / 8, abs=20)
    assert "packing: true" in (tmp_path / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(f"{(tmp_path / 'job.yaml').read_text()}max_steps: 7\n")
    assert json.loads(dstrain("gen-config", "--json").stdout)["run"]["steps"] == 7


def test_what_packed_rows_hold_is_planned_by_every_verb(
    dstrain: Type, tuned: tuple[str, ...], made_demo: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    shutil.copytree(made_demo / "model", large)
    entry = aliases.resolve("qwen3-8b")
    assert entry is not None
    (large / "config.json").write_text(json.dumps(dict(entry[1].config)))
    done = dstrain(*tuned, "--model", str(large), "--packing", "--zero-stage", "2", "--json")
    document = json.loads(done.stdout)
    planned = document["plans"][document["chosen"]]["speed"]["step_s"]

    def explained() -> float:
        return float(json.loads(dstrain("explain", "ds_config.json", "--json").stdout)["step_s"])

    assert explained() == pytest.approx(planned, rel=0.005)
    lock = tmp_path / ".dstrain" / "lock.json"
    locked = json.loads(lock.read_text())
    lock.write_text(json.dumps({**locked, "contents": None}))
    assert explained() > 1.05 * planned
    lock.write_text(json.dumps({**locked, "contents": {**locked["contents"], "attended_tokens": 0}}))
    refused = dstrain("explain", "ds_config.json")
    assert (refused.returncode, "/contents/attended_tokens" in refused.stderr) == (3, True), refused.stderr


LISTED = """\
data:
  - {path: train.jsonl, weight: 3}
  - {path: 'more/*.jsonl', weight: 1, max_samples: 300}
"""


def test_a_list_of_data_sets_is_read_as_it_is_mixed_and_plan_says_the_same(
    dstrain: Type, tuned: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    for name in "ab":
        (tmp_path / "more" / f"{name}.jsonl").write_text('{"text": "' + "word " * 300 + '"}\n' * 200)
    assert dstrain(*tuned).returncode == 0
    job = tmp_path / "job.yaml"
    job.write_text(job.read_text().replace('data: "train.jsonl"\n', LISTED))
    done = dstrain("gen-config", "--json")
    document = json.loads(done.stdout)
    mixed = [(source["samples"], source["samples_per_epoch"]) for source in document["data"]["sources"]]
    assert mixed == [(400, 400), (300, 133)]  # 3 to 1, and train.jsonl whole
    assert document["data"]["samples"] == 533
    assert "train.jsonl: 400 from 400, 75 %; half" in done.stderr
    assert "more/*.jsonl: 133 from 300, 25 %; half" in done.stderr
    assert document["data"]["longer_than"]["256"] == pytest.approx(0.25, abs=0.01)
    plan = dstrain("plan", *tuned[1:-1], "job.yaml", "--json")
    again = dstrain(*tuned[:-1], "job.yaml")
    assert (again.returncode, "write the list into job.yaml" in again.stderr) == (2, True)
    assert [json.loads(plan.stdout)[key] for key in ("data", "run")] == [document[key] for key in ("data", "run")]


def test_plan_reads_data_as_gen_config_does(dstrain: Type, tuned: tuple[str, ...]) -> None:
    planned, generated = dstrain("plan", *tuned[1:]), dstrain(*tuned, "--dry-run")
    about = [
        [line for line in text.splitlines() if line[:4] in ("data", "time")]
        for text in (planned.stdout, generated.stderr)
    ]
    assert len(about[0]) == 2
    assert about[0] == about[1]
    assert "next: dstrain gen-config" in planned.stderr
    assert "--data train.jsonl" in planned.stderr


def test_unknown_lengths_say_why(dstrain: Type, tuned: tuple[str, ...], tmp_path: Path) -> None:
    asked = {
        ("--data", "later.jsonl"): "later.jsonl is not here",
        ("--data", "org/name"): "org/name is read on the hub when it trains",
        ("--model", "qwen3-8b"): "the tokenizer of Qwen/Qwen3-8B is not here: hf download Qwen/Qwen3-8B",
    }
    for options, why in asked.items():
        done = dstrain(*tuned, *options, "--dry-run", HF_HOME=str(tmp_path))
        assert done.returncode == 0
        assert f"lengths are unknown: {why}" in " ".join(done.stderr.split())
    (tmp_path / "cats.jsonl").write_text('{"instruction": "a", "output": "b", "image": "c.png"}\n')
    for model in ("qwen3-8b", "qwen3-vl-8b"):
        planned = dstrain(*tuned, "--model", model, "--data", "cats.jsonl", "--dry-run")
        assert (
            "cats.jsonl has images, but Qwen/Qwen3-8B has no processor for them" in " ".join(planned.stderr.split())
        ) is (model == "qwen3-8b")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert "lengths are unknown: train.jsonl: " in dstrain(*tuned, "--dry-run").stderr
    assert "data     1 sample; " in dstrain(*tuned, "--task", "dpo", "--dry-run").stderr


def test_a_users_own_hostfile_in_the_same_folder_is_left_alone(dstrain: Type, tmp_path: Path) -> None:
    text = "# ours\ngpu01 slots=8\ngpu02 slots=8\n"
    (tmp_path / "hostfile").write_text(text)
    assert dstrain(*PLAN, "--hostfile", "hostfile").returncode == 0
    assert (tmp_path / "hostfile").read_text() == text


def test_a_template_that_makes_another_zero_is_refused(dstrain: Type, tmp_path: Path) -> None:
    dstrain("show", "template", "zero3.json.j2", "--dir", "mine")
    partial = tmp_path / "mine" / "_zero3.json.j2"
    partial.write_text(partial.read_text().replace('"stage": 3', '"stage": 0'))
    done = dstrain(*PLAN, "--template-dir", "mine")
    assert (done.returncode, "makes ZeRO-0" in done.stderr) == (3, True)
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize("text", ["{{ 1/0 }}", "{% if %}", "{"])
def test_a_broken_template_is_named_without_a_traceback(dstrain: Type, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "zero3.json.j2").write_text(text)
    done = dstrain(*PLAN, "--template-dir", "mine")
    assert (done.returncode, "zero3.json.j2" in done.stderr, "Traceback" in done.stderr) == (3, True, False)


def test_named_hosts_share_the_gpus(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--model", "qwen3-8b", "--hosts", "a,b")
    assert (tmp_path / "hostfile").read_text() == "a slots=4\nb slots=4\n"


def test_the_template_of_a_folder_is_used_where_it_is_typed(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert dstrain(*PLAN, "--template-dir", "empty").returncode == 3
    dstrain("show", "template", "--dir", "mine")
    edit(tmp_path / "mine" / "zero3.json.j2", '"zero_optimization"', '"dump_state": true,\n  "zero_optimization"')
    assert dstrain(*PLAN, "--template-dir", "mine").returncode == 0
    assert json.loads((tmp_path / "ds_config.json").read_text())["dump_state"] is True
    for words in ([], ["-n"], ["--seq-len", "2048"]):
        done = dstrain("gen-config", *words)
        assert (done.returncode, "names templates of its own: mine" in done.stderr) == (3, True)
        assert "--template-dir mine" in done.stderr
    assert dstrain("gen-config", "--template-dir", "mine").returncode == 0


def test_a_lock_names_no_files_of_others(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    lock = tmp_path / ".dstrain" / "lock.json"
    lock.write_text(lock.read_text().replace('"hostfile":', '"../hostfile":'))
    for verb in (("gen-config",), ("explain", "--edits")):
        done = dstrain(*verb)
        assert (done.returncode, '"../hostfile" is not a file that dstrain generates' in done.stderr) == (3, True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--gpus", "16", "--model", "qwen33-32b"), 3, 'Did you mean "qwen3-32b"?'),
        (("--gpus", "8", "--model", "qwen3-8b", "--seq-len", "-5"), 3, "--seq-len is -5"),
        (("--gpus", "8", "--model", "broken.json"), 3, "broken.json:1:"),
        (("--gpus", "8", "--model", "qwen3-8b", "-o", "/proc/nowhere"), 5, "cannot be written"),
        (("--gpus", "8", "--model", "qwen3-8b", "--method", "lara"), 2, "did you mean lora?"),
        (("--gpus", "8", "--model", "llama-3.1-405b"), 4, "These options fit"),
        (("--gpus", "8", "--model", "qwen3-8b", "--hostfile", "none"), 3, "none"),
        (("--gpus", "8", "--model", "org/unknown"), 5, "Give a local folder"),
    ],
)
def test_bad_input_gets_one_message_and_no_file(
    dstrain: Type, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "broken.json").write_text('{"model_type": ')
    done = dstrain("gen-config", *words, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert files(tmp_path) == {"broken.json"}


def test_a_model_that_you_changed_in_the_job_is_told(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--model", "qwen3-8b")
    job = tmp_path / "job.yaml"
    job.write_text(job.read_text().replace("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"))
    said = " ".join(dstrain("gen-config").stderr.split())
    assert "note job.yaml names model Qwen/Qwen3-32B, and this plan is for Qwen/Qwen3-8B" in said


def test_a_broken_lock_says_what_to_do(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / ".dstrain").mkdir()
    (tmp_path / ".dstrain" / "lock.json").write_text("<<<<<<< HEAD")
    done = dstrain("gen-config", "--gpus", "8", "--model", "qwen3-8b")
    assert done.returncode == 3
    assert "dstrain gen-config --adopt" in done.stderr


def test_of_three_at_once_the_files_are_of_one_plan_and_the_others_say_so(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    lengths = [1024 * number for number in range(1, 4)]
    command = [sys.executable, "-m", "dstrain.cli", *PLAN, "--seq-len"]
    started = [
        subprocess.Popen([*command, str(length)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for length in lengths
    ]
    said = {length: process.communicate(timeout=300)[1] for length, process in zip(lengths, started, strict=True)}
    codes = {length: process.returncode for length, process in zip(lengths, started, strict=True)}
    assert set(codes.values()) <= {0, 6}
    assert all("another dstrain writes into this folder" in said[length] for length in lengths if codes[length])
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert codes[lock["inputs"]["seq_len"]] == 0
    assert {name: (tmp_path / name).read_text() for name in lock["base"]} == lock["base"]
    assert files(tmp_path) == WRITTEN


def test_while_another_one_writes_it_is_refused(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    before = (tmp_path / "job.yaml").read_text()
    with alone(tmp_path / LOCK, "writes"):
        done, adopting = dstrain(*PLAN, "--seq-len", "2048"), dstrain("gen-config", "--adopt")
    assert (done.returncode, adopting.returncode) == (6, 6)
    assert "another dstrain writes into this folder" in done.stderr
    assert (tmp_path / "job.yaml").read_text() == before


def test_a_generation_that_was_killed_is_healed_and_what_it_left_is_named(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    edit(tmp_path / "job.yaml", "seed: 42", "seed: 7")
    program = """
import os, signal, sys
from dstrain.cli.main import main
replace = os.replace
def killed(source, target):
    if str(target).endswith("lock.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
main(sys.argv[1:])
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    again = [*PLAN, "--seq-len", "2048", "--force"]
    killed = subprocess.run([sys.executable, "-c", program, *again], cwd=tmp_path, env=environment, check=False)
    assert killed.returncode == -9
    assert "seed: 7" in (tmp_path / "job.yaml.bak").read_text()
    done = dstrain(*PLAN, "--seq-len", "2048")
    assert done.returncode == 0
    assert re.search(r"killed while it wrote: rm \.dstrain/\.lock\.json\.\w{8}\.tmp", done.stderr)
    assert files(tmp_path) == {*WRITTEN, "job.yaml.bak", *(name for name in files(tmp_path) if name.endswith(".tmp"))}


def test_after_edits_that_run_refuses_lint_comes_next(dstrain: Type, tmp_path: Path) -> None:
    words = ("gen-config", "--gpus", "1", "--gpu", "4090", "--model", "qwen3-0.6b", "--data", "train.jsonl")
    assert "next: dstrain run" in dstrain(*words).stderr
    path = tmp_path / "ds_config.json"
    path.write_text(path.read_text().replace('"zero_optimization"', '"zero_optimisation"'))
    again = dstrain("gen-config")
    assert "next: dstrain lint" in again.stderr, again.stderr
    assert dstrain("lint").returncode == dstrain("run", "-n").returncode == 3


@pytest.mark.parametrize(("verb", "first"), [("plan", 8), ("gen-config", 10)])
def test_the_help_has_sections_of_options_and_ten_come_first(dstrain: Type, verb: str, first: int) -> None:
    sections = dict(re.findall(r"^(\w[\w ]+):\n((?:  .*\n)+)", dstrain(verb, "--help").stdout, flags=re.MULTILINE))
    assert list(sections)[-6:] == ["First", "Machines", "Training", "Memory and speed", "Images", "Output"]
    assert len(re.findall(r"^  -", sections["First"], flags=re.MULTILINE)) == first
    assert len(re.findall(r"^  -", sections["Output"], flags=re.MULTILINE)) <= 10
