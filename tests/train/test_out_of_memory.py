"""What a rank writes when an allocation fails: the phase by the functions on the stack, and the first rank's record."""

from __future__ import annotations

import inspect
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.out_of_memory import tried
from dstrain.oom import OutOfMemory, Phase
from dstrain.records import load_json
from dstrain.rundir import RunDir
from dstrain.train import memory
from dstrain.train.memory import _PHASES, is_out_of_memory, phase_of, record
from dstrain.train.parts.saving import Saver
from dstrain.train.trainer import Trainer
from tests.train.engine import Engine
from tests.train.points import Space


def failure(*stack: tuple[str, str], error: str = "torch.OutOfMemoryError('CUDA out of memory')") -> BaseException:
    """Returns an error that was raised in these functions of these files, the outermost first."""
    scope: dict[str, Any] = {"torch": torch}
    body = f"raise {error}"
    for name, file in reversed(stack):
        exec(compile(f"def {name}():\n    {body}\n", f"/site-packages/{file}", "exec"), scope)
        scope = {"inner": scope[name]}
        body = "return inner()"
    try:
        scope["inner"]()
    except BaseException as raised:
        return raised
    raise AssertionError


STEP = ("training_step", "transformers/trainer.py")
ENGINE = "deepspeed/runtime/engine.py"


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([("load_model", "dstrain/train/model.py")], Phase.LOAD),
        ([STEP, ("compute_loss", "transformers/trainer.py")], Phase.FORWARD),
        ([STEP, ("backward", "accelerate/accelerator.py"), ("backward", ENGINE)], Phase.BACKWARD),
        ([STEP, ("backward", "accelerate/accelerator.py"), ("step", ENGINE)], Phase.STEP),
        ([("allocate_states", "dstrain/train/memory.py")], Phase.STEP),
        ([("reserved_for_first_step", "dstrain/train/memory.py")], Phase.STEP),
        ([("evaluation_loop", "dstrain/train/trainer.py")], Phase.EVALUATION),
        ([("_save_checkpoint", "dstrain/train/trainer.py")], Phase.SAVE),
    ],
)
def test_the_functions_on_the_stack_tell_the_phase(stack: list[tuple[str, str]], phase: Phase) -> None:
    frames = [frame for frame, _ in traceback.walk_tb(failure(*stack).__traceback__)]
    assert phase_of(frames) is phase


def test_the_functions_are_those_of_the_installed_packages() -> None:
    from deepspeed.runtime import engine

    files = {
        owner: str(inspect.getsourcefile(owner)) for owner in (engine.DeepSpeedEngine, *Trainer.__mro__[:-1], Saver)
    }
    for function, file, _ in _PHASES:
        if file.endswith("/memory.py"):
            assert getattr(memory, function).__module__ == memory.__name__
        else:
            assert any(path.endswith(file) and function in vars(owner) for owner, path in files.items()), function


def test_errors_of_the_host_and_of_programs_are_no_such_failure() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))
    wrapped = ValueError("no")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)


def test_the_first_rank_writes_and_no_other_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.current": 60, "reserved_bytes.all.current": 70}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(memory, "OBSERVER", memory.Observer())
    memory.OBSERVER(0, 20, 100, 10)
    for rank in (3, 1):
        record(failure(STEP), RunDir(tmp_path), rank)
    found = load_json(OutOfMemory, tmp_path / "oom.json")
    assert (found.rank, found.phase, found.batch, found.states) == (3, Phase.FORWARD, None, None)
    assert found.measured is not None
    assert (found.measured.limit_bytes, found.measured.needed_bytes) == (80, 90)
    assert [path.name for path in tmp_path.iterdir()] == ["oom.json"]
    assert json.loads((tmp_path / "oom.json").read_text())["schema"] == 1


CASE = 12
"""Of the benchmark: a Qwen3-MoE under ZeRO-1, which the chunked loss lets fit."""


def test_a_real_run_out_of_memory_trains_within_the_same_limit_with_the_first_change(
    root: Path, demo: Path, engine: Engine
) -> None:
    folder = root / "out of memory"
    folder.mkdir()
    result = tried(Space(folder=folder, demo=demo, engine=engine), CASE)
    assert (result.place, result.fits, result.is_cheapest) == (1, True, True)
    assert result.peak_bytes is not None
    assert 0 < result.peak_bytes <= result.limit_bytes
