"""Other choices of the planner in the files of a job: generated ones, and those of somebody else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dstrain.choices import Offload
from dstrain.config.edits.lock import LOCK, Lock, read_lock
from dstrain.config.edits.other_choices import JobFiles, job_files, settled_choices, with_choices, write
from dstrain.config.files import generated
from dstrain.errors import Conflict
from dstrain.job.file import read_job
from dstrain.paths import write_together
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate, Plan
from dstrain.plan.search.decide import decide
from dstrain.records import to_json
from tests.cases import ask

QUESTION = ask(model="qwen3-0.6b", gpus=8, gpu="h100-sxm", seq_len=2048, global_batch=64, zero_stage=2)


@cache
def plan() -> Plan:
    return decide(QUESTION.workload, QUESTION.request)


@cache
def texts() -> dict[str, str]:
    """Returns the files that are generated for the plan."""
    job = {"model": "qwen3-0.6b", "data": "train.jsonl", "eval_data": None, "hub": "hf", "output_dir": "out"}
    return generated(plan(), QUESTION.workload, QUESTION.hosts, template_dir=None, job=job)


def other(**choices: object) -> Estimate:
    """Returns the plan with some choices made otherwise."""
    base = changed(plan().chosen.configuration, grad_ckpt=False, grad_ckpt_every_n_layers=1)
    return assess(QUESTION.workload, changed(base, **choices))


def files(folder: Path, *, texts: dict[str, str], lock: Lock | None) -> JobFiles:
    written = {folder / name: text for name, text in texts.items()}
    if lock is not None:
        written[folder / LOCK] = to_json(lock)
    write_together(written)
    return job_files(folder / "job.yaml", folder / "ds_config.json")


@cache
def locked() -> Lock:
    return Lock(dstrain="1", deepspeed="0.19.8", inputs={"model": "qwen3-0.6b", "gpus": 8}, base=texts())


@pytest.mark.commands
def test_generated_files_follow_and_edits_stay(tmp_path: Path) -> None:
    edited = {
        "ds_config.json": texts()["ds_config.json"].replace(
            '"contiguous_gradients": true', '"contiguous_gradients": false'
        ),
        "job.yaml": texts()["job.yaml"].replace("seed: 42", "seed: 7  # mine"),
    }
    found = files(tmp_path, texts=edited, lock=locked())
    estimate = other(zero_stage=3, offload=Offload.OPTIMIZER, micro_batch=1, grad_accum=8)
    changed_files = write(found, with_choices(found, estimate, QUESTION.workload), QUESTION.workload)
    assert {path.name for path in changed_files} == {"ds_config.json", "job.yaml"}
    zero = json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"], zero["contiguous_gradients"]) == (3, "cpu", False)
    assert "stage3_prefetch_bucket_size" in zero
    job = read_job(tmp_path / "job.yaml").job
    assert (job.micro_batch, job.grad_accum, job.seed) == (1, 8, 7)
    assert "seed: 7  # mine" in (tmp_path / "job.yaml").read_text()


def test_gen_config_remembers_what_was_chosen(tmp_path: Path) -> None:
    found = files(tmp_path, texts=texts(), lock=locked())
    estimate = other(zero_stage=1, micro_batch=2, grad_accum=4)
    write(found, with_choices(found, estimate, QUESTION.workload), QUESTION.workload)
    lock = read_lock(tmp_path)
    assert lock is not None
    assert lock.inputs == {
        **locked().inputs, "zero_stage": 1, "micro_batch": 2, "grad_ckpt": False, "global_batch": 64,
    }  # fmt: skip
    assert set(lock.tuned) == lock.inputs.keys() - locked().inputs.keys()
    assert json.loads(lock.base["ds_config.json"])["zero_optimization"]["stage"] == 1
    assert lock.base["hostfile"] == texts()["hostfile"]


def test_what_was_given_stays_given_and_what_was_tuned_is_open_again(tmp_path: Path) -> None:
    given = replace(locked(), inputs={**locked().inputs, "zero_stage": 2})
    found = files(tmp_path, texts=texts(), lock=given)
    assert settled_choices(found) == {"zero_stage"}
    write(found, with_choices(found, other(micro_batch=1, grad_accum=8), QUESTION.workload), QUESTION.workload)
    assert settled_choices(job_files(tmp_path / "job.yaml", tmp_path / "ds_config.json")) == {"zero_stage"}


def test_what_runs_is_what_would_be_written(tmp_path: Path) -> None:
    found = files(tmp_path, texts=texts(), lock=locked())
    chosen = with_choices(found, other(zero_stage=3, micro_batch=2, grad_accum=4), QUESTION.workload)
    job = read_job(tmp_path / "job.yaml", chosen.overrides).job
    write(found, chosen, QUESTION.workload)
    assert job == read_job(tmp_path / "job.yaml").job
    assert ("zero_optimization", "stage") in [change.pointer for change in chosen.changes]


def test_an_accumulation_edited_by_hand_follows_the_micro_batch(tmp_path: Path) -> None:
    text = texts()["job.yaml"].replace("grad_accum: ", "grad_accum: 2 #")
    found = files(tmp_path, texts={**texts(), "job.yaml": text}, lock=locked())
    chosen = with_choices(
        found, other(micro_batch=4, grad_accum=plan().chosen.configuration.step.grad_accum), QUESTION.workload
    )
    job = read_job(tmp_path / "job.yaml", chosen.overrides).job
    assert (job.micro_batch, job.grad_accum) == (4, plan().chosen.configuration.step.grad_accum)


FOREIGN = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "reduce_bucket_size": 12345678,
        "round_robin_gradients": True,
    },
}


def test_in_files_of_somebody_else_only_the_choices_change(tmp_path: Path) -> None:
    text = "// ours\n" + json.dumps(FOREIGN, indent=4)
    found = files(tmp_path, texts={"ds_config.json": text, "job.yaml": "# ours\nmicro_batch: 8\nmodel: m\n"}, lock=None)
    chosen = with_choices(
        found, other(zero_stage=1, offload=Offload.NONE, micro_batch=4, grad_accum=2), QUESTION.workload
    )
    write(found, chosen, QUESTION.workload)
    written = (tmp_path / "ds_config.json").read_text()
    assert written.startswith("// ours\n")
    config = json.loads(written.removeprefix("// ours\n"))
    assert config["train_micro_batch_size_per_gpu"] == 4
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["round_robin_gradients"]) == (1, 12345678, True)
    assert "offload_optimizer" not in zero
    assert (tmp_path / "job.yaml").read_text().startswith("# ours\nmicro_batch: 4\nmodel: m\n")
    assert (tmp_path / "ds_config.json.bak").read_text() == text
    assert not (tmp_path / LOCK).exists()


def test_an_offload_of_somebody_else_that_stays_keeps_its_settings(tmp_path: Path) -> None:
    found = files(tmp_path, texts={"ds_config.json": json.dumps(FOREIGN), "job.yaml": "model: m\n"}, lock=None)
    chosen = with_choices(found, other(zero_stage=3, offload=Offload.OPTIMIZER), QUESTION.workload)
    zero = json.loads(chosen.merged.files["ds_config.json"])["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["pin_memory"]) == (3, False)


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    found = files(tmp_path, texts=texts(), lock=locked())
    chosen = with_choices(found, other(zero_stage=1), QUESTION.workload)
    (tmp_path / "job.yaml").write_text(texts()["job.yaml"] + "\n# later\n")
    with pytest.raises(Conflict, match="changed meanwhile"):
        write(found, chosen, QUESTION.workload)
    assert (tmp_path / "ds_config.json").read_text() == texts()["ds_config.json"]


@pytest.mark.parametrize(
    ("name", "old", "new", "settled"),
    [
        ("ds_config.json", '"stage": 2', '"stage": 1', "zero_stage"),
        (
            "ds_config.json",
            '"contiguous_gradients": true',
            '"contiguous_gradients": true, "offload_optimizer": {}',
            "offload offload_ratio",
        ),
        ("job.yaml", "grad_ckpt: ", "grad_ckpt: true #", "grad_ckpt"),
        ("job.yaml", "micro_batch: ", "micro_batch: 3 #", "micro_batch"),
        ("job.yaml", "seed: 42", "seed: 7", ""),
    ],
)
def test_an_edited_choice_is_settled(tmp_path: Path, name: str, old: str, new: str, settled: str) -> None:
    assert old in texts()[name]
    found = files(tmp_path, texts={**texts(), name: texts()[name].replace(old, new)}, lock=locked())
    assert settled_choices(found) == set(settled.split())
