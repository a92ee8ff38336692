"""Converters that several tables share, and how tools say who keeps which states: DeepSpeed or FSDP."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, DpoLoss, Method, Schedule, SinkName
from dstrain.config.imports.source import ABSENT, READ, Convert, Converted, OtherTraining, Source, Unmatched
from dstrain.errors import InvalidConfig
from dstrain.job.model_changes import ALL_LINEAR
from dstrain.plan.labels import bf16_losses


def number(value: Any, _: Source) -> float | int:
    """Returns a number, also one written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidConfig(f"{value} is not a number")
    try:
        return value if isinstance(value, int | float) else float(value)
    except ValueError:
        raise InvalidConfig(f'"{value}" is not a number') from None


def count(value: Any, source: Source) -> int:
    """Returns a whole number above 0."""
    plain = number(value, source)
    if plain != int(plain) or plain < 1:
        raise InvalidConfig(f"{value} is not a whole number above 0")
    return int(plain)


def interval(value: Any, source: Source) -> Any:
    """Returns a number of steps, or a share of the run below 1."""
    plain = number(value, source)
    return plain if 0 < plain < 1 else count(value, source)


def limit(value: Any, source: Source) -> Any:
    """Returns a whole number, or None for a number below 1, which means no limit."""
    return None if number(value, source) < 1 else count(value, source)


def flag(value: Any, _: Source) -> bool:
    """Returns a truth value, also one written as text."""
    named = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
    if str(value).lower() not in named:
        raise InvalidConfig(f"{value} is neither true nor false")
    return named[str(value).lower()]


def always(value: Any) -> Convert:
    """Returns a converter of a switch that, when on, means one value."""
    return lambda given, source: value if flag(given, source) else ABSENT


set_flag = always(True)
"""Returns true, or writes nothing."""


def number_unless_auto(value: Any, source: Source) -> Any:
    """Returns a number; "auto" writes nothing."""
    return ABSENT if value == "auto" else number(value, source)


def flag_unless_auto(value: Any, source: Source) -> Any:
    """Returns a truth value; "auto" writes nothing."""
    return ABSENT if value == "auto" else flag(value, source)


def thinking(value: Any, source: Source) -> Any:
    """Returns that no thoughts are kept, where a tool's switch is off."""
    return ABSENT if flag(value, source) else "off"


def file(value: Any, source: Source) -> str:
    """Returns the path of a file that exists."""
    return str(source.find(str(value)))


def of_streaming(value: Any, source: Source) -> Any:
    """Returns a number of samples if the data are streamed; otherwise writes nothing."""
    return count(value, source) if flag(source.value("streaming", False), source) else ABSENT


def opposite(value: Any, source: Source) -> bool:
    """Returns the opposite of a truth value."""
    return not flag(value, source)


def names(value: Any, _: Source) -> list[str]:
    """Returns a list of names, also one written with commas."""
    return [part.strip() for item in listed(value) for part in str(item).split(",") if part.strip()]


def targets(everything: str) -> Convert:
    """Returns a converter of an adapter's layers, where a tool takes its word for all linear layers alone."""

    def convert(value: Any, source: Source) -> Any:
        given = names(value, source)
        if given == [everything]:
            return [ALL_LINEAR]
        others = [name for name in given if name != everything]
        note = f"beside other names `{everything}` is that of a layer, which no model has: the others have adapters"
        return others if others == given else Converted(values={"lora.targets": others}, note=note)

    return convert


def listed(value: Any) -> list[Any]:
    """Returns a list: the value, or the one value in it."""
    return list(value) if isinstance(value, list | tuple) else [value]


def one_of(values: Mapping[Any, Any], otherwise: str) -> Convert:
    """Returns a converter by a table; a value outside it has no counterpart, and `otherwise` says what to do."""

    def convert(value: Any, _: Source) -> Any:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, list | dict) or key not in values:
            raise Unmatched(f"`{value}`: {otherwise}")
        return values[key]

    return convert


