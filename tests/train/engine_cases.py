"""Configurations that the real engine trains on CPU ranks, and what the plan says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.choices import LossKernel, Method, Offload, Optimizer, Precision, Task
from dstrain.facts.model.families import from_config
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.configuration import BF16_STATES, DEFAULTS, Configuration, changed
from dstrain.plan.memory.deepspeed import engine as planned_engine
from dstrain.plan.named_parts import frozen_parts, with_frozen
from dstrain.plan.training_code import needs_reentrant
from tests.train.engine import Engine

STEPS = 2
"""Steps of each case; the last is measured. ZeRO-3 knows the order of modules, and Adam has its states, after one."""

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
"""4.2 million parameters."""
DEEP = {
    **LLAMA,
    "vocab_size": 2000,
    "hidden_size": 192,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "head_dim": 48,
}
"""The same with more layers than are worth keeping gathered."""
TIED = {**LLAMA, "model_type": "qwen3", "vocab_size": 3000, "num_hidden_layers": 3, "tie_word_embeddings": True}
"""Its head is its embedding, and queries and keys are normalised."""
SPARSE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""A mixture of experts."""
BALANCED = {
    **SPARSE,
    "vocab_size": 512,
    "hidden_size": 64,
    "num_experts": 64,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
}
"""One with the loss that balances experts, whose tensors are a large part of its memory."""


