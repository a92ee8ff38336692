"""Recognizes another tool's file by its content, and reads its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config import jsonc
from dstrain.config.imports import accelerate, axolotl, llamafactory, shell, swift, trainer
from dstrain.config.imports.source import Setting, Source, Tool, settings_of
from dstrain.config.imports.walk import Imported, walk
from dstrain.errors import InvalidConfig, located
from dstrain.job.yaml_source import parse_yaml
from dstrain.records import Locator

_ALL = (llamafactory.TOOL, swift.TOOL, axolotl.TOOL, accelerate.TOOL, trainer.TOOL, trainer.DEEPSPEED)
TOOLS = MappingProxyType({tool.name: tool for tool in _ALL})
"""Tools by name."""

_MARKS = (
    ("axolotl", "base_model"),
    ("accelerate", "distributed_type"),
    ("accelerate", "compute_environment"),
    ("deepspeed", "zero_optimization"),
    ("deepspeed", "train_micro_batch_size_per_gpu"),
    ("deepspeed", "train_batch_size"),
    ("llamafactory", "model_name_or_path stage"),
    ("llamafactory", "model_name_or_path finetuning_type"),
    ("llamafactory", "model_name_or_path template"),
    ("swift", "model tuner_type"),
    ("swift", "model train_type"),
    ("swift", "model torch_dtype"),
    ("trainer", "model_name_or_path"),
)
"""Keys that a tool's file has, in the order of trying."""
_V1 = "LLaMA-Factory's v1 format is not read", "Import the YAML of `llamafactory-cli train`."
_OTHERS = (
    ("model dist_config", *_V1),
    ("model train_dataset", *_V1),
    ("export_dir", "it exports a model and trains nothing", "For a trained job: dstrain export."),
    ("model ds_config", "it is a job of dstrain already", "dstrain run starts it."),
)
"""Keys of files that are not read, why, and what to do."""


def read(path: Path, *, tool: str | None = None) -> Source:
    """Returns the settings of a file; `tool` is its tool, else the content tells. Raises InvalidConfig with the place
    of whatever cannot be read, or if no tool has such a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig(f"{path}: no such file", hint="dstrain import --help has examples.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from None
    if path.suffix in (".yaml", ".yml", ".json", ".jsonc"):
        return _of_mapping(path, text, tool)
    return _of_script(path, text, tool)


def import_file(path: Path, *, tool: str | None = None) -> Imported:
    """Returns the counterpart of a file; `tool` is its tool, else the content tells. Raises InvalidConfig as `read` and
    `walk` do.

    accelerate's file says nothing of the training, so the literals of its DeepSpeed configuration count too.
    """
    imported = walk(read(path, tool=tool))
    config = imported.values.get("plan.ds_config")
    if imported.source.tool is not accelerate.TOOL or config is None:
        return imported
    literals = walk(read(Path(config.value), tool=trainer.DEEPSPEED.name))
    return replace(imported, values={**literals.values, **imported.values}, notes=(*imported.notes, *literals.notes))


def _of_mapping(path: Path, text: str, tool: str | None) -> Source:
    if path.suffix.startswith(".json"):
        document = jsonc.read(text, str(path))
        data: Any = document.value
        locate: Locator = document.place
    else:
        data, locate = parse_yaml(text, str(path))
    if not isinstance(data, Mapping):
        raise InvalidConfig(f"{path}: is not a mapping of keys", hint="Name the file that the tool is started with.")
    known = TOOLS[tool or _recognized(path, data)]
    is_deepspeed = known is trainer.DEEPSPEED
    settings = _literals(data, locate) if is_deepspeed else settings_of(data, locate, known.sections)
    return Source(path=path, tool=known, settings=settings)


def _recognized(path: Path, data: Mapping[str, Any]) -> str:
    """Returns the name of the tool whose file has these keys."""
    keys = {key for key, value in data.items() if value is not None}
    for marks, problem, hint in _OTHERS:
        if set(marks.split()) <= keys:
            raise InvalidConfig(f"{path}: {problem}", hint=hint)
    for name, marks in _MARKS:
        if set(marks.split()) <= keys:
            return name
    raise InvalidConfig(f"{path}: its keys are those of no tool that is known here", hint=_FORCE)


_FORCE = f"Name its tool: --from {'|'.join(TOOLS)}"


def _literals(data: Mapping[str, Any], locate: Locator) -> dict[str, Setting]:
    """Returns the values of a DeepSpeed configuration that have rows."""
    settings = {}
    for key in trainer.DEEPSPEED_ROWS:
        value: Any = data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            settings[key] = Setting(value=value, place=locate(tuple(key.split("."))))
    return settings


_PROGRAMS = (
    ("swift", re.compile(r"(?:^|.*/)swift (?:sft|pt|rlhf)$")),
    ("swift", re.compile(r".*swift/cli/(?:sft|pt)\.py$")),
    ("llamafactory", re.compile(r"(?:^|.*/)(?:llamafactory-cli|lmf) train$")),
    ("axolotl", re.compile(r"(?:^|.*/)axolotl train$|.*axolotl\.cli\.train$")),
)
"""Two words, or one, with which a command of a tool begins."""
_LAUNCHERS = ("accelerate", "deepspeed", "torchrun", "python", "python3")
_SCRIPT = re.compile(r"[^=]+\.py")


def _of_script(path: Path, text: str, tool: str | None) -> Source:
    """Returns the settings of the first training command of a script."""
    for command in shell.commands(text, str(path)):
        words = command.words
        for at in range(len(words)):
            pair = " ".join(word.text for word in words[at : at + 2])
            for name, program in _PROGRAMS:
                length = 2 if program.fullmatch(pair) else 1 if program.fullmatch(words[at].text) else 0
                if length and (tool in (None, name)):
                    return _of_command(path, TOOLS[name], command, at + length)
        if tool in (None, "trainer") and (start := _script_word(command)) is not None:
            return _of_launcher(path, command, start)
    raise InvalidConfig(
        f"{path}: has no training command",
        hint="Known are swift sft, llamafactory-cli train, and accelerate, deepspeed, torchrun or python with a script."
        + ("" if tool is None else " Leave --from away, or name another tool."),
    )


def _script_word(command: shell.Command) -> int | None:
    """Returns the index of the Python script in a command of a launcher, with options behind it; None without one."""
    program = Path(command.texts[0]).name
    scripts = [at for at, text in enumerate(command.texts) if _SCRIPT.fullmatch(text)]
    is_launched = program in _LAUNCHERS or "accelerate.commands.launch" in command.texts
    return scripts[0] if is_launched and scripts and scripts[0] + 1 < len(command.words) else None


def _of_command(path: Path, tool: Tool, command: shell.Command, start: int) -> Source:
    """Returns the settings of a tool's own command; `start` is the index of the word behind its name."""
    words, verb = command.words[start:], command.words[start - 1]
    if words and words[0].text.endswith((".yaml", ".yml", ".json")):
        name = words[0].text
        raise InvalidConfig(f"the settings are in {name}", place=words[0].place, hint=f"dstrain import {name}")
    implied = {"rlhf": ("rlhf_type", "rlhf"), "pt": ("loss_scale", "all")}.get(verb.text)
    verbs = {implied[0]: Setting(value=implied[1], place=verb.place)} if implied else {}
    return Source(path=path, tool=tool, settings={**verbs, **_options(words)}, environment=_environment(command))


