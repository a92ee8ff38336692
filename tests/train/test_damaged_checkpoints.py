"""Every file of checkpoints that ranks wrote, damaged without a change of its size; and models that are lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import InvalidConfig
from dstrain.rundir import damage, file_sizes
from dstrain.train.checkpoints.checkpoints import checksum, recorded
from tests.train.checkpoints.damage import HARMS
from tests.train.checkpoints.test_verify import verify
from tests.train.engine import Engine
from tests.train.launching import change_job, codes, losses, make_run, said
from tests.train.test_elastic import go_on

KINDS: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"zero": {"stage": 1}},
    "zero2": {},
    "zero3": {"zero": {"stage": 3}},
    "lora": {"method": "lora", "lora": {"dropout": 0.1}},
}
SKIPPED = {"learning_rate": 1e20, "max_steps": 6}


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    folder = root / "damaged"
    for name, job in {**KINDS, "skipped": SKIPPED}.items():
        wanted = {"max_steps": 4, "save_steps": 2, "save_total_limit": None, "resume": "auto"}
        engine.train(make_run(folder / name, demo, **{**wanted, **job}))
    return folder


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_of_any_file_is_noticed(
    runs: Path, tmp_path: Path, kind: str, harm: Callable[[Path], None]
) -> None:
    whole = runs / kind / "checkpoint-4"
    assert recorded(whole).keys() == file_sizes(whole).keys()
    verify(runs / kind)
    unnoticed = []
    for name in ["complete.json", *file_sizes(whole)]:
        shutil.copytree(whole, tmp_path / "checkpoint-4", dirs_exist_ok=True)
        harm(tmp_path / "checkpoint-4" / name)
        try:
            if damage(tmp_path / "checkpoint-4") is None:
                verify(tmp_path)
                unnoticed.append(name)
        except InvalidConfig:
            pass
    assert unnoticed == []


def test_the_older_one_is_taken_and_the_losses_are_those_of_before(runs: Path, engine: Engine) -> None:
    run = shutil.copytree(runs / "zero1", runs / "zero1-again")
    shutil.copy(f"{runs / 'zero1'}.codes", f"{run}.codes")
    change_job(run, output_dir=str(run))
    HARMS["4,000 bytes"](run / "checkpoint-4" / "global_step4" / "mp_rank_00_model_states.pt")
    logs = [Path(f"{run}.log.{rank}") for rank in (0, 1)]

    def has_failed() -> bool:  # then launchers end the other ranks
        return any("Error: " in log.read_text() for log in logs if log.exists())

    assert 3 in engine.run("dstrain.train", run, log=Path(f"{run}.log"), is_over=has_failed)
    engine.train(run)
    assert codes(run)[-1] == [0, 0]
    text = said(run) + said(run, rank=1)
    assert "mp_rank_00_model_states.pt has another checksum" in text
    assert "put aside as checkpoint-4.damaged" in text
    assert "resume check: a loss of " in text
    assert "(difference 0)" in text
    assert losses(run) == losses(runs / "zero1")


def test_one_rank_computes_the_loss_that_two_have_saved(runs: Path, engine: Engine) -> None:
    run = shutil.copytree(runs / "zero3", runs / "zero3-one")
    change_job(run, output_dir=str(run), max_steps=5)
    go_on(run, engine, ranks=1)
    engine.train(run, ranks=1)
    assert codes(run) == [[0]], said(run)[-3000:]
    (line,) = [line for line in said(run).splitlines() if line.startswith("resume check: ")]
    assert float(line.rpartition(" ")[2].rstrip(")")) < 1e-5
    shutil.rmtree(run / "checkpoint-5")
    HARMS["bit"](next((run / "checkpoint-4").glob("global_step4_universal/zero/*/exp_avg.pt")))
    engine.train(run, ranks=1)
    assert codes(run) == [[0], [3]]
    assert "exp_avg.pt has another checksum" in said(run)


def test_a_loss_that_is_another_one_ends_the_run(runs: Path, engine: Engine) -> None:
    import torch

    run = shutil.copytree(runs / "zero2", runs / "zero2-other")
    change_job(run, output_dir=str(run), max_steps=6)
    folder = run / "checkpoint-4"
    known = torch.load(folder / "resume_check.pt", weights_only=True)
    torch.save({**known, "loss": known["loss"] * 1.02}, folder / "resume_check.pt")
    record = json.loads((folder / "complete.json").read_text())
    del record["crc32"]
    record["checksums"]["resume_check.pt"] = checksum(folder / "resume_check.pt")
    record["files"]["resume_check.pt"] = (folder / "resume_check.pt").stat().st_size
    (folder / "complete.json").write_text(json.dumps(record))
    engine.train(run)
    assert codes(run) == [[1, 1]]
    assert "Error: resume check: a loss of " in said(run)
    assert "Traceback" not in said(run)


def test_a_run_that_skipped_most_of_its_steps_is_no_success(runs: Path) -> None:
    assert codes(runs / "skipped") == [[1, 1]]
    assert " of 6 steps were skipped, as their gradients were not finite" in said(runs / "skipped")
    assert not (runs / "skipped" / "final").exists()
