"""Rules about settings that have no effect and that DeepSpeed ignores without a warning."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.document import dotted
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule, when
from dstrain.config.lint.subject import Subject

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_HARMLESS = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_PROFILERS = {
    "comms_logger": "the device is waited for after every collective: nothing overlaps communication any more",
    "flops_profiler": "it also turns wall_clock_breakdown on, which waits for the device around every part of a step",
}
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
TP_PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
"""Source: deepspeed 0.19.8 module_inject/autotp_config.py: AutoTPPresets.get_preset."""


def _offload_below(subject: Subject) -> Iterator[Fault]:
    stage, zero = subject.stage, subject.at("zero_optimization", {})
    if subject.device("offload_param") != "none" and stage < 3:
        yield Fault(
            pointer=("zero_optimization", "offload_param"),
            problem=f"offload_param with ZeRO-{stage}",
            effect="parameters stay on the GPU: only ZeRO-3 shares them out and can offload them",
            fix='write "stage": 3, or remove offload_param',
        )
    if subject.device("offload_optimizer") != "none" and stage == 0 and isinstance(zero, dict):
        yield Fault(
            pointer=("zero_optimization", "offload_optimizer"),
            problem="offload_optimizer with ZeRO-0",
            effect="an optimizer of the CPU is made for parameters on the GPU: the run stops at its first step",
            fix='write "stage": 2, or remove offload_optimizer',
        )


def _zero_plus_plus(subject: Subject) -> Iterator[Fault]:
    if subject.stage >= 3:
        return
    found = [name for name in QUANTIZED if subject.is_true(_ZERO + name)]
    if subject.number(_ZERO + "zero_hpz_partition_size", 1) > 1:
        found.append("zero_hpz_partition_size")
    for name in found:
        yield Fault(
            pointer=("zero_optimization", name),
            problem=f"{name} with ZeRO-{subject.stage}",
            effect="nothing happens: ZeRO++ is a part of ZeRO-3",
            fix='write "stage": 3, or remove the line',
        )


def _inert_sizes(subject: Subject) -> Iterator[Fault]:
    zero = subject.at("zero_optimization", {})
    names = [name for name in zero if str(name).startswith("stage3_")] if isinstance(zero, dict) else []
    if subject.stage < 3:
        for name in names:
            if name not in _HARMLESS:
                yield Fault(
                    pointer=("zero_optimization", name),
                    problem=f"{name} with ZeRO-{subject.stage}",
                    effect="nothing reads it below ZeRO-3",
                    fix="leave it or remove it",
                )


def _profilers(subject: Subject) -> Iterator[Fault]:
    for section, effect in _PROFILERS.items():
        if subject.is_true(f"{section}.enabled"):
            pointer = (section, "enabled")
            yield Fault(pointer=pointer, problem=f"{section} is on", effect=effect, fix='write "enabled": false')
    if subject.is_true("wall_clock_breakdown"):
        yield Fault(
            pointer=("wall_clock_breakdown",),
            problem="wall_clock_breakdown is on",
            effect="the device is waited for around every part of a step",
            fix='write "wall_clock_breakdown": false',
        )


def _monitors(subject: Subject) -> Iterator[Fault]:
    for section in _MONITORS:
        if subject.is_true(f"{section}.enabled"):
            yield Fault(
                pointer=(section, "enabled"),
                problem=f"DeepSpeed's {section} is on",
                effect="it gets learning rate, loss scale and timings, and no loss",
                fix="let the Trainer's callbacks log; in job.yaml: monitor: sinks",
            )


def _leaf_modules(subject: Subject) -> Iterator[Fault]:
    classes = subject.at(_ZERO + "leaf_module.classes", [])
    moe = subject.model.moe if subject.model is not None else None
    if isinstance(classes, list) and subject.model is not None:
        for index, name in enumerate(classes):
            bare = str(name).rsplit(".", 1)[-1]
            if moe is None or bare != moe.block_class:
                has = f"its MoE block is {moe.block_class}" if moe else "it has no experts"
                yield Fault(
                    pointer=("zero_optimization", "leaf_module", "classes", index),
                    severity=None if "moe" in bare.lower() else Severity.INFO,  # another class may be one of its own
                    problem=f'"{name}" is no MoE block of {subject.model.name}: {has}',
                    effect="a class that the model does not have is passed over in silence",
                    fix=f'write "{moe.block_class}"' if moe else "remove leaf_module",
                )


def _nvme_becomes_cpu(s: Subject) -> bool:
    return s.stage in (1, 2) and s.device("offload_optimizer") == "nvme"


def has_pass(s: Subject, name: str) -> bool:
    """Returns whether one of the compiler's passes is asked for; AutoSP is turned on so, and called by its script."""
    passes = s.at("compile.passes", [])
    return isinstance(passes, list) and name in passes


