import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import DataReport, check, files_of, is_file_name, samples
from dstrain.facts.data.formats import PLAIN, Reading
from tests.facts.data.tables import write_table

GOOD: dict[str, Any] = {"instruction": "Add.", "input": "1 + 1", "output": "2"}


def write(path: Path, *rows: Any, text: str | None = None) -> Path:
    path.write_text(text if text is not None else "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def problem_of(path: Path, reading: Reading = PLAIN, limit_bytes: int | None = None) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        check(path, reading, limit_bytes=limit_bytes)
    return caught.value


@pytest.mark.parametrize("skip", [False, True])
def test_a_problem_that_all_rows_have_is_said_once(tmp_path: Path, skip: bool) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' * 9)
    with pytest.raises(InvalidConfig) as caught:
        check(path, Reading(format=DataFormat.PREFERENCE), skip=skip)
    assert caught.value.problem.count("needs chosen and rejected") == 1


def test_good_file_is_reported_whole(tmp_path: Path) -> None:
    found = check(write(tmp_path / "train.jsonl", GOOD, GOOD), PLAIN)
    columns = ("instruction", "input", "output")
    assert found == DataReport(
        format=DataFormat.ALPACA,
        columns=columns,
        rows_checked=2,
        complete=True,
        unused={},
        media=(),
    )
    assert found.note is None


def test_what_nobody_reads_is_counted_by_name(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": "b", "name": None}]
    rows = [{"messages": turns, "source": "web", "id": 0}, {"messages": turns[1:], "source": ""}]
    path = write(tmp_path / "train.jsonl", *rows)
    note = "unused columns: source (1 sample), id (1 sample), messages.name (1 sample)"
    assert check(path, PLAIN).note == note
    assert str(check(path, PLAIN, limit_bytes=9).note).endswith(", of the first 1")


def test_a_column_whose_meaning_would_be_lost_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", GOOD, GOOD | {"loss_mask": [1, 0]})
    assert problem_of(path).problem.startswith(f'{path}:2: "loss_mask" weights or masks tokens')
    path = write(tmp_path / "train.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert problem_of(path).problem.startswith(f'{path}: "chosen" marks the preferred answer')


def test_limit_ends_the_check_early(tmp_path: Path) -> None:
    found = check(write(tmp_path / "train.jsonl", *[GOOD] * 100), PLAIN, limit_bytes=500)
    assert 0 < found.rows_checked < 100
    assert not found.complete


@pytest.mark.parametrize("cut", range(2, 300, 8))
def test_limit_may_cut_a_list_anywhere(tmp_path: Path, cut: int) -> None:
    rows = [{"text": 'a "quoted" \u00e9\n'}, {"text": "b", "n": 1.5, "flag": False}] * 20
    path = write(tmp_path / "train.json", text=json.dumps(rows))
    if cut < 30:
        assert "no samples" in problem_of(path, limit_bytes=cut).problem
    else:
        assert not check(path, PLAIN, limit_bytes=cut).complete


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert check(write(tmp_path / "train.json", GOOD, GOOD), PLAIN).rows_checked == 2


def test_blank_lines_and_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", text="\ufeff" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD))
    assert check(path, PLAIN).rows_checked == 2


@pytest.mark.parametrize("name", ["train.parquet", "train.arrow", "stream.arrow"])
def test_tables_are_read(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / name
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns}, {"messages": turns[:1]}]
    write_table(arrow.Table.from_pylist(rows), path, rows_per_group=1)
    assert problem_of(path).problem.startswith(f'{path}: row 2: "messages" ends with the user')
    write_table(arrow.Table.from_pylist(rows[:1]), path, rows_per_group=1)
    assert check(path, PLAIN).format is DataFormat.MESSAGES
    assert check(path, PLAIN, limit_bytes=1).complete is False


@pytest.mark.parametrize("name", ["train.arrow", "stream.arrow"])
def test_half_an_arrow_file_is_refused(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / name
    write_table(arrow.Table.from_pylist([{"text": "word " * 99}]), path, rows_per_group=1)
    path.write_bytes(path.read_bytes()[:-200])
    assert problem_of(path).problem.startswith(f"{path}: cannot be read as Arrow: ")
    path.write_bytes(b"no table at all")
    assert problem_of(path).problem.startswith(f"{path}: cannot be read as Arrow: ")


def test_missing_file_gets_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GOOD)
    error = problem_of(tmp_path / "trian.jsonl")
    assert error.problem.endswith("trian.jsonl: no such file")
    assert error.hint == f'Did you mean "{tmp_path / "train.jsonl"}"?'


def test_folder_is_refused(tmp_path: Path) -> None:
    assert problem_of(tmp_path).problem == f"{tmp_path}: is a folder; data must be one file"


LINE = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.jsonl", "", ": the file is empty"),
        ("train.jsonl", "\n \n", ": no samples"),
        ("train.json", "[]", ": no samples"),
        ("train.csv", LINE, ': unknown file name extension ".csv"'),
        ("train.jsonl", "\n".join([*[LINE] * 16, '{"a" 1}', LINE]), ":17:6: expecting ':' delimiter"),
        ("train.json", '[\n {"text": "a"}\n {"text": "b"}\n]', ":3:2: expecting ',' delimiter"),
        ("train.json", '[\n {"text": "a"}\n', ":3: the list is not closed"),
        ("train.json", json.dumps([GOOD, GOOD | {"output": 3}], indent=2), ':7: "output" is 3; it must be a string'),
        ("train.jsonl", f'{LINE}\n"text"\n', ":2: is a string; a sample must be an object"),
        ("train.jsonl", f"{LINE}\n[1]\n", ":2: is a list; a sample must be an object"),
        ("train.jsonl", f"{LINE}\nnull\n", ":2: is null; a sample must be an object"),
        ("train.jsonl", b'{"text": "caf\xe9"}\n', ":1:14: not UTF-8"),
        ("train.jsonl", '{"q": "a", "a": "b"}\n' * 3, ": no known format has the columns q, a; alpaca"),
        ("train.parquet", "PAR1 and no more", ": not a complete Parquet file"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert problem_of(path).problem.startswith(f"{path}{problem}")


def test_unknown_ending_gets_the_nearest(tmp_path: Path) -> None:
    assert problem_of(write(tmp_path / "train.jsnol", GOOD)).hint == 'Did you mean ".jsonl"?'


def test_five_problems_are_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", GOOD, *[{"instruction": "a"}] * 9)
    lines = problem_of(path).problem.splitlines()
    assert lines[0] == f'{path}:2: "output" is missing'
    assert len(lines) == 6
    assert lines[-1].endswith("stopped after 5 problems")


def test_samples_say_where_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", text='{"text": "a"}\n\n{"text": "b"}\n')
    assert [(sample.where, sample.row["text"]) for sample in samples(path)] == [(f"{path}:1", "a"), (f"{path}:3", "b")]


def test_samples_stop_at_a_broken_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"train\.jsonl:2:1: "):
        list(samples(write(tmp_path / "train.jsonl", text='{"text": "a"}\nnonsense\n')))


@pytest.mark.parametrize("name", ["train.jsonl", "./train", "/data/x", "data/TRAIN.PARQUET"])
def test_file_names_are_told_from_ids(name: str) -> None:
    assert is_file_name(name)
    assert not is_file_name("someone/some-data")


def test_a_glob_names_files_in_order_and_must_match(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        write(tmp_path / name, GOOD)
    assert files_of(f"{tmp_path}/*.jsonl") == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert is_file_name(f"{tmp_path}/*")
    with pytest.raises(InvalidConfig, match=r"/\*\.json: no file matches"):
        files_of(f"{tmp_path}/*.json")


def test_a_column_of_the_job_that_no_row_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", GOOD, GOOD | {"sys": "s"})
    assert check(path, Reading(columns={"system": "sys"})).unused == {}
    assert 'system is "syz", which no row has' in problem_of(path, Reading(columns={"system": "syz"})).problem


def test_keys_that_parquet_adds_to_every_tool_are_left_out(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tools = [{"name": "f", "parameters": {"city": "x"}}, {"name": "g", "parameters": {"day": 1}}]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a", "tools": tools, "note": None}]), path)
    (sample,) = samples(path)
    assert sample.row == {"text": "a", "tools": tools, "note": None}


@pytest.mark.parametrize("data_format", [DataFormat.PREFERENCE, DataFormat.TEXT])
def test_columns_of_another_task_are_one_problem(tmp_path: Path, data_format: DataFormat) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n' * 9)
    error = problem_of(path, Reading(format=data_format))
    assert error.problem.count("needs") == 1
    assert "stopped after" not in error.problem
    assert "Change task or data_format" in str(error.hint)
