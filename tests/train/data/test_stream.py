import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from torch.utils.data import DataLoader

from dstrain.choices import Interval, OnBadRow, Task
from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import stop
from dstrain.facts.data.rows import entries, streamed_parts
from dstrain.job import limits
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job
from dstrain.train import demo
from dstrain.train.data.sources import Reader, RowPlace, endless_rows
from dstrain.train.data.stream import StreamCollator, StreamProgress, said
from dstrain.train.job_data import StreamedData, streamed
from tests.facts.data.tables import write_table

WORDS = [f"w{number}" for number in range(200)]
Ids = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo.make_tokenizer(["user assistant system", *WORDS])


def talk(number: int) -> dict[str, Any]:
    answer = " ".join(WORDS[number : number + 1 + number % 7])
    turns = [{"role": "user", "content": WORDS[-1]}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def write(path: Path, rows: Sequence[dict[str, Any] | str]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def job(data: Any, **options: Any) -> Job:
    plain: dict[str, Any] = {"seq_len": 64, "max_steps": 9, "streaming": True, "shuffle_buffer": 16}
    return Job(model="m", output_dir="o", data=data, **plain | options)


class Rank:
    """What one rank reads, in micro-batches of two rows."""

    def __init__(self, job: Job, tokenizer: Any, *, rank: int = 0, num_ranks: int = 2, workers: int = 0) -> None:
        self.data: StreamedData = streamed(job, tokenizer)[0]
        self.job, self._tokenizer = job, tokenizer
        self.progress = StreamProgress(
            self.data.dataset, self.data.digest, rank=rank, num_ranks=num_ranks, workers=workers
        )
        self._workers = workers

    def read(self, num_batches: int) -> Ids:
        def ids(rows: Any) -> dict[str, Any]:
            return {"ids": [[int(token) for token in row["input_ids"]] for row in rows]}

        loader: Any = DataLoader(
            self.data.dataset, batch_size=2, collate_fn=StreamCollator(ids), num_workers=self._workers
        )
        return [row for batch in islice(self.progress.noted(loader), num_batches) for row in batch["ids"]]

    def texts(self, num_batches: int) -> list[str]:
        """Returns the answers read: the demo's template ends them with a token."""
        return [
            self._tokenizer.decode(row).split("assistant\n")[1].split("<|im_end|>")[0] for row in self.read(num_batches)
        ]


@pytest.mark.parametrize(("packing", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_a_stream_goes_on_from_any_place_as_if_it_had_not_stopped(
    tmp_path: Path, tokenizer: Any, packing: bool, workers: int
) -> None:
    rows: list[Any] = [talk(number) for number in range(60)]
    rows[::10] = ["{broken"] * 6
    wanted = job(write(tmp_path / "a.jsonl", rows), packing=packing, on_bad_row=OnBadRow.SKIP)

    def rank() -> Rank:
        return Rank(wanted, tokenizer, workers=workers)

    whole = rank()
    every = whole.read(20)  # the second pass begins at the sixteenth
    for end in (1, 15) if workers == 0 else (5,):
        before, after = rank(), rank()
        first = before.read(end)
        before.progress.save(tmp_path)
        assert after.progress.restore(tmp_path) is None
        assert first + after.read(20 - end) == every
        assert after.progress.counts == whole.progress.counts
        assert after.progress.problems == whole.progress.problems
    assert whole.progress.counts["skipped"] > 0
    lines = said([(whole.progress.counts, whole.progress.problems)], wanted)
    assert any("unusable rows were skipped" in line for line in lines)
    assert any("a.jsonl: byte " in line for line in lines)


def test_ranks_together_read_every_sample_of_a_pass_once_and_in_another_order_next_time(
    tmp_path: Path,
) -> None:
    rows = [talk(number) for number in range(64)]
    wanted = job(write(tmp_path / "a.jsonl", rows))
    data = endless_rows(wanted)
    passes: list[list[str]] = [[], []]
    for index in (0, 1):
        reader = Reader(data=data, index=index, count=2, block_samples=99, seed=0)
        for block in reader.blocks(0, [RowPlace(index)], stop):
            of_pass = block.places[0].number // len(data[0].chunks)
            if of_pass > 1:
                break
            passes[of_pass] += [where for where, _ in block.texts]
    assert len(set(passes[0])) == 64
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]


def test_weights_hold_over_blocks_and_a_small_data_set_repeats(tmp_path: Path, tokenizer: Any) -> None:
    few = write(tmp_path / "few.jsonl", [{"text": "w0 w1"}, {"text": "w2 w3"}])
    many = write(tmp_path / "many.jsonl", [talk(number) for number in range(60)])
    data = (DataSource(path=few, weight=1), DataSource(path=many, weight=3))
    stream = Rank(job(data), tokenizer)
    texts = [tokenizer.decode(row) for row in stream.read(32)]  # 4 blocks of 16
    assert sum("assistant" not in text for text in texts) == 16


@pytest.mark.parametrize(
    ("name", "rows_per_group", "parts"),
    [("a.parquet", 7, [7, 7, 7, 7, 2]), ("a.parquet", 100, [30]), ("stream.arrow", 14, [14, 14, 2])],
)
def test_tables_are_read_by_their_groups(
    tmp_path: Path, tokenizer: Any, name: str, rows_per_group: int, parts: list[int]
) -> None:
    rows = [talk(number) for number in range(30)]
    path = tmp_path / name
    write_table(pyarrow.Table.from_pylist(rows), path, rows_per_group=rows_per_group)
    assert [part.num_rows for part in streamed_parts(path, 2**20)] == parts
    stream = Rank(job(str(path)), tokenizer, num_ranks=1)
    assert Counter(stream.texts(15)) == Counter(row["messages"][1]["content"] for row in rows)


def test_parts_of_lines_have_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [{"text": "x" * (number * 37 % 300)} for number in range(50)])
    for size in (1, 64, 100, 10**6):
        places = [entry.where for part in streamed_parts(path, size) for entry in entries(path, None, part)]  # type: ignore[union-attr]
        assert len(places) == len(set(places)) == 50


def test_shards_of_a_hub_are_the_parts_of_a_stream(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [talk(number) for number in range(40)]
    files = [write(tmp_path / f"{shard}.jsonl", rows[shard::4]) for shard in range(4)]
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda _, *, streaming: load("json", data_files=files, streaming=streaming)
    )
    wanted = job("some/data")
    assert Counter(Rank(wanted, tokenizer, num_ranks=1).texts(20)) == Counter(r["messages"][1]["content"] for r in rows)
    before, after, whole = (Rank(wanted, tokenizer) for _ in range(3))
    first = before.read(7)
    before.progress.save(tmp_path)
    after.progress.restore(tmp_path)
    assert first + after.read(9) == whole.read(16)
    with pytest.raises(InvalidConfig, match="val_split holds out samples of files"):
        streamed(job("some/data", val_split=3), tokenizer)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_of_a_row_has_its_place_and_no_traceback(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    path = write(tmp_path / "a.jsonl", [*(talk(number) for number in range(9)), "{broken"])
    with pytest.raises(InvalidConfig, match=r"a\.jsonl: byte \d+:2: expecting property name") as error:
        Rank(job(path), tokenizer, num_ranks=1, workers=workers).read(30)
    assert "Traceback" not in str(error.value)


def test_other_readers_go_on_with_parts_that_none_has_begun(tmp_path: Path, tokenizer: Any) -> None:
    rows = [talk(number) for number in range(120)]
    wanted = job(write(tmp_path / "a.jsonl", rows))
    seen: list[str] = []
    for rank in (0, 1):
        stream = Rank(wanted, tokenizer, rank=rank)
        seen += stream.texts(8)
        stream.progress.save(tmp_path)
    for rank in range(4):
        stream = Rank(wanted, tokenizer, rank=rank, num_ranks=4)
        note = stream.progress.restore(tmp_path)
        assert note == "2 processes have read the stream, and 4 go on with the parts that none has begun"
        assert set(stream.texts(4)).isdisjoint(seen)


def test_val_split_holds_out_the_first_samples(tmp_path: Path, tokenizer: Any) -> None:
    rows = [talk(number) for number in range(40)]
    wanted = job(write(tmp_path / "a.jsonl", rows), val_split=6)
    stream = Rank(wanted, tokenizer, num_ranks=1)
    _, held_out = streamed(wanted, tokenizer)
    assert held_out is not None
    texts = [tokenizer.decode(row["input_ids"]) for row in held_out.dataset]
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(texts) == 6
    assert all(answer in text for answer, text in zip(answers, texts, strict=False))
    assert set(stream.texts(60)).isdisjoint(answers[:6])


def test_a_list_cannot_be_streamed(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([talk(1)]))
    with pytest.raises(InvalidConfig, match="a JSON list cannot be streamed"):
        streamed(job(str(path)), tokenizer)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_steps": None}, "max_steps is null, which streaming does not support: the number of rows is not known"),
        ({"task": Task.DPO}, "task is dpo"),
        ({"sp": 2}, "sp is 2"),
        ({"val_split": 0.1}, "val_split is 0.1"),
        ({"max_samples": 9}, "max_samples is 9"),
        (
            {"save_strategy": Interval.EPOCH},
            "save_strategy is epoch, which streaming does not support: a stream has no epochs",
        ),
    ],
)
def test_what_cannot_be_combined_is_one_clear_error(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        limits.require(job("a.jsonl", **options))
    assert str(error.value).startswith(problem)
