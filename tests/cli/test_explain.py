"""`dstrain explain` says what a key does and costs here, and what a whole file does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Type

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
    ("typed", "said"),
    [
        ("activation_offload", "whether the inputs of layers wait in host RAM"),
        ("beta", "dpo.beta of job.yaml"),
    ],
)
def test_a_key_is_one_of_the_job_where_the_engine_has_none(dstrain: Type, typed: str, said: str) -> None:
    assert said in " ".join(dstrain("explain", typed).stdout.split())


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


def test_a_key_of_the_job_is_changed_in_the_job_and_what_no_longer_fits_is_said(dstrain: Type, folder: Path) -> None:
    text = dstrain("explain", "train_micro_batch_size_per_gpu", cwd=folder).stdout
    assert "Memory and time if only micro_batch of the job changes" in text
    assert 'here      "auto"; ranks get 1 (micro_batch of the job)' in text
    assert "tokens/s" in text
    table = dstrain("explain", "zero_optimization.stage", cwd=folder).stdout.splitlines()
    assert next(line for line in table if line.startswith("  2  ")).endswith("no longer fits")


def test_a_key_that_ranks_get_from_the_job_alone_has_its_value(dstrain: Type, folder: Path) -> None:
    job = folder / "job.yaml"
    job.write_text(job.read_text(encoding="utf-8").replace('loss: "fused"', "tp: 2"), encoding="utf-8")
    text = dstrain("explain", "autotp_size", cwd=folder).stdout
    assert "here      not written (0); ranks get 2 (tp of the job)" in text
    assert "Memory and time if only tp of the job changes\n  2  " in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("steps_per_print", "The planner ignores this key"),
        ("elasticity", "gone      since DeepSpeed 0.19.8"),
        ("elasticity", "instead   write train_batch_size"),
        ("bf16.enabled", "bf16.enabled\n"),
        ("/bf16/enabled", "bf16.enabled\n"),
    ],
)
def test_a_key_is_told_by_its_path_or_pointer(dstrain: Type, folder: Path, name: str, said: str) -> None:
    assert said in dstrain("explain", name, cwd=folder).stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("activation_ofload", 'Did you mean "activation_offload" of job.yaml?'),
        ("overlap_com", 'Did you mean "zero_optimization.overlap_comm"?'),
        ("zero_optimisation.stage", 'Did you mean "zero_optimization.stage"?'),
        ("enabled", 'several keys end with "enabled"'),
        ("device", "zero_optimization.offload_param.device"),
        ("pin_memory", "dstrain explain zero_optimization.offload_optimizer.pin_memory"),
        ("missing.json", "missing.json: no such file"),
    ],
)
def test_what_is_no_key_or_several_is_refused_with_what_may_be_meant(dstrain: Type, name: str, said: str) -> None:
    done = dstrain("explain", name)
    assert (done.returncode, done.stdout, said in done.stderr) == (3, "", True), done.stderr


def test_a_file_is_said_section_by_section_with_what_the_job_fills_in(dstrain: Type, folder: Path) -> None:
    text = dstrain("explain", "ds_config.json", cwd=folder).stdout
    assert "ZeRO: " in text
    assert "Parameters, gradients and optimizer states are sharded over the GPUs" in text
    assert "16 GPUs × micro-batch 1 × 4 accumulated = 64 samples a step" in text
    assert 'train_batch_size: "auto" = 64 from the job' in text
    assert "not set by the file: " in text
    assert "$schema" not in text
    found = json.loads(dstrain("explain", "--json", cwd=folder).stdout)
    parts = [section["parts_bytes_per_gpu"] for section in found["sections"]]
    total = sum(sum(each.values()) for each in (*parts, found["beside_the_file_bytes"]))
    assert total == found["memory"]["device_bytes_per_gpu"]


def test_a_file_without_a_job_has_the_bytes_of_its_numbers(dstrain: Type, tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "bff16": 1}
    (tmp_path / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    text = dstrain("explain", "mine.json").stdout
    assert "No estimate: job.yaml does not exist;" in text
    assert "reduce_bucket_size: 500000000.0 (1.86 GiB of each GPU at most: the bucket" in text
    assert "not written: overlap_comm is true with stage 3, else false; sub_group_size is" in " ".join(text.split())
    assert "Not a key of DeepSpeed" in text
    (tmp_path / "two.json").write_text('{"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}}')
    assert "stage3_max_live_parameters: 1; not read at this stage" in dstrain("explain", "two.json").stdout
    (tmp_path / "broken.json").write_text('{"a": }')
    done = dstrain("explain", "broken.json")
    assert (done.returncode, "broken.json:1:7" in done.stderr) == (3, True)


def test_a_configuration_that_cannot_be_understood_has_no_numbers(dstrain: Type, folder: Path) -> None:
    edit(folder, '"reduce_bucket_size": 200000000', '"reduce_bucket_size": "many"')
    assert "dstrain lint shows the place" in dstrain("explain", cwd=folder).stdout
    assert "No numbers: " in dstrain("explain", "overlap_comm", cwd=folder).stdout


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
