"""What the planner may choose, and what it chooses: gen-config's files train on CPU ranks and leave trained weights."""

from __future__ import annotations

import itertools
import random
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.questions import QUESTIONS, asked, written
from dstrain.choices import Attention, LossKernel, Method, Offload, Precision
from dstrain.errors import DoesNotFit
from dstrain.facts.model.families import SHARED_EXPERTS
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.request import Request
from dstrain.plan.search.decide import decide
from dstrain.plan.search.search_space import space
from tests.train.engine import Engine
from tests.train.points import Point, Space, needs_bitsandbytes, workload_of

DRAWS = 200
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 2))
"""Nodes and their ranks."""
SHARED = ("qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b")
"""Models whose experts ranks may share."""
MODELS = ("qwen3-8b", "qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen3-vl-8b")


@pytest.fixture(scope="module")
def tiny(root: Path, demo: Path, engine: Engine) -> Space:
    # another module's test may run between two of these, which ends the fixture and makes it again
    folder = Path(tempfile.mkdtemp(prefix="space", dir=root))
    return Space(folder=folder, demo=demo, engine=engine)


def drawn(tiny: Space, number: int) -> Point:
    """Returns a draw: model, shape and method, then SP and TP, then ZeRO, then batch and buffers; none is rare."""
    dice = random.Random(number)
    alias = dice.choice(MODELS)
    model = tiny.model(alias)
    workload = workload_of(model, *dice.choice(SHAPES))
    request = Request(
        method=dice.choice(tuple(Method)),
        seq_len=dice.choice((64, 128)),
        global_batch=8,
        packing=dice.random() < 0.3,
        tp=None,
        loss=dice.choice((LossKernel.FULL, LossKernel.CHUNKED, LossKernel.FUSED)),
        tiled_mlp=model.moe is None and dice.random() < 0.3,
    )
    candidates = [candidate for candidate in space(workload, request) if candidate.way.zero.offload is not Offload.NVME]
    parallel = dice.choice(list(dict.fromkeys(candidate.way.parallel for candidate in candidates)))
    candidates = [candidate for candidate in candidates if candidate.way.parallel == parallel]
    way = dice.choice(list(dict.fromkeys(candidate.way for candidate in candidates)))
    chosen = dice.choice([candidate for candidate in candidates if candidate.way == way])
    return Point(alias=alias, workload=workload, configuration=chosen.configuration(model))


@pytest.mark.parts(144)
@pytest.mark.parametrize("number", range(DRAWS))
def test_a_point_trains_as_one_rank_without_zero_does(
    tiny: Space, need: Callable[[object, str], None], number: int
) -> None:
    point = drawn(tiny, number)
    if point.configuration.model.method is Method.QLORA:
        needs_bitsandbytes(need)
    tiny.trains_as_one_rank_does(point, str(number))


@pytest.mark.parts(16)
@pytest.mark.parametrize(("alias", "zero_stage"), list(itertools.product(SHARED, (1, 2, 3))))
def test_shared_experts_train_as_one_rank_does(tiny: Space, alias: str, zero_stage: int) -> None:
    values = {"ep": 2, "zero_stage": zero_stage, "precision": Precision.FP32, "seq_len": 64, "grad_accum": 4}
    point = Point(alias=alias, workload=workload_of(tiny.model(alias), 1, 2), configuration=changed(DEFAULTS, **values))
    tiny.trains_as_one_rank_does(point, f"EP {alias} {zero_stage}")


@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="DeepSpeed builds async_io with libaio-dev")
@pytest.mark.parametrize("grad_accum", [1, 4])
def test_states_on_a_drive_train_as_one_rank_does(tiny: Space, tmp_path: Path, grad_accum: int) -> None:
    workload = workload_of(tiny.model("qwen3-8b"), 1, 2, nvme=tmp_path)
    values = {"offload": Offload.NVME, "zero_stage": 3, "precision": Precision.FP32, "seq_len": 64}
    configuration = changed(DEFAULTS, **values, grad_accum=grad_accum, micro_batch=4 // grad_accum)
    point = Point(alias="qwen3-8b", workload=workload, configuration=configuration)
    tiny.trains_as_one_rank_does(point, f"NVMe {grad_accum}")


def test_all_families_whose_experts_are_shared_are_tried(tiny: Space) -> None:
    with_tower = "qwen3_vl_moe"  # tests/train/test_images.py
    assert {tiny.model(alias).model_type for alias in SHARED} == set(SHARED_EXPERTS) - {with_tower}


@pytest.mark.parametrize(("alias", "method"), [("qwen3-30b-a3b", Method.LORA), ("qwen3-vl-30b-a3b", Method.FULL)])
def test_zero_3_trains_and_saves_what_other_stages_do(tiny: Space, alias: str, method: Method) -> None:
    configuration = changed(DEFAULTS, zero_stage=3, method=method, precision=Precision.FP32, seq_len=64, grad_accum=4)
    point = Point(alias=alias, workload=workload_of(tiny.model(alias), 1, 2), configuration=configuration)
    tiny.trains_as_one_rank_does(point, f"ZeRO-3 {alias}")


def shrunk(tiny: Space, words: str) -> Point | None:
    """Returns the choice for a question on up to four ranks with a tiny model; None if nothing fits."""
    question = asked(shlex.split(words))
    try:
        configuration = decide(question.workload, question.request).chosen.configuration
    except DoesNotFit:
        return None
    cluster, zero = question.workload.cluster, configuration.zero
    per_node = min(cluster.gpus_per_node, 4 if cluster.num_nodes == 1 else 2)
    nodes = min(cluster.num_nodes, 2)
    sp = min(configuration.parallel.sp, nodes * per_node)
    alias = shlex.split(words)[1]
    chosen = changed(
        configuration,
        precision=Precision.FP32,
        attn=Attention.SDPA,
        activation_offload=False,  # of GPUs only: a CPU's are in host RAM
        sp=sp,
        ep=min(configuration.parallel.ep, nodes * per_node),
        hpz=min(zero.hpz, per_node),
        seq_len=128 if configuration.batch.seq_len > 4096 else 64,
        micro_batch=min(configuration.batch.micro_batch, 2),
        grad_accum=2 * sp,
        reduce_bucket_size=100_000,
        sub_group_size=20_000,
        prefetch_bucket_size=20_000,
    )
    return Point(alias=alias, workload=workload_of(tiny.model(alias), nodes, per_node), configuration=chosen)


@pytest.mark.parts(24)
@pytest.mark.parametrize("number", range(1, len(QUESTIONS) + 1))
def test_the_choice_for_a_question_trains(tiny: Space, need: Callable[[object, str], None], number: int) -> None:
    words = QUESTIONS[number - 1].words
    point = shrunk(tiny, words)
    if point is None:
        assert written(shlex.split(words)) is None
        return
    if point.configuration.model.method is Method.QLORA:
        needs_bitsandbytes(need)
    tiny.trains_as_one_rank_does(point, f"question {number}")
