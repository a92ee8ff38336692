"""Parts of data files hold each row once under its name, and rows are counted, or estimated with a known error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.errors import InvalidConfig
from dstrain.facts.data import rows
from dstrain.facts.data.rows import Part, RowEstimate, Sample, count_rows, entries, joined
from tests.facts.data.tables import write_table

LINE = st.sampled_from(['{"text": "a"}', "", "   ", '{"text": "a longer one, of some words"}', "{"])


def read(path: Path, part: Part | None = None) -> list[tuple[str, object]]:
    found = entries(path, None, part)
    return [(row.where, row.row) if isinstance(row, Sample) else (row.problem, None) for row in found]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LEAST_BYTES", 40)
    monkeypatch.setattr(rows, "_MOST_BYTES", 40)
    monkeypatch.setattr(rows, "_READ_BYTES", 16)


@given(lines=st.lists(LINE, min_size=1), is_ended=st.booleans(), begin=st.sampled_from(["", "\ufeff"]))
def test_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[str], is_ended: bool, begin: str) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes((begin + "\n".join(lines) + "\n" * is_ended + " ").encode())
    found = rows.parts_of(path)
    assert [row for part in found for row in read(path, part)] == read(path)
    assert sum(part.num_rows for part in found) == len(path.read_bytes().splitlines())
    if len(found) > 1:
        assert all(40 <= part.end - part.start < 40 + 16 + 40 for part in found[:-1])


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow"])
def test_tables(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / name
    write_table(pyarrow.table({"text": [f"row {n}" for n in range(50)]}), path, rows_per_group=7)
    found = rows.parts_of(path)
    assert len(found) > 5
    assert [row for part in found for row in read(path, part)] == read(path)
    streamed = rows.streamed_parts(path, 20)
    assert (len(streamed) > len(found)) == (path.suffix == ".arrow")
    assert [row for part in streamed for row in read(path, part)] == read(path)
    assert len(read(path)) == 50


def test_a_list_is_one_part(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"}, {"text": "b"}]')
    (part,) = rows.parts_of(path)
    assert read(path, part) == read(path)


def test_what_is_no_data_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such file"):
        rows.parts_of(tmp_path / "a.jsonl")


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
    monkeypatch.setattr(rows, "_COUNTED_BYTES", 10**6)
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 8000)


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