def _is_sequence_alone(s: Subject) -> bool:
    is_compiled = s.job is None and has_pass(s, "autosp")
    return s.is_trainers and s.number("sequence_parallel_size", 1) > 1 and not is_compiled


def _is_deepcompile_idle(s: Subject) -> bool:
    return s.is_true("compile.deepcompile") and s.is_trainers and not (s.job is None and has_pass(s, "autosp"))


def _ignored_checkpointing(subject: Subject) -> Iterator[Fault]:
    section = subject.at("activation_checkpointing", {})
    is_on = isinstance(section, dict) and any(value not in (False, None) for value in section.values())
    if subject.is_trainers and is_on:
        yield Fault(
            pointer=("activation_checkpointing",),
            problem="activation_checkpointing is DeepSpeed's own",
            effect="models of Transformers do not call it: nothing is recomputed because of this section",
            fix="write grad_ckpt: true in job.yaml (gradient_checkpointing of TrainingArguments)",
        )


def _unknown_preset(subject: Subject) -> Iterator[Fault]:
    name = subject.at("tensor_parallel.preset_model", None)
    if isinstance(name, str) and name.lower() not in TP_PRESETS:
        pointer = ("tensor_parallel", "preset_model")
        yield Fault(
            pointer=pointer,
            problem=f'{dotted(pointer)} is "{name}"',
            effect="there is no such preset, and it is passed over in silence",
            fix="write one of " + ", ".join(TP_PRESETS),
        )


def _aio_without_nvme(subject: Subject) -> Iterator[Fault]:
    is_read = subject.has("checkpoint.writer")  # its FAST writer uses aio too
    if (
        isinstance(subject.at("aio"), dict)
        and not is_read
        and "nvme"
        not in (
            subject.device("offload_optimizer"),
            subject.device("offload_param"),
        )
    ):
        yield Fault(
            pointer=("aio",),
            problem="aio without anything on NVMe",
            effect="nothing reads it",
            fix="leave it or remove it",
        )


E, W, I = Severity.ERROR, Severity.WARNING, Severity.INFO  # noqa: E741

