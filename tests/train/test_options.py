"""Options of a job that people of other tools expect, on two CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.choices import Method
from dstrain.facts.probe import read_model
from dstrain.job.adapter import shape_of_adapter
from dstrain.job.schema import Lora
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.plan.freezing import with_frozen
from dstrain.plan.memory.params import trained
from dstrain.records import to_data
from tests.train.engine import Engine
from tests.train.launching import change_job, codes, losses, make_run, said, tensors

GATHERS = "stage3_gather_16bit_weights_on_model_save"


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """One short run for each option."""
    folder = root / "options"
    light = make_run(folder / "light", demo, zero={"stage": 3}, save_only_model=True, save_steps=0.6)
    refused = make_run(folder / "refused", demo, save_only_model=True, zero={"stage": 3, GATHERS: False})
    lora: dict[str, Any] = {"rank": 4, "modules_to_save": ["embed_tokens"]}
    evaluated: dict[str, Any] = {"eval_data": str(demo / "eval.jsonl"), "precision": "fp32", "method": "lora"}
    first = make_run(folder / "first", demo, zero={"stage": 3}, lora=lora, loss="fused", **evaluated)
    for run in (light, refused, first):
        engine.train(run)
    adapter = first / "final"
    shape = to_data(replace(Lora(), **shape_of_adapter(adapter, Lora(), given=())))
    more: dict[str, Any] = {
        "adapter": str(adapter),
        "eval_on_start": True,
        "eval_steps": 9,
        "max_steps": 1,
        **evaluated,
    }
    engine.train(make_run(folder / "on2", demo, lora=shape, **more))
    engine.train(make_run(folder / "on3", demo, zero={"stage": 3}, lora=shape, **more))
    engine.train(make_run(folder / "other", demo, lora=shape | {"rank": 8}, **more))
    for stage in (1, 3):
        frozen: dict[str, Any] = {"freeze": ["embed_tokens", r"layers\.0\."], "precision": "fp32", "save_steps": 2}
        engine.train(make_run(folder / f"frozen{stage}", demo, zero={"stage": stage}, **frozen))
    engine.train(make_run(folder / "absent", demo, train_only=["mlpp"]))
    return folder


# Checkpoints of the weights alone


def test_a_checkpoint_of_the_weights_alone_is_the_model_and_nothing_else(
    runs: Path, demo: Path, engine: Engine
) -> None:
    light = runs / "light"
    assert codes(light) == [[0, 0]], said(light)[-3000:]
    assert [folder.name for folder in sorted(light.glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-3"]
    newest = light / "checkpoint-3"
    assert not [*newest.glob("global_step*"), *newest.glob("*.pt"), *newest.glob("rng_state*")]
    assert engine.export(light, runs / "exported") == 0
    exported, final = tensors(runs / "exported"), tensors(light / "final")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)


def test_a_resume_says_that_the_weights_alone_are_not_enough(runs: Path, demo: Path, engine: Engine) -> None:
    light = runs / "light"
    change_job(light, resume=str(light / "checkpoint-2"))
    engine.train(light)
    assert codes(light)[-1] == [3, 3]
    assert "checkpoint-2 holds the weights alone (save_only_model)" in said(light)
    change_job(light, resume="auto")
    engine.train(light)
    assert codes(light)[-1] == [0, 0]
    assert "warning: checkpoint-3 holds the weights alone (save_only_model): skipped" in said(light)


def test_weights_alone_need_to_be_gathered(runs: Path) -> None:
    assert codes(runs / "refused") == [[3, 3]]
    assert f"save_only_model is true, but {GATHERS} is not" in said(runs / "refused")


# Adapters that go on, and modules that train whole beside them


def evaluations(folder: Path) -> dict[int, float]:
    """Returns the evaluation loss by step."""
    return {line["step"]: line["eval_loss"] for line in read_jsonl(folder / "metrics.jsonl") if "eval_loss" in line}


@pytest.mark.parametrize("name", ["on2", "on3"])
def test_a_run_goes_on_from_the_weights_of_an_adapter(runs: Path, name: str) -> None:
    assert codes(runs / "first") == [[0, 0]], said(runs / "first")[-3000:]
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    assert evaluations(runs / name)[0] == pytest.approx(evaluations(runs / "first")[3], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_loads_an_adapter_with_its_whole_modules_to_the_same_loss(runs: Path, demo: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from dstrain.rundir import RunDir
    from dstrain.train.__main__ import read
    from dstrain.train.data.prepare import prepare
    from dstrain.train.tokenizer import load_tokenizer

    job = read(RunDir(runs / "first")).job
    base = AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(runs / "first" / "final")).eval()
    total, targets = 0.0, 0
    for sample in prepare(job, load_tokenizer(job, job.model), training=False).dataset:
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor([sample["labels"]])
        number = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss.detach()) * number
        targets += number
    assert evaluations(runs / "first")[3] == pytest.approx(total / targets, rel=1e-6)


def test_whole_modules_are_saved_and_exported(runs: Path, demo: Path, engine: Engine) -> None:
    assert engine.export(runs / "first", runs / "merged") == 0
    adapter, merged, base = (tensors(folder) for folder in (runs / "first" / "final", runs / "merged", demo / "model"))
    embedding = adapter["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(merged["model.embed_tokens.weight"], embedding.to(base["model.embed_tokens.weight"].dtype))
    assert not torch.equal(embedding, base["model.embed_tokens.weight"])


def test_whole_modules_have_the_states_that_are_planned(runs: Path, demo: Path) -> None:
    lora = Lora(rank=4, modules_to_save=("embed_tokens",))
    planned = trained(read_model(str(demo / "model")), Method.LORA, lora)
    states = json.loads((runs / "first" / "states.json").read_text())
    assert all(rank["trainable"] == planned.trainable for rank in states["ranks"])


def test_an_adapter_of_another_shape_is_named_once(runs: Path) -> None:
    assert codes(runs / "other") == [[3, 3]]
    assert "has rank 4; lora in the job has rank 8" in said(runs / "other")


# Parameters that stay as they are


@pytest.mark.parametrize("name", ["frozen1", "frozen3"])
def test_parameters_that_a_job_freezes_stay_as_they_are(runs: Path, demo: Path, engine: Engine, name: str) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    assert losses(runs / name) == pytest.approx(losses(runs / "frozen1"), rel=1e-6)
    final, base = tensors(runs / name / "final"), tensors(demo / "model")
    same = {key for key, weight in base.items() if torch.equal(final[key], weight)}
    assert same == {key for key in base if "embed_tokens" in key or "layers.0." in key}
    assert engine.export(runs / name / "checkpoint-2", runs / f"{name}-exported") == 0
    exported = tensors(runs / f"{name}-exported")
    assert all(torch.equal(exported[key], base[key]) for key in same)


def test_only_parameters_that_train_have_the_states_that_are_planned(runs: Path, demo: Path) -> None:
    model = read_model(str(demo / "model"))
    marked = with_frozen(model, freeze=["embed_tokens", r"layers\.0\."], train_only=[])
    planned = trained(marked, Method.FULL, Lora())
    states = json.loads((runs / "frozen3" / "states.json").read_text())
    assert all(rank["trainable"] == planned.trainable for rank in states["ranks"])
    assert planned.trainable + planned.frozen == model.num_params


def test_a_pattern_that_is_in_no_name_is_named_once(runs: Path) -> None:
    assert codes(runs / "absent") == [[3, 3]]
    assert 'train_only has "mlpp", which is in no name of a parameter' in said(runs / "absent")