def schedule(value: Any, _: Source) -> str:
    """Returns the learning-rate schedule."""
    name = str(value).lower()
    if name not in tuple(Schedule):
        raise Unmatched(f"`{value}` is not among dstrain's schedules; set lr_scheduler_type to one of its own")
    return name


ATTENTION = {
    "auto": Attention.AUTO.value,
    "sdpa": Attention.SDPA.value,
    "disabled": Attention.EAGER.value,
    "eager": Attention.EAGER.value,
    "fa2": Attention.FLASH_ATTENTION_2.value,
    "flash_attn": Attention.FLASH_ATTENTION_2.value,
    "flash_attention_2": Attention.FLASH_ATTENTION_2.value,
    "kernels-community/flash-attn2": Attention.FLASH_ATTENTION_2.value,
    "fa3": Attention.FLASH_ATTENTION_3.value,
    "flash_attention_3": Attention.FLASH_ATTENTION_3.value,
    "kernels-community/flash-attn3": Attention.FLASH_ATTENTION_3.value,
    "kernels-community/vllm-flash-attn3": Attention.FLASH_ATTENTION_3.value,
    "flash_attention_4": Attention.FLASH_ATTENTION_4.value,
    "kernels-community/flash-attn4": Attention.FLASH_ATTENTION_4.value,
}
"""The attention implementation by the names of all tools."""
attention = one_of(ATTENTION, "dstrain has auto, sdpa, eager and FlashAttention 2 to 4; auto is written")
swanlab_mode = one_of(
    {"cloud": "online", "local": "local", "offline": "offline", "disabled": "disabled"},
    "SwanLab's modes are online, offline, local and disabled",
)

OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
}
"""The optimizer by Transformers' names."""


def is_pure_bf16(source: Source) -> bool:
    """Returns whether the tool keeps master weights in bf16 too, as DeepSpeed does not at its word alone."""
    is_pure = source.value("bf16") == "full" or str(source.value("pure_bf16")).lower() == "true"
    return is_pure and source.value("deepspeed") is None


def optimizer(value: Any, source: Source) -> Any:
    """Returns the optimizer."""
    name = str(value).lower()
    if name in ("paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw"):
        plain = "adamw_8bit" if "8bit" in name else "adamw"
        note = "without paging to host RAM; for that, offload the optimizer in ds_config.json"
        return Converted(values={"optimizer": plain}, note=f"`{plain}` is written, {note}")
    if name == "adamw_torch_4bit":
        note = "`adamw_8bit` is written: moments have 8 bits, not 4"
        return Converted(values={"optimizer": "adamw_8bit"}, note=note)
    if name not in OPTIMIZERS:
        raise OtherTraining(f"`{value}`: dstrain trains with adamw, adamw_8bit, adamw_bf16 and muon")
    if OPTIMIZERS[name] == "adamw" and is_pure_bf16(source):
        note = f"`adamw_bf16` is written, as weights and moments are in bf16: {bf16_losses(None, None)}"
        return Converted(values={"optimizer": "adamw_bf16"}, note=note)
    return OPTIMIZERS[name]


def sinks(value: Any, _: Source) -> Converted:
    """Returns where metrics go."""
    wanted = names(value, _)
    known = [name for name in wanted if name in tuple(SinkName)]
    others = [name for name in wanted if name not in (*SinkName, "none", "all")]
    note = f"no sink for {', '.join(others)}; metrics.jsonl has every figure" if others else ""
    return Converted(values={"monitor.sinks": [] if "none" in wanted else known}, note=note)


def precision(value: Any, source: Source) -> Any:
    """Returns the precision from `bf16` and `fp16`, which are read together."""
    del value
    if source.value("bf16") in (True, "auto", "true", "full"):
        return "bf16"
    if source.value("fp16") in (True, "true"):
        return "fp16"
    note = (
        f"neither bf16 nor fp16 is on, so {source.tool.title} trains in the dtype of the checkpoint;"
        " bf16 with fp32 master weights is written"
    )
    return Converted(values={"precision": "bf16"}, note=note)


