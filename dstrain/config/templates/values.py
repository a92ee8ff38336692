"""The values that fill the templates."""

from __future__ import annotations

from typing import Any

from dstrain.choices import Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.job.task_limits import PARTS
from dstrain.plan.configuration import Configuration, flat
from dstrain.plan.estimate_records import Plan

_TEMPLATES = {
    (0, Offload.NONE): "zero0.json.j2",
    (1, Offload.NONE): "zero1.json.j2",
    (2, Offload.NONE): "zero2.json.j2",
    (3, Offload.NONE): "zero3.json.j2",
    (1, Offload.OPTIMIZER): "zero1_offload_optimizer.json.j2",
    (2, Offload.OPTIMIZER): "zero2_offload_optimizer.json.j2",
    (3, Offload.OPTIMIZER): "zero3_offload_optimizer.json.j2",
    (3, Offload.PARAMS): "zero3_offload_all.json.j2",
    (3, Offload.NVME): "zero3_nvme.json.j2",
}
"""The template of each ZeRO stage and offload."""


def template_of(configuration: Configuration) -> str:
    """Returns the name of the template for a configuration."""
    return _TEMPLATES[configuration.zero.stage, configuration.zero.offload]


def config_values(plan: Plan, workload: Workload) -> dict[str, Any]:
    """Returns the values of DeepSpeed templates."""
    configuration, model, cluster = plan.chosen.configuration, workload.model, workload.cluster
    is_leaf = configuration.zero.stage == 3 and configuration.parallel.ep == 1  # AutoEP has blocks of its own
    moe_block = model.moe.block_class if model.moe and is_leaf else None
    return {
        "overlap_comm": configuration.zero.overlap_comm,
        "reduce_bucket_size": configuration.zero.reduce_bucket_size,
        "prefetch_bucket_size": configuration.zero.prefetch_bucket_size,
        "param_persistence_threshold": configuration.zero.param_persistence_threshold,
        "max_live_parameters": configuration.zero.max_live_parameters,
        "max_reuse_distance": configuration.zero.max_reuse_distance,
        "sub_group_size": configuration.zero.sub_group_size,
        "optimizer": configuration.step.optimizer,
        "hpz": configuration.zero.hpz,
        "qwz": configuration.zero.qwz,
        "qgz": configuration.zero.qgz,
        "offload_ratio": configuration.zero.offload_ratio,
        "pin_memory": configuration.zero.pin_memory,
        "moe_block_class": moe_block,
        "nvme_path": cluster.nvme_path,
        "nvme_buffer_size": _nvme_buffer_size(workload),
        "fp16": configuration.model.precision == "fp16",
    }


def _nvme_buffer_size(workload: Workload) -> int:
    """Returns the elements of one swap buffer: the largest parameter's partition, rounded up to a power of two.

    Source: deepspeed 0.19.8 runtime/swap_tensor/partitioned_param_swapper.py: a buffer must hold a whole partition.
    """
    share = -(-workload.model.largest_tensor_numel // workload.cluster.num_gpus)
    return int(max(2**20, 1 << (share - 1).bit_length()))


def job_values(plan: Plan, cluster: Cluster, **given: Any) -> dict[str, Any]:
    """Returns the values of the job template; `given` has the user's model, data, hub and output folder."""
    configuration = plan.chosen.configuration
    return {
        **flat(configuration),
        "is_adapter": not configuration.model.is_full,
        "learning_rate": plan.learning_rate,
        "global_batch": plan.global_batch,
        "env": {"DS_ACCELERATOR": "cpu"} if cluster.gpu.is_cpu else {},
        **PARTS,
        **given,
    }
