"""The number of rows is counted, or estimated whatever their order, and then its error is known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dstrain.facts.data import row_counts
from dstrain.facts.data.row_counts import RowEstimate, count_rows, joined


def write_lines(path: Path, lengths: list[int]) -> Path:
    path.write_text("".join("x" * length + "\n" for length in lengths))
    return path


@pytest.fixture
def lengths() -> list[int]:
    """Lines whose lengths differ by a factor of 100."""
    rng = random.Random(0)
    return [rng.choice((9, 90, 900)) for _ in range(30_000)]


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "_COUNTED_BYTES", 10**6)
    monkeypatch.setattr(row_counts, "_BLOCK_BYTES", 8000)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.usefixtures("few_bytes")
def test_many_lines_are_estimated_in_any_order(tmp_path: Path, lengths: list[int], is_sorted: bool) -> None:
    ordered = sorted(lengths) if is_sorted else lengths
    files = [write_lines(tmp_path / f"{part}.jsonl", ordered[part::3]) for part in range(3)]
    found = count_rows(files)
    assert found.estimate is not None
    assert found.estimate.total_bytes == sum(file.stat().st_size for file in files)
    assert found.estimate.read_bytes < 0.25 * found.estimate.total_bytes
    assert found.number != len(lengths)
    assert abs(found.number / len(lengths) - 1) < min(0.1, found.estimate.error_ratio)


def test_few_lines_are_counted(tmp_path: Path, lengths: list[int]) -> None:
    found = count_rows([write_lines(tmp_path / "a.jsonl", lengths), write_lines(tmp_path / "b.jsonl", [1])])
    assert (found.number, found.estimate) == (30_001, None)


@pytest.mark.usefixtures("few_bytes")
def test_counted_files_beside_estimated_ones_make_the_error_smaller(tmp_path: Path, lengths: list[int]) -> None:
    lines = write_lines(tmp_path / "a.jsonl", lengths)
    items = tmp_path / "b.json"
    items.write_text(f"[{', '.join(['{}'] * 10_000)}]")
    alone, both = count_rows([lines]), count_rows([lines, items])
    assert both.number == alone.number + 10_000
    assert alone.estimate is not None
    assert both.estimate is not None
    assert both.estimate.error_ratio * both.number == pytest.approx(alone.estimate.error_ratio * alone.number)
    assert both.estimate == joined([(alone.number, alone.estimate), (10_000, None)])


def test_a_sum_of_counts_is_not_estimated() -> None:
    assert joined([(3, None), (4, None)]) is None
    half = RowEstimate(read_bytes=2, total_bytes=9, error_ratio=0.03)
    both = joined([(50, half), (50, half)])
    assert both is not None
    assert (both.read_bytes, both.total_bytes) == (4, 18)
    assert both.error_ratio == pytest.approx(0.03 / 2**0.5)
