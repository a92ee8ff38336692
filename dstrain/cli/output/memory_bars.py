"""Draws the memory of one GPU under each plan as stacked bars against its capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.labels import label, short_label
from dstrain.plan.memory.memory import Breakdown, Memory
from dstrain.plan.search.decide import Survey
from dstrain.units import GIB
from dstrain.wrapping import COLUMNS

WIDTH = 64
"""Cells of the longest bar."""
INDENT = "   "


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the memory of a GPU, with its letter and its color."""

    letter: str
    """What the bar consists of without colors."""
    name: str
    """Its name in the legend."""
    colour: str
    """Background on a terminal."""
    fields: tuple[str, ...]
    """The fields of a breakdown that it adds up."""


# fmt: off
PARTS: tuple[Part, ...] = (
    Part(letter="P", name="parameters", colour="blue", fields=("params",)),
    Part(letter="G", name="gradients", colour="cyan", fields=("grads",)),
    Part(letter="O", name="optimizer", colour="magenta", fields=("optimizer",)),
    Part(letter="B", name="engine buffers", colour="yellow", fields=("buffers",)),
    Part(letter="W", name="whole layers", colour="bright_cyan", fields=("gathered",)),
    Part(letter="A", name="activations", colour="green", fields=("activations",)),
    Part(letter="L", name="logits", colour="red", fields=("logits",)),
    Part(letter="x", name="CUDA, fragments", colour="bright_black", fields=("workspace", "fragmentation", "context")),
)
"""Resident parts first, then transient ones. `whole layers` are those that ZeRO-3 has gathered."""
# fmt: on
LOAD = Part(letter="l", name="at load", colour="white", fields=())
"""The bar of the memory while the model is loaded."""
LOAD_RATIO = 0.5
"""A load has a bar of its own from this share of the peak of training on."""


def bar_lines(survey: Survey, cluster: Cluster, *, in_colour: bool) -> list[Text]:
    """Returns a heading, a title and a bar for each plan, a second one for its load if that is large, and the legend.

    All bars have the same scale. `:` marks the memory that a plan may fill, `|` the capacity; a bar that crosses `|`
    does not fit. In color, a part is a patch that starts with its letter, else a run of letters.
    """
    capacity, usable = cluster.gpu.memory_bytes, survey.first.usable_bytes_per_gpu
    needs = [proposal.estimate.memory for proposal in survey.proposals]
    scale = max(capacity, *(max(need.device_bytes_per_gpu, need.load.device_bytes_per_gpu) for need in needs)) / WIDTH
    marks = {round(usable / scale): ":", round(capacity / scale): "|"}
    head = f"peak memory of one GPU, in GiB    : usable {usable / GIB:.1f}    | capacity {capacity / GIB:.1f}"
    lines = [Text(head)]
    estimates = [proposal.estimate for proposal in survey.proposals]
    for number, estimate in enumerate(estimates, 1):
        fits = "" if estimate.fits else " (does not fit)"
        title = f"{number:>2} {label(estimate.configuration)}{fits}"
        if len(title) > COLUMNS:
            title = f"{number:>2} {short_label(estimate.configuration)}{fits}"
        lines.append(Text(title, style="bold" if number == 1 else ""))
        lines += [_bar(bar, marks, scale, in_colour) for bar in _bars(estimate.memory)]
    shown = [part for need in needs for bar in _bars(need) for part, size in bar if size]
    first = {part.letter: size for bar in _bars(needs[0]) for part, size in bar}
    return [*lines, *_legend([part for part in (*PARTS, LOAD) if part in shown], first)]


def _bars(memory: Memory) -> list[list[tuple[Part, int]]]:
    """Returns the bars of a plan: the parts of the peak and, if it is large, the load."""
    load = memory.load.device_bytes_per_gpu
    peak = [(part, part_bytes(memory.breakdown_bytes, part)) for part in PARTS]
    return [peak, [(LOAD, load)]] if load > LOAD_RATIO * memory.device_bytes_per_gpu else [peak]


def _bar(parts: Sequence[tuple[Part, int]], marks: Mapping[int, str], scale: float, in_colour: bool) -> Text:
    """Returns one bar with its total; the ends of parts are rounded sums, so that the bar is as long as its total."""
    bar = Text(INDENT)
    cell, total = 0, 0
    for part, size in parts:
        total += size
        end = round(total / scale)
        for position in range(cell, end):
            letter = part.letter if position == cell or not in_colour else " "
            bar.append(marks.get(position, letter), style=f"black on {part.colour}")
        cell = max(cell, end)
    for position in range(cell, WIDTH + 1):
        bar.append(marks.get(position, " "))
    return bar.append(f"{total / GIB:6.1f}")


def part_bytes(parts: Breakdown, part: Part) -> int:
    """Returns the bytes of a part."""
    return sum(getattr(parts, field) for field in part.fields)


def _legend(parts: list[Part], first: Mapping[str, int]) -> list[Text]:
    """Returns what letters and colours mean, with the GiB of the first plan, in lines of up to 80 columns."""
    lines = [Text(INDENT)]
    for part in parts:
        words = f" {part.name} {first.get(part.letter, 0) / GIB:.1f}"
        if lines[-1].cell_len + len(INDENT) + 1 + len(words) > COLUMNS:
            lines.append(Text(INDENT))
        space = "" if lines[-1].plain == INDENT else "   "
        lines[-1].append(space).append(part.letter, style=f"black on {part.colour}").append(words)
    return lines
