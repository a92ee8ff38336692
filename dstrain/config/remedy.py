"""Settings of a change that fits after an out-of-memory: keys of the job and of ds_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Offload
from dstrain.config.jsonc import REMOVED, Change, lookup
from dstrain.config.resolve_auto import BATCH_KEYS, GATHERS
from dstrain.oom import ProposedChange
from dstrain.plan.configuration import Configuration, choices, flat
from dstrain.plan.labels import CHOICE_WORDS
from dstrain.plan.search.out_of_memory import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """Overrides of a run that ran out of memory; files stay as they are."""

    overrides: tuple[str, ...] = ()
    """`key=value` of the job, as for `--set`."""
    changes: tuple[Change, ...] = ()
    """Keys of the DeepSpeed configuration."""

    def also(self, further: ProposedChange) -> Adaptation:
        """Returns it with a further change."""
        return Adaptation(overrides=self.overrides + further.set, changes=self.changes + changes_in(further))


UNADAPTED = Adaptation()
"""No override."""


def changes_in(proposed: ProposedChange) -> tuple[Change, ...]:
    """Returns the keys of ds_config.json that a proposal changes."""
    return tuple(Change(pointer=tuple(key.split(".")), value=value) for key, value in proposed.ds_config.items())


def remedy(fix: Fix, current: Configuration, ds_config: Mapping[str, Any], *, moe_block: str | None) -> ProposedChange:
    """Returns the settings of a fix, given the configuration as its user wrote it.

    `moe_block` is the class of the model's MoE blocks, which ZeRO-3 gathers whole.
    """
    after = fix.estimate.configuration
    values = flat(after)
    keys = [name for name in fix.levers if not choices()[name].is_of_zero]  # the job has all but those of ZeRO
    if "micro_batch" in keys:
        keys.append("grad_accum")
    if "grad_ckpt_every_n_layers" in keys and "grad_ckpt" in keys and values["grad_ckpt_every_n_layers"] == 1:
        keys.remove("grad_ckpt_every_n_layers")
    literals = {
        key: values[name] for key, name in BATCH_KEYS.items() if name in keys and isinstance(ds_config.get(key), int)
    }
    zero = _zero_values(fix, current, after, ds_config, moe_block)
    return ProposedChange(
        change=", ".join(_words(fix, after)),
        set=tuple(f"{name}={_text(values[name])}" for name in sorted(keys, key=list(values).index)),
        ds_config=literals | {f"zero_optimization.{key}": value for key, value in zero.items()},
        device_bytes_per_gpu=fix.estimate.memory.device_bytes_per_gpu,
        step_ratio=None if fix.step_ratio is None else round(fix.step_ratio, 4),
        keeps_batch=fix.keeps_batch,
    )


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _words(fix: Fix, after: Configuration) -> dict[str, None]:
    """Returns the changed choices in words; several of recomputation have the same."""
    accumulated = {"micro_batch": f" × {after.step.grad_accum} accumulated"}
    changed = (name for name in CHOICE_WORDS if name in fix.levers)
    return dict.fromkeys(CHOICE_WORDS[name](after) + accumulated.get(name, "") for name in changed)


def _zero_values(
    fix: Fix, current: Configuration, after: Configuration, ds_config: Mapping[str, Any], moe_block: str | None
) -> dict[str, Any]:
    """Returns the changed keys of `zero_optimization`, with defaults that depend on the stage as they were."""
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
    return values