def method(kind: str, *, bits: Any, source: Source) -> Any:
    """Returns the method from the kind of adapter and the bits of the base model."""
    if kind not in ("full", "lora"):
        raise OtherTraining(f"`{kind}`: dstrain trains full, lora and qlora")
    if bits in (None, False, 16, 32):
        return Method(kind).value
    if kind == "lora" and bits == 4:
        return Method.QLORA.value
    raise OtherTraining(f"{bits} bits: dstrain quantizes the base model to 4 bits (method: qlora)")


def rope_scaling(value: Any, _: Source) -> Any:
    """Raises Unmatched: tools name a type and compute the factor themselves."""
    raise Unmatched(f"`{value}`: write rope_scaling: {{rope_type: yarn, factor: …}} into job.yaml")


def adapter(value: Any, source: Source) -> Any:
    """Returns the folder of the adapter from which training goes on; None or an empty value is none."""
    folders = names(value, source) if value else []
    if len(folders) > 1:
        raise OtherTraining("several adapters: merge all but the last into the model")
    return str(Path(folders[0]).expanduser().resolve()) if folders else ABSENT


def warmup_steps(value: Any, source: Source) -> Any:
    """Returns the steps of the warm-up; a number below 1 is a share of all steps."""
    steps = number(value, source)
    if steps >= 1:
        return Converted(values={"warmup_steps": count(value, source)})
    return float(steps) if steps or source.given("warmup_ratio") is ABSENT else ABSENT


_EVALUATION_KEYS = (
    *("eval_dataset", "val_dataset", "test_datasets", "validation_file"),
    *("val_size", "val_set_size", "split_dataset_ratio"),
)
"""Keys of all tools that give data for an evaluation."""


def eval_steps(value: Any, source: Source) -> Any:
    """Returns the steps between evaluations, if there are data for them."""
    has_data = any(source.value(key) for key in _EVALUATION_KEYS)
    return interval(value, source) if has_data and number(value, source) > 0 else ABSENT


def optional_count(value: Any, source: Source) -> Any:
    """Returns a whole number above 0; nothing, false and numbers below 1 are as an absent key."""
    return (limit(value, source) if value else None) or ABSENT


def split(value: Any, source: Source) -> Any:
    """Returns the samples that are held out for evaluation."""
    return number(value, source) or ABSENT


def strategy(target: str) -> Convert:
    """Returns a converter of when the model is saved or evaluated: every number of steps, or after each epoch."""

    def convert(value: Any, _: Source) -> Any:
        if value in ("steps", "epoch"):
            return value
        if target == "eval_strategy" and value in ("no", False):
            return ABSENT
        raise Unmatched(f"`{value}`: {target} is steps or epoch")

    return convert


drops = one_of(
    {"delete": "drop", "drop": "drop", "right": "truncate", "truncate": "truncate"},
    "dstrain truncates at the end, or drops",
)
"""Treatment of a sample that is too long."""


def resume(value: Any, _: Source) -> Any:
    """Returns where training continues."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return "auto" if str(value).lower() == "true" else ABSENT
    raise Unmatched("checkpoints of another tool cannot be resumed; name the saved model as `model`")


PRESETS = {
    "zero0": (0, "none"),
    "zero1": (1, "none"),
    "zero2": (2, "none"),
    "zero3": (3, "none"),
    "zero2_offload": (2, "optimizer"),
    "zero3_offload": (3, "params"),
}
"""ms-swift's names of its own configurations → ZeRO stage and offload. Source: ms-swift 4.4 swift/config/."""
HYBRID = "nodes"
"""In place of `plan.hpz`: a copy of the parameters on each node."""
_HYBRID = ("hybrid_shard", "4", "_hybrid_shard_zero2", "5")
_SHARDING = {
    **dict.fromkeys(("full_shard", "hybrid_shard", "1", "4", "true"), 3),
    **dict.fromkeys(("shard_grad_op", "_hybrid_shard_zero2", "2", "5", "false"), 2),
    **dict.fromkeys(("no_shard", "3"), 0),
}
"""FSDP's strategies, by the names and numbers of PyTorch and by FSDP2's `reshard_after_forward` → ZeRO stage."""


