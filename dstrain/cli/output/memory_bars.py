"""Draws the memory of one GPU under each plan as stacked bars against its capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from dstrain.cli.console import COLUMNS
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label, short_label
from dstrain.plan.memory.memory import Breakdown
from dstrain.plan.search.decide import Survey
from dstrain.units import GIB

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


def bar_lines(survey: Survey, cluster: Cluster, *, in_colour: bool) -> list[Text]:
    """Returns a heading, a title and a bar for each plan, and the legend.

    All bars have the same scale. `:` marks the memory that a plan may fill, `|` the capacity; a bar that crosses `|`
    does not fit. In color, a part is a patch that starts with its letter, else a run of letters.
    """
    capacity, usable = cluster.gpu.memory_bytes, survey.first.usable_bytes_per_gpu
    scale = max(capacity, *(proposal.estimate.memory.device_bytes_per_gpu for proposal in survey.proposals)) / WIDTH
    marks = {round(usable / scale): ":", round(capacity / scale): "|"}
    head = f"peak memory of one GPU, in GiB    : usable {usable / GIB:.1f}    | capacity {capacity / GIB:.1f}"
    lines = [Text(head)]
    estimates = [proposal.estimate for proposal in survey.proposals]
    for number, estimate in enumerate(estimates, 1):
        fits = "" if estimate.fits else " (does not fit)"
        title = f"{number:>2} {label(estimate.configuration)}{fits}"
        if len(title) > COLUMNS:
            title = f"{number:>2} {short_label(estimate.configuration)}{fits}"
        lines += [Text(title, style="bold" if number == 1 else ""), _bar(estimate, marks, scale, in_colour)]
    breakdowns = [estimate.memory.breakdown_bytes for estimate in estimates]
    parts = [part for part in PARTS if any(part_bytes(breakdown, part) for breakdown in breakdowns)]
    return [*lines, *_legend(parts, survey.first)]


def _bar(estimate: Estimate, marks: Mapping[int, str], scale: float, in_colour: bool) -> Text:
    """Returns one bar with its total; the ends of parts are rounded sums, so that the bar is as long as its total."""
    bar = Text(INDENT)
    cell, total = 0, 0
    for part in PARTS:
        total += part_bytes(estimate.memory.breakdown_bytes, part)
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


def _legend(parts: list[Part], first: Estimate) -> list[Text]:
    """Returns what letters and colours mean, with the GiB of the first plan, in lines of up to 80 columns."""
    lines = [Text(INDENT)]
    for part in parts:
        words = f" {part.name} {part_bytes(first.memory.breakdown_bytes, part) / GIB:.1f}"
        if lines[-1].cell_len + len(INDENT) + 1 + len(words) > COLUMNS:
            lines.append(Text(INDENT))
        space = "" if lines[-1].plain == INDENT else "   "
        lines[-1].append(space).append(part.letter, style=f"black on {part.colour}").append(words)
    return lines
