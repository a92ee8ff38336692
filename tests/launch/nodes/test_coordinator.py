"""What a run takes from its nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.launch.nodes.coordinator import Coordinator
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Wrote
from dstrain.launch.nodes.spec import LaunchSpec, StopRequests
from dstrain.rundir import RunDir


@pytest.mark.parametrize("name", ["../out", "/tmp/dstrain-out", "start.sh", "logs/../../out.log"])
def test_a_node_that_writes_elsewhere_is_named_and_writes_nothing(tmp_path: Path, name: str) -> None:
    place = RunDir(tmp_path / "run")
    place.path.mkdir()
    node = Node(number=1, host="node1", is_here=False, command=("x",), first_rank=1, num_ranks=1)
    score = LaunchSpec(
        nodes=(node,), run_dir=place, mark="m", open=lambda nodes: [], environment={}, unset=(), exports={},
        master_port=29500,
    )  # fmt: skip
    coordinator, part = Coordinator(score, StopRequests(), lambda text: None), SimpleNamespace(node=node, problem=None)
    own: Any = coordinator
    own._members = SimpleNamespace(mirrored={1})
    own._take(part, Wrote(name="logs/1_rank1.log", text="words", on_screen=False), 0.0)
    own._take(part, Wrote(name=name, text="words", on_screen=False), 0.0)
    assert part.problem.text == f"sent {name!r}, which is not a file of a run"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["1_rank1.log"]
