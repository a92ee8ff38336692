"""Describes a configuration key in words: type, default, history."""

from __future__ import annotations

import json

from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.table import KEYS


def description(key: Key) -> str:
    """Returns the description shown by editors: the meaning, then a line for each further fact.

    >>> from dstrain.config.keys.table import KEYS
    >>> print(description(KEYS["gradient_clipping",]))
    Maximum global L2 norm of the gradients; larger gradients are scaled down. 0 disables clipping.
    Default: 1.0 since 0.19.3; 0.0 before.
    "auto": the Trainer fills in max_grad_norm.
    """
    lines = [summary(key)]
    if (default := default_text(key)) is not None:
        lines.append(f"Default: {default}.")
    if key.filled is not None:
        lines.append(f'"auto": the Trainer fills in {key.filled}.')
    if key.since is not None:
        lines.append(f"Since DeepSpeed {key.since}.")
    if key.instead is not None:
        lines.append(f"Deprecated: {key.instead}.")
    return "\n".join(lines)


def summary(key: Key) -> str:
    """Returns the meaning of a key, with the ZeRO stages that read it.

    >>> from dstrain.config.keys.table import KEYS
    >>> summary(KEYS["zero_optimization", "stage3_max_live_parameters"])
    'Gathered elements kept per GPU before any is released. Stage 3 only.'
    """
    if not key.stages:
        return key.meaning
    stages = listed([str(stage) for stage in key.stages], "and")
    return f"{key.meaning} Stage{'s' if len(key.stages) > 1 else ''} {stages} only."


def meaning(key: Key) -> str:
    """Returns the meaning of a key; for a switch, the meaning of its section too.

    >>> from dstrain.config.keys.table import KEYS
    >>> meaning(KEYS["timers", "throughput", "enabled"])
    'Enables the section. The timer behind the reported samples per second.'
    """
    text = summary(key)
    return f"{text} {summary(KEYS[tuple(key.path.split('.')[:-1])])}" if key.is_switch else text


def default_text(key: Key) -> str | None:
    """Returns the default for display, or None."""
    if key.default_note is not None:
        return key.default_note
    return None if key.default is None else json.dumps(key.default, ensure_ascii=False)


def kind_text(key: Key) -> str:
    """Returns the type with its range and its legal words.

    >>> from dstrain.config.keys.table import KEYS
    >>> kind_text(KEYS["zero_optimization", "stage"])
    'whole number, 0 to 3'
    >>> kind_text(KEYS["zero_optimization", "offload_param", "device"])
    'none, cpu or nvme'
    """
    words = spoken_words(key)
    if key.kind is Kind.TEXT and words:
        text = listed(words)
    else:
        text = str(key.kind) + _range_text(key) + "".join(f" or {word}" for word in words)
    return f"{text}, or null" if key.is_nullable else text


def spoken_words(key: Key) -> list[str]:
    """Returns the legal words without those that differ only in case."""
    words: dict[str, str] = {}
    for word in key.words:
        words.setdefault(word.lower(), word)
    return list(words.values())


def listed(words: list[str], last: str = "or") -> str:
    """Returns words as an enumeration.

    >>> listed(["a", "b", "c"])
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _range_text(key: Key) -> str:
    if key.least is not None and key.most is not None:
        return f", {key.least:g} to {key.most:g}"
    if key.least is not None:
        return f", {key.least:g} " + ("or more" if key.below is None else f"to below {key.below:g}")
    if key.above is not None or key.below is not None:
        return f", above {key.above:g}" if key.above is not None else f", below {key.below:g}"
    return f", at most {key.most:g}" if key.most is not None else ""
