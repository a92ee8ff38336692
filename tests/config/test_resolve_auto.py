"""The configuration as the Trainer is given it."""

from pathlib import Path
from typing import Any

from dstrain.config.resolve_auto import for_trainer
from dstrain.facts import probe
from dstrain.job.file import read_job
from dstrain.job.schema import Job

ZERO = {"zero_optimization": {"stage": 2}}


def job(folder: Path, more: str = "") -> Job:
    text = f"model: org/model\noutput_dir: out\nmicro_batch: 2\ngrad_accum: 4\nlearning_rate: 1e-5\n{more}"
    (folder / "job.yaml").write_text(text)
    return read_job(folder / "job.yaml").job


def resolved(folder: Path, config: dict[str, Any], **given: Any) -> dict[str, Any]:
    return for_trainer(config, job(folder), given.get("model"), num_ranks=4)


def test_missing_keys_are_added(tmp_path: Path) -> None:
    assert resolved(tmp_path, ZERO) == {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }


def test_every_auto_that_is_known_is_filled(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    found = resolved(tmp_path, config, model=probe.read_model("qwen3-32b"))
    assert found["train_batch_size"] == 2 * 4 * 4
    assert found["fp16"] == {"enabled": False}
    assert found["optimizer"]["params"] == {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert found["scheduler"]["params"] == {"warmup_max_lr": 1e-5, "total_num_steps": "auto"}  # only the ranks know
    assert found["zero_optimization"]["reduce_bucket_size"] == 5120 * 5120
    assert found["zero_optimization"]["stage3_prefetch_bucket_size"] == int(0.9 * 5120 * 5120)


def test_what_stands_there_stays(tmp_path: Path) -> None:
    config = {**ZERO, "gradient_clipping": 1, "bf16": {"enabled": True, "immediate_grad_update": True}}
    found = resolved(tmp_path, config)
    assert found["gradient_clipping"] == 1
    assert found["bf16"] == {"enabled": True, "immediate_grad_update": True}


def test_what_is_the_editors_or_parked_is_left_out(tmp_path: Path) -> None:
    parked = {"$schema": "x", "_old": {"bucket": "auto"}, "x-note": 1}
    assert resolved(tmp_path, {**parked, **ZERO}) == resolved(tmp_path, ZERO)


def test_the_given_configuration_is_not_changed(tmp_path: Path) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    resolved(tmp_path, config, model=probe.read_model("qwen3-8b"))
    assert config == {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
