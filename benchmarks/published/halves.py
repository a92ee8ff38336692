"""Splits the published tables into those on which constants may be set and those on which accuracy is stated."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from benchmarks.published.answers import table_of
from benchmarks.published.rows import Row
from benchmarks.published.scope import is_asked

SEED = 0
"""Chooses between the halves where both are equally full."""
HALVES = Path(__file__).parents[2] / "tests" / "published" / "halves.csv"
"""The half of every table that is asked about; a table that is added later moves no other."""


class Half(StrEnum):
    """Use of a table."""

    FIT = "fit"
    """Constants are set with its rows in view."""
    UNSEEN = "unseen"
    """No constant is set with its rows in view: the accuracy that dstrain states."""


def split(rows: Iterable[Row], kept: Mapping[str, Half]) -> dict[str, Half]:
    """Returns the half of every table with rows that are asked about, those in `kept` unchanged.

    A table goes to the half in which its publisher has fewer tables, so that both halves know each training code; if
    there are as many in both, SHA-256 of `SEED` and the name decides. Tables are taken in the order of that hash.
    """
    publishers = {table_of(row): row.publisher for row in rows if is_asked(row)}
    halves = {table: half for table, half in kept.items() if table in publishers}
    for table in sorted(publishers, key=_hash):
        if table not in halves:
            peers = [half for other, half in halves.items() if publishers[other] is publishers[table]]
            surplus = peers.count(Half.FIT) - peers.count(Half.UNSEEN)
            takes_fit = surplus < 0 or (surplus == 0 and _hash(table)[0] % 2 == 0)
            halves[table] = Half.FIT if takes_fit else Half.UNSEEN
    return dict(sorted(halves.items()))


def _hash(table: str) -> bytes:
    return hashlib.sha256(f"{SEED}/{table}".encode()).digest()


def read_halves(path: Path = HALVES) -> dict[str, Half]:
    """Returns the half of each table in a file."""
    with path.open(encoding="utf-8", newline="") as stream:
        return {record["table"]: Half(record["half"]) for record in csv.DictReader(stream)}


def to_csv(halves: Mapping[str, Half]) -> str:
    """Returns the halves as CSV.

    >>> to_csv({"a": Half.FIT}).split()
    ['table,half', 'a,fit']
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "half"])
    writer.writerows(halves.items())
    return out.getvalue()
