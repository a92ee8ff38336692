"""Checkpoints from somebody else run no code."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from dstrain.rundir import mark_whole
from dstrain.train.checkpoints import export, universal_checkpoint

FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (["touch", str(self.path)],)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("evil", FILES)
@pytest.mark.parametrize("verb", [export.main, universal_checkpoint.main])
@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(
    evil: str, verb: Callable[[Sequence[str]], int], *, is_trusted: bool, tmp_path: Path, capsys: Any
) -> None:
    folder, pwned = tmp_path / "checkpoint-1", tmp_path / "pwned"
    shards = folder / "global_step1"
    shards.mkdir(parents=True)
    Qwen3Config(num_hidden_layers=1).save_pretrained(folder)
    (folder / "latest").write_text("global_step1")
    states: dict[str, Any] = {"optimizer_state_dict": {"zero_stage": 2, "partition_count": 1}, "ds_version": "0.19.8"}
    states |= {"buffer_names": [], "module": {}, "param_shapes": [], "shared_params": {}}
    for name in FILES:
        torch.save(states | ({"evil": Touches(pwned)} if name == evil else {}), shards / name)
    mark_whole(folder, {"step": 1, "world_size": 1, "zero_stage": 2})
    if is_trusted:
        os.environ[VARIABLES[1]] = "1"
    words = [str(folder), str(tmp_path / "out")] if verb is export.main else [str(folder)]
    try:
        code = verb(words)
    except Exception:  # trusted, it is no checkpoint still
        assert is_trusted
        return
    assert code != 0
    said = capsys.readouterr().err
    if not is_trusted:
        assert (code, pwned.exists()) == (3, False), said
        assert "holds more than tensors and plain values, which may run code: commands.call\n" in said  # as pickled
