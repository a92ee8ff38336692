"""Reads the fields of a config.json with type checks and the defaults of their model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from dstrain.errors import InvalidConfig

T = TypeVar("T", int, bool, str)

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "dtype": ("torch_dtype",),  # Transformers 4
    "num_experts": ("num_local_experts", "n_routed_experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One object of a config.json; every problem names the file and the key."""

    name: str
    """The model or file, for messages."""
    values: Mapping[str, object]
    """The parsed file."""
    defaults: Mapping[str, object]
    """Values of the Transformers config class for keys that the file lacks."""
    prefix: str = ""
    """Keys above this object, such as `text_config.`."""

    def size(self, key: str) -> int:
        """Returns a whole number from 1."""
        number = self._whole_number(key, smallest=1)
        if number is None:
            raise self.problem(key, "is missing")
        return number

    def count(self, key: str) -> int:
        """Returns a whole number from 0, by default 0."""
        return self._whole_number(key, smallest=0) or 0

    def optional_size(self, key: str) -> int | None:
        """Returns a whole number from 1, or None if the file says null or neither file nor defaults have the key."""
        is_null = key in self.values and self.values[key] is None
        return None if is_null else self._whole_number(key, smallest=1)

    def flag(self, key: str) -> bool:
        """Returns true or false, by default false."""
        return self._typed(key, bool, "true or false") or False

    def text(self, key: str) -> str | None:
        """Returns a string, or None if the key is missing."""
        return self._typed(key, str, "a string")

    def indices(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers, by default an empty one."""
        source, value = self._find(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise self.problem(source, f"is {_shown(value)}, not a list of whole numbers")
        return tuple(value)

    def section(self, key: str) -> Fields:
        """Returns the object under `key`, with its own defaults; by default an empty one."""
        value, defaults = self.values.get(key), self.defaults.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.problem(key, f"is {_shown(value)}, not an object")
        assert isinstance(defaults, Mapping), f"no family gives {key} its defaults"
        return Fields(name=self.name, values=value or {}, defaults=defaults, prefix=f"{self.prefix}{key}.")

    def require(self, *keys: str) -> None:
        """Raises InvalidConfig with all missing or wrong sizes, one per line."""
        problems = []
        for key in keys:
            try:
                self.size(key)
            except InvalidConfig as error:
                problems.append(error.problem)
        if problems:
            raise InvalidConfig("\n".join(problems), hint="Give the config.json of a Transformers model.")

    def divided(self, key: str, by: str) -> int:
        """Returns the quotient of two sizes. Raises InvalidConfig if it is not whole."""
        total, parts = self.size(key), self.size(by)
        if total % parts:
            raise self.problem(key, f"is {total}, not a multiple of {by} {parts}")
        return total // parts

    def problem(self, key: str, says: str) -> InvalidConfig:
        """Returns an error about `key`; `says` follows the quoted key."""
        return InvalidConfig(f'{self.name}: "{self.prefix}{key}" {says}')

    def _whole_number(self, key: str, *, smallest: int) -> int | None:
        number = self._typed(key, int, "a whole number")
        if number is not None and number < smallest:
            raise self.problem(self._find(key)[0], f"is {number}; the minimum is {smallest}")
        return number

    def _typed(self, key: str, kind: type[T], name: str) -> T | None:
        source, value = self._find(key)
        if value is None or type(value) is kind:
            return value
        raise self.problem(source, f"is {_shown(value)}, not {name}")

    def _find(self, key: str) -> tuple[str, object]:
        """Returns the key or synonym that the file uses, and its value; otherwise the key and its default."""
        for candidate in (key, *_SYNONYMS.get(key, ())):
            if self.values.get(candidate) is not None:
                return candidate, self.values[candidate]
        return key, self.defaults.get(key)


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
