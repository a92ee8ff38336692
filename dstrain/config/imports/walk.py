"""Walks the settings of a file with its tool's table, judges unknown keys by their names, and writes the job's text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Method
from dstrain.config.edits import edit
from dstrain.config.imports.source import ABSENT, READ, Computed, Converted, Fate, Row, Setting, Source, Unmatched
from dstrain.config.jsonc import REMOVED, Change, lookup, same
from dstrain.errors import InvalidConfig, Place, nearest
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Dpo, Job, Monitor, Samples
from dstrain.job.yaml_source import parse_yaml
from dstrain.records import Keys, Locator


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value to write."""

    value: Any
    key: str
    """The key it comes from."""
    place: Place
    """The place of the key it comes from; the file if it is the tool's default."""
    is_default: bool
    """Whether it is the tool's default, which the file does not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The fate of a key that is not simply written."""

    fate: Fate
    key: str
    place: Place
    text: str
    """The advice, or why nothing is needed."""

    def document(self) -> dict[str, Any]:
        """Returns the note as JSON."""
        place = {"file": self.place.file, "line": self.place.line or 1, "column": self.place.column or 1}
        return {"fate": self.fate, "key": self.key, **place, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The counterpart of a file."""

    source: Source
    values: Mapping[str, Value]
    """Target → value: keys of job.yaml (`lora.rank`), `plan.X` and `machines.X`."""
    notes: tuple[Note, ...]
    """In the order of the file."""

    def of(self, prefix: str) -> dict[str, Any]:
        """Returns the values whose targets begin with `prefix.`, without it."""
        return {
            target.removeprefix(f"{prefix}."): value.value
            for target, value in self.values.items()
            if target.startswith(f"{prefix}.")
        }

    @property
    def job(self) -> dict[str, Value]:
        """The values for job.yaml."""
        return {target: value for target, value in self.values.items() if not target.startswith(("plan.", "machines."))}

    @property
    def stops(self) -> tuple[Note, ...]:
        """The reasons for which this would be another training."""
        return tuple(note for note in self.notes if note.fate is Fate.OTHER_TRAINING)


def walk(source: Source, *, ignore: Collection[str] = (), typed: Collection[str] = ()) -> Imported:
    """Returns the counterpart of a file without the keys in `ignore`, where targets in `typed` are given elsewhere.

    Raises InvalidConfig with every value that means nothing, and its place, or for a key to ignore that the file does
    not have.
    """
    values: dict[str, Value] = {}
    notes, errors = list(_unread(source)), list[InvalidConfig]()
    source, ignored = _without(source, ignore)
    for row, key, setting, is_default in _settings(source):
        if row is None:
            notes.append(_unknown(key, setting, source))
            continue
        try:
            converted = _converted(row, _computed(row, key, setting, typed), source, is_default=is_default)
        except Unmatched as error:
            notes.append(Note(fate=error.fate, key=key, place=setting.place, text=str(error)))
            continue
        except InvalidConfig as error:
            text = error.problem if error.place else f"{setting.place}: {key}: {error.text}"
            errors.append(InvalidConfig(text, hint=error.hint))
            continue
        made = {
            target: Value(value=value, key=key, place=setting.place, is_default=is_default)
            for target, value in converted.values.items()
            # a tool's default never wins over what another key of the file says
            if value is not ABSENT and (target not in values or not is_default)
        }
        notes += _overruled(values, made)
        values |= made
        notes += _notes(row, key, setting, converted) if converted.note or not is_default else []
    if errors:
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        raise InvalidConfig("\n".join(error.problem for error in errors), hint="\n".join(hints) or None)
    notes += [*ignored, *_of_other_methods(values)]
    ordered = sorted(notes, key=lambda note: (note.place.file, note.place.line or 0))
    return Imported(source=source, values=values, notes=tuple(ordered))


def _unread(source: Source) -> Iterator[Note]:
    for key, setting in source.unread.items():
        yield Note(fate=Fate.UNREAD, key=key, place=setting.place, text=str(setting.value))


def _without(source: Source, ignore: Collection[str]) -> tuple[Source, list[Note]]:
    """Returns a file without some of its keys, and notes of them."""
    absent = [key for key in ignore if key not in source.settings]
    if absent:
        near = [name for key in absent if (name := nearest(key, source.settings)) is not None]
        hint = f"It has {', '.join(near)}." if near else "Name keys as the page of the import has them."
        raise InvalidConfig(f"--ignore {absent[0]}: {source.path} has no such key", hint=hint)
    kept = {key: setting for key, setting in source.settings.items() if key not in ignore}
    text = "left out, as --ignore says"
    gone = [Note(fate=Fate.MISSING, key=key, place=source.settings[key].place, text=text) for key in ignore]
    return replace(source, settings=kept), gone


def _computed(row: Row, key: str, setting: Setting, typed: Collection[str]) -> Any:
    """Returns the value of a setting. Raises Unmatched for one that only a shell can compute if a job does without,
    else InvalidConfig."""
    if not isinstance(setting.value, Computed) or row.fate is Fate.NEEDLESS:
        return setting.value
    if row.target in typed:
        raise Unmatched(f"{setting.value}: --{row.target} is taken")
    if row.target.startswith("machines."):
        raise Unmatched(f"{setting.value}: the GPUs are those of --gpus and --gpus-per-node, or of this machine")
    if row.target in ("output_dir", "monitor.name"):
        raise Unmatched(f"{setting.value}: dstrain's own name is written")
    problem, hint = f"--{key} has {setting.value}", "Write the value in its place."
    raise InvalidConfig(problem, place=setting.place, hint=hint)


_IDLE = "with the other keys of the file it changes nothing"
_OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", "false", "off", [], {})
"""Values that switch a key off."""


def _notes(row: Row, key: str, setting: Setting, converted: Converted) -> list[Note]:
    """Returns the fate of a key; nothing if it is simply written, or asks for nothing."""
    fate, text = row.fate, converted.note
    if text:
        fate = Fate.CHANGED if fate is Fate.WRITTEN else fate
    elif fate is not Fate.WRITTEN:
        text = "" if _is_one_of(setting.value, row.unless) else row.note.replace("{value}", str(setting.value))
    elif converted is not READ and all(value is ABSENT for value in converted.values.values()):
        plain = setting.value.lower() if isinstance(setting.value, str) else setting.value
        is_nothing = _is_one_of(plain, (*_OFF, "auto", row.default))
        fate, text = Fate.NEEDLESS, "" if is_nothing else _IDLE
    return [Note(fate=fate, key=key, place=setting.place, text=text)] if text else []


def _is_one_of(value: Any, others: Iterable[Any]) -> bool:
    """Returns whether a value is among others; true is not 1, and false is not 0."""
    return any(value == other and isinstance(value, bool) is isinstance(other, bool) for other in others)


def _overruled(values: Mapping[str, Value], made: Mapping[str, Value]) -> list[Note]:
    """Returns the keys whose value another key of the file replaces by another one."""
    return [
        Note(
            fate=Fate.CHANGED,
            key=before.key,
            place=before.place,
            text=f"`{value.key}` at {value.place} decides {target.removeprefix('plan.').removeprefix('machines.')}",
        )
        for target, value in made.items()
        if (before := values.get(target)) is not None and before.value != value.value
    ]


def _of_other_methods(values: Mapping[str, Value]) -> list[Note]:
    """Returns the keys of an adapter in a file that trains none."""
    if not is_full(values):
        return []
    own = [value for target, value in values.items() if target.startswith("lora.") and not value.is_default]
    places = {value.key: value.place for value in own}
    text = "it is for an adapter, and all parameters are trained"
    return [Note(fate=Fate.NEEDLESS, key=key, place=place, text=text) for key, place in places.items()]


def is_full(values: Mapping[str, Value]) -> bool:
    """Returns whether no adapter is trained."""
    return "method" not in values or values["method"].value == Method.FULL


def _settings(source: Source) -> Iterator[tuple[Row | None, str, Setting, bool]]:
    """Yields every setting with its row and key, and whether it is a default; variables, then keys, then defaults."""
    for name, setting in source.environment.items():
        if name in source.tool.environment:
            yield source.tool.environment[name], name, setting, False
    rows = source.tool.rows
    for key, setting in source.settings.items():
        yield rows.get(key), key, setting, False
    for key, row in rows.items():
        if row.default is not ABSENT and key not in source.settings:
            yield row, key, Setting(value=row.default, place=Place(file=str(source.path))), True


def _converted(row: Row, value: Any, source: Source, *, is_default: bool) -> Converted:
    """Converts a value by its row; the row's own note is for values that the file gives."""
    result = row.convert(value, source) if row.fate is Fate.WRITTEN else ABSENT
    if isinstance(result, Converted):
        return result
    has_note = bool(row.target) and not is_default and result is not ABSENT
    return Converted(values={row.target: result} if row.target else {}, note=row.note if has_note else "")


def _unknown(key: str, setting: Setting, source: Source) -> Note:
    """Returns the fate of a key that no table has: the import stops if its name speaks of what is trained."""
    near = meant(key, source.tool.rows)
    text = f"dstrain does not know this key of {source.tool.title}" + (f'; did you mean "{near}"?' if near else "")
    fate = Fate.UNKNOWN
    if is_about_training(key, setting.value):
        fate, text = Fate.OTHER_TRAINING, f"{text}, and its name says that it changes what is trained"
    return Note(fate=fate, key=key, place=setting.place, text=text)


_STEMS = (
    # adapters, frozen and trained parts
    *("lora", "qlora", "dora", "peft", "adapter", "prefix", "ptuning", "galore", "pissa"),
    *("freez", "froz", "unfreez", "trainable", "tune", "tuning", "finetun"),
    # quantization, precision
    *("quant", "bits", "nbit", "precision"),
    # what is learned from whom
    *("prefer", "reward", "chosen", "reject", "refer", "distill", "teacher", "rlhf", "advantage", "generations"),
    # lengths, templates, mixtures
    *("length", "cutoff", "truncat", "context", "template", "conv", "chat", "prompt", "system", "instruct"),
    *("mix", "interleav", "proportion", "weight", "sampling", "upsampl", "curricul", "pack"),
    # loss and optimizer
    *("loss", "label", "smooth", "mask", "noise", "neft", "dropout", "regulariz", "optim", "momentum", "schedul"),
    *("warmup", "decay", "epoch", "batch", "accum"),
    # other inputs and parts of a model
    *("image", "video", "audio", "vision", "visual", "pixel", "multimodal", "projector", "tower", "expert", "router"),
)
_WORDS = frozenset(
    (
        *("bit", "int4", "int8", "fp4", "fp8", "nf4", "4bit", "8bit", "awq", "gptq", "hqq", "bnb", "ia3", "oft", "fix"),
        *("dpo", "ipo", "kto", "orpo", "cpo", "simpo", "ppo", "grpo", "rl", "rm", "ref", "beta", "kl", "aux", "lr"),
        *("len", "seq", "ctx", "moe", "mtp", "vit", "mm", "head", "heads", "rope"),
    )
)
_TRAINS = ("tune", "tuning", "train", "trainable", "unfreeze", "unfrozen", "learn", "fit")


def is_about_training(key: str, value: Any) -> bool:
    """Returns whether the name of a key says that it changes what is trained, and its value asks for something.

    >>> is_about_training("lora_rank", 8), is_about_training("save_path", "x"), is_about_training("use_dora", False)
    (True, False, False)
    """
    words = _words(key)
    speaks = any(word in _WORDS or word.startswith(_STEMS) for word in words)
    plain = value.lower() if isinstance(value, str) else value
    return speaks and (not _is_one_of(plain, _OFF) or (plain is not None and any(word in _TRAINS for word in words)))


def meant(key: str, known: Iterable[str]) -> str | None:
    """Returns the key of which one has a typing error: all words are the same but one, which is nearly the same.

    >>> meant("cutof_len", ["cutoff_len", "cut_len"]), meant("lora_rank", ["local_rank"])
    ('cutoff_len', None)
    """
    words = _words(key)
    for other in known:
        pairs = [pair for pair in zip(words, _words(other), strict=False) if pair[0] != pair[1]]
        if len(words) == len(_words(other)) and len(pairs) == 1:
            one, two = pairs[0]
            if min(len(one), len(two)) > 3 and difflib.SequenceMatcher(None, one, two).ratio() >= 0.85:
                return other
    return None


def _words(key: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())


_SECTIONS = {"dpo": Dpo, "lora": Lora, "samples": Samples, "monitor": Monitor}
_PATHS = ("data", "eval_data", "model")
"""Keys of which gen-config itself writes a single name, relative to the job."""


def edited(text: str, imported: Imported) -> str:
    """Returns a generated job file with the imported values; one that is the tool's default says so in a comment."""
    data, _ = parse_yaml(text, "job.yaml")
    changes = [
        Change(
            pointer=tuple(target.split(".")),
            value=value.value,
            after=_before(target),
            comment=f"{imported.source.tool.title}'s default" if value.is_default else None,
        )
        for target, value in written(imported).items()
        if not same(_present(data, target), value.value)
    ]
    return edit.apply_yaml(text, "job.yaml", changes)


def written(imported: Imported) -> dict[str, Value]:
    """Returns the values that job.yaml gets, without the keys of an adapter that is not trained."""
    is_adapter = not is_full(imported.values)
    return {
        target: value
        for target, value in imported.job.items()
        if (target not in _PATHS or not isinstance(value.value, str)) and (is_adapter or not target.startswith("lora."))
    }


def locator(imported: Imported, job: Path) -> Locator:
    """Returns the place of a job's key: in the imported file, or in the job for what it does not set."""

    def locate(keys: Keys) -> Place:
        for length in range(len(keys), 0, -1):
            value = imported.values.get(".".join(map(str, keys[:length])))
            if value is not None:
                return value.place
        return Place(file=str(job))

    return locate


def _present(data: Mapping[str, Any], target: str) -> Any:
    """Returns the value that a job has for a key: the written one, or the default."""
    pointer = tuple(target.split("."))
    value = lookup(data, pointer)
    if value is not REMOVED:
        return value
    record = _SECTIONS[pointer[0]] if len(pointer) > 1 else Job
    field = next(field for field in fields(record) if field.name == pointer[-1])
    default = field.default if field.default is not MISSING else REMOVED
    return list(default) if isinstance(default, tuple) else default


def _before(target: str) -> tuple[str, ...]:
    """Returns the keys that precede a key in the schema of its section."""
    *outer, name = target.split(".")
    names = [field.name for field in fields(_SECTIONS[outer[0]] if outer else Job)]
    return tuple(names[: names.index(name)])
