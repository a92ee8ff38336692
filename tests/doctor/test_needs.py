"""What a job wants of its machines, and what they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.doctor.requirements import Needs, bare, of_job, on_host, question
from dstrain.facts.cluster.hostfile import expand
from dstrain.job.schema import Job

ZERO_2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}


def job(tmp_path: Path, **changes: object) -> Job:
    return Job(model="Qwen/Qwen3-8B", output_dir=str(tmp_path / "out"), **changes)  # type: ignore[arg-type]


def test_extensions_and_folders_follow_the_configuration(tmp_path: Path) -> None:
    found = of_job(job(tmp_path), {}, None, NVME, None)
    assert found.has_job
    assert found.ops == ("cpu_adam", "async_io")
    assert found.folders == {"output": str(tmp_path / "out"), "nvme": "/nvme"}


@pytest.mark.parametrize(
    ("changes", "there", "count"),
    [
        ({"save_total_limit": 2}, 0, 3),  # the oldest goes after the newest was written
        ({"save_total_limit": 2}, 2, 1),
        ({"save_total_limit": 2, "max_steps": 100, "save_steps": 500}, 0, 1),
        ({"save_total_limit": None}, 0, None),
        ({"save_total_limit": None, "max_steps": 1000, "save_steps": 100}, 0, 10),
        ({"save_total_limit": None, "save_steps": 0.3}, 0, 4),
    ],
)
def test_checkpoints_that_will_be_written_are_counted(
    tmp_path: Path, changes: dict[str, object], there: int, count: int | None
) -> None:
    for number in range(there):
        (tmp_path / "out" / f"checkpoint-{number}").mkdir(parents=True)
    assert of_job(job(tmp_path, **changes), {}, None, {}, None).num_checkpoints == count


def test_the_jobs_environment_counts_and_secrets_never_leave(tmp_path: Path) -> None:
    shell = {"HF_TOKEN": "hf_secret", "HF_ENDPOINT": "http://me:secret@mirror", "SHELL": "/bin/sh"}
    found = of_job(job(tmp_path, env={"DS_ACCELERATOR": "cpu", "NCCL_DEBUG": "INFO"}), shell, None, ZERO_2, None)
    assert found.on_cpu
    assert "secret" not in str(found)
    asked = question(found)
    assert asked.environment["NCCL_DEBUG"] == "INFO"
    assert not {"HF_TOKEN", "SHELL"} & set(asked.environment)
    assert asked.endpoints["Hugging Face"] == "http://mirror"


def test_a_job_of_local_files_asks_no_hub(tmp_path: Path) -> None:
    local = Job(model="./model", data="./train.jsonl", output_dir=str(tmp_path))
    assert of_job(local, {}, None, {}, None).hubs == ()
    assert of_job(local, {}, None, {}, None).paths == ("./model", "./train.jsonl")
    assert of_job(job(tmp_path), {}, None, {}, None).hubs == ("Hugging Face",)


def test_only_the_host_of_rank_0_has_a_port_and_swanlab() -> None:
    hosts = expand("node[0-1]:8", None)
    needs = bare({}, hosts)
    first, second = (question(on_host(needs, host), host.name) for host in hosts.hosts)
    assert (first.port, second.port) == (29500, None)
    assert ("SwanLab" in first.endpoints, "SwanLab" in second.endpoints) == (True, False)
    assert (first.others, second.others) == (("node1",), ("node0",))
    assert first.master == second.master == "node0"


def test_one_host_is_asked_for_no_way_to_others() -> None:
    asked = question(bare({"MASTER_PORT": "29511"}))
    assert (asked.others, asked.master, asked.port) == ((), None, 29511)


def test_without_a_job_nothing_is_known_of_ram() -> None:
    assert Needs().host_bytes is None
