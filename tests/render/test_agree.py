"""ds_config.json and job.yaml must say the same."""

from pathlib import Path

import pytest

from dstrain.errors import InvalidConfig
from dstrain.jobfile import JobFile, read_job
from dstrain.render.agree import disagreements, for_trainer, read_config

JOB = "model: org/model\noutput_dir: out\nmicro_batch: 2\ngrad_accum: 4\nlearning_rate: 1e-5\n"


def job(folder: Path) -> JobFile:
    (folder / "job.yaml").write_text(JOB)
    return read_job(folder / "job.yaml")


def config(folder: Path, text: str) -> Path:
    path = folder / "ds.json"
    path.write_text(text)
    return path


def test_a_literal_that_disagrees_names_both_places(tmp_path: Path) -> None:
    file = job(tmp_path)
    path = config(tmp_path, '{"train_micro_batch_size_per_gpu": 8,\n "zero_optimization": {"stage": 2}}')
    (found,) = disagreements(read_config(path, "ds.json"), file.job, file.locate, 4)
    assert found.startswith("ds.json:1:2: train_micro_batch_size_per_gpu is 8, and ")
    assert "job.yaml:3:1: micro_batch makes it 2" in found


def test_the_batch_identity_is_told(tmp_path: Path) -> None:
    file = job(tmp_path)
    path = config(tmp_path, '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    (found,) = disagreements(read_config(path, "ds.json"), file.job, file.locate, 4)
    assert "2 × 4 × 4 GPUs = 32" in found


def test_auto_and_equal_literals_agree(tmp_path: Path) -> None:
    file = job(tmp_path)
    text = '{"gradient_accumulation_steps": 4, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}'
    assert disagreements(read_config(config(tmp_path, text), "ds.json"), file.job, file.locate, 4) == []


@pytest.mark.parametrize("stage", ['"3"', "4", "true", "2.0"])
def test_a_stage_that_only_looks_like_one_is_refused(tmp_path: Path, stage: str) -> None:
    path = config(tmp_path, f'{{"zero_optimization": {{"stage": {stage}}}}}')
    with pytest.raises(InvalidConfig, match=r"ds\.json:1:24: stage is"):
        read_config(path, "ds.json")


def test_missing_keys_are_added_as_auto_and_said(tmp_path: Path) -> None:
    effective, added = for_trainer({"$schema": "x", "zero_optimization": {"stage": 2}}, job(tmp_path).job)
    assert effective["gradient_clipping"] == "auto"
    assert effective["bf16"] == {"enabled": "auto"}
    assert "$schema" not in effective
    assert len(added) == 4
