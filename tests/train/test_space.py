"""Points of the planner's space: gen-config's files for each train on CPU ranks, and leave trained weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from dstrain.choices import Method, Offload, Precision
from dstrain.config.templates.files import generated
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus, hostfile
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.file import read_job
from dstrain.launch.launch import write_inputs
from dstrain.launch.prepare.prepare import prepare
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Plan
from dstrain.plan.labels import label
from dstrain.plan.memory.memory import Detail
from dstrain.plan.request import Request
from dstrain.plan.search.search_space import global_batch, space
from tests.conftest import asked_for
from tests.train.engine import Engine
from tests.train.launching import codes, losses, said, tensors, without_dropout

DRAWS = 200
STEPS = 3
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 2))
"""Nodes and their ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration for the ranks of a machine that plays several nodes."""

    workload: Workload
    configuration: Configuration


def workload_of(model: ModelFacts, nodes: int, per_node: int) -> Workload:
    cluster = clusters.describe(
        gpu=gpus.gpu(gpus.CPU),
        gpu_origin=Origin.GIVEN,
        gpus=nodes * per_node,
        gpus_per_node=per_node,
        host_memory_bytes=2**36,
    )
    return Workload(model=model, cluster=cluster)


def point(model: ModelFacts, number: int) -> Point:
    """Returns a draw: first shape and method, then a strategy, then its batch and buffers, so that none is rare."""
    dice = random.Random(number)
    workload = workload_of(model, *dice.choice(SHAPES))
    request = Request(
        method=dice.choice((Method.FULL, Method.LORA)),
        seq_len=dice.choice((64, 128)),
        global_batch=8,
        packing=dice.random() < 0.3,
    )
    candidates = [candidate for candidate in space(workload, request) if candidate.way.zero.offload is not Offload.NVME]
    ways = list(dict.fromkeys(candidate.way for candidate in candidates))
    way = dice.choice(ways)
    chosen = dice.choice([candidate for candidate in candidates if candidate.way == way])
    return Point(workload=workload, configuration=chosen.configuration(model))


def write(point: Point, folder: Path, model: Path, data: Path) -> Path:
    """Writes the files of a point as gen-config does and its run directory as `dstrain run` does; returns that."""
    folder.mkdir()
    workload, configuration = point.workload, point.configuration
    plan = Plan(
        chosen=assess(workload, configuration, detail=Detail.QUICK),
        rejected=(),
        num_estimated=1,
        global_batch=global_batch(workload.cluster, configuration),
        learning_rate=1e-3,
        reasons=(),
        notes=(),
    )
    hosts = hostfile.expand(f"localhost:{workload.cluster.num_gpus}", None)
    job = {"model": str(model), "data": str(data), "eval_data": None, "hub": "hf", "output_dir": "output"}
    for name, text in generated(plan, workload, hosts, template_dir=None, job=job).items():
        (folder / name).write_text(text)
    file = read_job(folder / "job.yaml", [f"max_steps={STEPS}", "logging_steps=1", "monitor.sinks=[]"])
    prepared = prepare(file, {"DS_ACCELERATOR": "cpu"})
    prepared.run_dir.path.mkdir()
    write_inputs(prepared, job=prepared.job, hostfile=(folder / "hostfile").read_text(), secrets={})
    return prepared.run_dir.path


Kind = tuple[Method, int, bool]


def kind_of(configuration: Configuration) -> Kind:
    """Returns what losses depend on: everything else is how they are computed."""
    return configuration.model.method, configuration.batch.seq_len, configuration.batch.packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The run directories of the drawn points, and of one rank without ZeRO for each kind."""

    points: dict[int, tuple[Point, Path]]
    references: dict[Kind, Path]


@pytest.fixture(scope="module")
def trained(root: Path, demo: Path, engine: Engine, request: pytest.FixtureRequest) -> Trained:
    folder = root / "space"
    folder.mkdir()
    plain = without_dropout(demo / "model", folder / "model")
    model, data = probe.read_model(str(plain)), demo / "train.jsonl"
    points: dict[int, tuple[Point, Path]] = {}
    references: dict[Kind, Path] = {}
    for number in asked_for(request, "number"):
        drawn = point(model, number)
        place = write(drawn, folder / str(number), plain, data)
        engine.train(place, ranks=drawn.workload.cluster.num_gpus)
        points[number] = drawn, place
        kind = kind_of(drawn.configuration)
        if kind not in references:
            alone = Point(workload=workload_of(model, 1, 1), configuration=_alone(kind))
            references[kind] = write(alone, folder / f"alone {len(references)}", plain, data)
            engine.train(references[kind], ranks=1)
    return Trained(points=points, references=references)


def _alone(kind: Kind) -> Configuration:
    """Returns ZeRO-0 with micro-batches of one sample."""
    method, seq_len, packing = kind
    batch = {"seq_len": seq_len, "packing": packing, "micro_batch": 1, "grad_accum": 8}
    return changed(DEFAULTS, method=method, precision=Precision.FP32, zero_stage=0, grad_ckpt=False, **batch)


@pytest.mark.parametrize("number", range(DRAWS))
def test_a_point_trains_as_one_rank_without_zero_does(trained: Trained, number: int) -> None:
    drawn, place = trained.points[number]
    name = f"{label(drawn.configuration)} on {drawn.workload.cluster.num_gpus} ranks"
    assert codes(place) == [[0] * drawn.workload.cluster.num_gpus], f"{name}\n{said(place)[-3000:]}"
    alone = trained.references[kind_of(drawn.configuration)]
    assert losses(place) == pytest.approx(losses(alone), rel=1e-4), name
    whole, expected = tensors(place / "final"), tensors(alone / "final")
    assert set(whole) == set(expected), name
    for key, weight in whole.items():
        assert weight.float().allclose(expected[key].float(), rtol=1e-2, atol=1e-3), f"{name}: {key}"