SEEING = {
    "model_type": "qwen3_vl",
    "text_config": {
        **LLAMA,
        "model_type": "qwen3_vl_text",
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 6,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_heads": 4,
        "out_hidden_size": 256,
        "patch_size": 8,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 3],
    },
    "tie_word_embeddings": False,
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}
"""A vision-language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of one model on some ranks."""

    name: str
    """What is special about it."""
    ranks: int
    """CPU ranks."""
    model: Mapping[str, Any]
    """The model's config.json."""
    configuration: Configuration
    """How it is trained."""
    parts: tuple[str, ...] = ()
    """Keys of a job that freeze or train parts of a vision-language model, each turned from its default."""
    is_full: bool = False
    """Whether the device has no memory left while the engine is set up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What lived on the ranks, in bytes; the most of any rank."""

    peak: int
    """On the device during the last step."""
    steady: int
    """On the device before it."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """Peak of each phase of the step."""
    host: int = 0
    """On the host."""
    host_at_load: int = 0
    """On the host until the engine was set up; the model is made there."""
    pinned: tuple[int, ...] = ()
    """Page-locked buffers of the first rank."""
    left: int = 0
    """What was left when the engine was gone; of all ranks."""


BASE = changed(DEFAULTS, seq_len=128, reduce_bucket_size=700_000, param_persistence_threshold=1000)


def case(name: str, stage: int, *, ranks: int = 2, model: Mapping[str, Any] = LLAMA, **options: Any) -> Case:
    """Returns a case; ZeRO-3 overlaps communication by default."""
    parts = options.pop("parts", ())
    configuration = changed(BASE, zero_stage=stage, **{"overlap_comm": stage == 3, **options})
    return Case(name=f"ZeRO-{stage}, {name}", ranks=ranks, model=model, configuration=configuration, parts=parts)


def gathers(prefetch: int, reuse: int, live: int = DEFAULTS.zero.max_live_parameters) -> dict[str, Any]:
    """Returns how ZeRO-3 gathers."""
    return {"prefetch_bucket_size": prefetch, "max_reuse_distance": reuse, "max_live_parameters": live}


CPU: dict[str, Any] = {"offload": Offload.OPTIMIZER}
BOTH: dict[str, Any] = {"offload": Offload.PARAMS}
FP32: dict[str, Any] = {"grad_accum_dtype": Precision.FP32}
BF16: dict[str, Any] = {"optimizer": Optimizer.ADAMW_BF16}
CKPT: dict[str, Any] = {"grad_ckpt": True}
FULL_LORA: dict[str, Any] = {"method": Method.LORA, "lora": Lora(rank=8, dropout=0.0, targets=("all-linear",))}
SOME_LORA: dict[str, Any] = {
    "method": Method.LORA,
    "lora": Lora(rank=16, dropout=0.0, targets=("q_proj", "v_proj", "down_proj")),
}
WHOLE: dict[str, Any] = {
    "method": Method.LORA,
    "lora": Lora(rank=8, modules_to_save=("embed_tokens", "lm_head")),
}
ENDS: dict[str, Any] = {
    "method": Method.LORA,
    "lora": Lora(rank=8, targets=("q_proj", "down_proj", "embed_tokens", "lm_head")),
}
EXPERTS: dict[str, Any] = {
    "model": SPARSE,
    "method": Method.LORA,
    "lora": Lora(rank=8, targets=("q_proj",), target_parameters=("experts.down_proj", "experts.gate_up_proj")),
}
NARROW: dict[str, Any] = {"model": DEEP}
IMAGES: dict[str, Any] = {"model": SEEING, "image_patches": 256}
ALIGNER = ("freeze_multi_modal_projector",)
TOWER = ("freeze_vision_tower", *ALIGNER)
CASES = (
    case("plain", 0),
    case("accumulating, checkpointing", 0, model=TIED, grad_accum=2, **CKPT),
    case("adapters", 0, **SOME_LORA),
    case("plain", 1),
    case("accumulating, overlapping", 1, grad_accum=2, overlap_comm=True),
    case("checkpointing, tied", 1, model=TIED, **CKPT),
    case("fp32 accumulation", 1, grad_accum=2, seq_len=64, **FP32),
    case("plain", 2),
    case("overlapping, checkpointing, large bucket", 2, overlap_comm=True, reduce_bucket_size=3_000_000, **CKPT),
    case("accumulating, tiny bucket", 2, grad_accum=3, seq_len=64, reduce_bucket_size=100_000),
    case("fp32 accumulation", 2, **FP32),
    case("mixture of experts", 2, model=SPARSE),
    case("experts in balance, checkpointing", 2, model=BALANCED, seq_len=512, router_loss=True, **CKPT),
    case("adapters, checkpointing", 2, **FULL_LORA, **CKPT),
    case("adapters of experts", 2, **EXPERTS),
    case("optimizer on the host", 2, seq_len=64, **CPU),
    case("optimizer on the host, accumulating", 2, grad_accum=2, **CPU),
    case("everything kept gathered", 3),
    case("prefetching up to a limit", 3, **NARROW, **gathers(300_000, 500_000, 2_000_000)),
    case("nothing gathered ahead or kept", 3, **gathers(0, 0)),
    case("checkpointing, nothing kept", 3, **NARROW, **CKPT, **gathers(200_000, 0, 1_500_000)),
    case("checkpointing, tied, accumulating", 3, model=TIED, grad_accum=2, **CKPT),
    case("fp32, small sub-groups", 3, **NARROW, sub_group_size=500_000, **gathers(50_000_000, 0, 100_000), **FP32),
    case("mixture of experts, checkpointing", 3, model=SPARSE, **CKPT, **gathers(0, 0)),
    case("adapters", 3, **SOME_LORA),
    case("adapters, checkpointing", 3, **FULL_LORA, **CKPT),
    case("adapters of experts", 3, **EXPERTS, **gathers(0, 0)),
    case("adapters of experts, checkpointing", 3, **EXPERTS, **CKPT, **gathers(0, 0)),
    case("optimizer on the host", 3, seq_len=64, grad_accum=2, **CPU),
    case("half of the optimizer on the host", 3, **NARROW, sub_group_size=500_000, offload_ratio=0.5, **CPU),
    case("inputs of layers on the host", 2, activation_offload=True, seq_len=512, **NARROW, **CKPT),
    case("inputs of layers on the host, accumulating", 3, activation_offload=True, seq_len=512, grad_accum=2, **CKPT),
    case("parameters sent in 8 bits", 3, **NARROW, qwz=True, **gathers(300_000, 500_000, 2_000_000)),
    case("parameters sent in 8 bits, checkpointing", 3, qwz=True, **CKPT, **gathers(0, 0)),
    case("parameters on the host, checkpointing", 3, **NARROW, **CKPT, **gathers(300_000, 500_000), **BOTH),
    case("states in bf16, overlapping", 1, overlap_comm=True, **BF16),
    case("states in bf16", 2, seq_len=64, **BF16),
    case("states in bf16, fp32 accumulation", 2, **BF16, **FP32),
    case("states in bf16, on the host, accumulating", 2, seq_len=64, grad_accum=2, **BF16, **CPU),
    case("states in bf16, small sub-groups", 3, **NARROW, sub_group_size=500_000, **BF16, **gathers(300_000, 0)),
    case("states in bf16, adapters", 3, **SOME_LORA, **BF16),
    case(
        "states in bf16, half of them on the host",
        3,
        **NARROW,
        sub_group_size=500_000,
        offload_ratio=0.5,
        **BF16,
        **CPU,
    ),
    case("two sequence-parallel ranks", 2, sp=2),
    case("two sequence-parallel ranks, checkpointing", 3, sp=2, **NARROW, **CKPT, **gathers(200_000, 0, 1_500_000)),
    case("two sequence-parallel ranks, padded rows", 1, sp=2, micro_batch=2),
    case("two sequence-parallel ranks, packed rows", 2, sp=2, packing=True, micro_batch=2),
    case("two sequence-parallel ranks, packed rows, checkpointing", 3, sp=2, packing=True, **CKPT),
    case("packed rows", 2, packing=True, micro_batch=2),
    case("packed rows, checkpointing", 3, packing=True, **CKPT),
    case("fused loss, accumulating", 1, loss=LossKernel.FUSED, grad_accum=2),
    case("fused loss, tied", 2, model=TIED, loss=LossKernel.FUSED, **CKPT),
    case("adapters, whole embedding and head", 2, **WHOLE),
    case("adapters, whole embedding that is the head, checkpointing", 2, model=TIED, **WHOLE, **CKPT),
    case("adapters, whole embedding and head", 3, **WHOLE),
    case("adapters of embedding and head, accumulating", 2, **ENDS, grad_accum=2),
    case("adapters of an embedding that is the head, checkpointing", 2, model=TIED, **ENDS, **CKPT),
    case("adapters of embedding and head, checkpointing", 3, **ENDS, **CKPT),
    case("adapters of embedding and head", 3, **ENDS, **gathers(0, 0)),
    case("fused loss, adapters, checkpointing", 3, loss=LossKernel.FUSED, **FULL_LORA, **CKPT),
    case("fused loss, nothing kept, sequence-parallel", 3, sp=2, loss=LossKernel.FUSED, **NARROW, **gathers(0, 0)),
    case("chunked loss, checkpointing", 3, loss=LossKernel.CHUNKED, **CKPT),
    case("pairs of answers, chunked loss, accumulating", 2, task=Task.DPO, loss=LossKernel.CHUNKED, grad_accum=2),
    case("pairs of answers, checkpointing", 3, task=Task.DPO, **CKPT, **gathers(0, 0)),
    case("tiled MLPs, accumulating", 1, seq_len=768, tiled_mlp=True, grad_accum=2),
    case("tiled MLPs, checkpointing", 2, seq_len=768, tiled_mlp=True, **CKPT),
    case("tiled MLPs", 3, seq_len=768, tiled_mlp=True, **gathers(0, 0)),
    case("tiled MLPs, checkpointing", 3, seq_len=768, tiled_mlp=True, **NARROW, **CKPT, **gathers(200_000, 500_000)),
    case("tiled MLPs, adapters, checkpointing", 3, seq_len=300, tiled_mlp=True, **NARROW, **FULL_LORA, **CKPT),
    case("images", 2, **IMAGES),
    case("images, trained tower", 1, **IMAGES, parts=TOWER),
    case("images, trained tower, checkpointing", 2, **IMAGES, **CKPT, parts=TOWER, micro_batch=2),
    case("images, trained tower", 3, **IMAGES, parts=TOWER),
    case("images, trained tower, checkpointing", 3, **IMAGES, **CKPT, parts=TOWER, **gathers(200_000, 0, 1_500_000)),
    case("images, trained aligner", 3, **IMAGES, parts=ALIGNER, **gathers(0, 0)),
    case("images, trained aligner alone", 2, **IMAGES, parts=(*ALIGNER, "freeze_language_model")),
    case("pairs with images", 2, **IMAGES, task=Task.DPO, loss=LossKernel.CHUNKED),
    case("pairs with images, trained tower, checkpointing", 3, **IMAGES, **CKPT, parts=TOWER, task=Task.DPO),
    case("pairs with images, adapters, checkpointing", 3, **IMAGES, **SOME_LORA, **CKPT, task=Task.DPO),
    case("pairs with images, adapters", 1, **IMAGES, **SOME_LORA, task=Task.DPO),
    case("two expert-parallel ranks", 1, ep=2, model=SPARSE),
    case("two expert-parallel ranks, accumulating", 2, ep=2, model=SPARSE, grad_accum=2),
    case("two expert-parallel ranks, checkpointing", 3, ep=2, model=SPARSE, **CKPT, **gathers(0, 0)),
    case("two tensor-parallel ranks", 1, tp=2, seq_len=64),
    case("four ranks", 1, ranks=4),
    case("four ranks, accumulating", 2, ranks=4, grad_accum=2),
    case("four ranks, tied, fp32 accumulation", 2, ranks=4, model=TIED, seq_len=64, **FP32),
    case("four ranks, optimizer on the host", 2, ranks=4, seq_len=64, **CPU),
    case("four ranks, checkpointing", 3, ranks=4, **NARROW, **CKPT, **gathers(200_000, 0, 1_500_000)),
    case("four ranks, accumulating, fp32", 3, ranks=4, seq_len=64, grad_accum=3, **FP32),
    case("four ranks, secondary partitions", 3, ranks=4, **NARROW, hpz=2, **gathers(0, 0)),
    case("four ranks, two and two share rows", 1, ranks=4, sp=2, grad_accum=2),
    case("four ranks, two and two share experts", 2, ranks=4, ep=2, model=SPARSE, **CKPT),
    case("four ranks, two and two share experts", 3, ranks=4, ep=2, model=SPARSE),
    case("four ranks, two of them tensor-parallel", 2, ranks=4, tp=2, grad_accum=2, **CKPT),
)
"""What is measured. Adapters have no dropout: a CPU keeps its mask in bf16, a GPU in one byte. Tensor parallelism is
last, because its groups stay."""


def ds_config(configuration: Configuration) -> dict[str, Any]:
    """Returns the configuration in DeepSpeed's words."""
    zero: dict[str, Any] = {
        "stage": configuration.zero.stage,
        "overlap_comm": configuration.zero.overlap_comm,
        "reduce_bucket_size": configuration.zero.reduce_bucket_size,
        "sub_group_size": configuration.zero.sub_group_size,
        "stage3_prefetch_bucket_size": configuration.zero.prefetch_bucket_size,
        "stage3_param_persistence_threshold": configuration.zero.param_persistence_threshold,
        "stage3_max_live_parameters": configuration.zero.max_live_parameters,
        "stage3_max_reuse_distance": configuration.zero.max_reuse_distance,
        "zero_hpz_partition_size": configuration.zero.hpz,
        "zero_quantized_weights": configuration.zero.qwz,
    }
    if configuration.zero.offload is not Offload.NONE:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": configuration.zero.offload_ratio}
    if configuration.zero.offload is Offload.PARAMS:
        zero["offload_param"] = {"device": "cpu"}
    found = {
        "train_micro_batch_size_per_gpu": configuration.batch.micro_batch,
        "gradient_accumulation_steps": configuration.step.grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": configuration.model.precision is Precision.BF16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if configuration.step.optimizer is Optimizer.ADAMW_BF16:
        found["bf16"] = {"enabled": True, **dict.fromkeys(BF16_STATES, True)}
    if configuration.step.optimizer is Optimizer.MUON:
        zero["reduce_scatter"] = zero["stage"] < 3
        found |= {"gradient_clipping": 0.0, "optimizer": {"type": "Muon", "params": {"lr": 1e-4}}}
    if configuration.parallel.tp > 1:
        found["tensor_parallel"] = {"autotp_size": configuration.parallel.tp}
    if configuration.parallel.ep > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": configuration.parallel.ep}
    if configuration.step.grad_accum_dtype:
        found["data_types"] = {"grad_accum_dtype": configuration.step.grad_accum_dtype.value}
    return found


def job_of(case: Case) -> Job:
    """Returns a job that trains the parts of a case."""
    plain = Job(model="", output_dir="")
    turned: dict[str, Any] = {key: not getattr(plain, key) for key in case.parts}
    return replace(plain, **turned)


def described(case: Case) -> dict[str, Any]:
    """Returns what `tracked.py` needs to run a case."""
    configuration, lora = case.configuration, case.configuration.model.lora
    targets: str | list[str] = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    adapter = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
    if lora.target_parameters:
        adapter["target_parameters"] = list(lora.target_parameters)
    if lora.modules_to_save:
        adapter |= {
            "modules_to_save": list(lora.modules_to_save),
            "ensure_weight_tying": case.model["tie_word_embeddings"],
        }
    return {
        "name": case.name,
        "config": dict(case.model),
        "ds_config": ds_config(configuration),
        "frozen_parts": sorted(frozen_parts(job_of(case))),
        "image_patches": configuration.batch.image_patches,
        "seq_len": configuration.batch.seq_len,
        "micro_batch": configuration.batch.micro_batch,
        "grad_accum": configuration.step.grad_accum,
        "sp": configuration.parallel.sp,
        "packing": configuration.batch.packing,
        "activation_offload": configuration.checkpointing.offload,
        "steps": STEPS,
        "optimizer": configuration.step.optimizer,
        "loss": configuration.kernels.loss,
        "task": configuration.batch.task,
        "is_full": case.is_full,
        "tiled_mlp": configuration.checkpointing.tiled_mlp,
        "grad_ckpt": {"use_reentrant": needs_reentrant(configuration.model.method, configuration.zero.stage)}
        if configuration.checkpointing.enabled
        else None,
        "lora": adapter if configuration.model.method is Method.LORA else None,
    }


def run(engine: Engine, cases: Sequence[Case], folder: Path, *, timeout_s: float) -> list[Measured]:
    """Returns what each case had, trained one after another by the same ranks; all have as many."""
    ranks = cases[0].ranks
    folder.mkdir()
    path = folder / f"cases-{ranks}.json"
    path.write_text(json.dumps([described(case) for case in cases]))
    codes = engine.run("tests.train.tracked", path, log=folder / "log", ranks=ranks, timeout_s=timeout_s)
    assert not any(codes), (folder / f"log.{codes.index(max(codes, key=abs))}").read_text()[-4000:]
    found = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]
    return [_measured(rows) for rows in zip(*found, strict=True)]


