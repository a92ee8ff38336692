"""accelerate's configuration: where training runs and how it is sharded, not what is trained.

Source: accelerate 1.15 commands/config/config_args.py and commands/launch.py.
"""

from __future__ import annotations

from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.rows import (
    ABSENT,
    READ,
    Convert,
    Converted,
    OtherTraining,
    Unmatched,
    inside,
    lacks,
    needless,
    stops,
    table,
    to,
)
from dstrain.config.imports.source import Source, Tool
from dstrain.config.imports.strategy import ds_config, fully_sharded, offload, offload_params, sharding

_KINDS = {"DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO"}


def _kind(value: Any, source: Source) -> Any:
    if str(value).upper() not in _KINDS:
        raise OtherTraining(f"`{value}`: dstrain trains on NVIDIA GPUs and on CPUs")
    kind = str(value).upper()
    return "cpu" if kind == "MULTI_CPU" else _strategy(kind, source)


_STAGE = 2
"""ZeRO's stage without a key. Source: accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin."""
_STRATEGIES = {
    "FSDP": ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"),
    "DEEPSPEED": ("deepspeed_config.zero_stage", "deepspeed_config.deepspeed_config_file", "deepspeed"),
}
"""Kinds of training → keys of which one says how states are sharded."""


def _strategy(kind: str, source: Source) -> Converted:
    """Returns how a kind of training shards states where no key of its own says it."""
    keys = _STRATEGIES.get(kind)
    if keys is None or any(source.given(key) is not ABSENT for key in keys):
        return READ
    return fully_sharded(source) if kind == "FSDP" else Converted(values={"plan.zero_stage": _STAGE})


def _switch(kind: str) -> Convert:
    """Returns the converter of an option of `accelerate launch` that chooses a kind of training."""
    return lambda value, source: _strategy(kind, source) if convert.flag(value, source) else ABSENT


def _fsdp_offload(value: Any, source: Source) -> Any:
    """Returns nothing: the key is read with those of FSDP's strategy, or with the choice of FSDP."""
    is_fsdp = source.value("use_fsdp") is True or str(source.value("distributed_type")).upper() == "FSDP"
    is_read = is_fsdp or any(source.given(key) is not ABSENT for key in _STRATEGIES["FSDP"])
    return READ if convert.flag(value, source) and is_read else ABSENT


def _of(kind: str, converter: Convert) -> Convert:
    """Returns a converter of a key that accelerate reads for one kind of training only."""

    def converted(value: Any, source: Source) -> Any:
        given = source.given("distributed_type")
        return converter(value, source) if given is ABSENT or str(given).upper() == kind else ABSENT

    return converted


def _compiled(value: Any, _: Source) -> Any:
    """Returns that the layers are compiled. Raises Unmatched for other compilers than inductor."""
    name = str(value).lower()
    if name in ("inductor", "no"):
        return True if name == "inductor" else ABSENT
    raise Unmatched(f"`{value}`: torch_compile: true compiles with inductor")


def _precision(value: Any, _: Source) -> Any:
    if value in ("bf16", "fp16"):
        return value
    if str(value).lower() in ("no", "false"):
        return "fp32"
    raise OtherTraining(f"`{value}`: dstrain trains in bf16, fp16 and fp32")


def _stage(value: Any, source: Source) -> Any:
    if source.value("deepspeed_config.deepspeed_config_file") is not None:
        return ABSENT
    return int(convert.number(value, source))


_FSDP = "ZeRO takes the place of FSDP"
_NODES = "`dstrain run` starts the ranks over ssh or the scheduler's hosts; see the hostfile"

