"""Parts of data files hold the rows of the whole file, each once, under the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.errors import InvalidConfig
from dstrain.facts.data import parts
from dstrain.facts.data.rows import Part, Sample, entries
from tests.facts.data.tables import write_table

LINE = st.sampled_from(['{"text": "a"}', "", "   ", '{"text": "a longer one, of some words"}', "{"])


def read(path: Path, part: Part | None = None) -> list[tuple[str, object]]:
    found = entries(path, None, part)
    return [(row.where, row.row) if isinstance(row, Sample) else (row.problem, None) for row in found]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_LEAST_BYTES", 40)
    monkeypatch.setattr(parts, "_MOST_BYTES", 40)
    monkeypatch.setattr(parts, "_BLOCK_BYTES", 16)


@settings(max_examples=50)
@given(lines=st.lists(LINE, min_size=1), is_ended=st.booleans(), begin=st.sampled_from(["", "\ufeff"]))
def test_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[str], is_ended: bool, begin: str) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes((begin + "\n".join(lines) + "\n" * is_ended + " ").encode())
    found = parts.parts_of(path)
    assert [row for part in found for row in read(path, part)] == read(path)
    assert sum(part.num_rows for part in found) == len(path.read_bytes().splitlines())
    if len(found) > 1:
        assert all(40 <= part.end - part.start < 40 + 16 + 40 for part in found[:-1])


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow"])
def test_tables(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / name
    write_table(pyarrow.table({"text": [f"row {n}" for n in range(50)]}), path, rows_per_group=7)
    found = parts.parts_of(path)
    assert len(found) > 5
    assert [row for part in found for row in read(path, part)] == read(path)
    streamed = parts.streamed_parts(path, 20)
    assert (len(streamed) > len(found)) == (path.suffix == ".arrow")
    assert [row for part in streamed for row in read(path, part)] == read(path)
    assert len(read(path)) == 50


def test_a_list_is_one_part(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"}, {"text": "b"}]')
    (part,) = parts.parts_of(path)
    assert read(path, part) == read(path)


def test_what_is_no_data_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such file"):
        parts.parts_of(tmp_path / "a.jsonl")
