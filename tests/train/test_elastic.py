"""From two ranks to one and back: the loss goes on as if nothing had changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.launch.prepare import resume
from dstrain.records import load_json
from dstrain.rundir import RunDir
from dstrain.train.checkpoints import universal_checkpoint
from tests.train.engine import Engine
from tests.train.launching import (
    change_job,
    codes,
    environment,
    lines,
    losses,
    make_run,
    said,
    tensors,
    without_dropout,
)

pytestmark = pytest.mark.parts(6, at=4)

NAMES = ["zero2", "zero3"]
STEPS = 12
CLOSE = 1e-4
"""In fp32 and without dropout only the order of sums differs, which is a few 1e-6; a weight that decays though it
should not, or a step that is counted twice, is some 1e-3."""


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """For each stage a run that nothing disturbs, and one that goes on after step 4 on one rank and after 8 on two."""
    folder = root / "elastic"
    job: dict[str, Any] = {
        "model": str(without_dropout(demo / "model", folder / "model")),
        "data": str(demo / "few.jsonl"),  # 17 samples: an epoch ends at step 5, with a part of a step
        "precision": "fp32",
        "weight_decay": 2.0,
        "max_steps": STEPS,
        "save_steps": 4,
        "save_total_limit": 1,
        "resume": "auto",
    }
    for name in NAMES:
        zero = {"stage": int(name[4])}
        engine.train(make_run(folder / f"{name}-whole", demo, zero=zero, **job))
        run = make_run(folder / f"{name}-elastic", demo, zero=zero, **job)
        engine.train(run, kill_at=5)
        go_on(run, engine, ranks=1, in_child=name == "zero2")
        engine.train(run, ranks=1, kill_at=9)
        go_on(run, engine, ranks=2)
        engine.train(run)
    engine.train(folder / "zero2-elastic")
    return folder


def go_on(run: Path, engine: Engine, *, ranks: int, in_child: bool = False) -> None:
    """Does what `dstrain run` does before the launch; without `in_child` the copy is there already."""
    job = load_json(Job, run / "request.json")
    resuming = resume.resuming(job, num_ranks=ranks)
    config = json.loads((run / "ds_config.resolved.json").read_text())
    needed = resume.decide(resuming.saved, config, num_ranks=ranks)
    assert needed is not None
    if not in_child:
        program = ("dstrain.train.checkpoints.universal_checkpoint", needed.checkpoint)
        assert engine.run(*program, log=Path(f"{run}.log"), ranks=1) == [0], said(run)
    told: list[str] = []
    for _ in range(2):  # of which the second finds the copy
        resume.convert(needed, environment(run.parent), told.append)
    assert [text.split()[0] for text in told] == (["converting", "converted"] if in_child else [])
    change_job(run, grad_accum=resuming.job.grad_accum)


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_on_one_rank_and_again_on_two_is_that_of_the_undisturbed_run(runs: Path, name: str) -> None:
    whole, changed = losses(runs / f"{name}-whole"), losses(runs / f"{name}-elastic")
    assert codes(runs / f"{name}-whole") == [[0, 0]], said(runs / f"{name}-whole")[-3000:]
    assert list(changed) == list(range(1, STEPS + 1)), said(runs / f"{name}-elastic")[-3000:]
    assert list(changed.values()) == pytest.approx(list(whole.values()), abs=CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_each_step_has_the_tokens_and_the_learning_rate_it_would_have_had(runs: Path, name: str) -> None:
    for key in ("tokens", "learning_rate"):
        whole, changed = (
            {line["step"]: line[key] for line in lines(runs / f"{name}-{kind}")} for kind in ("whole", "elastic")
        )
        assert changed == whole


@pytest.mark.parametrize("name", NAMES)
def test_the_final_model_is_that_of_the_undisturbed_run(runs: Path, name: str) -> None:
    whole, changed = (tensors(runs / f"{name}-{kind}" / "final") for kind in ("whole", "elastic"))
    assert whole.keys() == changed.keys()
    for key in whole:
        torch.testing.assert_close(changed[key], whole[key], rtol=0, atol=CLOSE)


def test_the_copy_goes_with_its_checkpoint(runs: Path) -> None:
    left = [path for _, path in RunDir(runs / "zero2-elastic").checkpoints()]
    assert [path.name for path in left] == [f"checkpoint-{STEPS}"]
    assert not list(left[0].glob("*universal*"))


def test_the_same_number_of_ranks_goes_on_from_the_ordinary_shards(runs: Path) -> None:
    record = json.loads((runs / "zero2-elastic" / f"checkpoint-{STEPS}" / "complete.json").read_text())
    assert (record["world_size"], record["micro_batch"], record["grad_accum"]) == (2, 2, 1)
    assert codes(runs / "zero2-elastic")[-1] == [0, 0]
    assert said(runs / "zero2-elastic").count("resuming from checkpoint-12") == 1


# What DeepSpeed's loading of a copy gets wrong


def test_no_two_states_of_an_optimizer_share_a_step() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.0)
    shared = torch.tensor(3.0)
    for each in weights:
        each.grad = torch.ones(2)
        optimizer.state[each] = {"step": shared, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    universal_checkpoint.mend(optimizer)
    optimizer.step()
    assert [float(optimizer.state[each]["step"]) for each in weights] == [4.0, 4.0]


def test_an_optimizer_that_counts_with_numbers_gets_numbers() -> None:
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.0)
    optimizer.state[weights] = {"step": torch.tensor(3.0)}
    universal_checkpoint.mend(optimizer)
    assert optimizer.state[weights]["step"] == 3
    assert isinstance(optimizer.state[weights]["step"], int)


# What is not converted


def _checkpoint(folder: Path, **zero: Any) -> Path:
    shards = folder / "checkpoint-1" / "global_step1"
    shards.mkdir(parents=True)
    (shards.parent / "complete.json").write_text(json.dumps({"step": 1, "world_size": 2, "zero_stage": 2}))
    (shards.parent / "latest").write_text("global_step1")
    torch.save({"ds_config": {"zero_optimization": zero}, "module": {}}, shards / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({}, shards / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return shards.parent


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.commands
def test_weights_that_were_dealt_out_in_turn_would_be_mixed_up(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, round_robin_gradients=True)
    needed = resume.Resize(checkpoint=checkpoint, from_ranks=2, to_ranks=1)
    with pytest.raises(InvalidConfig, match="would be mixed up") as caught:
        resume.convert(needed, environment(tmp_path), lambda text: None)
    assert "cannot be converted for 1 rank:" in caught.value.problem
    assert "Run on 2 GPUs, or" in str(caught.value.hint)
    assert "dstrain export" in str(caught.value.hint)


def test_a_checkpoint_without_shards_is_refused(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path)
    (checkpoint / "latest").unlink()
    with pytest.raises(InvalidConfig, match="holds no ZeRO shards"):
        universal_checkpoint.convert(checkpoint)


def test_a_conversion_that_fails_leaves_nothing_half_done(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path)
    with pytest.raises(KeyError):
        universal_checkpoint.convert(checkpoint)
    assert _names(checkpoint) == ["complete.json", "global_step1", "latest"]


def test_what_an_earlier_conversion_left_half_done_is_no_copy(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, round_robin_gradients=True)
    (checkpoint / "global_step1_universal").mkdir()
    with pytest.raises(InvalidConfig, match="would be mixed up"):
        universal_checkpoint.convert(checkpoint)
    assert _names(checkpoint) == ["complete.json", "global_step1", "latest"]
