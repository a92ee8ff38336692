"""Keys of a job that some tasks or a CPU do not support, each with a value that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

from dstrain.choices import Attention, DataFormat, DpoLoss, Interval, LossKernel, LossOn, Method, Task
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job


def shown(value: Any) -> str:
    """Returns a value as a job file has it.

    >>> shown(True), shown(3), shown(None)
    ('true', '3', 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if is_dataclass(value):
        return "set"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimit:
    """A key of a job whose values are limited by its task, or by another feature that it uses."""

    key: str
    """Dotted, if it is in a section."""
    values: tuple[Any, ...]
    """The supported values; the first one works always."""
    why: str
    """The reason, as the end of a sentence."""
    task: Task = Task.DPO
    """The task."""
    advice: str | None = None
    """The remedy, if another key has to change; default: to write `instead`."""
    refuses: Callable[[Any], bool] | None = None
    """Whether a value is not supported, if `values` are only examples."""

    def is_exceeded(self, value: Any) -> bool:
        """Returns whether a value is not supported."""
        return value not in self.values if self.refuses is None else self.refuses(value)

    def problem(self, subject: str, value: Any) -> str:
        """Returns the problem with a value; `subject` names the feature that does not support it, with its verb."""
        return f"{self.key} is {shown(value)}, which {subject} not support: {self.why}"

    @property
    def says(self) -> str:
        """The limit in words."""
        return f"task {self.task} needs {self.instead}: {self.why}"

    @property
    def instead(self) -> str:
        """The value to write."""
        return f"{self.key}: {shown(self.values[0])}"

    @property
    def fix(self) -> str:
        """The remedy."""
        return self.advice or f"write {self.instead}"


_OF_SFT = (DataFormat.AUTO, DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT)
_NO_DPO = (Task.SFT, Task.PRETRAIN)
PARTS: Mapping[str, bool] = MappingProxyType(
    {field.name: bool(field.default) for field in fields(Job) if field.name.startswith("freeze_")}
)
"""Keys of a job that freeze parts of a vision-language model → their defaults."""

# fmt: off
LIMITS = (
    TaskLimit(key="loss", values=(LossKernel.CHUNKED, LossKernel.FULL),
              why="it needs a sum for each answer, and the fused loss has one for all tokens"),
    TaskLimit(key="packing", values=(False,), why="each answer has a row of its own"),
    TaskLimit(key="sp", values=(1,), why="an answer cannot be split between ranks"),
    TaskLimit(key="tp", values=(1,), why="ranks that share weights were not tried with its loss"),
    TaskLimit(key="ep", values=(1,), why="it was not tried with shared experts"),
    TaskLimit(key="router_aux_loss_coef", values=(None, 0.0), why="its loss has no place for that of routers"),
    TaskLimit(key="loss_on", values=(LossOn.ANSWER, LossOn.LAST), why="only the last answer counts"),
    TaskLimit(key="data_format", values=(DataFormat.AUTO, DataFormat.PREFERENCE), why="it trains on pairs of answers"),
    TaskLimit(key="data_format", values=(DataFormat.AUTO, DataFormat.TEXT), why="it trains on texts",
              task=Task.PRETRAIN),
    TaskLimit(key="data_format", values=_OF_SFT, why="it has one answer for each question", task=Task.SFT),
)
"""Settings that tasks do not support; the first six keys are choices of the planner as well."""
WITH_MEDIA = (
    TaskLimit(key="samples", values=(None,), why="generation was not tried with them"),
    TaskLimit(key="sp", values=(1,),
              why="sequence parallelism replaces the vision tower's attention too, which has no position ids"),
    TaskLimit(key="tp", values=(1,), why="tensor parallelism was not tried with images"),
)
"""Settings that data with images or videos do not support yet; the planner's rules about degrees are made of them."""
_UNKNOWN_POSITIONS = TaskLimit(
    key="packing", values=(False,), why="in packed rows, their positions are not known of this model's family")
WITH_ADAPTERS = tuple(
    TaskLimit(key=key, values=(value,), why="adapters are those of the language model, and all else is frozen")
    for key, value in PARTS.items())
"""Settings that adapters do not support yet."""
BY_NAME = tuple(
    TaskLimit(key=key, values=((),), why="an adapter freezes all of the model") for key in ("freeze", "train_only"))
"""Settings without meaning for adapters."""
FROZEN_EMBEDDING = TaskLimit(
    key="new_tokens", values=((),),
    why="their embeddings stay as they are unless lora: modules_to_save has embed_tokens (and an untied lm_head)",
    advice="add embed_tokens, and an untied lm_head, to lora: modules_to_save")
"""Settings that adapters do not support while they freeze the embedding."""
UNDROPPED = TaskLimit(
    key="lora.dropout", values=(0.0,),
    why="the adapters of experts are added to weights, so that no input can be dropped")
"""Limits of adapters of experts. Source: peft 0.21 tuners/lora/layer.py: ParamWrapper.update_layer."""
WITH_NEW_TOKENS = (TaskLimit(key="tp", values=(1,), why="parts of an embedding with new rows were not tried"),)
"""Settings that new tokens do not support yet."""
WITH_STREAMING = (
    TaskLimit(key="task", values=_NO_DPO, why="losses of whole answers were not tried in a stream",
              advice="remove streaming"),
    TaskLimit(key="sp", values=(1,), why="ranks that share the rows of a stream were not tried"),
    TaskLimit(key="tp", values=(1,), why="ranks that share the rows of a stream were not tried"),
    TaskLimit(key="ep", values=(1,), why="ranks that share experts were not tried in a stream"),
    TaskLimit(key="eval_strategy", values=(Interval.STEPS,), why="a stream has no epochs"),
    TaskLimit(key="save_strategy", values=(Interval.STEPS,), why="a stream has no epochs"),
    TaskLimit(key="max_steps", values=(1000,), why="the number of rows is not known, so epochs do not end a run",
              refuses=lambda steps: steps is None),
    TaskLimit(key="val_split", values=(1000,), why="the number of rows is not known; give a number of samples",
              refuses=lambda split: split is not None and (split < 1 or split % 1 != 0)),
    TaskLimit(key="max_samples", values=(None,), why="max_steps ends the run"),
)
"""Settings that streaming does not support."""
WITH_SAMPLES = (
    TaskLimit(key="task", values=_NO_DPO, why="generation was not tried with its loss", advice="remove samples"),
    TaskLimit(key="sp", values=(1,), why="their prompts are not shared by ranks"),
    TaskLimit(key="tp", values=(1,), why="generation was not tried with shared weights"),
    TaskLimit(key="ep", values=(1,), why="generation was not tried with shared experts"),
    TaskLimit(key="torch_compile", values=(False,), why="each length of a text would compile the layers again"),
)
"""Settings that `samples` do not support."""
# fmt: on


def broken(job: Job) -> Iterator[tuple[TaskLimit, str]]:
    """Yields the limits that a job exceeds, and the problem in words."""
    yield from _exceeded(job, (limit for limit in LIMITS if job.task is limit.task), f"task {job.task} does")
    if job.method is not Method.FULL:
        embedding = () if "embed_tokens" in job.lora.modules_to_save else (FROZEN_EMBEDDING,)
        yield from _exceeded(job, (*WITH_ADAPTERS, *BY_NAME, *embedding), f"method {job.method} does")
        if job.lora.target_parameters:
            yield from _exceeded(job, (UNDROPPED,), "target_parameters do")
    if job.streaming:
        yield from _exceeded(job, WITH_STREAMING, "streaming does")
    if job.samples is not None:
        yield from _exceeded(job, WITH_SAMPLES, "samples do")
    if job.new_tokens:
        yield from _exceeded(job, WITH_NEW_TOKENS, "new_tokens do")


def broken_by_media(job: Job, columns: Sequence[str], *, packs: bool) -> Iterator[tuple[TaskLimit, str]]:
    """Yields the limits of data with images or videos that a job exceeds, and the problem in words.

    `columns`: the media of the data. `packs`: whether the family's positions in packed rows are known.
    """
    yield from _exceeded(job, limits_of_media(packs=packs), f"data with {' and '.join(columns)} do")


def limits_of_media(*, packs: bool) -> tuple[TaskLimit, ...]:
    """Returns the limits of data with images or videos; `packs` as above."""
    return WITH_MEDIA if packs else (*WITH_MEDIA, _UNKNOWN_POSITIONS)


def _exceeded(job: Job, limits: Iterable[TaskLimit], subject: str) -> Iterator[tuple[TaskLimit, str]]:
    for limit in limits:
        value = _value(job, limit.key)
        if limit.is_exceeded(value):
            yield limit, limit.problem(subject, value)


def _value(job: Job, key: str) -> Any:
    """Returns the value of a key; of `max_samples`, the first one that a data set has."""
    if key == "max_samples":
        return next((source.max_samples for source in job.train_sources if source.max_samples is not None), None)
    return reduce(getattr, key.split("."), job)


def require_for_media(job: Job, columns: Sequence[str], *, packs: bool) -> None:
    """Raises InvalidConfig for a job that exceeds a limit of its data, as `broken_by_media` finds it."""
    for limit, problem in broken_by_media(job, columns, packs=packs):
        raise InvalidConfig(problem, hint=limit.instead)


def require_format(task: Task, data_format: DataFormat) -> None:
    """Raises InvalidConfig for data in a format that a task does not support."""
    for limit in LIMITS:
        if limit.key == "data_format" and task is limit.task and data_format not in limit.values:
            raise InvalidConfig(limit.problem(f"task {task} does", data_format), hint=limit.instead)


def is_smoothing_unused(job: Job) -> bool:
    """Returns whether label smoothing is asked of a loss that has none."""
    return job.dpo.label_smoothing > 0 and job.dpo.loss_type is not DpoLoss.ROBUST


def require(job: Job) -> None:
    """Raises InvalidConfig for a job that exceeds a limit of its task."""
    for limit, problem in broken(job):
        raise InvalidConfig(problem, hint=limit.advice or limit.instead)


_ZERO = "zero_optimization."
QWZ = _ZERO + "zero_quantized_weights"
"""Key of parameters that are gathered in 8 bits."""
OFFLOADED = "the optimizer is offloaded"
"""Setting of a configuration that lifts an optimizer's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """A value of an option or job key that a CPU does not run, always or mostly."""

    key: str
    """Name in requests, configurations and, if the job has it, in job.yaml; dotted for a key of ds_config.json."""
    value: str
    """The value; `true` for a switch."""
    why: str
    """The feature that a CPU lacks."""
    instead: str
    """The value to write."""
    unless: str = ""
    """Condition under which it runs all the same; empty: none."""
    source: str
    """Where the limit is implemented."""

    @property
    def problem(self) -> str:
        """The problem with the value."""
        return f"{self.key} is {self.value}, but the ranks train on the CPU"

    @property
    def asked(self) -> str:
        """The option of `dstrain plan` that asks for the value."""
        return self._option(self.value)

    @property
    def answer(self) -> str:
        """The option to write."""
        return self._option(self.instead)

    def _option(self, value: str) -> str:
        name = "qwz" if self.key == QWZ else self.key.replace("_", "-")
        return {"true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name} {value}")

    @property
    def is_of_engine(self) -> bool:
        """Whether the key is one of ds_config.json."""
        return "." in self.key


_DS = "deepspeed 0.19.8 "

# fmt: off
CPU_LIMITS = (
    *(CpuLimit(key="attn", value=attn, why="FlashAttention has no kernels for a CPU", instead="sdpa",
               source="flash-attn, which is built with nvcc or hipcc") for attn in Attention if attn.is_flash),
    CpuLimit(key="precision", value="fp16", why="most CPUs multiply no fp16 matrices", instead="fp32",
             unless="the CPU has AVX512-FP16 or AMX-FP16",
             source=_DS + "accelerator/cpu_accelerator.py: is_fp16_supported"),
    CpuLimit(key="offload", value="nvme", why="DeepSpeed builds async_io with the headers of libaio only",
             instead="params", unless="libaio-dev is installed",
             source=_DS + "ops/op_builder/async_io.py: is_compatible"),
    CpuLimit(key="activation_offload", value="true", why="activations of a CPU are in host RAM already",
             instead="false", source="torch 2.13 autograd/graph.py: save_on_cpu pins memory, which a CPU alone cannot"),
    CpuLimit(key="liger", value="true", why="Triton compiles kernels for GPUs only", instead="false",
             source="triton 3.9 runtime/driver.py; its interpreter alone does not run liger-kernel 0.8.5's norms"),
    *(CpuLimit(key=f"{_ZERO}zero_quantized_{name}", value="true", why="DeepSpeed's quantizer is a CUDA kernel",
               instead="false", unless=unless, source=_DS + "ops/op_builder/cpu/no_impl.py: NotImplementedBuilder")
      for name, unless in (("weights", ""), ("nontrainable_weights", ""),
                           ("gradients", "there is one node, on which it does nothing"))),
    CpuLimit(key="optimizer.type", value="Lamb", why="DeepSpeed's Lamb is a CUDA kernel", instead="AdamW",
             source=_DS + "ops/lamb/fused_lamb.py: FusedLamb"),
    CpuLimit(key="optimizer.type", value="Lion", why="DeepSpeed's Lion is a CUDA kernel", instead="AdamW",
             unless=OFFLOADED,
             source=_DS + "runtime/engine.py: _configure_basic_optimizer (FusedLion, DeepSpeedCPULion)"),
)
# fmt: on
"""Everything else that dstrain plans trains on a CPU too, in 4 bits with bitsandbytes 0.49 or later."""


def cpu_limits_of(values: Mapping[str, Any]) -> list[CpuLimit]:
    """Returns the limits that values of keys meet; DeepSpeed takes names of optimizers in any case.

    >>> [limit.instead for limit in cpu_limits_of({"attn": "flash_attention_2", "precision": "bf16"})]
    ['sdpa']
    """
    return [limit for limit in CPU_LIMITS if str(values.get(limit.key)).lower() == limit.value.lower()]
