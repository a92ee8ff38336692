"""Options of a script that trains with Transformers' Trainer or TRL's, and the literals of its DeepSpeed configuration.

Source: Transformers 5.23 training_args.py and examples/pytorch/language-modeling/run_clm.py, TRL's ModelConfig,
SFTConfig and DPOConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.accelerate import ROWS as ACCELERATE
from dstrain.config.imports.source import (
    ABSENT,
    READ,
    Convert,
    Converted,
    OtherTraining,
    Row,
    Source,
    Tool,
    Unmatched,
)
from dstrain.config.imports.tables import LAUNCHERS, RANKS, TRAINING_ARGUMENTS, read_table, rows_of
from dstrain.job.model_changes import ALL_LINEAR

_SWITCHES = ("use_peft", "use_lora", "lora_enable", "enable_lora")
_FOUR_BITS = ("load_in_4bit", "use_qlora", "q_lora", "qlora")
_RANKS = ("lora_r", "lora_rank")


def _is_on(source: Source, *keys: str) -> bool:
    return any(str(source.value(key)).lower() == "true" for key in keys)


def is_adapter(source: Source) -> bool:
    """Returns whether a script trains an adapter: by a switch, or by a rank without any switch."""
    if _is_on(source, *_SWITCHES, *_FOUR_BITS[1:]):
        return True
    has_switch = any(source.given(key) is not ABSENT for key in _SWITCHES)
    return not has_switch and any(source.given(key) is not ABSENT for key in _RANKS)


def _is_trl(source: Source) -> bool:
    """Returns whether an adapter has the options, and so the defaults, of TRL."""
    return _is_on(source, "use_peft") and source.given("lora_rank") is ABSENT


def method(_: Any, source: Source) -> Any:
    """Returns the method. Raises OtherTraining for an adapter whose size stands in the code of the script."""
    bits = source.value("bits") or (4 if _is_on(source, *_FOUR_BITS) else 8 if _is_on(source, "load_in_8bit") else None)
    if not is_adapter(source):
        if convert.name_says(source, convert.ADAPTERS):
            raise OtherTraining(f"its name says that it trains an adapter: {_SIZE}")
        return convert.method("full", bits=bits, source=source)
    has_rank = any(source.value(key) not in (None, ABSENT) for key in _RANKS)
    if not _is_trl(source) and not (has_rank and source.value("lora_alpha") is not None):
        raise OtherTraining(f"an adapter: {_SIZE}")
    return convert.method("lora", bits=bits, source=source)


_SIZE = "its size is in the code of the script; add --lora_r N --lora_alpha N to the command"


def rank(value: Any, source: Source) -> Any:
    """Returns the rank of an adapter, and the method, which it asks for if no switch does."""
    if value is None:
        return 16 if _is_trl(source) else ABSENT
    found = {"lora.rank": convert.count(value, source)}
    return Converted(values=found | ({"method": method(None, source)} if is_adapter(source) else {}))


def _alpha(value: Any, source: Source) -> Any:
    if value is None:
        return 32 if _is_trl(source) else ABSENT
    return convert.count(value, source)


def layers(value: Any, source: Source) -> Any:
    """Returns the layers that have an adapter; without a value the choice of TRL, or of the code of the script."""
    if value is not None:
        given = convert.names(value, source)
        return [ALL_LINEAR] if given in (["all"], ["all-linear"]) else convert.targets("all-linear")(value, source)
    if not is_adapter(source) or any(source.given(key) is not ABSENT for key in ("target_modules", "lora_target")):
        return ABSENT
    if _is_trl(source):
        note = "no layers are named: those that PEFT takes for most families are written"
        return Converted(values={"lora.targets": ["q_proj", "v_proj"]}, note=note)
    note = "the code of the script names the layers of the adapter; all linear layers are written"
    return Converted(values={"lora.targets": [ALL_LINEAR]}, note=note)


def _named(_: Any, source: Source) -> Any:
    """Returns the task that the names of a script and of its folders say. Raises OtherTraining for another one."""
    word = convert.named_task(source)
    if word in (None, "sft"):
        return READ
    note = f"its name says `{word}`"
    if word == "pt":
        values = {"loss_on": "all", "data_format": "text"}
        return Converted(values=values, note=f"{note}: the loss is on every token of plain text")
    return Converted(values=convert.task(word, source).values, note=note)


def _preference(convert_: Convert) -> Convert:
    """Returns a converter of a key of training on preferences, which is none of supervised training."""

    def converted(value: Any, source: Source) -> Any:
        if not convert.is_dpo(source) and value is not None:
            raise OtherTraining(f"`{value}`: it is for training on preferences, and no name here says that it is DPO")
        return convert_(value, source)

    return converted


def _loss_type(value: Any, source: Source) -> Any:
    if value in ("nll", "causal_lm") and not convert.is_dpo(source):
        return READ
    return _preference(convert.loss_of_dpo)(value, source)


def _mixed(value: Any, source: Source) -> Any:
    """Returns the precision of a script, which follows accelerate's unless its own options say otherwise."""
    return ABSENT if source.given("bf16") is not ABSENT else value


def _bf16(value: Any, source: Source) -> Any:
    is_elsewhere = all(source.given(key) is ABSENT for key in ("bf16", "fp16"))
    return (
        ABSENT if is_elsewhere and source.given("mixed_precision") is not ABSENT else convert.precision(value, source)
    )