# fmt: off
RULES = (
    Rule(id="DS201", severity=E, title="offload below its stage", find=_offload_below,
         source=_DS + "runtime/zero/stage_1_and_2.py never reads offload_param"),
    Rule(id="DS202", severity=E, title="an optimizer on NVMe below ZeRO-3",
         find=when(_ZERO + "offload_optimizer.device", _nvme_becomes_cpu,
                   problem="an optimizer on NVMe with ZeRO-{stage}",
                   effect="it goes to host RAM, whatever nvme_path says; only ZeRO-3 uses NVMe",
                   fix='write "stage": 3, or "device": "cpu"'),
         source=_DS + "runtime/zero/stage_1_and_2.py: cpu_offload is device != none"),
    Rule(id="DS203", severity=E, title="ZeRO++ below ZeRO-3", find=_zero_plus_plus,
         source=_DS + "runtime/engine.py: only the ZeRO-3 branch of _configure_zero_optimizer reads them"),
    Rule(id="DS204", severity=E, title="a partial offload below ZeRO-3",
         find=when(_ZERO + "offload_optimizer.ratio",
                   lambda s: s.stage < 3 and s.number(_ZERO + "offload_optimizer.ratio", 1.0) < 1,
                   problem="offload_optimizer.ratio is {value} with ZeRO-{stage}",
                   effect="DeepSpeed refuses it when the engine starts: only ZeRO-3 leaves a part on the GPU",
                   fix='write "stage": 3, or remove the line'),
         source=_DS + "runtime/zero/config.py: offload_ratio_check"),
    Rule(id="DS205", severity=E, title="SuperOffload below ZeRO-3",
         find=when(_ZERO + "offload_optimizer.super_offload",
                   lambda s: s.stage < 3 and s.is_true(_ZERO + "offload_optimizer.super_offload"),
                   problem="super_offload with ZeRO-{stage}",
                   effect="nothing happens: SuperOffload is an optimizer of ZeRO-3",
                   fix='write "stage": 3, or remove the line'),
         source=_DS + "runtime/engine.py: super_offload is asked for in the ZeRO-3 branch only"),
    Rule(id="DS206", severity=I, title="sizes of ZeRO-3 below it", find=_inert_sizes,
         source=_DS + "runtime/zero/stage_1_and_2.py"),
    Rule(id="DS207", severity=W, title="DeepSpeed's activation checkpointing under the Trainer",
         find=_ignored_checkpointing,
         source=_DS + "runtime/activation_checkpointing/checkpointing.py: only deepspeed.checkpointing.checkpoint"),
    Rule(id="DS208", severity=W, title="DeepCompile that nobody calls",
         find=when("compile.deepcompile", _is_deepcompile_idle,
                   problem="compile.deepcompile is on",
                   effect="nothing is compiled unless torch_compile=True is among the TrainingArguments too; "
                          "dstrain run does not set it",
                   fix="remove it, or compile in a script of your own"),
         source=_DS + "runtime/engine.py: compile() is only called by who wants it"),
    Rule(id="DS209", severity=W, title="an unknown AutoTP preset", find=_unknown_preset,
         source=_DS + "module_inject/autotp_config.py: get_preset returns None"),
    Rule(id="DS210", severity=W, title="a leaf module that the model does not have", find=_leaf_modules,
         source=_DS + "utils/z3_leaf_module.py"),
    Rule(id="DS211", severity=E, title="sequence parallelism without its groups",
         find=when("sequence_parallel_size", _is_sequence_alone,
                   problem="sequence_parallel_size is {value}",
                   effect="under the Trainer it changes the batch check alone: sequences are not cut, and "
                          "every rank trains on whole ones",
                   fix="remove it; Ulysses is turned on by accelerate's ParallelismConfig(sp_size=…)"),
         source=_DS + "runtime/config.py: world_size / sequence_parallel_size"),
    Rule(id="DS212", severity=W, title="profilers left on", find=_profilers,
         source=_DS + "utils/comms_logging.py, utils/timer.py; measured: DeepSpeed#617"),
    Rule(id="DS213", severity=I, title="DeepSpeed's own monitors", find=_monitors,
         source=_DS + "runtime/engine.py: _write_monitor"),
    Rule(id="DS214", severity=I, title="a bucket that nothing reads",
         find=when(_ZERO + "allgather_bucket_size",
                   lambda s: not s.has(_ZERO + "zenflow") and s.number(_ZERO + "allgather_bucket_size", 0) > 0
                   and s.number(_ZERO + "allgather_bucket_size", 0) % 2 == 0,
                   problem="allgather_bucket_size is {value}",
                   effect="nothing reads it on torch 2: parameters are gathered in one call",
                   fix="leave it or remove it"),
         source=_DS + "runtime/utils.py: all_gather_dp_groups"),
    Rule(id="DS215", severity=I, title="aio without NVMe", find=_aio_without_nvme,
         source=_DS + "runtime/swap_tensor"),
    Rule(id="DS216", severity=W, title="ZenFlow by an empty section",
         find=when(_ZERO + "zenflow", lambda s: s.at(_ZERO + "zenflow") == {},
                   problem="zenflow is an empty section",
                   effect="the section alone turns ZenFlow on: it has no switch",
                   fix="remove it, or write the choices you mean"),
         source=_DS + "runtime/zenflow/zenflow_config.py"),
    Rule(id="DS217", severity=W, title="torch_autocast beside a precision section",
         find=when("torch_autocast.enabled",
                   lambda s: s.is_true("torch_autocast.enabled")
                   and (s.is_true("bf16.enabled") or s.is_true("fp16.enabled")),
                   problem="torch_autocast beside bf16 or fp16",
                   effect="the model is converted and autocast as well; DeepSpeed says nothing",
                   fix="keep one of them"),
         source=_DS + "runtime/torch_autocast.py"),
)
"""Rules about what does nothing."""
