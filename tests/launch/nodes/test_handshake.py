"""Packages that a job needs are the same on every node, before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Attention, Optimizer
from dstrain.errors import EnvironmentProblem
from dstrain.facts import probe
from dstrain.facts.this_machine import versions
from dstrain.job.schema import Job
from dstrain.launch.nodes.handshake import require_compatible
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Hello
from dstrain.launch.prepare.packages import of_ranks
from dstrain.rundir import RunDir


def node(number: int) -> Node:
    return Node(number=number, host=f"gpu{number}", is_here=not number, command=None, first_rank=number, num_ranks=1)


def hello(number: int, **changed: str | None) -> Hello:
    given: dict[str, Any] = {"shares_run_dir": True, "interface": None, "num_gpus": 1, "port": 29500, "unlike": {}}
    return Hello(host=f"gpu{number}", versions=versions(["flash_attn"]) | changed, clock=0.0, **given)


def test_a_node_without_the_attention_kernel_is_named_before_the_launch() -> None:
    hellos = {node(number): hello(number, flash_attn="2.8.3" if number < 2 else None) for number in range(3)}
    with pytest.raises(EnvironmentProblem, match=r"gpu2: flash_attn is missing; most hosts have 2\.8\.3"):
        require_compatible(hellos, RunDir(Path("/run")), 29500, on_cpu=False)


def test_only_packages_that_the_job_needs_are_compared() -> None:
    plain = Job(model="m", data="d", output_dir="o")
    assert of_ranks(plain, None) == ()
    assert of_ranks(plain, probe.read_model("qwen3-8b")) == ()
    wishes: dict[str, Any] = {"attn": Attention.FLASH_ATTENTION_2, "optimizer": Optimizer.ADAMW_8BIT}
    wished = Job(model="m", data="d", output_dir="o", **wishes)
    assert of_ranks(wished, None) == ("bitsandbytes", "flash_attn", "kernels")
    assert of_ranks(replace(plain, liger=True), None) == ("liger_kernel", "triton")
    hybrid = replace(probe.read_model("qwen3-8b"), model_type="qwen3_5")
    assert of_ranks(plain, hybrid) == ("flash-linear-attention", "causal-conv1d")