def ds_config(value: Any, source: Source) -> Any:
    """Returns the file that a value names; or the strategy of a preset, which gets dstrain's configuration."""
    if value in (None, False, ""):
        return ABSENT
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value in PRESETS:
        stage, offload = PRESETS[value]
        note = f"dstrain's own configuration of ZeRO-{stage} is written, with the buffers of its plan"
        return Converted(values={"plan.zero_stage": stage, "plan.offload": offload}, note=note)
    return str(source.find(str(value)))


def fsdp(value: Any, _: Source) -> Any:
    """Returns the strategy of Transformers' option `fsdp`: words such as `full_shard auto_wrap offload`."""
    words = str(value).lower() if not isinstance(value, list) else " ".join(map(str, value)).lower()
    strategies = [word for word in words.replace(",", " ").split() if word in _SHARDING]
    if not words.strip() or (not strategies and "fsdp" not in words):
        return ABSENT
    return _zero(strategies[0] if strategies else "full_shard", offloads="offload" in words.split())


def sharding(value: Any, source: Source) -> Any:
    """Returns the strategy of accelerate's `fsdp_config`. Raises OtherTraining for one that does not exist."""
    if str(value).lower() not in _SHARDING:
        raise OtherTraining(f"`{value}` is not a strategy of FSDP")
    offloads = any(source.value(f"fsdp_config.{key}") is True for key in ("fsdp_offload_params", "offload_params"))
    return _zero(str(value).lower(), offloads=offloads)


def fully_sharded(source: Source) -> Converted:
    """Returns ZeRO's counterpart of FSDP without a strategy: parameters are sharded after the forward pass, too.

    Source: accelerate 1.15 utils/dataclasses.py: FullyShardedDataParallelPlugin.
    """
    return _zero("full_shard", offloads=source.value("fsdp_config.fsdp_offload_params") is True)


def _zero(strategy: str, *, offloads: bool) -> Converted:
    """Returns ZeRO's counterpart of a strategy of FSDP. Parameters leave the GPU in stage 3 only.

    A hybrid one shards inside a node and copies between nodes, as MiCS did until DeepSpeed 0.19; the rest of it is
    hpZ's copy of the parameters. Source: torch 2.13 distributed/fsdp/api.py: ShardingStrategy.
    """
    stage = _SHARDING[strategy]
    values: dict[str, Any] = {"plan.zero_stage": stage}
    if offloads and stage:
        values["plan.offload"] = "params" if stage == 3 else "optimizer"
    if strategy not in _HYBRID:
        return Converted(values=values, note=f"ZeRO-{stage} shards the same states")
    note = f"ZeRO-{stage} shards the same states over the GPUs of all nodes, not of each node: less memory, same losses"
    if stage == 3 and not offloads:
        values["plan.hpz"] = HYBRID
        note += "; of several nodes each keeps a copy of the parameters (hpZ), which the backward pass gathers from it"
    return Converted(values=values, note=note)


_OFFLOADS = {("none", "none"): "none", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "params", ("nvme", "nvme"): "nvme"}


def offload(value: Any, source: Source) -> Any:
    """Returns the offload of accelerate's `deepspeed_config`."""
    params = str(source.value("deepspeed_config.offload_param_device", "none")).lower()
    stage = number(source.value("deepspeed_config.zero_stage", 2), source)
    pair = str(value).lower(), params if stage == 3 else "none"
    if pair not in _OFFLOADS:
        note = "dstrain offloads parameters with the optimizer; `params` is written"
        return Converted(values={"plan.offload": "params"}, note=note)
    return _OFFLOADS[pair]


def offload_params(value: Any, source: Source) -> Any:
    """Returns the offload if only parameters are offloaded."""
    if source.given("deepspeed_config.offload_optimizer_device") is not ABSENT:
        return READ
    return ABSENT if str(value).lower() == "none" else offload("none", source)


