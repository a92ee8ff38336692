"""axolotl's keys. Source: axolotl 0.16, utils/schemas/*.py, utils/config and core/builders/base.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dstrain.config import jsonc
from dstrain.config.imports import converters as convert
from dstrain.config.imports.converters import ds_config
from dstrain.config.imports.source import ABSENT, READ, Converted, OtherTraining, Source, Tool, Unmatched
from dstrain.config.imports.tables import RANKS, TRAINING_ARGUMENTS, rows_of
from dstrain.config.jsonc import lookup
from dstrain.job.model_changes import ALL_LINEAR


def _method(value: Any, source: Source) -> Any:
    """Returns the method from the adapter and the bits in which the base model is loaded."""
    four, eight = (source.value(key) is True for key in ("load_in_4bit", "load_in_8bit"))
    if not value:
        return convert.method("full", bits=4 if four else 8 if eight else None, source=source)
    kind = "lora" if value in ("lora", "qlora") else str(value)
    if kind == "lora" and eight and not four:
        return Converted(
            values={"method": "lora"}, note="the base model stays in bf16, not in 8 bits; qlora has 4 bits"
        )
    return convert.method(kind, bits=4 if four or value == "qlora" else None, source=source)


def _task(value: Any, source: Source) -> Any:
    """Returns the task of `rl`, or of `reward_model: true`."""
    return convert.task(value, source) if value else ABSENT


def _targets(value: Any, source: Source) -> Any:
    """Returns the layers with an adapter."""
    everything = [ALL_LINEAR] if source.value("lora_target_linear") is True or not value else []
    if isinstance(value, str):
        raise Unmatched("a regular expression: write the names of the layers into lora.targets")
    return everything + [name for name in convert.names(value or [], source) if name not in everything]


def _linear(value: Any, source: Source) -> Any:
    """Returns all linear layers, which names in `lora_target_modules` only add to."""
    if value is True and isinstance(source.value("lora_target_modules"), list):
        return READ
    return [ALL_LINEAR] if value is True else ABSENT


def _experts(value: Any, source: Source) -> Any:
    """Returns the stacked weights of experts with adapters; linear layers have some only if they are named."""
    if not value:
        return ABSENT
    found = {"lora.target_parameters": convert.names(value, source)}
    if not source.value("lora_target_modules") and source.value("lora_target_linear") is not True:
        found["lora.targets"] = []
    return Converted(values=found)


def _unfrozen(value: Any, source: Source) -> Any:
    """Returns the patterns of trained parameters, which axolotl matches from the beginning of a name."""
    patterns = convert.names(value, source) if value else []
    if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in patterns):
        raise OtherTraining("a part of a parameter is trained: dstrain trains or freezes whole ones")
    return [pattern if pattern.startswith("^") else f"^{pattern}" for pattern in patterns] or ABSENT


def _checkpointing(value: Any, _: Source) -> Any:
    """Returns whether activations are recomputed, and whether their inputs wait in host RAM."""
    if str(value).startswith("offload"):
        return Converted(values={"grad_ckpt": True, "activation_offload": True})
    return bool(value)


def _truth(value: Any, _: Source) -> bool:
    """Returns whether a value is given and on."""
    return bool(value)


def _warmup_ratio(value: Any, source: Source) -> Any:
    """Returns the share of warm-up steps. warmup_steps wins over it; without both axolotl takes 3 %."""
    return ABSENT if source.given("warmup_steps") is not ABSENT else convert.number(value, source)


def _per_epoch(key: str) -> Any:
    """Returns the converter of a number of times in each epoch: `key` is then a share of the run.

    Source: axolotl 0.16 utils/config/__init__.py: normalize_config.
    """

    def converted(value: Any, source: Source) -> Any:
        if not value or source.given(key) is not ABSENT:
            return ABSENT
        if value == 1:
            return "epoch"
        share = 1 / (convert.number(value, source) * convert.number(source.value("num_epochs"), source))
        return Converted(values={key: round(share, 6)}) if share < 1 else ABSENT

    return converted


def _evaluations(value: Any, source: Source) -> Any:
    """Returns when evaluations are; axolotl itself refuses the key without data for them."""
    if not source.value("val_set_size") and not source.value("test_datasets"):
        raise Unmatched("there are no data for an evaluation: set eval_data or val_split")
    return _per_epoch("eval_steps")(value, source)


def _new_tokens(value: Any, source: Source) -> Any:
    """Returns the tokens of a generated text, if texts are generated."""
    return convert.count(value, source) if source.value("eval_table_size") else ABSENT


def _saves(value: Any, source: Source) -> Any:
    """Returns nothing if another key says when checkpoints are written."""
    if source.given("save_steps") is not ABSENT or source.given("saves_per_epoch") is not ABSENT:
        return ABSENT
    return convert.strategy("save_strategy")(value, source)


def _sinks(name: str) -> Any:
    """Returns the converter of the switch of a sink."""

    def converted(value: Any, source: Source) -> Any:
        keys = {"wandb": "use_wandb wandb_project", "tensorboard": "use_tensorboard", "swanlab": "use_swanlab"}
        wanted = [sink for sink, all_ in keys.items() if any(source.value(key) for key in all_.split())]
        return wanted if name in wanted else ABSENT

    return converted


def _fp16(value: Any, source: Source) -> Any:
    """Returns nothing if `bf16` decides; its default is bf16 if the GPU has it."""
    if source.given("bf16") is not ABSENT or not convert.flag(value, source):
        return READ
    raise Unmatched("bf16 is `auto` by default, and wins where the GPU has bf16; set precision to fp16")


_LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation")


def _liger(value: Any, source: Source) -> Any:
    """Returns whether Liger's kernels are used. axolotl switches each part by itself, dstrain all of a family."""
    if not convert.flag(value, source):
        return ABSENT
    others = [key for key in _LIGER if not source.value(key)]
    note = f"liger: true replaces what {' and '.join(others)} would, too" if others else ""
    return Converted(values={"liger": True}, note=note)


def _ds_config(value: Any, source: Source) -> Any:
    """Returns the file that a value names. axolotl's own zero2.json offloads the optimizer, which its name hides."""
    found = ds_config(value, source)
    if not isinstance(found, str):
        return found
    document = jsonc.read(Path(found).read_text(encoding="utf-8"), found).value
    section = lookup(document, ("zero_optimization", "offload_optimizer", "device"), "none")
    if section == "none" or "offload" in Path(found).name:
        return found
    note = f"{Path(found).name} offloads the optimizer to {section}; if it fits without, remove offload_optimizer"
    return Converted(values={"plan.ds_config": found}, note=note)


_PASSED_ON = {key: row for key, row in TRAINING_ARGUMENTS.items() if row.default is ABSENT}
ROWS = rows_of("axolotl", globals(), base=_PASSED_ON)
"""Its own keys, and the keys of Transformers that it passes on."""

TOOL = Tool(name="axolotl", title="axolotl", rows=ROWS, environment=RANKS, sections=("fsdp_config",))
