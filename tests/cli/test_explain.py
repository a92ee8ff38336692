"""`dstrain explain` says what a key does and costs here, and what a whole file does."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Type = Callable[..., subprocess.CompletedProcess[str]]
WAY = ("--gpus", "16", "--gpu", "a100-80g", "--model", "qwen3-32b")


@pytest.fixture
def folder(dstrain: Type, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files of a plan for 16 GPUs, none of which is here; planned once for all tests."""
    planned = tmp_path_factory.getbasetemp() / "planned"
    if not planned.exists():
        planned.mkdir()
        assert dstrain("gen-config", *WAY, cwd=planned).returncode == 0
    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "ds_config.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_key_is_explained_without_a_job_and_says_what_numbers_need(dstrain: Type) -> None:
    done = dstrain("explain", "overlap_comm")
    assert done.returncode == 0
    for said in ("zero_optimization.overlap_comm", "Reduces gradients during", "type      true or false, or null",
                 "default   true with stage 3, else false", "deepspeed/runtime/zero/config.py",
                 "No numbers: job.yaml does not exist;"):  # fmt: skip
        assert said in done.stdout


def test_a_key_of_the_job_is_explained_beside_that_of_the_engine(dstrain: Type, folder: Path) -> None:
    (folder / "job.yaml").write_text((folder / "job.yaml").read_text() + "optimizer: muon\n")
    done = dstrain("explain", "optimizer", cwd=folder)
    of_job, _, of_engine = done.stdout.partition("\n\noptimizer\n")
    assert of_job.startswith("optimizer of job.yaml\n  `adamw`, `adamw_8bit`")
    for said in ("type      adamw, adamw_8bit, adamw_bf16 or muon", 'default   "adamw"', 'here      "muon"'):
        assert said in of_job
    assert "source    deepspeed/runtime/config.py: get_optimizer_name" in of_engine
    assert "job.yaml  micro_batch; " in dstrain("explain", "train_micro_batch_size_per_gpu", cwd=folder).stdout
    assert dstrain("explain", "hostfile", cwd=folder).stdout.startswith("hostfile of job.yaml"), "a file has that name"
    found = json.loads(dstrain("explain", "rank", "--json", cwd=folder).stdout)
    assert [(key["key"], key["default"]) for key in found["job"]] == [("lora.rank", 16)]


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("activation_offload", 0, "whether the inputs of layers wait in host RAM"),
        ("activation_ofload", 3, 'Did you mean "activation_offload" of job.yaml?'),
        ("overlap_com", 3, 'Did you mean "zero_optimization.overlap_comm"'),
        ("beta", 0, "dpo.beta of job.yaml"),
        ("enabled", 3, 'several keys end with "enabled"'),
    ],
)
def test_a_key_is_one_of_the_job_where_the_engine_has_none(dstrain: Type, typed: str, code: int, said: str) -> None:
    done = dstrain("explain", typed)
    assert (done.returncode, said in " ".join((done.stdout + done.stderr).split())) == (code, True), done


def test_a_switch_is_estimated_either_way(dstrain: Type, folder: Path) -> None:
    done = dstrain("explain", "overlap_comm", "--json", cwd=folder)
    here = json.loads(done.stdout)["here"]
    assert (here["gpu"], here["gpus"], here["value"], here["dstrain"]["value"]) == ("a100-80g", 16, True, True)
    ways = {json.dumps(way["value"]): way for way in here["ways"] if way["is_written"]}
    assert ways["true"]["is_here"]
    assert ways["true"]["is_chosen"]
    assert ways["false"]["effect"]["device_bytes_per_gpu"] < 0
    assert ways["false"]["effect"]["step_ratio"] > 0


