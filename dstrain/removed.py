"""Names that earlier versions knew and this one refuses, each with the way that remains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_EXPORTED = "`dstrain script accelerate` says what a job needs without DeepSpeed."
_TRAINED = "Jobs train with adamw, adamw_8bit, adamw_bf16 and muon."
_COMPUTED = "Jobs train with full, chunked and fused."
_KTO = "train by KTO with TRL's KTOTrainer; of preferences, task: dpo remains"
_QGZ = "leave it out; lint says why zero_quantized_gradients in ds_config.json is dangerous"
_REWARD = "train reward models with TRL's RewardTrainer; of preferences, task: dpo remains"
_LAUNCHED = "Agents start DeepSpeed's launcher on every node: by srun in a SLURM allocation, by ssh elsewhere."


def _sentence(text: str) -> str:
    """Returns the text as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "adopt": "Type `dstrain gen-config --adopt`, with `-o DIR` for another folder.",
        "calibrate": "Type `dstrain report RUN … --calibrate`.",
        "completion": "Type `dstrain show completion bash`.",
        "diff": "Type `dstrain explain --edits`.",
        "export-config": "Type `dstrain script accelerate`, with `--engine fsdp2` or `ddp` in place of DeepSpeed.",
        "schema": "Type `dstrain show schema`, or `dstrain show schema job`.",
        "templates": "Type `dstrain show template`, with `--dir DIR` to copy them.",
        "watch": "Type `dstrain status --watch`.",
        "doctor --notify": "SwanLab sends the notices of a run: docs/monitoring.md.",
        "run --launcher": _LAUNCHED,
        "tune --launcher": _LAUNCHED,
        "plan --states": _EXPORTED,
        "plan --double-quant": "QLoRA's scales are always quantised too.",
        "plan --no-double-quant": "QLoRA's scales are always quantised too.",
        "plan --optimizer=adamw_fused": _TRAINED,
        "plan --optimizer=adafactor": _TRAINED,
        "plan --optimizer=lion": _TRAINED,
        "plan --optimizer=sgd": _TRAINED,
        "plan --loss=in-place": _COMPUTED,
        "plan --loss=liger": _COMPUTED,
        "plan --loss=tiled": _COMPUTED,
        "plan --task=kto": _sentence(_KTO),
        "plan --task=reward": _sentence(_REWARD),
        "gen-config --task=kto": _sentence(_KTO),
        "gen-config --task=reward": _sentence(_REWARD),
        "plan --qgz": _sentence(_QGZ),
        "plan --no-qgz": _sentence(_QGZ),
        "gen-config --qgz": _sentence(_QGZ),
        "gen-config --no-qgz": _sentence(_QGZ),
        "demo --task=kto": _sentence(_KTO),
        "demo --task=reward": _sentence(_REWARD),
        "script pbs": "Take the hosts with `dstrain hostfile write --from pbs`, then type `dstrain run --hostfile`.",
        "script lsf": "Take the hosts with `dstrain hostfile write --from lsf`, then type `dstrain run --hostfile`.",
        "script torchrun": "`dstrain script bash` starts each node by hand.",
        "script k8s --kind": "`dstrain script k8s` writes a TrainJob of Kubeflow Trainer.",
        "script k8s --queue": "`dstrain script k8s` writes a TrainJob, which has no queue of Volcano's.",
    }
)
"""Words of a command line → what to type instead: `watch`, `run --sync`, `plan --task=kto`."""
_RULES = {
    "loss_spike": "divergence gradient_spike repeated_spikes repeated_gradient_spikes large_gradient",
    "skipped_steps": "loss_scale",
    "busiest_expert": "uneven_experts",
    "slowdown": "slow_links exposed_communication low_mfu busy_at_low_power",
    "slow_rank": "cpu_wait gpu_clock gpu_power",
    "slow_checkpoint": "checkpoint_time",
    "memory_growth": "gpu_memory_growth host_memory_growth host_memory allocator_retries "
    "fragmentation memory_imbalance",
}
"""A health rule → those that are gone, whose troubles it tells or that told none of their own."""
JOB: Mapping[str, str] = MappingProxyType(
    {
        "kto": _KTO,
        "reward": _REWARD,
        "task=kto": _KTO,
        "task=reward": _REWARD,
        "data_format=unpaired": _KTO,
        "audio_max_seconds": "dstrain trains on text, images and videos, not on sound",
        "monitor.notify": "Set SwanLab's variables, such as SWANLAB_NOTIFY_LARK_WEBHOOK_URL (docs/monitoring.md)",
        **{f"health.{name}": f"{rule} remains" for rule, names in _RULES.items() for name in names.split()},
    }
)
"""Keys of job.yaml, or one of their values → what to write instead: `kto`, `monitor.notify`, `task=kto`."""
