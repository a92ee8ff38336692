"""The training scripts that people copy most: their options (scripts.toml), and how a script is recognized."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports import datasets, preferences, trainer
from dstrain.config.imports.environment import RANKS
from dstrain.config.imports.rows import (
    ABSENT,
    READ,
    Convert,
    Converted,
    OtherTraining,
    Row,
    lacks,
    needless,
    same,
    stops,
    table,
    to,
)
from dstrain.config.imports.source import Source, Tool


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
    return (
        READ if value in (16, 32) or trainer.is_adapter(source) else convert.method("full", bits=value, source=source)
    )


def _no_bias(value: Any, _: Source) -> Any:
    if value != "none":
        raise OtherTraining(f"`{value}`: biases stay as they are beside an adapter")
    return READ


def _answers(value: Any, source: Source) -> Any:
    """Returns what the loss is on; TRL's switch is off by default, which its chats and its completions take apart."""
    if preferences.preference_task(source) is not None:
        return READ
    if convert.flag(value, source):
        return "answer"
    note = "on every token of a chat, as TRL's is; of completions to prompts TRL learns the completion: loss_on: answer"
    return Converted(values={"loss_on": "all"}, note=note)


def _clipping(value: Any, source: Source) -> Any:
    number = convert.number(value, source)
    return number if number > 0 else 0.0


def _nothing_inside(value: Any, _: Source) -> Any:
    if not value:
        return READ
    raise OtherTraining(f"`{value}`: the model is loaded by its own config.json")


def _limit_unless_none(value: Any, source: Source) -> Any:
    return ABSENT if value is None or convert.number(value, source) < 1 else convert.count(value, source)


def _qwen_lora(value: Any, source: Source) -> Any:
    """Returns the adapter of Qwen's finetune.py, which trains embedding and head of a base model whole beside it."""
    found = trainer.method(value, source)
    if found == "qlora":
        note = "the script loads a base model that GPTQ has quantized; dstrain quantizes it with bitsandbytes"
        return Converted(values={"method": found}, note=note)
    is_base = found == "lora" and "chat" not in str(source.value("model_name_or_path")).lower()
    return Converted(values={"method": found} | ({"lora.modules_to_save": ["wte", "lm_head"]} if is_base else {}))


def _loss_of_pairs(value: Any, source: Source) -> Any:
    return ABSENT if preferences.preference_task(source) is None else preferences.dpo_loss(value, source)


_CONVERTERS: Mapping[str, Convert] = {
    "all_tokens": convert.always("all"),
    "answers": _answers,
    "bits": _bits,
    "both_lengths": _both_lengths,
    "clipping": _clipping,
    "dpo_loss": preferences.of_dpo(preferences.dpo_loss),
    "flash": _flash,
    "layers": trainer.layers,
    "limit_unless_none": _limit_unless_none,
    "loss_of_pairs": _loss_of_pairs,
    "method": trainer.method,
    "mixer": datasets.mixer,
    "mixture": datasets.mixture,
    "no_bias": _no_bias,
    "no_flash": _no_flash,
    "nothing_inside": _nothing_inside,
    "qwen_lora": _qwen_lora,
    "rank": trainer.rank,
    "read_with_mixer": lambda _, source: ABSENT if source.value("dataset_mixer") is None else READ,
    "rows": datasets.rows,
    "same_rate": _same_rate,
}
"""Converters by the names that scripts.toml has for them, beside those of all tools."""
_FATES = {"missing": lacks, "stops": stops}


def _converter(name: str) -> Convert:
    return _CONVERTERS[name] if name in _CONVERTERS else getattr(convert, name)


def _rows(section: Mapping[str, Any], base: Mapping[str, Row]) -> Mapping[str, Row]:
    """Returns a section's rows, with its defaults, over those that it rests on."""
    own: list[Row] = []
    for key, (target, *rest) in section.get("written", {}).items():
        own.append(to(key, target, _converter(rest[0]) if rest else same))
    for part in section.get("needless", ()):
        own += needless(part["options"], part["why"])
    for name, made in _FATES.items():
        for part in section.get(name, ()):
            own += made(part["options"], part["why"], unless=(None, *part.get("unless", ())))
    rows = dict(table(tuple(base.values()), own))
    for key, default in section.get("defaults", {}).items():
        rows[key] = replace(rows[key], default=default)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, or those of one repository."""

    tool: Tool
    paths: tuple[str, ...]
    """Parts of the paths of its programs."""
    marks: tuple[frozenset[str], ...]
    """Options, or sets of options, that only it has."""


def _scripts() -> Iterator[Script]:
    text = Path(__file__).with_name("scripts.toml").read_text(encoding="utf-8")
    rows = trainer.ROWS
    for name, section in tomllib.loads(text).items():
        made = _rows(section, rows)
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
    """Returns the table for a program with these options: that of the longest part of its path, or of a mark."""
    found = [(len(path), script.tool) for script in SCRIPTS for path in script.paths if path in program]
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    return next((script.tool for script in SCRIPTS if any(mark <= options.keys() for mark in script.marks)), TOOL)