def _of_section(key: str) -> Any:
    """Returns the converter of `bf16` or `fp16`."""

    def converted(value: Any, _: Source) -> Any:
        return key if isinstance(value, Mapping) and value.get("enabled") is True else READ

    return converted


def _betas(value: Any, _: Source) -> Any:
    if not (isinstance(value, list) and len(value) == 2):
        return ABSENT
    return Converted(values={"adam_beta1": value[0], "adam_beta2": value[1]})


def _engine_optimizer(value: Any, source: Source) -> Any:
    name = str(value).lower()
    if name not in ("adam", "adamw"):
        raise Unmatched(f"`{value}` stays in ds_config.json, and dstrain's figures are for AdamW")
    return READ


def _flash(value: Any, source: Source) -> Any:
    """Returns the attention of a switch, or of a name."""
    if str(value).lower() in ("true", "false"):
        return "flash_attention_2" if convert.flag(value, source) else ABSENT
    return convert.attention(value, source)


def _no_flash(value: Any, source: Source) -> Any:
    return "sdpa" if convert.flag(value, source) else "flash_attention_2"


def _both_lengths(_: Any, source: Source) -> Any:
    """Returns the limit of a prompt and an answer together."""
    return sum(convert.count(source.value(key, 512), source) for key in ("max_source_length", "max_target_length"))


def _same_rate(value: Any, source: Source) -> Any:
    """Returns nothing for a part of the model that has the learning rate of all others."""
    if value is None or value == source.value("learning_rate"):
        return READ
    raise OtherTraining(f"`{value}`: a part of the model with a learning rate of its own")


def _bits(value: Any, source: Source) -> Any:
    return READ if value in (16, 32) or is_adapter(source) else convert.method("full", bits=value, source=source)


def _no_bias(value: Any, _: Source) -> Any:
    if value != "none":
        raise OtherTraining(f"`{value}`: biases stay as they are beside an adapter")
    return READ


def _answers(value: Any, source: Source) -> Any:
    """Returns the tokens with loss; TRL's switch, off by default, means different things for chats and completions."""
    if convert.is_dpo(source):
        return READ
    if convert.flag(value, source):
        return "answer"
    note = "on every token of a chat, as TRL's is; of completions to prompts TRL learns the completion: loss_on: answer"
    return Converted(values={"loss_on": "all"}, note=note)


def _read_with_mixer(_: Any, source: Source) -> Any:
    return ABSENT if source.value("dataset_mixer") is None else READ


def _clipping(value: Any, source: Source) -> Any:
    number = convert.number(value, source)
    return number if number > 0 else 0.0


def _nothing_inside(value: Any, _: Source) -> Any:
    if not value:
        return READ
    raise OtherTraining(f"`{value}`: the model is loaded by its own config.json")


def _qwen_lora(value: Any, source: Source) -> Any:
    """Returns the adapter of Qwen's finetune.py, which trains embedding and head of a base model whole beside it."""
    found = method(value, source)
    if found == "qlora":
        note = "the script loads a base model that GPTQ has quantized; dstrain quantizes it with bitsandbytes"
        return Converted(values={"method": found}, note=note)
    is_base = found == "lora" and "chat" not in str(source.value("model_name_or_path")).lower()
    return Converted(values={"method": found} | ({"lora.modules_to_save": ["wte", "lm_head"]} if is_base else {}))


_all_tokens = convert.always("all")
_beta = _preference(convert.dpo_number)

ROWS = rows_of("trainer", globals(), base={**ACCELERATE, **LAUNCHERS, **TRAINING_ARGUMENTS})
"""Options of launchers, of Transformers and of its usual scripts."""

DEEPSPEED_ROWS = rows_of("deepspeed", globals())
"""The literals of a DeepSpeed configuration that belong into job.yaml; every other key stays in its place."""

DEEPSPEED = Tool(name="deepspeed", title="DeepSpeed", rows=DEEPSPEED_ROWS, sections=("optimizer",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, or the scripts of one repository."""

    tool: Tool
    paths: tuple[str, ...]
    """Parts of the paths of its programs."""
    marks: tuple[frozenset[str], ...]
    """Options, or sets of options, that only it has."""


def _scripts() -> Iterator[Script]:
    rows: Mapping[str, Row] = ROWS
    for name, section in read_table("scripts").items():
        made = rows_of(section, globals(), base=rows)
        rows = made if name == "common" else rows
        yield Script(
            tool=Tool(name="trainer", title=section["title"], rows=made, environment=RANKS),
            paths=tuple(section.get("paths", ())),
            marks=tuple(frozenset(mark.split("+")) for mark in section.get("marks", "").split()),
        )


COMMON, *SCRIPTS = _scripts()
TOOL = COMMON.tool
"""The table of a script that is not recognized."""


def tool_of(program: str, options: Mapping[str, Any]) -> Tool:
    """Returns the table for a program with these options, found by the longest part of its path, or by a mark."""
    found = [(len(path), script.tool) for script in SCRIPTS for path in script.paths if path in program]
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    return next((script.tool for script in SCRIPTS if any(mark <= options.keys() for mark in script.marks)), TOOL)
