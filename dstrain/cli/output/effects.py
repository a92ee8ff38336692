"""Formats an edit's effect on memory and speed, and the bytes of a number."""

from __future__ import annotations

from dstrain.config.key_bytes import Cost
from dstrain.plan.effect import Effect
from dstrain.units import GIB, format_bytes


def effect_text(effect: Effect) -> str:
    """Returns an effect in words.

    >>> effect_text(Effect(device_bytes_per_gpu=-429496730, host_bytes_per_node=0, step_ratio=0.06, tokens_ratio=-0.057,
    ...     fits_before=True, fits=True))
    '−0.4 GiB, +6 % step time'
    """
    parts = [_bytes(effect.device_bytes_per_gpu, "")]
    if effect.host_bytes_per_node:
        parts.append(_bytes(effect.host_bytes_per_node, " of RAM a node"))
    if effect.step_ratio is not None and effect.tokens_ratio is not None:
        parts.append(_percent(effect.step_ratio, "step time"))
        if abs((1 + effect.step_ratio) * (1 + effect.tokens_ratio) - 1) > 5e-3:  # the tokens of a step changed
            parts.append(_percent(effect.tokens_ratio, "tokens/s"))
    if effect.fits != effect.fits_before:
        parts.append("fits now" if effect.fits else "no longer fits")
    return ", ".join(parts)


def _bytes(count: int, what: str) -> str:
    size = f"{abs(count) / GIB:.1f} GiB" if abs(count) >= GIB / 20 or not count else format_bytes(abs(count))
    return f"{_sign(count)}{size}{what}"


def _percent(ratio: float, what: str) -> str:
    if ratio >= 1:
        return f"{what} × {1 + ratio:.1f}"
    rounded = round(100 * ratio) if abs(ratio) >= 0.095 else round(100 * ratio, 1)
    return f"{_sign(rounded)}{abs(rounded):g} % {what}"


def _sign(number: float) -> str:
    return "+" if number > 0 else "−" if number < 0 else "±"


def cost_text(cost: Cost | None) -> str:
    """Returns the bytes of a number in brackets, or nothing."""
    return f" ({format_bytes(cost.count_bytes)} {cost.where})" if cost else ""