def _of_launcher(path: Path, command: shell.Command, at: int) -> Source:
    """Returns the settings of a launcher's command: the script's options, the launcher's, and accelerate's file."""
    launcher = {accelerate.flat(key): setting for key, setting in _options(command.words[1:at]).items()}
    settings = {**launcher, **_options(command.words[at + 1 :])}
    source = Source(path=path, tool=trainer.TOOL, settings=settings, environment=_environment(command))
    named = source.settings.get("config_file")
    if named is None:
        return source
    with located("config_file", place=named.place):
        path = source.find(str(named.value))
    file = read(path, tool="accelerate")
    return replace(source, settings={**file.settings, **source.settings})


def _environment(command: shell.Command) -> dict[str, Setting]:
    return {
        name: Setting(value=word.text, place=word.place)
        for name, word in command.environment.items()
        if word.computed is None
    }


_INTEGER, _FLOAT = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def _options(words: Sequence[shell.Word]) -> dict[str, Setting]:
    """Returns the options of a command: `--key value`, `--key=value`, `--key` for true, `--key a b` for a list.

    Raises InvalidConfig for a value that only a shell can compute.
    """
    settings: dict[str, Setting] = {}
    values: list[Any] = []
    key = ""
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            key, values = name.replace("-", "_"), [_scalar(value)] if equals else []
        elif key:
            values.append(_scalar(word.text))
        if word.computed is not None:
            problem = f"--{key} has {word.computed}, which only a shell can compute"
            raise InvalidConfig(problem, place=word.place, hint="Write the value in its place.")
        if key:
            plain = True if not values else values[0] if len(values) == 1 else list(values)
            place = settings[key].place if key in settings and not word.text.startswith("--") else word.place
            settings[key] = Setting(value=plain, place=place)
    return {key: setting for key, setting in settings.items() if setting.value is not None}


def _scalar(text: str) -> Any:
    """Returns an option's value as YAML has it; JSON as data.

    >>> _scalar("1e-4"), _scalar("true"), _scalar("None"), _scalar("a#1")
    (0.0001, True, None, 'a#1')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "null"):
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text
