"""Reads the fields of a config.json with type checks and the defaults of their model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dstrain.errors import InvalidConfig

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "dtype": ("torch_dtype",),  # Transformers 4
    "num_experts": ("num_local_experts", "n_routed_experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One object of a config.json; every problem names the file and the key."""

    name: str
    """Whose config it is, for messages."""
    values: Mapping[str, object]
    """What the file says."""
    defaults: Mapping[str, object]
    """What the Transformers config class says where the file does not."""
    prefix: str = ""
    """Keys above this object, such as `text_config.`."""

    def size(self, key: str) -> int:
        """Returns a whole number from 1."""
        found, value = self._find(key)
        if value is None:
            raise self.problem(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.problem(found, f"is {_shown(value)}, not a whole number")
        if value < 1:
            raise self.problem(found, f"is {value}, not a number from 1")
        return value

    def count(self, key: str) -> int:
        """Returns a whole number from 0; 0 where it is not given."""
        found, value = self._find(key)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.problem(found, f"is {_shown(value)}, not a whole number")
        if value < 0:
            raise self.problem(found, f"is {value}, not a number from 0")
        return value

    def optional_size(self, key: str) -> int | None:
        """Returns a whole number from 1, or None where the file says null or nobody says anything."""
        if (key in self.values and self.values[key] is None) or self._find(key)[1] is None:
            return None
        return self.size(key)

    def flag(self, key: str) -> bool:
        """Returns true or false; false where it is not given."""
        found, value = self._find(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.problem(found, f"is {_shown(value)}, not true or false")
        return value

    def text(self, key: str) -> str | None:
        """Returns a string, or None where it is not given."""
        found, value = self._find(key)
        if value is None or isinstance(value, str):
            return value
        raise self.problem(found, f"is {_shown(value)}, not a string")

    def indices(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers; an empty one where it is not given."""
        found, value = self._find(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise self.problem(found, f"is {_shown(value)}, not a list of whole numbers")
        return tuple(value)

    def section(self, key: str) -> Fields:
        """Returns the object under `key`, with its own defaults; an empty one where it is not given."""
        value, defaults = self.values.get(key), self.defaults.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.problem(key, f"is {_shown(value)}, not an object")
        assert isinstance(defaults, Mapping), f"no family gives {key} its defaults"
        return Fields(name=self.name, values=value or {}, defaults=defaults, prefix=f"{self.prefix}{key}.")

    def require(self, *keys: str) -> None:
        """Raises InvalidConfig with every one of the sizes that is missing or wrong, each on a line of its own."""
        problems = []
        for key in keys:
            try:
                self.size(key)
            except InvalidConfig as error:
                problems.append(error.problem)
        if problems:
            raise InvalidConfig("\n".join(problems), hint="Is it the config.json of a Transformers model?")

    def divided(self, key: str, by: str) -> int:
        """Returns the quotient of two sizes. Raises InvalidConfig where it is not whole."""
        total, parts = self.size(key), self.size(by)
        if total % parts:
            raise self.problem(key, f"is {total}, which {by} {parts} does not divide")
        return total // parts

    def problem(self, key: str, says: str) -> InvalidConfig:
        """Returns the error that `key` has."""
        return InvalidConfig(f'{self.name}: "{self.prefix}{key}" {says}')

    def _find(self, key: str) -> tuple[str, object]:
        """Returns the key under which the file gives a value, and the value; else the default."""
        for candidate in (key, *_SYNONYMS.get(key, ())):
            if self.values.get(candidate) is not None:
                return candidate, self.values[candidate]
        return key, self.defaults.get(key)


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
