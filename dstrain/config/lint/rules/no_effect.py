"""Rules about settings without effect: DeepSpeed ignores them, lacks another setting, or takes another one instead."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.jsonc import Pointer, dotted, lookup
from dstrain.config.keys import KEYS, is_read, key_of
from dstrain.config.lint.rule import Breaks, Fault, Rule, Subject, each_of, fault, together, when
from dstrain.config.resolve_auto import GATHERS
from dstrain.facts.ds_config import OLD_OFFLOADS, offload_device
from dstrain.findings import Severity

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
_OFFLOAD = _ZERO + "offload_optimizer."
_BUCKET = _ZERO + "allgather_bucket_size"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_HARMLESS = (GATHERS, "stage3_gather_fp16_weights_on_model_save")
_PROFILERS = {
    "comms_logger.enabled": "it waits for the device after every collective, so communication no longer overlaps",
    "flops_profiler.enabled": "it also enables wall_clock_breakdown, which waits for the device around every part of a "
    "step",
    "wall_clock_breakdown": "it waits for the device around every part of a step",
}
_TP_PRESETS = KEYS["tensor_parallel", "preset_model"].words


def is_on(path: str) -> Breaks:
    """Returns a condition that is true if a switch is on."""
    return lambda subject: subject.is_true(path)


def above(path: str, bound: float) -> Breaks:
    """Returns a condition that is true if a number exceeds a bound."""
    return lambda subject: subject.number(path, bound) > bound


def has_pass(s: Subject, name: str) -> bool:
    """Returns whether compile.passes contains a pass."""
    passes = s.at("compile.passes", [])
    return isinstance(passes, list) and name in passes


def _below_zero3(breaks: Breaks) -> Breaks:
    return lambda subject: subject.stage < 3 and bool(breaks(subject))


def _inert_sizes(s: Subject) -> list[dict[str, str]]:
    names = [str(name) for name in s.zero if str(name).startswith("stage3_") and name not in _HARMLESS]
    return [{"key": name} for name in names if s.stage < 3]


def _leaf_modules(subject: Subject) -> Iterator[Fault]:
    classes = subject.at(_ZERO + "leaf_module.classes", [])
    if not isinstance(classes, list) or subject.model is None:
        return
    moe = subject.model.moe
    for index, name in enumerate(classes):
        bare = str(name).rsplit(".", 1)[-1]
        if moe is None or bare != moe.block_class:
            has = f"its MoE block is {moe.block_class}" if moe else "it has no experts"
            yield fault(
                ("zero_optimization", "leaf_module", "classes", index),
                f'"{name}" is not an MoE block of {subject.model.name}: {has}',
                "DeepSpeed ignores a class that the model does not have, without a warning",
                f'write "{moe.block_class}"' if moe else "remove leaf_module",
                severity=None if "moe" in bare.lower() else Severity.INFO,  # the class may be a leaf for another reason
            )


def _compiles_autosp(s: Subject) -> bool:
    return s.job is None and has_pass(s, "autosp")


def _checkpoints(s: Subject) -> bool:
    section = s.at("activation_checkpointing", {})
    return isinstance(section, dict) and any(value not in (False, None) for value in section.values())


def _unknown_preset(s: Subject) -> bool:
    name = s.at("tensor_parallel.preset_model", None)
    return isinstance(name, str) and name.lower() not in _TP_PRESETS


def _is_aio_idle(s: Subject) -> bool:
    devices = (s.device("offload_optimizer"), s.device("offload_param"))
    return isinstance(s.at("aio"), dict) and not s.has("checkpoint.writer") and "nvme" not in devices


E, W, I = Severity.ERROR, Severity.WARNING, Severity.INFO  # noqa: E741


def _deviceless(s: Subject) -> list[dict[str, str]]:
    """Returns the sections of offload that name no device, in their new form alone."""
    sections = [name for name, old in OLD_OFFLOADS.items() if not s.has(_ZERO + old)]
    given = {name: s.at(_ZERO + name) for name in sections}
    return [{"section": name} for name, value in given.items() if isinstance(value, dict) and "device" not in value]


_OF_NVME = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
_OF_DYNAMIC_SCALE = (
    *("loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"),
    "consecutive_hysteresis",
)
_OTHER_RULES = ("stage", *QUANTIZED, "zero_hpz_partition_size", "cpu_offload", "cpu_offload_param", "legacy_stage1",
                "overlap_comm", "offload_param", "offload_optimizer", "zenflow")  # fmt: skip
"""Keys that have their own rules, and those that are deprecated."""


def _unread(subject: Subject) -> Iterator[Fault]:
    for pointer, why in _unread_keys(subject):
        problem = f"{dotted(pointer)} has no effect here"
        yield fault(pointer, problem, f"nothing reads it: {why}", "leave it or remove it")


def _unread_keys(subject: Subject) -> Iterator[tuple[Pointer, str]]:
    """Yields keys that nothing reads because of another key, with the reason, unless another rule reports them."""
    for section, names in _OF_NVME.items():
        device = subject.at(f"{_ZERO}{section}.device", None)
        for name in names if device in ("cpu", "none") else ():
            if subject.at(f"{_ZERO}{section}.{name}", None) is not None:
                yield ("zero_optimization", section, name), f'{section}.device is "{device}", and only "nvme" uses it'
    if subject.is_true("fp16.enabled") and subject.number("fp16.loss_scale", 0) > 0:
        for name in _OF_DYNAMIC_SCALE:
            if subject.has(f"fp16.{name}"):
                yield ("fp16", name), "fp16.loss_scale is fixed, and only the dynamic scale (0) uses it"
    for name in subject.zero:
        pointer = ("zero_optimization", name)
        row = key_of(pointer)
        if row is None or row.removed is not None or name in _OTHER_RULES or name.startswith("stage3_"):
            continue
        if not is_read(pointer, subject.stage):
            yield pointer, "ZeRO-0 ignores this section" if subject.stage == 0 else f"ZeRO-{subject.stage} does not"


def _never_on(subject: Subject) -> Iterator[Fault]:
    """Yields sections with settings but without their switch, which is off by default."""
    for pointer, value in subject.walk():
        row = key_of((*pointer, "enabled"))
        is_switched = row is not None and row.path.endswith(".enabled") and row.default is False
        if not is_switched or not isinstance(value, dict) or not value or "enabled" in value:
            continue
        if pointer[0] in ("bf16", "bfloat16", "fp16") and subject.job is not None:
            continue  # dstrain run adds it
        outer = [pointer[:end] for end in range(1, len(pointer))]
        if not any(lookup(subject.config, (*section, "enabled")) is False for section in outer):
            problem, fix = f'{dotted(pointer)} has no "enabled"', 'write "enabled": true, or remove the section'
            yield fault(pointer, problem, "it is off: the default is false", fix)


# fmt: off
RULES = (
    Rule(id="DS201", severity=E, title="offload below its stage",
         find=together(
             when(_ZERO + "offload_param",
                  lambda s: s.device("offload_param") != offload_device(s.config, "offload_param"),
                  problem="offload_param with ZeRO-{stage}",
                  effect="parameters stay on the GPU: only ZeRO-3 partitions and offloads them",
                  fix='write "stage": 3, or remove offload_param'),
             when(_ZERO + "offload_optimizer",
                  lambda s: s.device("offload_optimizer") != "none" and not s.offloads_optimizer,
                  problem="offload_optimizer with ZeRO-0",
                  effect="a CPU optimizer is built for parameters on the GPU: the run stops at its first step",
                  fix='write "stage": 2, or remove offload_optimizer')),
         source=_DS + "runtime/zero/stage_1_and_2.py never reads offload_param"),
    Rule(id="DS202", severity=E, title="optimizer on NVMe below ZeRO-3",
         find=when(_OFFLOAD + "device", lambda s: s.stage in (1, 2) and s.device("offload_optimizer") == "nvme",
                   problem="an optimizer on NVMe with ZeRO-{stage}",
                   effect="it is kept in host RAM and nvme_path is ignored; only ZeRO-3 uses NVMe",
                   fix='write "stage": 3, or "device": "cpu"'),
         source=_DS + "runtime/zero/stage_1_and_2.py: cpu_offload is device != none"),
    Rule(id="DS203", severity=E, title="ZeRO++ below ZeRO-3",
         find=each_of({_ZERO + name: _below_zero3(is_on(_ZERO + name)) for name in QUANTIZED}
                      | {_ZERO + "zero_hpz_partition_size": _below_zero3(above(_ZERO + "zero_hpz_partition_size", 1))},
                      problem="{name} with ZeRO-{stage}", effect="it has no effect: ZeRO++ is part of ZeRO-3",
                      fix='write "stage": 3, or remove the line'),
         source=_DS + "runtime/engine.py: only the ZeRO-3 branch of _configure_zero_optimizer reads them"),
    Rule(id="DS204", severity=E, title="partial offload below ZeRO-3",
         find=when(_OFFLOAD + "ratio", _below_zero3(lambda s: s.number(_OFFLOAD + "ratio", 1.0) < 1),
                   problem="offload_optimizer.ratio is {value} with ZeRO-{stage}",
                   effect="DeepSpeed refuses it when the engine starts: only ZeRO-3 keeps a part on the GPU",
                   fix='write "stage": 3, or remove the line'),
         source=_DS + "runtime/zero/config.py: offload_ratio_check"),
    Rule(id="DS205", severity=E, title="SuperOffload below ZeRO-3",
         find=when(_OFFLOAD + "super_offload", _below_zero3(is_on(_OFFLOAD + "super_offload")),
                   problem="super_offload with ZeRO-{stage}",
                   effect="it has no effect: SuperOffload is an optimizer of ZeRO-3",
                   fix='write "stage": 3, or remove the line'),
         source=_DS + "runtime/engine.py: super_offload is asked for in the ZeRO-3 branch only"),
    Rule(id="DS206", severity=I, title="sizes of ZeRO-3 below it",
         find=when(_ZERO + "{key}", _inert_sizes, problem="{key} with ZeRO-{stage}", effect="only ZeRO-3 reads it",
                   fix="leave it or remove it"),
         source=_DS + "runtime/zero/stage_1_and_2.py"),
    Rule(id="DS207", severity=W, title="DeepSpeed's activation checkpointing under the Trainer",
         find=when("activation_checkpointing", lambda s: s.is_trainers and _checkpoints(s),
                   problem="activation_checkpointing configures DeepSpeed's own implementation",
                   effect="models of Transformers do not call it: this section causes no recomputation",
                   fix="write grad_ckpt: true in job.yaml (gradient_checkpointing of TrainingArguments)"),
         source=_DS + "runtime/activation_checkpointing/checkpointing.py: only deepspeed.checkpointing.checkpoint"),
    Rule(id="DS208", severity=W, title="DeepCompile that is never called",
         find=when("compile.deepcompile",
                   lambda s: s.is_true("compile.deepcompile") and s.is_trainers and not _compiles_autosp(s)
                   and not (s.job is not None and s.job.job.torch_compile),
                   problem="compile.deepcompile is enabled",
                   effect="nothing is compiled unless torch_compile is true in job.yaml, or in the TrainingArguments "
                          "of your own script",
                   fix="remove it, or write torch_compile: true in job.yaml"),
         source=_DS + "runtime/engine.py: compile() is only called by who wants it"),
    Rule(id="DS209", severity=W, title="unknown AutoTP preset",
         find=when("tensor_parallel.preset_model", _unknown_preset, problem="{path} is {value}",
                   effect="DeepSpeed has no such preset and ignores it without a warning",
                   fix="write one of " + ", ".join(_TP_PRESETS)),
         source=_DS + "module_inject/autotp_config.py: get_preset returns None"),
    Rule(id="DS210", severity=W, title="leaf module that the model does not have", find=_leaf_modules,
         source=_DS + "utils/z3_leaf_module.py"),
    Rule(id="DS211", severity=E, title="sequence parallelism without its groups",
         find=when("sequence_parallel_size",
                   lambda s: s.is_trainers and above("sequence_parallel_size", 1)(s) and not _compiles_autosp(s),
                   problem="sequence_parallel_size is {value}",
                   effect="under the Trainer it changes only the batch check: sequences are not split, and "
                          "every rank trains on whole ones",
                   fix="remove it; in job.yaml: sp (in your own Trainer: accelerate's ParallelismConfig)"),
         source=_DS + "runtime/config.py: world_size / sequence_parallel_size"),
    Rule(id="DS212", severity=W, title="enabled profilers",
         find=together(*(when(path, is_on(path), problem=f"{path.split('.')[0]} is enabled", effect=effect,
                              fix=f'write "{path.split(".")[-1]}": false') for path, effect in _PROFILERS.items())),
         source=_DS + "utils/comms_logging.py, utils/timer.py; measured: DeepSpeed#617"),
    Rule(id="DS213", severity=I, title="DeepSpeed's own monitors",
         find=each_of({f"{name}.enabled": is_on(f"{name}.enabled")
                       for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
                      problem="{path} enables DeepSpeed's own monitor",
                      effect="it logs learning rate, loss scale and timings, but no loss",
                      fix="let the Trainer's callbacks log; in job.yaml: monitor: sinks"),
         source=_DS + "runtime/engine.py: _write_monitor"),
    Rule(id="DS214", severity=I, title="unused bucket",
         find=when(_BUCKET,
                   lambda s: not s.has(_ZERO + "zenflow") and above(_BUCKET, 0)(s) and s.number(_BUCKET, 0) % 2 == 0,
                   problem="allgather_bucket_size is {value}",
                   effect="nothing reads it on torch 2: parameters are gathered in one call",
                   fix="leave it or remove it"),
         source=_DS + "runtime/utils.py: all_gather_dp_groups"),
    Rule(id="DS215", severity=I, title="aio without NVMe",
         find=when("aio", _is_aio_idle, problem="aio without offload to NVMe", effect="nothing reads it",
                   fix="leave it or remove it"),
         source=_DS + "runtime/swap_tensor"),
    Rule(id="DS216", severity=W, title="empty ZenFlow section",
         find=when(_ZERO + "zenflow", lambda s: s.at(_ZERO + "zenflow") == {}, problem="zenflow is an empty section",
                   effect="the section alone enables ZenFlow: it has no switch",
                   fix="remove it, or write the settings that you mean"),
         source=_DS + "runtime/zenflow/zenflow_config.py"),
    Rule(id="DS217", severity=W, title="torch_autocast with a precision section",
         find=when("torch_autocast.enabled",
                   lambda s: s.is_true("torch_autocast.enabled")
                   and (s.is_true("bf16.enabled") or s.is_true("fp16.enabled")),
                   problem="torch_autocast together with bf16 or fp16",
                   effect="the model is both converted and autocast; DeepSpeed does not warn",
                   fix="keep one of them"),
         source=_DS + "runtime/torch_autocast.py"),
    Rule(id="DS218", severity=E, title="offload without a device",
         find=when(_ZERO + "{section}", _deviceless, problem="{section} has no device",
                   effect='nothing is offloaded: the default is "none"',
                   fix='write "device": "cpu", or remove the section'),
         source=_DS + "runtime/zero/offload_config.py: OffloadDeviceEnum.none is the default"),
    Rule(id="DS219", severity=I, title="setting that another one makes unused", find=_unread,
         source=_DS + "runtime/zero/stage3.py, runtime/swap_tensor, runtime/fp16/loss_scaler.py, runtime/engine.py"),
    Rule(id="DS220", severity=W, title="section that is never enabled", find=_never_on,
         source=_DS + "section by section: dstrain/config/keys.toml"),
)
"""Rules about settings without effect."""
# fmt: on
