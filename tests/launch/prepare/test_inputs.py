"""Inputs and the run directory of a job that this machine lacks: `run` refuses them, `lint` warns, as another machine
may train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrain.config.lint.rule import JobContext
from dstrain.errors import Conflict, EnvironmentProblem, InvalidConfig
from dstrain.job.file import read_job
from dstrain.launch.prepare.checks import BEFORE_HUBS, DATA_FILES, OF_LINT, findings, require
from dstrain.launch.prepare.inputs import check_run_dir
from dstrain.launch.prepare.prepare import prepare
from dstrain.rundir import RunDir
from tests.cli.test_run import CONFIG, EMPTY_WEIGHTS, SAMPLE

JOB = "model: Qwen/Qwen3-8B\noutput_dir: o\n"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data", "gone.jsonl", "gone.jsonl: no such file"),
        ("data", "gone/*.jsonl", "no file matches"),
        ("data", "[train.jsonl, gone.jsonl]", "gone.jsonl: no such file"),
        ("eval_data", "gone.jsonl", "gone.jsonl: no such file"),
        ("model", "./gone", "which does not exist"),
        ("adapter", "gone", "adapter_config.json: no such file"),
        ("resume", "gone", "does not exist"),
    ],
)
def test_lint_warns_of_what_run_refuses_at_its_line(tmp_path: Path, key: str, value: str, said: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    given = {"model": "Qwen/Qwen3-8B", "output_dir": "o", "data": "train.jsonl", "method": "lora", key: value}
    (tmp_path / "job.yaml").write_text("".join(f"{name}: {text}\n" for name, text in given.items()))
    file = read_job(tmp_path / "job.yaml")
    (warning,) = findings(OF_LINT, JobContext(job=file))
    assert (warning.rule, warning.severity) == ("DS812", "warning")
    assert warning.place.line == list(given).index(key) + 1
    assert said in warning.problem
    with pytest.raises(InvalidConfig, match=rf"job\.yaml:{warning.place.line}:1: "):
        require(BEFORE_HUBS, JobContext(job=file))
    if "data" in key:
        with pytest.raises(InvalidConfig, match=r"no such file|no file matches"):
            require(DATA_FILES, JobContext(job=file))


def test_a_job_without_data_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    file = read_job(tmp_path / "job.yaml")
    (warning,) = findings(OF_LINT, JobContext(job=file))
    assert (warning.rule, warning.problem) == ("DS812", "data is not set")


def test_keys_that_lack_evaluations_are_reported_at_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    more = "data: train.jsonl\neval_steps: 5\nsamples:\n  prompts: [a]\nload_best: true\n"
    (tmp_path / "job.yaml").write_text(JOB + more)
    file = read_job(tmp_path / "job.yaml")
    places = [(one.rule, one.place.line) for one in findings(OF_LINT, JobContext(job=file))]
    assert places == [("DS808", 4), ("DS808", 7), ("DS808", 5)]


CACHED = """\
model: org/model
data: {data}
output_dir: out
hostfile: hostfile
ds_config: ds_config.json
env: {{"DS_ACCELERATOR": "cpu"}}
"""


@pytest.mark.parametrize(
    ("missing", "data", "offline", "said"),
    [
        (None, "train.jsonl", "1", "org/model is read from the cache alone, by ranks with HF_HUB_OFFLINE=1"),
        ("model.safetensors", "train.jsonl", None, "the cache, which lacks the weights; each rank asks for minutes"),
        ("tokenizer.json", "train.jsonl", None, "the cache, which lacks the tokenizer; each rank asks for minutes"),
        (None, "org/data", None, "the cache, which lacks org/data; each rank asks for minutes"),
    ],
)
def test_ranks_read_the_cache_alone_if_it_has_everything_and_the_hub_does_not_answer(
    missing: str | None, data: str, offline: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub/models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": EMPTY_WEIGHTS, "tokenizer.json": b"{}"}
    for name, content in files.items():
        if name != missing:
            (snapshot / name).write_bytes(content)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "train.jsonl").write_text(SAMPLE * 10)
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}')
    (tmp_path / "hostfile").write_text("localhost slots=1\n")
    (tmp_path / "job.yaml").write_text(CACHED.format(data=data))
    prepared = prepare(read_job(tmp_path / "job.yaml", []), {})
    assert prepared.job.env.get("HF_HUB_OFFLINE") == offline
    assert said in "\n".join(prepared.notes)


def test_earlier_checkpoints_are_a_conflict_unless_the_run_goes_on_from_them(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-40").mkdir()
    with pytest.raises(Conflict, match="checkpoints up to step 40") as caught:
        check_run_dir(RunDir(tmp_path), resume="never")
    assert "--set resume=auto" in str(caught.value)
    check_run_dir(RunDir(tmp_path), resume="auto")


def test_an_output_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="file/run cannot be written"):
        check_run_dir(RunDir(tmp_path / "file" / "run"), resume="never")
