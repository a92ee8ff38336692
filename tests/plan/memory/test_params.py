"""What trains, in elements."""

from dataclasses import replace

import pytest
from cases import ask

from dstrain.choices import Method
from dstrain.facts import probe
from dstrain.facts.model.model_facts import Kind
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory.params import adapted, lora_params, trained, trained_on_rank
from dstrain.plan.named_parts import with_frozen


def test_full_training_trains_every_parameter_of_a_language_model() -> None:
    model = ask(model="qwen3-8b", gpus=8).workload.model
    counts = trained(model, Method.FULL, Lora())
    assert (counts.trainable, counts.frozen) == (8_190_735_360, 0)


@pytest.mark.parametrize(("name", "whole"), [("qwen3-0.6b", 0), ("qwen3-8b", 151_936 * 4096)])
def test_a_tensor_parallel_rank_trains_its_part(name: str, whole: int) -> None:
    # an embedding is cut only with a head that is tied to it; norms are whole
    model = ask(model=name, gpus=8).workload.model
    norms = model.num_params_of(Kind.NORM)
    counts = trained_on_rank(model, changed(DEFAULTS, tp=4))
    assert counts.trainable == (model.num_params - whole - norms) // 4 + whole + norms


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"])
def test_an_expert_parallel_rank_has_its_experts_and_all_that_is_no_expert(name: str) -> None:
    model = ask(model=name, gpus=8).workload.model
    experts = model.num_params_of(Kind.EXPERT)
    counts = trained_on_rank(model, changed(DEFAULTS, ep=8))
    assert counts.trainable == model.num_params - experts + experts // 8
    assert counts.everywhere == model.num_params


def test_the_vision_tower_is_frozen() -> None:
    model = ask(model="qwen3-vl-8b", gpus=8).workload.model
    counts = trained(model, Method.FULL, Lora())
    assert counts.frozen == model.num_params_of(Kind.VISION) > 0
    assert counts.trainable + counts.frozen == model.num_params


def test_all_linear_lora_of_llama_3_8b_is_the_published_41_943_040() -> None:
    # rank 16 over q 4096→4096, k and v 4096→1024, o, gate and up 4096→14336, down: 16 × 81,920 × 32 layers
    model = ask(model="llama-3.1-8b", gpus=1).workload.model
    assert lora_params(model, Lora(rank=16)) == 41_943_040


def test_named_targets_are_adapted_alone() -> None:
    model = ask(model="llama-3.1-8b", gpus=1).workload.model
    names = {group.name for group in adapted(model, Lora(targets=("q_proj", "v_proj")))}
    assert names == {"self_attn.q_proj.weight", "self_attn.v_proj.weight"}


def test_qlora_keeps_embedding_and_head_unquantized() -> None:
    model = ask(model="qwen3-8b", gpus=1).workload.model
    counts = trained(model, Method.QLORA, Lora())
    kept = model.num_params_of(Kind.EMBEDDING, Kind.HEAD, Kind.NORM)
    assert counts.quantized == model.num_params - kept


def test_a_job_trains_parts_of_a_vision_language_model_and_freezes_blocks_by_name() -> None:
    model = probe.read_model("qwen3-vl-8b")
    plain = Job(model="", output_dir="", freeze_vision_tower=False)
    tower = sum(g.numel * g.count for g in model.tensors if g.kind is Kind.VISION and "merger" not in g.name)
    blocks = sum(g.numel for g in model.tensors if ".blocks." in g.name)

    def trainable(job: Job) -> int:
        return trained(with_frozen(model, job), Method.FULL, Lora()).trainable

    decoder = model.num_params - model.num_params_of(Kind.VISION)
    assert trainable(plain) == decoder + tower
    assert trainable(replace(plain, freeze=(r"blocks\.[0-9]\.",))) == decoder + tower - 10 * blocks
    assert trainable(replace(plain, freeze_language_model=True)) == tower
