"""The settings of another tool's file, each with its place, and the rows of its table: the fate of each key."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dstrain.config.jsonc import REMOVED
from dstrain.errors import InvalidConfig, Place
from dstrain.paths import shown
from dstrain.records import Locator

ABSENT: Any = REMOVED
"""In place of a value: nothing is given, or nothing is to be written."""


class Fate(StrEnum):
    """The fate of a key."""

    WRITTEN = "written"
    """It has a counterpart, which is written."""
    NEEDLESS = "needless"
    """dstrain does without it: the training is the same."""
    MISSING = "missing"
    """It has no counterpart; the training is the same except for this."""
    OTHER_TRAINING = "other training"
    """It has no counterpart, and without it something else would be trained: the import stops."""
    CHANGED = "changed"
    """It has a counterpart that differs in something."""
    UNKNOWN = "unknown"
    """The table has no such key."""
    UNREAD = "not read"
    """It is in the file, and not part of what is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of a converter if one value alone does not express it."""

    values: Mapping[str, Any]
    """Target → value."""
    note: str = ""
    """How the counterpart differs, and what to do."""


READ = Converted(values={})
"""The result of a converter for a value without a key of its own: it writes another key, or nothing is needed."""


class Unmatched(Exception):
    """A value without counterpart; the text says what to do."""

    fate = Fate.MISSING


class OtherTraining(Unmatched):
    """A value without which something else would be trained."""

    fate = Fate.OTHER_TRAINING


Convert = Callable[[Any, "Source"], Any]
"""Takes a value and all settings; returns the value for the target, `Converted`, READ, or ABSENT to write nothing,
which the page says of a value that asks for something. Raises Unmatched, or InvalidConfig for a value that the tool
itself would refuse."""


def same(value: Any, _: Source) -> Any:
    """Returns the value as it is."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of another tool."""

    key: str
    """Its name there; `section.key` inside a section."""
    fate: Fate
    target: str = ""
    """A key of job.yaml (`lora.rank` reaches inside), `plan.X` for a choice of gen-config, or `machines.X`."""
    convert: Convert = same
    default: Any = ABSENT
    """The tool's default if the key is absent, in its own terms."""
    note: str = ""
    """The advice, or why nothing is needed."""
    unless: tuple[Any, ...] = (False,)
    """Values that mean the same as an absent key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that a file gives."""

    value: Any
    place: Place


@dataclass(frozen=True, slots=True)
class Computed:
    """In place of a value: an expression that only a shell can compute."""

    text: str

    def __str__(self) -> str:
        return f"{self.text}, which only a shell can compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Another tool."""

    name: str
    """As `--from` takes it."""
    title: str
    """As people write it."""
    rows: Mapping[str, Row]
    environment: Mapping[str, Row] = field(default_factory=dict)
    """Rows of environment variables."""
    sections: tuple[str, ...] = ()
    """Keys whose values are mappings with rows of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file with its settings."""

    path: Path
    tool: Tool
    settings: Mapping[str, Setting]
    """Key → value; keys without value are left out."""
    environment: Mapping[str, Setting] = field(default_factory=dict)
    """Variables that the script sets for the command."""
    unread: Mapping[str, Setting] = field(default_factory=dict)
    """Parts of the file that are not read → why, in place of a value."""

    def given(self, key: str) -> Any:
        """Returns the value that the file gives, or ABSENT."""
        setting = self.settings.get(key)
        return ABSENT if setting is None else setting.value

    def value(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the tool's default for it, or `default`."""
        row = self.tool.rows.get(key)
        value = self.given(key)
        value = row.default if value is ABSENT and row is not None else value
        return default if value is ABSENT else value

    def find(self, name: str) -> Path:
        """Returns the file that a key names. Tools are started in a folder above their files, so a relative name is
        looked up from the current folder, and from the folders around the file. Raises InvalidConfig if it is missing.
        """
        path = Path(name).expanduser()
        folders = (Path(), *self.path.resolve().parents)
        for candidate in [path] if path.is_absolute() else [folder / path for folder in folders]:
            if candidate.exists():
                return Path(shown(os.path.normpath(candidate)))
        raise InvalidConfig(
            f'"{name}": no such file is here or around {self.path.name}',
            hint=f"Import it from the folder in which {self.tool.title} is started.",
        )


def settings_of(data: Mapping[str, Any], locate: Locator, sections: tuple[str, ...]) -> dict[str, Setting]:
    """Returns the settings of a mapping; in a section they have its name before theirs."""
    settings: dict[str, Setting] = {}
    for key, value in data.items():
        if key in sections and isinstance(value, Mapping):
            inner = settings_of(value, lambda keys, key=key: locate((key, *keys)), ())  # type: ignore[misc]
            settings |= {f"{key}.{name}": setting for name, setting in inner.items()}
        elif value is not None:
            settings[key] = Setting(value=value, place=locate((key,)))
    return settings
