"""Job files: strict, with places, and overrides on top."""

from pathlib import Path

import pytest

from dstrain.errors import InvalidConfig
from dstrain.jobfile import read_job
from dstrain.paths import shipped

JOB = "model: org/model\noutput_dir: out\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path: Path, written: str) -> None:
    assert read_job(write(tmp_path, JOB + f"learning_rate: {written}\n")).job.learning_rate == 1e-5


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001"])
def test_an_override_is_a_number_too(tmp_path: Path, written: str) -> None:
    assert read_job(write(tmp_path, JOB), [f"learning_rate={written}"]).job.learning_rate == 1e-5


def test_an_override_reaches_inside(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, JOB + "lora:\n  rank: 4\n"), ["lora.rank=8", "lora.targets=[q_proj]"]).job
    assert (job.lora.rank, job.lora.targets) == (8, ("q_proj",))


def test_a_typo_is_named_with_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfig, match=r'job\.yaml:3:1: unknown key "learning_rat"; did you mean "learning_rate"\?'
    ):
        read_job(write(tmp_path, JOB + "learning_rat: 1e-5\n"))


def test_another_tools_word_is_translated(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match='did you mean "micro_batch"'):
        read_job(write(tmp_path, JOB + "per_device_train_batch_size: 2\n"))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_job(write(tmp_path, JOB + "seq_len: 0\nmethod: lara\nfoo: 1\n"))
    assert len(caught.value.problem.splitlines()) == 3


def test_a_problem_of_an_override_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--set seq_len: seq_len is 0"):
        read_job(write(tmp_path, JOB), ["seq_len=0"])


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"job\.yaml:3:1: .*duplicate"):
        read_job(write(tmp_path, JOB + "model: other/model\n"))


def test_paths_are_relative_to_the_job(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, JOB + "data: train.jsonl\n")).job
    assert (job.data, job.output_dir) == (str(tmp_path / "train.jsonl"), str(tmp_path / "out"))


def test_a_hub_id_is_left_alone(tmp_path: Path) -> None:
    assert read_job(write(tmp_path, JOB)).job.model == "org/model"


@pytest.mark.parametrize("text", ["", "[1]", "a: [1\n", "\tmodel: x"])
def test_what_is_no_job_is_refused_with_the_files_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"job\.yaml"):
        read_job(write(tmp_path, text))


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is not key=value"):
        read_job(write(tmp_path, JOB), ["learning_rate"])


@pytest.mark.parametrize("path", sorted(shipped("launch").glob("*.job.yaml")), ids=lambda path: path.name)
def test_an_example_job_is_a_job(path: Path) -> None:
    assert read_job(path).job.data is not None


def test_there_are_example_jobs_for_full_training_and_lora() -> None:
    assert {path.name for path in shipped("launch").glob("*.job.yaml")} >= {"full.job.yaml", "lora.job.yaml"}
