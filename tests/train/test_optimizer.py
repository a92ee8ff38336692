"""8-bit AdamW on two CPU ranks: small states, which a resumed run goes on with to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.choices import Optimizer
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM
from tests.train.engine import Engine
from tests.train.engine_cases import case, predicted, run
from tests.train.launching import CHECKOUT, QLORA, codes, environment, losses, make_run, require_resumed, said

pytestmark = pytest.mark.parts(6, at=1)

STAGES = (0, 2, 3)
JOB: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "resume": "auto", "precision": "fp32"}


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine, need: Callable[[object, str], None]) -> Path:
    """For each ZeRO stage a run with AdamW, one with 8-bit AdamW, and one of these that is killed and goes on."""
    need((QLORA / "bitsandbytes").is_dir(), "bitsandbytes is not installed: make qlora")
    folder = root / "optimizer"
    for stage in STAGES:
        zero = {"stage": stage}
        engine.train(make_run(folder / f"adamw-{stage}", demo, zero=zero, **JOB))
        engine.train(make_run(folder / f"whole-{stage}", demo, zero=zero, optimizer="adamw_8bit", **JOB))
        cut = make_run(folder / f"cut-{stage}", demo, zero=zero, optimizer="adamw_8bit", **JOB)
        engine.train(cut, kill_at=5)
        engine.train(cut)
    return folder


def moments(checkpoint: Path, stage: int) -> list[Any]:
    """Returns the optimizer's states of rank 0, one dictionary for each flat parameter."""
    if stage == 0:
        saved = torch.load(next(checkpoint.glob("global_step*/mp_rank_00_model_states.pt")), weights_only=False)
        return list(saved["optimizer"]["state"].values())
    shard = next(checkpoint.glob("global_step*/*zero_pp_rank_0_*optim_states.pt"))
    saved = torch.load(shard, weights_only=False)["optimizer_state_dict"]
    base = saved["base_optimizer_state"] if stage < 3 else saved["optimizer_state_dict"]
    return list(base["state"].values())


@pytest.mark.parametrize("stage", STAGES)
def test_it_trains_about_as_adamw_does(runs: Path, stage: int) -> None:
    assert codes(runs / f"whole-{stage}") == [[0, 0]], said(runs / f"whole-{stage}")[-2000:]
    eight, whole = losses(runs / f"whole-{stage}"), losses(runs / f"adamw-{stage}")
    assert eight == pytest.approx(whole, rel=0.01)
    assert eight != whole


@pytest.mark.parametrize("stage", STAGES)
def test_moments_of_more_than_4096_elements_take_a_byte_each(runs: Path, stage: int) -> None:
    states = [
        state["__bnb_optimizer_quant_state__"] for state in moments(runs / f"whole-{stage}" / "checkpoint-6", stage)
    ]
    kept_wide = 1 if stage == 0 else 0  # Transformers keeps embeddings in fp32, which ZeRO's flat shards hide
    large = [state[name].dtype for state in states for name in ("state1", "state2") if state[name].numel() > 4096]
    assert large.count(torch.uint8) > 0
    assert large.count(torch.float32) == 2 * kept_wide


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_ends_as_an_undisturbed_one(runs: Path, stage: int) -> None:
    require_resumed(runs / f"cut-{stage}", runs / f"whole-{stage}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_counts_what_lives_between_steps(
    stage: int, engine: Engine, tmp_path: Path, need: Callable[[object, str], None]
) -> None:
    need((QLORA / "bitsandbytes").is_dir(), "bitsandbytes is not installed: make qlora")
    tried = case("8-bit AdamW", stage, optimizer=Optimizer.ADAMW_8BIT)
    (measured,) = run(engine, [tried], tmp_path / "cases", timeout_s=120)
    assert measured.steady == pytest.approx(predicted(tried).steady, rel=0.002)
    for phase in ("forward", "backward"):  # on a CPU the step has fp32 copies, on a GPU it works in place
        assert measured.phases[phase] == pytest.approx(predicted(tried).phases[phase], rel=0.01)


@pytest.mark.engine
def test_scales_of_4_bit_weights_are_measured_with_them(tmp_path: Path, need: Callable[[object, str], None]) -> None:
    need((QLORA / "bitsandbytes").is_dir(), "bitsandbytes is not installed: make qlora")
    program = """
from bitsandbytes.nn import Linear4bit
from dstrain.train.memory import _Counter, _parameters
layer = Linear4bit(256, 512, bias=False, compress_statistics=True).to("cpu")
print(_Counter(on_gpu=False).count(_parameters(list(layer.parameters())), is_offloaded=False))
"""
    env = environment(tmp_path) | {"PYTHONPATH": f"{CHECKOUT}:{QLORA}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) == 256 * 512 * NF4_BYTES_PER_PARAM
