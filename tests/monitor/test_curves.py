"""Curves have the same names in all trackers, for training and evaluation those of Transformers' callbacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import rewrite_logs

from dstrain.choices import SwanLabMode
from dstrain.monitor.curves import CURVES, points, tag_of
from dstrain.monitor.metrics import scalars
from dstrain.monitor.sinks.registry import open_sinks
from dstrain.monitor.sinks.sink import End, Setup
from dstrain.units import GIB

TRAINERS = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_runtime", "test_loss", "rewards/margins")
NIGHT = Path(__file__).parents[1] / "report" / "night" / "metrics.jsonl"


def test_what_transformers_logs_has_the_names_of_its_callbacks() -> None:
    assert [tag_of(name) for name in TRAINERS] == list(rewrite_logs(dict.fromkeys(TRAINERS)))


def test_each_curve_has_a_name_of_its_own_in_a_section() -> None:
    tags = [curve.tag for curve in CURVES.values()]
    assert len(set(tags)) == len(tags)
    assert {tag.split("/")[0] for tag in tags} == {"train", "speed", "memory", "rows", "experts"}
    assert all("bytes" not in tag for tag in tags)


def test_every_metric_of_a_run_is_in_the_table() -> None:
    lines = [json.loads(line) for line in NIGHT.read_text().splitlines()]
    logged = {name for line in lines if "event" not in line for name in scalars(line) if not name.startswith("eval_")}
    assert logged - CURVES.keys() <= {"step", "start_step", "time_s"}  # they place a point


def test_tensorboard_has_the_loss_first_and_memory_in_gib(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    setup = Setup(project="p", name="n", mode=SwanLabMode.OFFLINE, run_dir=tmp_path, config={}, is_resumed=False)
    (sink,) = open_sinks(["tensorboard"], setup, lambda line: None)
    sink.log(points({"aside_s": 1.0, "host_bytes_max": 3 * GIB, "loss": 2.0}), 7)
    sink.finish(End.SUCCESS)
    (file,) = (tmp_path / "tensorboard").glob("*/events.*")
    read = events.EventAccumulator(str(file))
    read.Reload()
    assert read.Tags()["scalars"] == ["train/loss", "speed/aside_s", "memory/host_gib_max"]
    assert [(one.step, one.value) for one in read.Scalars("memory/host_gib_max")] == [(7, 3.0)]
