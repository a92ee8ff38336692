"""Checkpoints that ranks cannot use are put aside, and the attention that all nodes have is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.job.file import read_job
from dstrain.launch.launch import Launch, for_ranks, write_request
from dstrain.launch.nodes.connection import Node
from dstrain.launch.nodes.protocol import Hello
from dstrain.launch.prepare.prepare import prepare
from dstrain.launch.run.supervisor import decide_attention
from tests.cli.test_run import CONFIG, EMPTY_WEIGHTS, SAMPLE
from tests.launch.hosts import Job
from tests.train.checkpoints.damage import HARMS

pytest_plugins = ("tests.launch.fixtures",)
STEPS = ("--set", "save_steps=4", "--set", "resume=auto")


def test_a_checkpoint_that_is_not_as_it_was_saved_is_put_aside_and_the_older_one_is_taken(light_job: Job) -> None:
    first = light_job.call("run", *STEPS, "--set", "max_steps=12")
    assert first.code == 0, first.said
    for step, harm in ((8, "4,000 bytes"), (12, "bit")):
        HARMS[harm](light_job.place.path / f"checkpoint-{step}" / "weights")
    again = light_job.call("run", *STEPS, "--set", "max_steps=16")
    assert again.code == 0, again.said
    for step in (8, 12):
        line = f"checkpoint-{step} is damaged (weights has another checksum than when it was saved): put aside as"
        assert f"warning: {line} checkpoint-{step}.damaged" in again.said
        assert (light_job.place.path / f"checkpoint-{step}.damaged" / "weights").exists()
    assert "starting again from step 4" in again.said
    assert sorted(light_job.losses()) == list(range(1, 17))


def test_without_an_older_one_training_does_not_start_over_by_itself(light_job: Job) -> None:
    first = light_job.call("run", *STEPS, "--set", "max_steps=4")
    assert first.code == 0, first.said
    HARMS["bit"](light_job.place.path / "checkpoint-4" / "weights")
    again = light_job.call("run", *STEPS, "--set", "max_steps=8", "--max-restarts", "2")
    assert again.code == 1, again.said
    assert "and there is no older one" in again.said
    assert "starts over; its files are in output/checkpoint-4.damaged" in again.said
    assert max(light_job.losses()) == 4


JOB = """\
model: ./model
data: train.jsonl
output_dir: out
hostfile: hostfile
attn: {attn}
ds_config: ds_config.json
"""
"""A job for two hosts, with the attention that it asks for."""


def launch_of(folder: Path, attn: str) -> Launch:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model" / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "train.jsonl").write_text(SAMPLE * 10)
    (folder / "ds_config.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}')
    (folder / "hostfile").write_text("gpu0 slots=1\ngpu1 slots=1\n")
    (folder / "job.yaml").write_text(JOB.format(attn=attn))
    prepared = prepare(read_job(folder / "job.yaml", []), {})
    unused: dict[str, Any] = {"mark": "m", "note": None, "exported": {}, "secrets": {}, "for_nodes": {}, "nodes": ()}
    launch = Launch(prepared=prepared, by_srun=False, master_port=29500, **unused)
    prepared.run_dir.path.mkdir()
    write_request(prepared, for_ranks(launch))
    return launch


def hellos(*packages: dict[str, str]) -> dict[Node, Hello]:
    told: dict[str, Any] = {"versions": {}, "shares_run_dir": True, "interface": None, "num_gpus": 1, "port": 29500}
    told |= {"unlike": {}, "clock": 0.0, "attention_cached": {}, "attention_downloadable": []}
    return {
        Node(number=number, host=f"gpu{number}", is_here=False, command=(), first_rank=number, num_ranks=1): Hello(
            host=f"gpu{number}", attention_packages=own, **told
        )
        for number, own in enumerate(packages)
    }


def written(launch: Launch) -> list[str]:
    """Returns the attention of the request, the estimate and the record of its reason."""
    place = launch.prepared.run_dir
    request, plan, facts = (json.loads(path.read_text()) for path in (place.request, place.plan, place.facts))
    return [request["attn"], plan["configuration"]["attn"], facts["attention"]]


def test_every_rank_reads_the_best_attention_that_all_nodes_have(tmp_path: Path) -> None:
    launch, said = launch_of(tmp_path, "auto"), list[str]()
    before = "the best that all nodes have, which they tell at the launch; planned as sdpa"
    assert written(launch) == ["sdpa", "sdpa", before]
    two = {"flash_attention_2": "2.8.3"}
    request = decide_attention(launch, hellos(two | {"flash_attention_3": "3.0.0"}, two), said.append)
    choice = "flash_attention_2 (flash-attn 2.8.3), on all 2 nodes; gpu1 lacks flash_attention_3"
    assert said == [f"attn     {choice}"]
    assert written(launch) == ["flash_attention_2", "flash_attention_2", choice]
    assert request == launch.prepared.run_dir.request.read_text()


def test_a_node_without_the_kernel_that_the_job_names_ends_the_launch(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "flash_attention_2")
    with pytest.raises(EnvironmentProblem, match=r"job\.yaml:5:1: attn is flash_attention_2, but gpu1 lacks"):
        decide_attention(launch, hellos({"flash_attention_2": "2.8.3"}, {}), lambda text: None)