def test_a_size_is_compared_with_what_dstrain_and_deepspeed_take(dstrain: Type, folder: Path) -> None:
    edit(folder, '"reduce_bucket_size": 200000000', '"reduce_bucket_size": 1e9')
    done = dstrain("explain", "reduce_bucket_size", cwd=folder)
    text = done.stdout
    words = " ".join(text.split())
    assert "here 1000000000.0 (3.73 GiB of each GPU at most: the bucket and the copy that is reduced)" in words
    assert "dstrain 200000000 (762.9 MiB of each GPU at most: the bucket and the copy that is reduced)" in words
    assert "engine buffers sized to the free memory" in text
    table = text.split("Memory and time if only reduce_bucket_size changes\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["1000000000.0", "200000000", "500000000", '"auto"']
    assert "(current)" in table[0]
    assert "−" in table[1]
    assert "(dstrain's)" in table[1]


def test_a_stage_that_does_not_fit_says_so(dstrain: Type, folder: Path) -> None:
    table = dstrain("explain", "zero_optimization.stage", cwd=folder).stdout.splitlines()
    assert next(line for line in table if line.startswith("  2  ")).endswith("no longer fits")


def test_a_key_of_the_job_is_changed_in_the_job(dstrain: Type, folder: Path) -> None:
    text = dstrain("explain", "train_micro_batch_size_per_gpu", cwd=folder).stdout
    assert "Memory and time if only micro_batch of the job changes" in text
    assert 'here      "auto"; ranks get 1 (micro_batch of the job)' in text
    assert "tokens/s" in text


def test_a_key_that_ranks_get_from_the_job_alone_has_its_value(dstrain: Type, folder: Path) -> None:
    job = folder / "job.yaml"
    job.write_text(job.read_text(encoding="utf-8").replace('loss: "fused"', "tp: 2"), encoding="utf-8")
    text = dstrain("explain", "autotp_size", cwd=folder).stdout
    assert "here      not written (0); ranks get 2 (tp of the job)" in text
    assert "Memory and time if only tp of the job changes\n  2  " in text


def test_a_key_that_the_planner_does_not_count_says_so(dstrain: Type, folder: Path) -> None:
    assert "The planner ignores this key" in dstrain("explain", "steps_per_print", cwd=folder).stdout


def test_a_removed_key_says_since_when_and_what_instead(dstrain: Type) -> None:
    text = dstrain("explain", "elasticity").stdout
    assert "gone      since DeepSpeed 0.19.8" in text
    assert "instead   write train_batch_size" in text


@pytest.mark.parametrize("name", ["bf16.enabled", "/bf16/enabled"])
def test_a_path_and_a_pointer_mean_the_same(dstrain: Type, name: str) -> None:
    assert dstrain("explain", name).stdout.startswith("bf16.enabled\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("overlap_com", 'Did you mean "zero_optimization.overlap_comm"?'),
        ("zero_optimisation.stage", 'Did you mean "zero_optimization.stage"?'),
        ("device", "zero_optimization.offload_param.device"),
        ("missing.json", "missing.json: no such file"),
    ],
)
def test_what_is_no_key_or_several_is_refused_with_what_may_be_meant(dstrain: Type, name: str, said: str) -> None:
    done = dstrain("explain", name)
    assert (done.returncode, done.stdout) == (3, "")
    assert said in done.stderr


def test_the_parts_of_a_file_sum_to_its_memory(dstrain: Type, folder: Path) -> None:
    found = json.loads(dstrain("explain", "--json", cwd=folder).stdout)
    parts = [section["parts_bytes_per_gpu"] for section in found["sections"]]
    total = sum(sum(each.values()) for each in (*parts, found["beside_the_file_bytes"]))
    assert total == found["memory"]["device_bytes_per_gpu"]


def test_a_file_is_said_section_by_section_with_what_the_job_fills_in(dstrain: Type, folder: Path) -> None:
    text = dstrain("explain", "ds_config.json", cwd=folder).stdout
    assert "ZeRO: " in text
    assert "Parameters, gradients and optimizer states are sharded over the GPUs" in text
    assert "16 GPUs × micro-batch 1 × 4 accumulated = 64 samples a step" in text
    assert 'train_batch_size: "auto" = 64 from the job' in text
    assert "not set by the file: " in text
    assert "$schema" not in text


def test_a_file_without_a_job_has_the_bytes_of_its_numbers(dstrain: Type, tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "bff16": 1}
    (tmp_path / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    text = dstrain("explain", "mine.json").stdout
    assert "No estimate: job.yaml does not exist;" in text
    assert "reduce_bucket_size: 500000000.0 (1.86 GiB of each GPU at most: the bucket" in text
    assert "not written: overlap_comm is true with stage 3, else false; sub_group_size is" in " ".join(text.split())
    assert "Not a key of DeepSpeed" in text


def test_what_a_stage_does_not_read_is_marked(dstrain: Type, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}}
    (tmp_path / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    assert "stage3_max_live_parameters: 1; not read at this stage" in dstrain("explain", "mine.json").stdout


def test_a_configuration_that_cannot_be_understood_has_no_numbers(dstrain: Type, folder: Path) -> None:
    edit(folder, '"reduce_bucket_size": 200000000', '"reduce_bucket_size": "many"')
    assert "dstrain lint shows the place" in dstrain("explain", cwd=folder).stdout
    assert "No numbers: " in dstrain("explain", "overlap_comm", cwd=folder).stdout


def test_a_syntax_error_has_its_place(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"a": }', encoding="utf-8")
    done = dstrain("explain", "mine.json")
    assert done.returncode == 3
    assert "mine.json:1:7" in done.stderr


@pytest.mark.parametrize("subject", ["ds_config.json", "stage", "offload_optimizer", "optimizer.type"])
def test_it_fits_80_columns_when_piped(dstrain: Type, folder: Path, subject: str) -> None:
    lines = dstrain("explain", subject, cwd=folder).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)


def test_a_key_that_the_stage_does_not_read_says_so(dstrain: Type, folder: Path) -> None:
    edit(folder, '"stage": 3', '"stage": 2')
    said = dstrain("explain", "zero_hpz_partition_size", cwd=folder).stdout
    assert "not read under ZeRO-2" in said
    assert "an error, DS203: " in said


def test_a_name_of_several_keys_proposes_the_likeliest(dstrain: Type) -> None:
    said = dstrain("explain", "pin_memory").stderr
    assert "dstrain explain zero_optimization.offload_optimizer.pin_memory" in said
