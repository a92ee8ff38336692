"""Prints the memory of a rank that ran out of it, beside its plan, and the changes that fit."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.lint.finding import printable
from dstrain.launch.again import RUN, line_of
from dstrain.launch.run.state import State
from dstrain.oom import NamedTensors, OutOfMemory, ProposedChange
from dstrain.units import format_bytes
from dstrain.wrapping import wrapped

TOTAL = "total"
"""The last row of the table."""


def lines(record: OutOfMemory, *, resumes: bool, command: str) -> list[str]:
    """Returns the block of a report: where, the parts of memory, the largest tensors, and changes that fit.

    `resumes` says whether a checkpoint exists to go on from; `command` starts the run.
    """
    head = [f"Out of GPU memory: {record.where}"]
    head += [f"  {record.measured.words}"] if record.measured is not None else []
    return [
        *map(wrapped, head),
        *_table(record),
        *_largest(record),
        *_changes(record, resumes=resumes, command=command),
    ]


def command_of(state: State | None) -> str:
    """Returns the line that starts a run again, as it was typed if that is known."""
    return line_of(state.command if state is not None else RUN)


def rows(record: OutOfMemory) -> list[tuple[str, str, str]]:
    """Returns the name of each part, its planned and its measured bytes, and their totals; empty without a plan."""
    ledger = record.ledger
    if not ledger:
        return []
    planned, measured = [one.predicted_bytes for one in ledger], [one.measured_bytes for one in ledger]
    known = [size for size in measured if size is not None]
    total = sum(known) if len(known) == len(ledger) else None
    names = [*(str(one.part) for one in ledger), TOTAL]
    sizes = zip([*planned, sum(planned)], [*measured, total], strict=True)
    return [
        (name, format_bytes(size), "-" if held is None else format_bytes(held))
        for name, (size, held) in zip(names, sizes, strict=True)
    ]


def largest_text(one: NamedTensors) -> str:
    """Returns the number, the size and the name of some tensors."""
    return printable(f"{one.count} × {format_bytes(one.size_bytes)}  {one.name}")


def change_text(one: ProposedChange) -> str:
    """Returns a change with its price."""
    return printable(f"{one.change}: {one.price}" if one.price else one.change)


def _table(record: OutOfMemory) -> Iterator[str]:
    found = [("", "planned", "measured"), *rows(record)]
    if len(found) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    yield ""
    for name, planned, measured in found:
        yield f"  {name:<{widths[0]}}  {planned:>{widths[1]}}  {measured:>{widths[2]}}"


def _largest(record: OutOfMemory) -> Iterator[str]:
    predicted = record.predicted
    if predicted is not None and predicted.largest:
        yield from ("", f"Largest tensors at the planned peak ({printable(predicted.peak_instant)}):")
        yield from (f"  {largest_text(one)}" for one in predicted.largest)
    elif predicted is not None:
        yield from ("", f"Planned peak: {printable(predicted.peak_instant)}; no tensor is listed")
    if record.largest:
        yield from ("", "Largest live blocks of the GPU:")
        yield from (f"  {one.count} × {format_bytes(one.size_bytes)}" for one in record.largest)


def _changes(record: OutOfMemory, *, resumes: bool, command: str) -> Iterator[str]:
    if record.fixes:
        yield from ("", "Changes that fit, by the plan and by what was measured:")
    for number, one in enumerate(record.fixes, 1):
        yield wrapped(f"  {number}. {change_text(one)}")
        yield f"     {printable(one.typed(resumes=resumes, command=command))}"  # in one line, to be copied