ROWS = table(
    to("distributed_type", "machines.gpu", _kind),
    to("mixed_precision", "precision", _precision),
    to("num_processes", "machines.gpus", convert.count),
    to("num_machines", "machines.nodes", convert.count),
    to("use_cpu", "machines.gpu", convert.always("cpu")),
    to("gradient_accumulation_steps", "grad_accum", convert.count),
    to("deepspeed_config.deepspeed_config_file", "plan.ds_config", _of("DEEPSPEED", ds_config)),
    to("deepspeed_config.zero_stage", "plan.zero_stage", _of("DEEPSPEED", _stage)),
    to("deepspeed_config.offload_optimizer_device", "plan.offload", _of("DEEPSPEED", offload)),
    to("deepspeed_config.offload_param_device", "plan.offload", _of("DEEPSPEED", offload_params)),
    to(
        "deepspeed_config.gradient_accumulation_steps",
        "grad_accum",
        _of("DEEPSPEED", convert.number_unless_auto),
    ),
    to("deepspeed_config.gradient_clipping", "max_grad_norm", _of("DEEPSPEED", convert.number_unless_auto)),
    to("deepspeed_config.deepspeed_hostfile", "machines.hostfile", convert.file),
    to("fsdp_config.fsdp_sharding_strategy", "plan.zero_stage", _of("FSDP", sharding)),
    to("fsdp_config.fsdp_reshard_after_forward", "plan.zero_stage", _of("FSDP", sharding)),
    to("fsdp_config.fsdp_offload_params", "", _fsdp_offload),
    to("use_fsdp", "", _switch("FSDP")),
    to("use_deepspeed", "", _switch("DEEPSPEED")),
    to("fsdp_config.fsdp_activation_checkpointing", "grad_ckpt", _of("FSDP", convert.flag)),
    to("parallelism_config.parallelism_config_sp_size", "sp", convert.count),
    needless(
        """
        compute_environment debug downcast_bf16 enable_cpu_affinity main_training_function same_network
        rdzv_backend rdzv_conf use_env machine_rank main_process_ip main_process_port gpu_ids tpu_env
        tpu_use_cluster tpu_use_sudo tpu_name tpu_zone command_file commands fsdp_config.fsdp_version
        config_file multi_gpu module mpirun_config max_restarts monitor_interval tee
        num_cpu_threads_per_process ipex_config megatron_lm_config
        """,
        _NODES,
    ),
    needless(
        """
        deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model
        deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_inclusion_filter
        deepspeed_config.deepspeed_exclusion_filter deepspeed_config.offload_optimizer_nvme_path
        deepspeed_config.offload_param_nvme_path deepspeed_config.deepspeed_moe_layer_cls_names
        """,
        "`dstrain run` loads, saves and launches by itself; name NVMe with --nvme",
    ),
    needless(
        inside(
            "fsdp_config",
            """
        fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
        fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_sync_module_states
        fsdp_use_orig_params fsdp_backward_prefetch fsdp_backward_prefetch_policy
        fsdp_forward_prefetch fsdp_limit_all_gathers
        """,
        ),
        _FSDP,
    ),
    needless(
        inside(
            "parallelism_config",
            """
        parallelism_config_dp_replicate_size parallelism_config_dp_shard_size
        parallelism_config_sp_backend parallelism_config_sp_seq_length
        parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation
        parallelism_config_cp_comm_strategy parallelism_config_cp_backend
        """,
        ),
        "the ranks left by sp are data-parallel",
    ),
    lacks(
        """
        parallelism_config.parallelism_config_tp_size parallelism_config.parallelism_config_cp_size
        """,
        "set sp or tp in job.yaml",
        unless=(1,),
    ),
    to("dynamo_config.dynamo_backend", "torch_compile", _compiled, note="layers are compiled, not the whole model"),
    lacks(
        inside(
            "dynamo_config",
            "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation",
        ),
        "torch_compile: true compiles layers with inductor's default mode",
        unless=("default", False),
    ),
    stops("fp8_config fp8", "fp8", unless=({}, None)),
    stops(
        """
        image_uri ec2_instance_type iam_role_name sagemaker_inputs_file profile
        """,
        "it is for SageMaker",
        unless=(None,),
    ),
)
"""The keys of its file; its options on a command line have the same names."""

SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config")
TOOL = Tool(name="accelerate", title="accelerate", rows=ROWS, sections=SECTIONS)


def flat(key: str) -> str:
    """Returns the row of an option on the command line of `accelerate launch`.

    >>> flat("zero_stage"), flat("num_processes")
    ('deepspeed_config.zero_stage', 'num_processes')
    """
    return next((f"{section}.{key}" for section in SECTIONS if f"{section}.{key}" in ROWS), key)
