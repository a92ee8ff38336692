"""The settings of another tool's file, each with its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.config.imports.rows import ABSENT, Row
from dstrain.errors import InvalidConfig, Place
from dstrain.paths import shown
from dstrain.records import Locator


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that a file gives."""

    value: Any
    place: Place


@dataclass(frozen=True, slots=True)
class Computed:
    """In place of a value: what only a shell can compute."""

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
    """Returns the settings of a mapping; those of a section have its name before theirs."""
    settings: dict[str, Setting] = {}
    for key, value in data.items():
        if key in sections and isinstance(value, Mapping):
            inner = settings_of(value, lambda keys, key=key: locate((key, *keys)), ())  # type: ignore[misc]
            settings |= {f"{key}.{name}": setting for name, setting in inner.items()}
        elif value is not None:
            settings[key] = Setting(value=value, place=locate((key,)))
    return settings