def runs_deepspeed(source: Source) -> bool:
    """Returns whether the tool trains with DeepSpeed by this file, not with DDP or FSDP."""
    if source.tool.name == "deepspeed" or source.value("deepspeed"):
        return True
    kind = source.value("distributed_type")
    if kind is not None:
        return str(kind).upper() == "DEEPSPEED"
    return source.value("use_deepspeed") is True or any(key.startswith("deepspeed_config.") for key in source.settings)


_DPO = ("dpo", "ipo")
"""Words of tools (`stage`, `rlhf_type`, `rl`) for DPO."""
_ELSEWHERE = {"kto": "TRL's KTOTrainer trains by KTO", "rm": "TRL's RewardTrainer trains reward models"}
"""Their words for other trainings on preferences → who has them."""
_SUPERVISED = ("sft", "finetune", "finetuning", "supervised", "instruct")
_PRETRAINING = ("pt", "cpt", "clm", "pretrain", "pretraining")
_OTHERS = (
    *("ppo", "grpo", "gspo", "dapo", "rloo", "orpo", "cpo", "simpo", "mpo", "bco", "rlhf", "rlvr", "prm", "opd"),
    *("gkd", "distill", "distillation", "cls", "classification", "classifier"),
    *("embedding", "reranker", "rerank", "mlm"),
)
_TASK_NAMES = {
    **{name: name for name in (*_DPO, *_ELSEWHERE, *_OTHERS)},
    **dict.fromkeys(("reward", "rewards"), "rm"),
    **dict.fromkeys(_PRETRAINING, "pt"),
    **dict.fromkeys(_SUPERVISED, "sft"),
}
"""Words in the names of scripts and folders → what they train."""
TRL = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
"""The verbs of `trl`."""
ADAPTERS = ("lora", "qlora", "peft", "adapter")


def words_of(name: str) -> list[str]:
    """Returns the words of a name.

    >>> words_of("train_dpoLora-v2.py")
    ['train', 'dpo', 'lora', 'v2', 'py']
    """
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def named_task(source: Source) -> str | None:
    """Returns the task that the names of a script and its folders suggest; the nearest name counts."""
    for name in source.value("script_name", ()):
        for part in reversed(Path(name).parts):
            found = [_TASK_NAMES[word] for word in words_of(part) if word in _TASK_NAMES]
            if found:
                return next((task for task in found if task != "sft"), "sft")
    return None


def name_says(source: Source, words: Iterable[str]) -> bool:
    """Returns whether the name of a script or of its file has one of these words."""
    return any(word in words for name in source.value("script_name", ()) for word in words_of(Path(name).name))


def is_dpo(source: Source) -> bool:
    """Returns whether a tool trains on preferences by DPO."""
    named = (*(source.value(key) for key in ("stage", "rlhf_type", "rl")), named_task(source))
    return source.value("reward_model") is not True and any(name in _DPO for name in named if isinstance(name, str))


def task(value: Any, source: Source) -> Any:
    """Returns the task of a training on preferences. Raises OtherTraining for one that dstrain does not have."""
    name = "rm" if value is True else value  # axolotl's `reward_model: true`
    if name in _DPO:
        return Converted(values={"task": "dpo"} | ({"dpo.loss_type": "ipo"} if name == "ipo" else {}))
    others = _ELSEWHERE.get(str(name), f"of preferences, {' and '.join(_DPO)} are imported")
    raise OtherTraining(f"`{value}`: {others}")


def of_dpo(convert: Convert) -> Convert:
    """Returns a converter of a key that is read for DPO alone."""
    return lambda value, source: convert(value, source) if is_dpo(source) else ABSENT


def _number(value: Any, source: Source) -> Any:
    return ABSENT if value is None else number(value, source)


dpo_number = of_dpo(_number)
"""Converts a number that is read for DPO alone."""


def dpo_loss(value: Any, _: Source) -> str:
    """Returns the loss of DPO. Raises OtherTraining for one that dstrain does not have."""
    (name, *others) = names(value, _)
    if others or name not in tuple(DpoLoss):
        raise OtherTraining(f"`{value}`: dstrain's losses of preferences are {', '.join(DpoLoss)}")
    return name


loss_of_dpo = of_dpo(dpo_loss)
"""Converts a loss that is read for DPO alone."""
