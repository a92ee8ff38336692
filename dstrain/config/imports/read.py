"""Recognizes another tool's file by its content, and reads its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config import jsonc
from dstrain.config.imports import accelerate, axolotl, converters, llamafactory, shell, swift, trainer
from dstrain.config.imports.shell_words import Word
from dstrain.config.imports.source import Computed, Setting, Source, Tool, settings_of
from dstrain.config.imports.walk import Imported, walk
from dstrain.errors import InvalidConfig, Place, located
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


Given = Callable[..., Mapping[str, str]]
"""Returns the variables that are set before a `script`, given by its text."""


def _nothing(*, script: str) -> Mapping[str, str]:
    del script
    return {}


def read(path: Path, *, tool: str | None = None, given: Given = _nothing) -> Source:
    """Returns the settings of a file; `tool` is its tool, else the content tells, and `given` are variables that are
    set before a script. Raises InvalidConfig with the place of whatever cannot be read, or if no tool has such a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig(f"{path}: no such file", hint="dstrain import --help has examples.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from None
    if path.suffix in (".yaml", ".yml", ".json", ".jsonc"):
        return _of_mapping(path, text, tool)
    return _of_script(path, text, tool, given(script=text))


def import_file(
    path: Path,
    *,
    tool: str | None = None,
    given: Given = _nothing,
    ignore: Collection[str] = (),
    typed: Collection[str] = (),
) -> Imported:
    """Returns the counterpart of a file; `tool` is its tool, else the content tells. Raises InvalidConfig as `read` and
    `walk` do.

    accelerate's file says nothing of the training, so the literals of its DeepSpeed configuration count too.
    """
    imported = walk(read(path, tool=tool, given=given), ignore=ignore, typed=typed)
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
    if known is trainer.TOOL:
        names = [path.name, path.resolve().parent.name]
        settings["script_name"] = Setting(value=names, place=Place(file=str(path)))
        known = trainer.tool_of("", settings)
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
_LAUNCHING = ("accelerate.commands.launch", "torch.distributed.run", "torch.distributed.launch")
_TRAINS = re.compile(r"train|tun(?:e|ing)|sft|dpo|kto|ppo|grpo|orpo|reward", re.IGNORECASE)
_OTHER_WORK = re.compile(
    r"merge|eval|infer|predict|convert|export|quant|download|prepare|preprocess|serve|demo|setup|generate|upload|test",
    re.IGNORECASE,
)
"""Words in the names of programs that train nothing, unless another word says that they do."""


def _of_script(path: Path, text: str, tool: str | None, given: Mapping[str, str]) -> Source:
    """Returns the settings of the first training command of a script, or of the first one with options if there is one;
    other commands that would train, and the rest of a command's lines, are told."""
    found, unread = list[Source](), dict[str, Setting]()
    for command in shell.commands(text, str(path), given):
        source, word = _of_any(path, command, tool), command.words[0]
        if source is not None:
            found.append(source)
        elif word.text.startswith("--"):
            unread[word.text] = Setting(value=_NOT_CONTINUED, place=word.place)
    chosen = next((source for source in found if not source.unread), found[0] if found else None)
    if chosen is None:
        raise InvalidConfig(
            f"{path}: has no training command",
            hint="Known are swift sft, llamafactory-cli train, trl sft, and accelerate, deepspeed, torchrun or python"
            " with a script." + ("" if tool is None else " Leave --from away, or name another tool."),
        )
    for number, other in enumerate(source for source in found if source is not chosen):
        place = next(iter(other.settings.values())).place
        unread[f"command {number + 2}"] = Setting(value=_ANOTHER, place=place)
    return replace(chosen, unread={**chosen.unread, **unread})


_ANOTHER = "another training command: import it from a file of its own"
_NOT_CONTINUED = (
    "bash takes this line for a command of its own: the line above does not end with a backslash, or a blank follows it"
)
_WITHOUT = (
    "it has no options: its settings are in its code, which is not read, so the defaults of Transformers are taken"
)


def _of_any(path: Path, command: shell.Command, tool: str | None) -> Source | None:
    """Returns the settings of a training command; None for another command."""
    words = command.words
    for at in range(len(words)):
        pair = " ".join(word.text for word in words[at : at + 2])
        for name, program in _PROGRAMS:
            length = 2 if program.fullmatch(pair) else 1 if program.fullmatch(words[at].text) else 0
            if length and (tool in (None, name)):
                return _of_command(path, TOOLS[name], command, at + length)
    if tool not in (None, trainer.TOOL.name):
        return None
    start = _script_word(command)
    return None if start is None else _of_launcher(path, command, *start)


def _script_word(command: shell.Command) -> tuple[int, int] | None:
    """Returns the indices of a launcher in a command and of the Python script or module that it starts."""
    texts = command.texts
    names = [text.rpartition("/")[2] for text in texts]
    if (at := names.index("trl") if "trl" in names[:-1] else -1) >= 0 and texts[at + 1] in converters.TRL:
        return at, at + 1
    launchers = [at for at, name in enumerate(names) if name in _LAUNCHERS]
    behind = texts.index("--") if "--" in texts else 0
    launchers = [at for at in launchers if at > behind] or launchers
    for start in launchers[:1]:
        for at in range(start + 1, len(texts)):
            is_module = texts[at - 1] in ("-m", "--module") and texts[at] not in _LAUNCHING
            if not is_module and not (texts[at].endswith(".py") and "=" not in texts[at]):
                continue
            name = names[at]
            return None if _OTHER_WORK.search(name) and not _TRAINS.search(name) else (start, at)
    return None


def _of_command(path: Path, tool: Tool, command: shell.Command, start: int) -> Source:
    """Returns the settings of a tool's own command; `start` is the index of the word behind its name."""
    words, verb = command.words[start:], command.words[start - 1]
    if words and words[0].text.endswith((".yaml", ".yml", ".json")):
        name = words[0].text
        raise InvalidConfig(f"the settings are in {name}", place=words[0].place, hint=f"dstrain import {name}")
    implied = {"rlhf": ("rlhf_type", "rlhf"), "pt": ("loss_scale", "all")}.get(verb.text)
    verbs = {implied[0]: Setting(value=implied[1], place=verb.place)} if implied else {}
    return Source(path=path, tool=tool, settings={**verbs, **_options(words)}, environment=_environment(command))


def _of_launcher(path: Path, command: shell.Command, start: int, at: int) -> Source:
    """Returns the settings of a launcher's command: the script's options and its file, the launcher's, and
    accelerate's file."""
    word, behind = command.words[at], command.words[at + 1 :]
    is_verb = command.texts[start].endswith("trl")
    program = f"trl/{word.text}" if is_verb else word.text if word.text.endswith(".py") else word.text.replace(".", "/")
    launcher = {accelerate.flat(key): setting for key, setting in _options(command.words[start + 1 : at]).items()}
    options = _options(behind)
    file = options.pop("config", None) or _positional(behind)
    given = _of_named(path, file, trainer.TOOL.name).settings if file else {}
    names = [
        program,
        *([str(file.value)] if file else []),
        path.name,
        path.resolve().parent.name,
        *_code(path, program),
    ]
    script = {"script_name": Setting(value=names, place=word.place)}
    settings = {**launcher, **given, **options, **script}
    tool = trainer.tool_of(program, settings)
    settings = {_plain(key, tool): _negated(key, setting, tool) for key, setting in settings.items()}
    unread = {} if options or file else {program: Setting(value=_WITHOUT, place=word.place)}
    source = Source(path=path, tool=tool, settings=settings, environment=_environment(command), unread=unread)
    # options of the command line replace the settings of accelerate's file
    named = source.settings.get("config_file")
    if named is None:
        return source
    return replace(source, settings={**_of_named(path, named, "accelerate").settings, **source.settings})


def _positional(behind: Sequence[Word]) -> Setting | None:
    """Returns the file of settings behind a program, which stands before all options."""
    if not behind or behind[0].text.startswith("-"):
        return None
    word = behind[0]
    value = Computed(word.computed) if word.computed else word.text
    is_file = word.computed is not None or word.text.endswith((".yaml", ".yml", ".json"))
    return Setting(value=value, place=word.place) if is_file else None


def _of_named(path: Path, named: Setting, tool: str) -> Source:
    """Returns the settings of a file that a command names."""
    if isinstance(named.value, Computed):
        hint = "Import that file itself, or write its name in its place."
        raise InvalidConfig(f"the settings are in {named.value}", place=named.place, hint=hint)
    with located("its file of settings", place=named.place):
        file = _found(path, str(named.value))
    other = _tool_of_mapping(file)
    if other not in (None, tool):
        problem = f"the settings are in {named.value}, a file of {TOOLS[other].title}"
        raise InvalidConfig(problem, place=named.place, hint=f"dstrain import {named.value}")
    return read(file, tool=tool)


def _tool_of_mapping(path: Path) -> str | None:
    try:
        return read(path).tool.name
    except InvalidConfig:
        return None


def _found(path: Path, name: str) -> Path:
    return Source(path=path, tool=trainer.TOOL, settings={}).find(name)


def _plain(key: str, tool: Tool) -> str:
    """Returns the key of an option; `no_x` switches off the option x, if there is one."""
    return key[3:] if key.startswith("no_") and key not in tool.rows and key[3:] in tool.rows else key


def _negated(key: str, setting: Setting, tool: Tool) -> Setting:
    return setting if _plain(key, tool) == key else replace(setting, value=setting.value is not True)


_SWITCH = re.compile(r"\b(?:lora_enable|enable_lora|use_lora|use_peft|use_qlora|q_lora|get_peft_config)\b")


def _code(path: Path, program: str) -> list[str]:
    """Returns names in the code of a program that say what it trains: its Trainer, and an adapter without a switch."""
    try:
        text = _found(path, program).read_text(encoding="utf-8")
    except (InvalidConfig, OSError, UnicodeDecodeError):
        return []
    adapter = ["lora"] if "LoraConfig(" in text and not _SWITCH.search(text) else []
    return [*re.findall(r"\b([A-Z]+Trainer)\(", text), *adapter]


def _environment(command: shell.Command) -> dict[str, Setting]:
    return {
        name: Setting(value=word.text, place=word.place)
        for name, word in command.environment.items()
        if word.computed is None
    }


_INTEGER, _FLOAT = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def _options(words: Sequence[Word]) -> dict[str, Setting]:
    """Returns the options of a command: `--key value`, `--key=value`, `--key` for true, `--key a b` for a list."""
    settings: dict[str, Setting] = {}
    values: list[Any] = []
    key = ""
    for word in words:
        is_key = word.text.startswith("--") and len(word.text) > 2
        if is_key:
            name, equals, value = word.text[2:].partition("=")
            key, values = name.replace("-", "_"), [_scalar(value)] if equals else []
        elif key:
            values.append(_scalar(word.text))
        if key:
            if word.computed is not None:
                values = [Computed(word.computed)]
            plain = True if not values else values[0] if len(values) == 1 else list(values)
            place = settings[key].place if key in settings and not is_key else word.place
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
