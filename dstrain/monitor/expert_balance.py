"""How evenly a window's tokens are shared among the experts of each layer: figures, curves and a map (pure)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.errors import DstrainError
from dstrain.monitor.sinks.sink import Table, markdown
from dstrain.records import from_data, type_config

EVENT = "expert_loads"
"""The `event` of a line of `metrics.jsonl` that has the load of each expert, and the name of its table in sinks."""
LAYERS = "expert_layers"
"""Key of a window with the numbers of the decoder layers that have experts, from 0."""
BY_LAYER = "_by_layer"
"""End of the name of a list with a value for each of these layers."""
COLUMNS = ("layer", "deviation / mean", "busiest / mean", "busiest expert", "diversity", "experts without a token")
BOUNDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Load at which the color of a cell of a map changes; 0 has a color of its own."""
_COLORS = (0x000000, 0x2F62C9, 0x6F92D9, 0xB3C5EB, 0xF1F2F4, 0xF6CFB3, 0xE8935A, 0xC62828)
"""Colors of the shades in pictures, as on the page on white."""
_DIGITS = 3
"""Decimals of the figures of a layer."""
_LEAST = 0.01
"""To what the loads of a map are rounded, of which there are thousands; one that is not 0 stays above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly the experts of one layer are used."""

    cv: float
    """Standard deviation of the load over its mean."""
    max_over_mean: float
    """Load of the busiest expert over the mean."""
    diversity: float
    """exp(entropy) of the load over the number of experts: 1 if all are used alike."""
    dead: int
    """Experts without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMap:
    """The load of each expert of each layer in one window."""

    __pydantic_config__ = type_config

    step: int
    """The last step of the window."""
    layers: tuple[int, ...]
    """Numbers of the decoder layers, from 0."""
    loads: tuple[tuple[float, ...], ...]
    """(layers, experts): tokens over the mean of the layer, 1 if all experts are used alike."""

    @property
    def text(self) -> str:
        """The map in a sentence.

        >>> LoadMap(step=8, layers=(1, 2), loads=((1.0, 1.0), (2.0, 0.0))).text
        'step 8: expert 0 of layer 2 is the busiest with 2.0 times the mean; 1 of 4 experts got no token'
        """
        busiest, layer = max((max(loads), -layer) for layer, loads in zip(self.layers, self.loads, strict=True))
        expert = self.loads[self.layers.index(-layer)].index(busiest)
        dead = sum(load == 0 for loads in self.loads for load in loads)
        total = f"{sum(map(len, self.loads)):,}"
        rest = f"{dead:,} of {total} experts got no token" if dead else f"all {total} experts got tokens"
        where = f"expert {expert} of layer {-layer}"
        return f"step {self.step:,}: {where} is the busiest with {busiest:.1f} times the mean; {rest}"

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """A row for each layer: `COLUMNS`."""
        found = []
        for layer, loads in zip(self.layers, self.loads, strict=True):
            one = balance_of(loads)
            figures = (f"{one.cv:.2f}", f"{max(loads):.2f}", str(loads.index(max(loads))))
            found.append((str(layer), *figures, f"{one.diversity:.2f}", str(one.dead)))
        return tuple(found)

    def table(self, step: int) -> Table:
        """Returns the table and picture that sinks show at the end of a run, after a step."""
        text = f"# Load of experts\n\n{self.text}\n\n{markdown(COLUMNS, self.rows)}\n"
        cells = tuple(tuple(_COLORS[shade(load)] for load in of_layer) for of_layer in self.loads)
        return Table(name=EVENT, step=step, text=text, columns=COLUMNS, rows=self.rows, cells=cells)


def shade(load: float) -> int:
    """Returns the color of a load, 0…7; `load` is over the mean.

    >>> [shade(load) for load in (0.0, 0.1, 1.0, 9.0)]
    [0, 1, 4, 7]
    """
    return 1 + bisect_right(BOUNDS, load) if load else 0


def balance_of(loads: Sequence[float]) -> Balance:
    """Returns how evenly one layer is used; `loads`: (experts,), of which one is above 0.

    Source: NVIDIA NeMo AutoModel components/moe/load_balance_metrics.py (cv, diversity, dead experts).
    """
    total, number = sum(loads), len(loads)
    mean = total / number
    used = [load / total for load in loads if load]
    return Balance(
        cv=math.sqrt(sum((load - mean) ** 2 for load in loads) / number) / mean,
        max_over_mean=max(loads) / mean,
        diversity=math.exp(-sum(share * math.log(share) for share in used)) / number,
        dead=number - len(used),
    )


def balance(counts: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[str, Any]:
    """Returns the metrics of a window; `counts`: (layers, experts), tokens.

    They are means over the layers, the worst layer's where the name says so.

    >>> found = balance([[10, 10, 10, 10], [40, 0, 0, 0]], (3, 4))
    >>> round(found["expert_load_cv_worst_layer"], 3), found["dead_experts_by_layer"]
    (1.732, [0, 3])
    """
    found = [balance_of(layer) for layer in counts]
    return {
        "expert_load_cv": sum(one.cv for one in found) / len(found),
        "expert_load_cv_worst_layer": max(one.cv for one in found),
        "expert_load_max_over_mean": max(one.max_over_mean for one in found),
        "expert_load_diversity": sum(one.diversity for one in found) / len(found),
        "dead_experts": sum(one.dead for one in found),
        "experts": sum(map(len, counts)),
        LAYERS: list(layers),
        f"expert_load_cv{BY_LAYER}": [round(one.cv, _DIGITS) for one in found],
        f"expert_load_max_over_mean{BY_LAYER}": [round(one.max_over_mean, _DIGITS) for one in found],
        f"expert_load_diversity{BY_LAYER}": [round(one.diversity, _DIGITS) for one in found],
        f"dead_experts{BY_LAYER}": [one.dead for one in found],
    }


def load_map(counts: Sequence[Sequence[int]], layers: Sequence[int], step: int) -> LoadMap:
    """Returns the map of a window; `counts`: (layers, experts), tokens."""
    return LoadMap(step=step, layers=tuple(layers), loads=tuple(map(_over_mean, counts)))


def _over_mean(counts: Sequence[int]) -> tuple[float, ...]:
    mean = sum(counts) / len(counts)
    return tuple(max(round(count / mean, 2), _LEAST) if count else 0.0 for count in counts)


def curves(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns a window's figures of each layer, for sinks, which take one number for each name.

    >>> curves({"expert_layers": [1, 12], "expert_load_cv_by_layer": [0.2, 0.3], "peak_bytes_by_rank": [5, 6]})
    {'expert_load_cv/layer_01': 0.2, 'expert_load_cv/layer_12': 0.3}
    """
    layers = values.get(LAYERS, ())
    return {
        f"{name.removesuffix(BY_LAYER)}/layer_{layer:02}": value
        for name, listed in values.items()
        if name.endswith(BY_LAYER)
        for layer, value in zip(layers, listed, strict=False)
    }


def newest(lines: Sequence[Mapping[str, Any]]) -> LoadMap | None:
    """Returns the last map in lines of `metrics.jsonl`; None without one that is whole."""
    for line in reversed(lines):
        if line.get("event") == EVENT:
            values = {name: line.get(name) for name in LoadMap.__slots__}
            try:
                found = from_data(LoadMap, values, locate=lambda _: "metrics.jsonl")
            except DstrainError:
                continue
            if found.layers and len(found.layers) == len(found.loads) and all(map(any, found.loads)):
                return found
    return None
