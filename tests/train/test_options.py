"""Options of a job that people of other tools expect, on two CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dstrain.choices import Method
from dstrain.config.resolve_auto import GATHERS
from dstrain.errors import InvalidConfig
from dstrain.facts.probe import read_model
from dstrain.job.model_changes import Lora, shape_of_adapter
from dstrain.job.schema import Job
from dstrain.plan.memory.params import trained
from dstrain.plan.named_parts import with_frozen
from dstrain.records import to_data
from dstrain.rundir import RunDir
from dstrain.train import adapters
from dstrain.train.adapters import freeze
from dstrain.train.checkpoints.checkpoints import choose
from dstrain.train.parts.saving import require_weights
from tests.train.engine import Engine
from tests.train.launching import codes, evaluations, losses, make_run, said, tensors

pytestmark = pytest.mark.parts(6, at=4)

FROZEN = ["embed_tokens", r"layers\.0\."]
"""Patterns of the parameters that a run freezes."""


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """One short run for each option."""
    folder = root / "options"
    exact: dict[str, Any] = {"precision": "fp32"}
    frozen: dict[str, Any] = {"freeze": FROZEN, "save_steps": 2, **exact}
    adapter: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "modules_to_save": ["embed_tokens"]}, **exact}
    evaluated: dict[str, Any] = {"eval_data": str(demo / "eval.jsonl"), **adapter}
    first = make_run(folder / "first", demo, zero={"stage": 3}, loss="fused", **evaluated)
    for run in (
        make_run(folder / "light", demo, zero={"stage": 3}, save_only_model=True, save_steps=0.6),
        make_run(folder / "frozen1", demo, zero={"stage": 1}, **frozen),
        make_run(folder / "frozen3", demo, zero={"stage": 3}, **frozen),
        make_run(folder / "tokens", demo, zero={"stage": 3}, new_tokens=["<a>", "<b>"], **evaluated),
        first,
    ):
        engine.train(run)
    shape = to_data(replace(Lora(), **shape_of_adapter(folder / "tokens" / "final", Lora(), given=())))
    more = {
        "adapter": str(folder / "tokens" / "final"),
        "new_tokens": ["<a>", "<b>"],
        "eval_on_start": True,
        "eval_steps": 9,
        "max_steps": 1,
    }
    engine.train(make_run(folder / "on", demo, zero={"stage": 3}, **(evaluated | more | {"lora": shape})))
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


def test_no_run_resumes_from_the_weights_alone(runs: Path) -> None:
    run_dir = RunDir(runs / "light")
    assert choose(run_dir, "auto", world_size=2) is None
    assert run_dir.newest_checkpoint(for_resume=True).skipped[0] == (
        "checkpoint-3 holds the weights alone (save_only_model)"
    )
    with pytest.raises(InvalidConfig, match="checkpoint-2 holds the weights alone"):
        choose(run_dir, str(run_dir.path / "checkpoint-2"), world_size=2)


def test_weights_alone_need_to_be_gathered() -> None:
    job = Job(model="m", output_dir="o", save_only_model=True)
    with pytest.raises(InvalidConfig, match="checkpoints would have no weights"):
        require_weights(job, {"zero_optimization": {"stage": 3}})
    require_weights(job, {"zero_optimization": {"stage": 3, GATHERS: True}})
    require_weights(job, {"zero_optimization": {"stage": 2}})


# Adapters that go on, and modules that train whole beside them


def test_a_run_goes_on_from_the_weights_of_an_adapter(runs: Path) -> None:
    assert codes(runs / "tokens") == [[0, 0]], said(runs / "tokens")[-3000:]
    assert codes(runs / "on") == [[0, 0]], said(runs / "on")[-3000:]
    assert evaluations(runs / "on")[0] == pytest.approx(evaluations(runs / "tokens")[3], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_loads_an_adapter_with_its_whole_modules_to_the_same_loss(runs: Path, demo: Path) -> None:
    from peft import PeftModel

    from dstrain.train.data.prepare import prepare
    from dstrain.train.rank import read
    from dstrain.train.tokenizer import load_tokenizer

    assert codes(runs / "first") == [[0, 0]], said(runs / "first")[-3000:]
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


def test_an_adapter_of_another_shape_is_refused(runs: Path, demo: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(demo / "model")
    with pytest.raises(InvalidConfig, match=r"has rank 4, modules_to_save .*; lora in the job has rank 8"):
        adapters.load(base, runs / "first" / "final", Lora(rank=8))


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
    marked = with_frozen(model, Job(model="m", output_dir="o", freeze=tuple(FROZEN)))
    planned = trained(marked, Method.FULL, Lora())
    states = json.loads((runs / "frozen3" / "states.json").read_text())
    assert all(rank["trainable"] == planned.trainable for rank in states["ranks"])
    assert planned.trainable + planned.frozen == model.num_params


def test_a_pattern_that_is_in_no_name_and_a_job_that_trains_nothing_are_refused(demo: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    with pytest.raises(InvalidConfig, match='train_only has "mlpp", which is in no name of a parameter'):
        freeze(model, Job(model="m", output_dir="o", train_only=("mlpp",)))
    with pytest.raises(InvalidConfig, match="leave nothing to train"):
        freeze(model, Job(model="m", output_dir="o", freeze=(".",)))


# New tokens


def test_new_tokens_train_and_are_saved_and_exported(runs: Path, demo: Path, engine: Engine) -> None:
    name = "tokens"
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    before = tensors(demo / "model")["model.embed_tokens.weight"]
    tokenizer = AutoTokenizer.from_pretrained(runs / name / "final")
    assert tokenizer("<a><b>")["input_ids"] == [len(before), len(before) + 1]
    assert engine.export(runs / name, runs / f"{name}-merged") == 0
    merged = tensors(runs / f"{name}-merged")["model.embed_tokens.weight"]
    assert torch.equal(merged, tensors(runs / name / "final")["base_model.model.model.embed_tokens.weight"])
    assert len(merged) == len(before) + 2
    assert (merged[-2:] - before.mean(0)).norm() < 0.1 * before.norm(dim=1).mean()  # Transformers' start
