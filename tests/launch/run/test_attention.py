"""What nodes tell of their attention kernels reaches the run directory, from which every rank reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.job.file import read_job
from dstrain.launch.launch import Launch, for_ranks, write_request
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Hello
from dstrain.launch.prepare.prepare import prepare
from dstrain.launch.run.start import decide_attention
from tests.cli.test_run import CONFIG, EMPTY_WEIGHTS, SAMPLE

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
