"""What to type for a change that fits after an out-of-memory: keys of the job, keys of ds_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Offload
from dstrain.config.document import REMOVED, Change, dotted, lookup
from dstrain.config.resolve_auto import GATHERS
from dstrain.oom import ProposedChange
from dstrain.plan.configuration import Configuration, flat
from dstrain.plan.search.out_of_memory import Fix

_OF_ZERO = frozenset({"zero_stage", "offload"})
"""Choices that ds_config.json owns; the job owns all others."""
_BATCH_KEYS = {"micro_batch": "train_micro_batch_size_per_gpu", "grad_accum": "gradient_accumulation_steps"}
"""Key of the job → that of ds_config.json, in which it is usually "auto"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that fits, as it is typed."""

    words: str
    """The change in words."""
    overrides: tuple[str, ...]
    """For `--set`: `key=value` of the job."""
    changes: tuple[Change, ...] = ()
    """Keys of ds_config.json."""
    device_bytes_per_gpu: int | None = None
    """Predicted memory of a GPU, the measured excess included; None if it was not planned."""
    step_ratio: float | None = None
    """How much longer a step takes, as a share; None if that is unknown."""
    keeps_batch: bool = True
    """Whether a step has the same tokens as before."""

    @property
    def price(self) -> str:
        """What it costs, in words."""
        return self.proposed.price

    def typed(self, *, resumes: bool, command: str = "dstrain run") -> str:
        """Returns what to type, to go on from the newest checkpoint if there is one."""
        return self.proposed.typed(resumes=resumes, command=command)

    @property
    def settings(self) -> str:
        """The keys of job and ds_config.json that change, with their values."""
        return ", ".join([*self.overrides, *([self.proposed.keys] if self.changes else [])])

    @property
    def proposed(self) -> ProposedChange:
        """The change as it is recorded."""
        return ProposedChange(
            change=self.words,
            set=self.overrides,
            ds_config={dotted(change.pointer): change.value for change in self.changes},
            device_bytes_per_gpu=self.device_bytes_per_gpu,
            step_ratio=None if self.step_ratio is None else round(self.step_ratio, 4),
            keeps_batch=self.keeps_batch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """What a run overrides since it ran out of memory; files stay as they are."""

    overrides: tuple[str, ...] = ()
    """`key=value` of the job, as for `--set`."""
    changes: tuple[Change, ...] = ()
    """Keys of the DeepSpeed configuration."""

    def also(self, further: Remedy) -> Adaptation:
        """Returns it with a further change."""
        return Adaptation(overrides=self.overrides + further.overrides, changes=self.changes + further.changes)


UNADAPTED = Adaptation()
"""No override."""


def remedy(fix: Fix, current: Configuration, ds_config: Mapping[str, Any], *, moe_block: str | None) -> Remedy:
    """Returns what to type for a fix, given the configuration as its user wrote it.

    `moe_block` is the class of the model's MoE blocks, which ZeRO-3 gathers whole.
    """
    after = fix.estimate.configuration
    values = flat(after)
    keys = [name for name in fix.levers - _OF_ZERO if name in values]
    if "micro_batch" in keys:
        keys.append("grad_accum")
    if "grad_ckpt_every_n_layers" in keys and "grad_ckpt" in keys and values["grad_ckpt_every_n_layers"] == 1:
        keys.remove("grad_ckpt_every_n_layers")
    literals = [
        Change(pointer=(key,), value=values[name])
        for name, key in _BATCH_KEYS.items()
        if name in keys and isinstance(ds_config.get(key), int)
    ]
    return Remedy(
        words=", ".join(_words(fix, after)),
        overrides=tuple(f"{name}={_text(values[name])}" for name in sorted(keys, key=list(values).index)),
        changes=(*literals, *_zero_changes(fix, current, after, ds_config, moe_block)),
        device_bytes_per_gpu=fix.estimate.memory.device_bytes_per_gpu,
        step_ratio=fix.step_ratio,
        keeps_batch=fix.keeps_batch,
    )


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _words(fix: Fix, after: Configuration) -> Iterator[str]:
    """Yields the changed choices in words."""
    if "micro_batch" in fix.levers:
        yield f"micro-batch {after.batch.micro_batch} × {after.step.grad_accum} accumulated"
    if fix.levers & {"grad_ckpt", "grad_ckpt_every_n_layers", "activation_offload", "tiled_mlp"}:
        yield after.checkpointing.words
    if "loss" in fix.levers:
        yield f"{after.kernels.loss} loss"
    if "zero_stage" in fix.levers:
        yield f"ZeRO-{after.zero.stage}"
    if "offload" in fix.levers:
        yield after.zero.offload.words
    if "seq_len" in fix.levers:
        yield f"{after.batch.seq_len} tokens"


def _zero_changes(
    fix: Fix, current: Configuration, after: Configuration, ds_config: Mapping[str, Any], moe_block: str | None
) -> Sequence[Change]:
    """Returns the keys of `zero_optimization`, with defaults that depend on the stage as they were."""
    values: dict[str, Any] = {}
    if "zero_stage" in fix.levers:
        values["stage"] = after.zero.stage
        if after.zero.stage == 3:
            kept: dict[str, Any] = {"overlap_comm": current.zero.overlap_comm, GATHERS: True}
            kept |= {"leaf_module": {"classes": [moe_block]}} if moe_block is not None else {}
            missing = [key for key in kept if lookup(ds_config, ("zero_optimization", key)) is REMOVED]
            values |= {key: kept[key] for key in missing}
    if "offload" in fix.levers:
        device = {"device": "cpu", "pin_memory": after.zero.pin_memory}
        values["offload_optimizer"] = device
        if after.zero.offload is Offload.PARAMS:
            values["offload_param"] = device
    return [Change(pointer=("zero_optimization", key), value=value) for key, value in values.items()]
