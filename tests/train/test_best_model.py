"""Early stopping and the best checkpoint, on two CPU ranks whose evaluation loss rises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.choices import Method
from dstrain.job.schema import Job
from dstrain.monitor.best_model import BestModel, best_model
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.rundir import RunDir
from dstrain.train.checkpoints.export import locate
from tests.train.engine import Engine
from tests.train.launching import change_job, codes, make_run, said, tensors

OF_MODEL = {"model.safetensors", "config.json", "generation_config.json"}
OF_ADAPTER = {"adapter_model.safetensors", "adapter_config.json", "README.md"}
OF_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def overfits(folder: Path, demo: Path, stage: int, **job: Any) -> Path:
    """Returns a run whose evaluation loss rises after some steps: the learning rate is large from the first one."""
    base: dict[str, Any] = {
        "data": str(demo / "few.jsonl"),
        "eval_data": str(demo / "eval.jsonl"),
        "precision": "fp32",
        "learning_rate": 0.03,
        "warmup_ratio": 0.0,
        "lr_scheduler_type": "constant",
        "max_steps": 12,
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "early_stopping": 2,
    }
    return make_run(folder, demo, zero={"stage": stage}, **(base | job))


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    folder = root / "best"
    adapter: dict[str, Any] = {"method": Method.LORA, "lora": {"rank": 4}, "learning_rate": 0.1, "early_stopping": 1}
    resumed = overfits(folder / "resumed2", demo, 2, max_steps=5)
    for run in (resumed, overfits(folder / "adapter3", demo, 3, **adapter)):
        engine.train(run)
    assert recorded(resumed) == BestModel(step=4, loss=evaluations(resumed)[4])  # one evaluation without improvement
    change_job(resumed, max_steps=12, resume="auto")
    engine.train(resumed)
    return folder


def evaluations(folder: Path) -> dict[int, float]:
    """Returns the evaluation loss by step."""
    return {line["step"]: line["eval_loss"] for line in read_jsonl(folder / "metrics.jsonl") if "eval_loss" in line}


def recorded(folder: Path) -> BestModel:
    best = best_model(json.loads((folder / "summary.json").read_text()))
    assert best is not None
    return best


@pytest.mark.parametrize(("name", "patience"), [("resumed2", 2), ("adapter3", 1)])
def test_a_run_stops_once_its_evaluations_do_not_improve(runs: Path, name: str, patience: int) -> None:
    assert set(map(tuple, codes(runs / name))) == {(0, 0)}, said(runs / name)[-3000:]
    losses = evaluations(runs / name)
    best = min(losses, key=lambda step: losses[step])
    expected = BestModel(step=best, loss=losses[best], stopped_at=best + patience, evaluations=patience)
    assert recorded(runs / name) == expected
    assert max(losses) == best + patience < 12
    assert said(runs / name).count(f"{expected.text}; the final model is that of checkpoint-{best}\n") == 1


def test_patience_continues_after_a_resume(runs: Path) -> None:
    assert (recorded(runs / "resumed2").stopped_at, len(codes(runs / "resumed2"))) == (6, 2)


@pytest.mark.parametrize(("name", "files"), [("resumed2", OF_MODEL), ("adapter3", OF_ADAPTER)])
def test_the_final_model_is_that_of_the_best_checkpoint_which_stays(runs: Path, name: str, files: set[str]) -> None:
    best = recorded(runs / name)
    checkpoints = [path for _, path in RunDir(runs / name).whole_checkpoints()]
    assert [path.name for path in checkpoints] == [f"checkpoint-{best.step}", f"checkpoint-{best.stopped_at}"]
    final, kept, last = (tensors(path) for path in (runs / name / "final", *checkpoints))
    assert {path.name for path in (runs / name / "final").iterdir()} == files | OF_TOKENIZER
    assert final.keys() == kept.keys()
    assert all(torch.equal(final[key], kept[key]) for key in final)
    assert not all(torch.equal(final[key], last[key]) for key in final)


def test_the_last_step_is_evaluated_before_its_checkpoint(root: Path, demo: Path, engine: Engine) -> None:
    better = overfits(
        root / "last", demo, 2, max_steps=2, eval_steps=5, save_steps=5, early_stopping=None, load_best=True
    )
    engine.train(better)
    assert recorded(better) == BestModel(step=2, loss=evaluations(better)[2])
    assert RunDir(better).best_checkpoint() == better / "checkpoint-2"


def test_an_export_of_a_run_is_that_of_its_best_checkpoint(runs: Path) -> None:
    assert locate(runs / "resumed2") == runs / "resumed2" / "checkpoint-4"


def test_only_early_stopping_or_load_best_keep_a_best_checkpoint() -> None:
    assert not Job(model="m", output_dir="o").keeps_best
    assert Job(model="m", output_dir="o", early_stopping=1).keeps_best
