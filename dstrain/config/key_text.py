"""Describes a configuration key in words: type, default, history."""

from __future__ import annotations

import json

from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.table import KEYS


def description(key: Key) -> str:
    """Returns what editors show for a key: its meaning, then a line for each further fact.

    >>> from dstrain.config.keys.table import KEYS
    >>> print(description(KEYS["gradient_clipping",]))
    Largest global L2 norm of the gradients; larger ones are scaled down. 0 turns clipping off.
    Default: 1.0 since 0.19.3; 0.0 before.
    "auto": the Trainer fills in max_grad_norm.
    """
    lines = [key.meaning]
    if (default := default_text(key)) is not None:
        lines.append(f"Default: {default}.")
    if key.filled is not None:
        lines.append(f'"auto": the Trainer fills in {key.filled}.')
    if key.since is not None:
        lines.append(f"Since DeepSpeed {key.since}.")
    if key.instead is not None:
        lines.append(f"Deprecated: {key.instead}.")
    return "\n".join(lines)


def meaning(key: Key) -> str:
    """Returns what a key does; of a switch also what its section does, which it turns on.

    >>> from dstrain.config.keys.table import KEYS
    >>> meaning(KEYS["timers", "throughput", "enabled"])
    'Turns it on: The timer behind the samples per second that are printed.'
    """
    above = KEYS.get(tuple(key.path.split(".")[:-1]))
    if above is None or not key.path.endswith(".enabled") or not key.meaning.startswith("Turns"):
        return key.meaning
    return f"{key.meaning.removesuffix('.')}: {above.meaning}"


def default_text(key: Key) -> str | None:
    """Returns the default as people read it; None where there is none."""
    if key.default_note is not None:
        return key.default_note
    return None if key.default is None else json.dumps(key.default, ensure_ascii=False)


def kind_text(key: Key) -> str:
    """Returns the type with its range and its words.

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
    """Returns the legal words, each once where only its letters' case differs."""
    found: dict[str, str] = {}
    for word in key.words:
        found.setdefault(word.lower(), word)
    return list(found.values())


def listed(words: list[str], last: str = "or") -> str:
    """Returns words as a list.

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
