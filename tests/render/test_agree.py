"""ds_config.json and job.yaml must say the same."""

from pathlib import Path

import pytest

from dstrain.errors import InvalidConfig
from dstrain.jobfile import JobFile, read_job
from dstrain.render.agree import disagreements, for_trainer, read_config

JOB = "model: org/model\noutput_dir: out\nmicro_batch: 2\ngrad_accum: 4\nlearning_rate: 1e-5\n"


def job(folder: Path, more: str = "") -> JobFile:
    (folder / "job.yaml").write_text(JOB + more)
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"bf16": true', 'ds.json:1:2: bf16 is true, which is no object; write "bf16": {"enabled": "auto"}'),
        ('"fp16": null', "ds.json:1:2: fp16 is null, which is no object; remove the line"),
        ('"optimizer": "AdamW"', 'ds.json:1:2: optimizer is "AdamW", which is no object; write "optimizer": {"type"'),
        ('"optimizer": {"params": [1]}', "ds.json:1:16: optimizer.params is [1], which is no object; write"),
        ('"optimizer": {"type": 1}', "ds.json:1:16: optimizer.type is 1; write its name in double quotes"),
        ('"scheduler": 3', "ds.json:1:2: scheduler is 3, which is no object; write"),
        ('"aio": []', 'ds.json:1:2: aio is [], which is no object; write "aio": {}'),
        ('"bfloat16": {"enabled": true}', 'ds.json:1:2: "bfloat16" is an old name'),
    ],
)
def test_a_section_that_is_no_object_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    path = config(tmp_path, f'{{{text}, "zero_optimization": {{"stage": 2}}}}')
    with pytest.raises(InvalidConfig) as caught:
        read_config(path, "ds.json")
    assert caught.value.problem.startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"offload_optimizer": null', "offload_optimizer is null, which is no object; remove the line"),
        ('"offload_optimizer": "cpu"', 'is "cpu", which is no object; write "offload_optimizer": {"device": "cpu"}'),
        ('"offload_param": [1]', 'offload_param is [1], which is no object; write "offload_param": {"device": "cpu"}'),
        ('"offload_param": {"device": ["cpu"]}', 'device is ["cpu"]; write "cpu", "nvme" or "none"'),
        ('"offload_param": {"device": null}', 'device is null; write "cpu", "nvme" or "none"'),
    ],
)
def test_an_offload_that_would_end_the_ranks_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = config(tmp_path, f'{{"zero_optimization": {{"stage": 3,\n {text}}}}}')
    with pytest.raises(InvalidConfig) as caught:
        read_config(path, "ds.json")
    assert caught.value.problem.startswith("ds.json:2:")
    assert problem in caught.value.problem


@pytest.mark.parametrize("size", ["null", "{}", '"big"', "true", "-1", "1.5", "0", "1" + "0" * 400])
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, size: str) -> None:
    path = config(tmp_path, f'{{"zero_optimization": {{"reduce_bucket_size": {size}}}}}')
    with pytest.raises(InvalidConfig, match=r'ds\.json:1:24: zero_optimization\.reduce_bucket_size is .*or "auto"$'):
        read_config(path, "ds.json")


@pytest.mark.parametrize("key", ["stage3_max_live_parameters", "sub_group_size"])
def test_an_auto_that_nothing_fills_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidConfig, match=f'{key} is "auto", and nothing fills this one'):
        read_config(config(tmp_path, f'{{"zero_optimization": {{"{key}": "auto"}}}}'), "ds.json")


def test_sizes_may_be_written_as_floats_or_auto(tmp_path: Path) -> None:
    zero = '"reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto", "sub_group_size": 0'
    assert read_config(config(tmp_path, f'{{"zero_optimization": {{{zero}}}}}'), "ds.json").value


def test_all_problems_of_a_configuration_are_told_at_once(tmp_path: Path) -> None:
    zero = '{"stage": "3", "offload_param": null, "offload_optimizer": {"device": "gpu"}, "sub_group_size": null}'
    with pytest.raises(InvalidConfig) as caught:
        read_config(config(tmp_path, f'{{"bf16": true, "zero_optimization": {zero}}}'), "ds.json")
    assert len(caught.value.problem.splitlines()) == 5


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("bf16", '"bf16": {"enabled": false}'),
        ("bf16", '"bf16": {"enabled": null}'),
        ("bf16", '"bf16": {"enabled": 1}'),
        ("bf16", '"fp16": {"enabled": true}'),
        ("fp16", '"bf16": {"enabled": true}'),
        ("fp32", '"bf16": {"enabled": true}'),
        ("bf16", '"gradient_clipping": null'),
        ("bf16", '"gradient_clipping": true'),
        ("bf16", '"train_micro_batch_size_per_gpu": null'),
        ("bf16", '"optimizer": {"params": {"betas": [0.9, 0.95]}}'),
        ("bf16", '"optimizer": {"params": {"betas": [0.9]}}'),
        ("bf16", '"optimizer": {"params": {"lr": null}}'),
    ],
)
def test_what_contradicts_the_job_is_found(tmp_path: Path, precision: str, text: str) -> None:
    file = job(tmp_path, f"precision: {precision}\n")
    document = read_config(config(tmp_path, f'{{{text}, "zero_optimization": {{"stage": 2}}}}'), "ds.json")
    (found,) = disagreements(document, file.job, file.locate, 4)
    assert 'write "auto" here' in found


def test_equal_betas_and_precisions_agree(tmp_path: Path) -> None:
    file = job(tmp_path)
    text = """{"bf16": {"enabled": true}, "fp16": {"enabled": false}, "gradient_clipping": 1,
        "optimizer": {"params": {"betas": [0.9, 0.999]}}, "zero_optimization": {"stage": 2}}"""
    assert disagreements(read_config(config(tmp_path, text), "ds.json"), file.job, file.locate, 4) == []


def test_a_missing_enabled_is_filled_and_the_rest_of_the_section_stays(tmp_path: Path) -> None:
    given = {"bf16": {}, "fp16": {"loss_scale": 0}}
    effective, added = for_trainer(given, job(tmp_path).job)
    assert effective["bf16"] == {"enabled": "auto"}
    assert effective["fp16"] == {"loss_scale": 0, "enabled": "auto"}
    assert given == {"bf16": {}, "fp16": {"loss_scale": 0}}
    assert any(line.startswith('"bf16.enabled" is missing') for line in added)


def test_fp32_adds_no_precision(tmp_path: Path) -> None:
    effective, _ = for_trainer({}, job(tmp_path, "precision: fp32\n").job)
    assert "bf16" not in effective and "fp16" not in effective
