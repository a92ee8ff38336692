"""Tokens are the same over any number of processes, whoever was killed on the way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest

from dstrain.choices import OnBadRow
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import rows as data_rows
from dstrain.job.file import read_job
from dstrain.job.schema import Job
from dstrain.train import demo, job_data
from dstrain.train.data import token_cache
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.data.token_cache import alone, made_beside

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo.make_tokenizer(["user assistant question answer number 0123456789"])


def rows(count: int, *, bad: tuple[int, ...] = ()) -> str:
    lines = [json.dumps({"instruction": f"question {n}", "output": f"answer {n} " * (n % 7 + 1)}) for n in range(count)]
    return "".join(f"{'{' if n in bad else line}\n" for n, line in enumerate(lines))


def prepared(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, processes: int, **keys: Any
) -> PreparedData:
    """Returns the data that so many processes prepare in a cache of their own; with several, a part is a few rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / f"cache-{processes}")
    monkeypatch.setattr(token_cache, "_processes", lambda: processes)
    for name in ("_LEAST_BYTES", "_MOST_BYTES", "_READ_BYTES"):
        monkeypatch.setattr(data_rows, name, 2**20 if processes == 1 else 2**10)
    job = Job(model="m", output_dir="o", data=str(folder / "train.jsonl"), **keys)
    return prepare(job, tokenizer, training=True)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"max_samples": 100, "on_bad_row": OnBadRow.SKIP},
        {"max_samples": 1000, "on_bad_row": OnBadRow.SKIP},
        {"packing": True, "seq_len": 64},
    ],
    ids=["all", "first", "more-than-there-are", "packed"],
)
def test_several_processes_make_what_one_makes(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    (tmp_path / "train.jsonl").write_text(rows(200, bad=(3, 4, 70) if "on_bad_row" in keys else ()))
    alone = prepared(tmp_path, tokenizer, monkeypatch, 1, **keys)
    together = prepared(tmp_path, tokenizer, monkeypatch, 3, **keys)
    assert together.num_made > 3
    assert (together.digest, together.notes) == (alone.digest, alone.notes)
    assert [str(row) for row in together.dataset] == [str(row) for row in alone.dataset]
    assert prepared(tmp_path, tokenizer, monkeypatch, 3, **keys).num_made == 0


def test_a_wrong_row_of_any_process_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text(rows(200, bad=(150,)))
    with pytest.raises(InvalidConfig, match=r"train\.jsonl:151:1: expecting property name"):
        prepared(tmp_path, tokenizer, monkeypatch, 2)


def test_a_process_that_is_killed_is_an_error_and_leaves_no_half_file(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text(rows(200))
    write = token_cache._write_table

    def killed(path: Path, *args: Any) -> None:
        path.write_text("half")
        if path.name.startswith("000003."):
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "_write_table", killed)
        with pytest.raises(EnvironmentProblem, match="was ended by SIGKILL"):
            prepared(tmp_path, tokenizer, monkeypatch, 2)
    (cache,) = (tmp_path / "cache-2" / "dstrain").iterdir()
    assert list(cache.glob("*.part*"))
    assert not (cache / "000003.arrow").exists()
    alone = prepared(tmp_path, tokenizer, monkeypatch, 1)
    assert prepared(tmp_path, tokenizer, monkeypatch, 2).digest == alone.digest
    assert not list(cache.glob("*.part*"))


def test_without_locks_processes_work_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with alone(tmp_path, lambda: pytest.fail("it waits")), made_beside(tmp_path / "a") as mine:
        mine.write_text("whole")
    assert (tmp_path / "a").read_text() == "whole"


def descendants(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, waiting = set(), [pid]
    while waiting:
        waiting += (new := [child for child in children.get(waiting.pop(), []) if child not in found])
        found |= set(new)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # a process that ends while it is read is another error than one that has ended
        return False


def wait_for(condition: Any, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path, tokenizer: Any) -> Path:
    """A job with four parts of data."""
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "train.jsonl").write_text(rows(36_000))
    path = tmp_path / "job.yaml"
    path.write_text("model: model\noutput_dir: out\nseq_len: 128\npacking: true\ndata: train.jsonl\n")
    return path


@pytest.mark.commands
@pytest.mark.parts(6, at=5)
def test_a_killed_preparation_goes_on_where_it_was_by_two_at_once_and_run_finds_it(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = job.parent / "cache"
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "dstrain.cli", "data", "prepare"]

    def start() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(line, cwd=job.parent, env=environment, **pipes)

    def finished() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow") if ".part" not in path.name}

    killed = start()
    wait_for(finished)
    family = descendants(killed.pid)
    killed.kill()
    killed.communicate()
    wait_for(lambda: not any(map(alive, family)), 20)
    kept = finished()
    assert 0 < len(kept) < 4
    both = [start(), start()]
    said = [(*child.communicate(), child.returncode) for child in both]
    assert [code for *_, code in said] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert "train.jsonl: 36,000 samples, " in said[0][0].splitlines()[0]
    assert len(finished()) == 4
    assert finished().items() >= kept.items()
    assert not list(cache.rglob("*.part*"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    read = read_job(job).job
    found: Any = job_data.load(read, read.model, lambda *_: None).train  # what every rank of `dstrain run` calls
    assert (found.num_made, found.num_samples) == (0, 36_000)
