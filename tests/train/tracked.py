"""Trains one configuration after another on this rank and writes what lived: `tests.train.tracked CASES`.

CASES is a JSON file: a list of objects with `name`, `config` (of the model), `frozen_parts` (of a vision-language
model), `image_patches` (of its single image of a sample), `ds_config`, `seq_len`, `micro_batch`,
`grad_accum`, `sp`, `packing`, `activation_offload`, `steps`, `optimizer`, `loss`, `task`, `tiled_mlp`, `is_full`
(whether the device is, while the engine is set up), `grad_ckpt` (null, or its keywords) and `lora` (null, or the
keywords of LoraConfig). Each rank writes a list of what it measured to `CASES.RANK`.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator.real_accelerator import get_accelerator, set_accelerator

from dstrain.choices import LossKernel, Optimizer, Task
from dstrain.job.schema import Job
from dstrain.train import loss
from dstrain.train.adapters import freeze_parts, require_input_grads
from dstrain.train.arguments import recompute
from dstrain.train.loss import replace_loss
from dstrain.train.model import tile_mlps
from dstrain.train.parts.dpo import DpoObjective
from dstrain.train.tracing.kernels import token_losses
from tests.train.tracking import DEVICE, HOST, Ledger, TwoPlaceAccelerator, two_places, use_private_buffers


def build(case: dict[str, Any]) -> Any:
    """Returns the model on the host, in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, modeling_utils

    code: Any = modeling_utils

    config = AutoConfig.for_model(**case["config"])
    torch.manual_seed(0)
    family = AutoModelForImageTextToText if "vision_config" in case["config"] else AutoModelForCausalLM
    is_bf16 = case["ds_config"]["bf16"]["enabled"]
    model = family.from_config(config, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    freeze_parts(model, case["frozen_parts"])
    model.config.use_cache = False
    model.train()
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        if case["grad_ckpt"] is not None:
            require_input_grads(model)
        model = get_peft_model(
            model,
            LoraConfig(**case["lora"], task_type="CAUSAL_LM"),
            autocast_adapter_dtype=False,
        )
    if case["grad_ckpt"] is not None:
        code.save_on_cpu = Waiting
        recompute(model, case["grad_ckpt"], **({"offload": True} if case["activation_offload"] else {}))
    loss.token_losses = token_losses  # the chunks of a CPU are in fp32
    if case["loss"] != LossKernel.FULL and case["task"] != Task.DPO:
        replace_loss(model, LossKernel(case["loss"]))
    if case["tiled_mlp"]:
        tile_mlps(model)
    return model


def optimizer_for(model: Any, case: dict[str, Any]) -> Any:
    """Returns the optimizer that the Trainer would make, with its two groups."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": 0.01},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    zero, shared = case["ds_config"]["zero_optimization"], case["ds_config"].get("expert_parallel")
    if "offload_optimizer" in zero:
        return DeepSpeedCPUAdam(groups, lr=1e-4, fp32_optimizer_states=case["optimizer"] != Optimizer.ADAMW_BF16)
    if case["optimizer"] == Optimizer.ADAMW_8BIT:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=1e-4)
    if case["optimizer"] == Optimizer.MUON:
        return None  # the engine makes it
    optimizer = torch.optim.AdamW(groups, lr=1e-4, **case.get("adamw", {"fused": True}))
    if shared:
        share_experts(model, optimizer, shared, stage=zero["stage"])
    return optimizer


class Waiting(torch.autograd.graph.saved_tensors_hooks):
    """Stands for `save_on_cpu`, which pins memory: what is saved goes to the host's place and comes back."""

    def __init__(self, **_: Any) -> None:
        accelerator: Any = get_accelerator()

        def fetched(tensor: Any) -> Any:
            with accelerator._ledger.placing(DEVICE):
                return tensor.clone()

        super().__init__(lambda tensor: accelerator.pin_memory(tensor), fetched)


class Quantizer:
    """Stands for `CUDAQuantizer`, with the tensors that its kernels take and make."""

    def quantize(self, param: Any) -> tuple[Any, Any]:
        """Returns 8-bit numbers and the scale of up to 2,048 of them."""
        half, numel = param.to(torch.half), param.numel()
        groups = next(count for count in range(-(-numel // 2048), numel) if numel % (8 * count) == 0)
        scales = torch.empty(groups, device=half.device)
        scales.fill_(float(half.abs().max()) / 127)
        numbers = torch.empty(half.numel(), dtype=torch.int8, device=half.device)
        numbers.numpy()[:] = (half.numpy().ravel() / float(scales[0])).round()
        return numbers, scales

    def dequantize(self, numbers: Any, scales: Any, dtype: Any = None) -> Any:
        """Returns fp16, of the shape of `numbers`, or a copy in another dtype."""
        half = torch.empty(numbers.shape, dtype=torch.half, device=numbers.device)
        each = numbers.numel() // scales.numel()
        half.numpy().ravel()[:] = numbers.numpy().ravel() * scales.numpy().repeat(each)
        return half if dtype in (None, torch.half) else half.to(dtype)


def share_experts(model: Any, optimizer: Any, section: dict[str, Any], *, stage: int) -> None:
    """Prepares a model for expert parallelism, in which as many tokens come to each expert."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.moe import ep_router

    from dstrain.train.parts.expert_parallel import find_classes_by_name, gather_in_one_order, part_experts

    class Evenly:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def topk(self, scores: Any, k: int, **_: Any) -> tuple[Any, Any]:
            rows, experts = scores.shape
            indices = (torch.arange(rows * k, device=scores.device) % experts).view(rows, k)
            return scores.gather(1, indices), indices

    ep_router.torch = Evenly()
    find_classes_by_name()
    gather_in_one_order()
    if stage < 3:
        part_experts(optimizer, model, AutoEP(model, parse_autoep_config(section)).ep_parser(), section["autoep_size"])


def mark_instants(model: Any, ledger: Ledger) -> None:
    """Makes the ledger enter a phase when the gradient of a layer's output, or of the logits, is there."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def mark(module: Any, phase: str) -> None:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad and torch._C._current_graph_task_id() == -1:
                tensor.register_hook(lambda _grad: ledger.enter(phase))

        module.register_forward_hook(hook)

    mark(base.lm_head, "head backward")
    decoder = getattr(base.model, "language_model", base.model)
    mark(decoder.norm, "norm backward")
    for number, layer in enumerate(decoder.layers):
        mark(layer, f"layer {number} backward")
    mark(decoder.embed_tokens, "embedding backward")


def measure(case: dict[str, Any], ledger: Ledger, caches: list[Any]) -> dict[str, Any]:
    """Returns what lived on this rank while a configuration trained; peaks are those of the last step."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    partition_parameters.CUDAQuantizer = Quantizer
    began, before = time.monotonic(), dict(ledger.bytes)
    get_accelerator().is_full = case["is_full"]
    model = build(case)
    mark_instants(model, ledger)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_for(model, case),
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=case["ds_config"],
        mpu=share_rows(model, case),
    )
    del model
    gc.collect()
    found: dict[str, Any] = {"name": case["name"], "host_at_load": ledger.host_peak - before[HOST]}
    width = case["seq_len"] // case["sp"]
    rows = case["micro_batch"] * Task(case["task"]).rows
    vocab_size = case["config"].get("text_config", case["config"])["vocab_size"]
    ids = torch.randint(8, vocab_size, (rows, width), device="cpu:0")
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if case["sp"] > 1 or case["packing"]:
        begin = width * (int(os.environ["RANK"]) % case["sp"])
        batch["position_ids"] = torch.arange(begin, begin + width, device="cpu:0").repeat(case["micro_batch"], 1)
    if case["sp"] > 1:
        batch["shift_labels"] = ids
    if case["packing"]:
        batch["position_ids"] %= case["seq_len"] // 2
    for step in range(case["steps"]):
        if step == case["steps"] - 1:
            ledger.enter("between")
            ledger.forget_peaks()
            found |= {"steady": ledger.bytes[DEVICE], "host_steady": ledger.bytes[HOST]}
            found["pinned"] = sorted(ledger.pinned.values())
        for _ in range(case["grad_accum"]):
            ledger.enter("between")
            found["loss"] = train(engine, with_images(case, batch), ledger, case)
    found |= {"peaks": dict(ledger.peaks), "peak": max(ledger.peaks.values()), "host_peak": ledger.host_peak}
    engine.destroy()
    del engine, ids, batch
    _forget_globals(caches)
    found |= {"left": ledger.bytes[DEVICE] - before[DEVICE], "host_left": ledger.bytes[HOST] - before[HOST]}
    found["wall_s"] = time.monotonic() - began
    return found


def with_images(case: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch with the images of its samples."""
    return batch | images(case, batch["input_ids"])


def images(case: dict[str, Any], ids: Any) -> dict[str, Any]:
    """Puts the tokens of an image at the beginning of each sample, and returns what the processor adds."""
    patches, rows = case["image_patches"], ids.shape[0]
    if not patches:
        return {}
    tower = case["config"]["vision_config"]
    ids[:, : patches // 4] = case["config"]["image_token_id"]
    side = int(patches**0.5)
    return {
        "pixel_values": torch.randn(
            (rows * patches, 3 * 2 * tower["patch_size"] ** 2), device="cpu:0", dtype=torch.bfloat16
        ),
        "image_grid_thw": torch.tensor([[1, side, patches // side]] * rows),
        "mm_token_type_ids": (ids == case["config"]["image_token_id"]).int(),
    }


def share_rows(model: Any, case: dict[str, Any]) -> Any:
    """Makes attention exchange slices of rows, as accelerate does; returns the groups of the ranks, None without.

    The samples of packed rows are attended one by one.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from dstrain.train.data.isolation import attend_by_sample, by_sample

    if case["packing"]:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = by_sample(ALL_ATTENTION_FUNCTIONS["sdpa"])
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=case["sp"],
        micro_batch_size=case["micro_batch"],
    )
    if case["packing"]:
        attend_by_sample(model, attention=ALL_ATTENTION_FUNCTIONS["sdpa"])
    return groups


def train(engine: Any, batch: dict[str, Any], ledger: Ledger, case: dict[str, Any]) -> float:
    """Trains one micro-batch as the Trainer does, which drops it and the model's outputs, and returns the loss."""
    ledger.enter("forward")
    is_dpo = case["task"] == Task.DPO
    loss = mean_of_pairs(engine, batch, case) if is_dpo else engine(**batch, use_cache=False).loss
    del batch
    ledger.enter("loss backward")
    engine.backward(loss)
    ledger.enter("step")
    engine.step()
    return float(loss.item())


def mean_of_pairs(engine: Any, batch: dict[str, Any], case: dict[str, Any]) -> Any:
    """Returns the mean loss of pairs over a micro-batch, as `DpoTrainer` does."""
    objective = DpoObjective(job=Job(model="", output_dir="", loss=LossKernel(case["loss"]), task=Task.DPO))
    outputs = objective.outputs(functools.partial(engine, use_cache=False), batch)
    return objective.losses(outputs, torch.zeros(2 * case["micro_batch"]))["loss"].mean()


def _forget_globals(caches: list[Any]) -> None:
    """Drops what DeepSpeed keeps of an engine that is gone.

    That is a stack of modules, the groups of ZeRO++ and of Ulysses, its own attention and `linear`, and caches of
    methods, which hold `self`.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
    from deepspeed.utils import groups
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    groups.mpu = None
    parallel_state_sp._release_sequence_parallel_groups()
    parameter_offload.FWD_MODULE_STACK.clear()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    own = torch.nn.functional.linear
    torch.nn.functional.linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", own)
    for cache in caches:
        cache.cache_clear()
    while gc.collect():
        pass


def _import_everything() -> list[Any]:
    """Imports what cases need, keeps it from the garbage collector, and returns DeepSpeed's caches of methods."""
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401
    from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: F401

    gc.unfreeze()
    kind = type(functools.cache(len))
    found = [each for each in gc.get_objects() if type(each) is kind and each.__module__.startswith("deepspeed")]
    gc.collect()
    gc.freeze()
    return found


def main(path: Path) -> None:
    """Measures every case and writes the list."""
    import deepspeed

    torch.set_num_threads(1)
    ledger = Ledger()
    set_accelerator(TwoPlaceAccelerator(ledger))
    use_private_buffers()
    deepspeed.init_distributed(dist_backend="gloo")
    caches = _import_everything()
    target = Path(f"{path}.{os.environ['RANK']}")
    results: list[dict[str, Any]] = []
    for case in json.loads(path.read_text()):
        ledger.forget_peaks()
        ledger.enter("start")
        with two_places(ledger):
            results.append(measure(case, ledger, caches))
        target.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
