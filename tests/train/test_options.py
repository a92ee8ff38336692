"""Options of a job that people of other tools expect, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.engine import Engine
from tests.train.launching import change_job, codes, make_run, said, tensors


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """One short run for each option."""
    folder = root / "options"
    light = make_run(folder / "light", demo, zero={"stage": 3}, save_only_model=True, save_steps=0.6)
    refused = make_run(folder / "refused", demo, save_only_model=True, zero={"stage": 3, GATHERS: False})
    for run in (light, refused):
        engine.train(run)
    return folder


GATHERS = "stage3_gather_16bit_weights_on_model_save"


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
