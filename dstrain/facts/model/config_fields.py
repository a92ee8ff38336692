"""Reads the fields of a config.json: typed values, rotary scaling, and the layers with a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


_MOST = 1024
"""Largest plausible factor."""


def rope_type(text: Fields) -> str:
    """Returns how positions are scaled (`llama3`, `yarn`, …), or `default`; Transformers 4 calls it `type` too."""
    rope = _rope(text)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def positions(text: Fields) -> int:
    """Returns the length that a model supports; model cards add scaling to config.json and leave this number as it is.

    Linear scaling is counted in it already by those who publish it, such as Gemma 3.
    """
    own, rope, kind = text.size("max_position_embeddings"), _rope(text), rope_type(text)
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    factor = rope.get("factor") if kind in ("yarn", "dynamic") else None
    if not isinstance(factor, int | float) or not 1 <= factor <= _MOST:
        return own
    return max(own, int(factor * (original if isinstance(original, int) else own)))


def _rope(text: Fields) -> Mapping[str, object]:
    """Returns the rotary parameters under their name in Transformers 5 or 4; with types for layers (Gemma 3), of
    full attention."""
    rope = text.values.get("rope_parameters") or text.values.get("rope_scaling")
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else {}
    return rope if isinstance(rope, Mapping) else {}


_PATTERN = 6
"""Gemma 3: every sixth layer has no window. Source: configuration_gemma3.py."""
_FIRST_WINDOWED = 28
"""Qwen: the first layer with a window, if windows are on. Source: configuration_qwen2.py: max_window_layers."""


def all_layers(text: Fields) -> int:
    """Returns the number of decoder layers."""
    return text.size("num_hidden_layers")


def but_every_sixth(text: Fields) -> int:
    """Returns the layers with a window in Gemma 3, whose pattern config.json may change."""
    return all_layers(text) - all_layers(text) // (text.optional_size("sliding_window_pattern") or _PATTERN)


def upper_layers(text: Fields) -> int:
    """Returns the layers from `max_window_layers` on (Qwen 2 and 3)."""
    return max(0, all_layers(text) - (text.optional_size("max_window_layers") or _FIRST_WINDOWED))


def every_second_lower_layer(text: Fields) -> int:
    """Returns every second layer below `max_window_layers` (Qwen 2 MoE)."""
    return (min(text.optional_size("max_window_layers") or _FIRST_WINDOWED, all_layers(text)) + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """How a family decides which layers have a window."""

    default: int | None = 4096
    """The window if config.json has no `sliding_window`."""
    count: Callable[[Fields], int] = all_layers
    """Returns the number of layers with a window."""
    reads_layer_types: bool = True
    """Whether the list `layer_types` of config.json overrides that number."""
    is_switched: bool = False
    """Whether windows are off without `use_sliding_window`."""


def windows(text: Fields, rule: WindowRule | None) -> tuple[int | None, int]:
    """Returns the window in tokens and the number of layers that have it; (None, 0) without windows.

    >>> mistral = Fields(name="", values={"num_hidden_layers": 32, "sliding_window": 4096}, defaults={})
    >>> windows(mistral, WindowRule()), windows(mistral, None)
    ((4096, 32), (None, 0))
    """
    if rule is None or (rule.is_switched and not text.flag("use_sliding_window")):
        return None, 0
    window = text.optional_size("sliding_window") if "sliding_window" in text.values else rule.default
    count = rule.count(text)
    layer_types = text.values.get("layer_types")
    if rule.reads_layer_types and isinstance(layer_types, (list, tuple)):
        count = sum(kind == "sliding_attention" for kind in layer_types[: all_layers(text)])
    return (window, count) if window and count else (None, 0)