def _measured(rows: Sequence[Mapping[str, Any]]) -> Measured:
    phases: dict[str, int] = {}
    for row in rows:
        for name, count in row["peaks"].items():
            phase = "backward" if name.startswith(("head", "norm", "layer")) else name
            phases[phase] = max(phases.get(phase, 0), count)
    return Measured(
        peak=max(row["peak"] for row in rows),
        steady=max(row["steady"] for row in rows),
        phases=phases,
        host=max(row["host_steady"] for row in rows),
        host_at_load=max(row["host_at_load"] for row in rows),
        pinned=tuple(rows[0]["pinned"]),
        left=sum(abs(row["left"]) for row in rows),
    )


def predicted(case: Case) -> Measured:
    """Returns what the plan says of a case."""
    model = with_frozen(from_config(case.model, name=case.name, source=case.name), job_of(case))
    way = replace(case.configuration, code=replace(case.configuration.code, attends_at_once=False))
    ranks = case.ranks // way.parallel.tp
    played = planned_engine.engine_of(model, way, ranks)
    steady = played.resident.total
    phases: dict[str, int] = {}
    for instant in planned_engine.instants(model, way, ranks, kernel_workspaces=False):
        name = _PHASES.get(instant.name, instant.name)
        phases[name] = max(phases.get(name, 0), steady + instant.total)
    host = planned_engine.host_of(model, way, ranks)
    return Measured(
        peak=max(phases.values()), steady=steady, phases=phases, host=host.asked, pinned=tuple(sorted(host.pinned))
    )


_PHASES = {
    "loss forward": "forward",
    "head backward": "backward",
    "layer backward": "backward",
    "vision backward": "backward",
    "gradient reduction": "embedding backward",
    "optimizer step": "step",
}
"""Instants of the plan → phases of the measurement, where they differ. A gradient of the head is reduced when the next
one comes, so that the head and the layers are one phase."""
