"""`dstrain demo`: the whole way, typed as a user types it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Task
from dstrain.cli.verbs import demo as demo_command
from dstrain.cli.verbs.demo import _build as build
from dstrain.cli.verbs.demo import _tell as tell
from dstrain.errors import EnvironmentProblem, RunFailed
from dstrain.monitor.metrics import read_jsonl
from dstrain.monitor.verdict import FEWEST_STEPS, LATEST_STEPS
from dstrain.rundir import RunDir
from tests.cli.conftest import Type, lay_traps

pytestmark = pytest.mark.engine


CANARY = "canary-7c1d"
"""A secret, as it stands in the shell of whoever types the demo."""
SEEN: list[str] = []
"""Command lines that held it."""


def command_lines() -> list[str]:
    """Returns the command lines of all processes, as everybody on the machine sees them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace").replace("\0", " "))
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A demo under ZeRO-3, with modules of a stranger in every folder from which it starts something."""
    import os
    import subprocess

    folder = tmp_path_factory.mktemp("demo")
    for place in (folder, folder / "d"):
        lay_traps(place)
    command = [sys.executable, "-P", "-m", "dstrain.cli", "demo", "d", "--zero-stage", "3", "--steps", "80", "--json"]
    environment = {**os.environ, "HF_TOKEN": CANARY, "SWANLAB_API_KEY": CANARY}
    child = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while True:
        try:
            stdout, stderr = child.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            SEEN.extend(line for line in command_lines() if CANARY in line)
    done = subprocess.CompletedProcess(command, child.returncode, stdout, stderr)
    return done, folder / "d"


def test_it_learns_more_than_how_often_each_token_occurs(demo: tuple[Any, Path]) -> None:
    done, folder = demo
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["eval_loss"] < found["loss_to_beat"]
    assert found["last_loss"] < found["first_loss"]
    assert (folder / "output-zero3" / "final" / "model.safetensors").exists()
    assert "learning_rate: 0.005  # set by dstrain demo" in (folder / "job.yaml").read_text()
    assert json.loads((folder / "output-zero3" / "request.json").read_text())["learning_rate"] == 5e-3


def test_a_model_that_learned_less_is_a_failure(demo: tuple[Any, Path]) -> None:
    folder = demo[1]
    with pytest.raises(RunFailed, match="the model did not learn"):
        tell(("entropy", 1.0), RunDir(folder / "output-zero3"), folder, as_json=False)


def test_model_states_are_what_the_plan_said(demo: tuple[Any, Path]) -> None:
    states = json.loads(demo[0].stdout)["states"]
    for measured in states["measured_bytes_per_gpu"]:
        assert measured == pytest.approx(states["predicted_bytes_per_gpu"], rel=0.005)


def test_it_shows_the_commands_and_the_table(demo: tuple[Any, Path]) -> None:
    said = demo[0].stderr
    for words in ("$ dstrain gen-config", "$ dstrain run", "unigram entropy", "tokens/s", "(beaten)"):
        assert words in said


def test_metrics_are_kept_a_line_each(demo: tuple[Any, Path]) -> None:
    lines = read_jsonl(demo[1] / "output-zero3" / "metrics.jsonl")
    wanted = {"step", "time_s", "loss", "grad_norm", "learning_rate", "tokens_per_s"}
    assert wanted <= set(next(line for line in lines if "loss" in line))


def test_bytes_are_compared_with_the_plan_after_the_first_steps(demo: tuple[Any, Path]) -> None:
    folder = demo[1] / "output-zero3"
    (verdict,) = [line for line in read_jsonl(folder / "metrics.jsonl") if line.get("event") == "verdict"]
    states = next(one for one in verdict["comparisons"] if one["quantity"] == "states_bytes_per_gpu")
    # a busy machine's steps warm up for longer
    assert FEWEST_STEPS <= verdict["step"] <= LATEST_STEPS
    assert verdict["cause"] is None
    assert states["off"] == pytest.approx(0.0, abs=0.005)
    (log,) = (folder / "logs").glob("*rank0.log")
    assert "no time is planned on a CPU; bytes are as planned" in log.read_text()
    assert all(check["passed"] for check in json.loads((folder / "preflight.json").read_text())["checks"])


def test_swanlab_kept_its_files_offline(demo: tuple[Any, Path]) -> None:
    assert list((demo[1] / "output-zero3" / "swanlog").glob("run-*"))


def test_samples_stand_in_the_log_and_not_in_what_swanlab_uploads(demo: tuple[Any, Path]) -> None:
    folder = demo[1] / "output-zero3"
    labels = json.loads((folder / "preflight.json").read_text())["checks"][0]
    (log,) = (folder / "logs").glob("*rank0.log")
    sent = b"".join(path.read_bytes() for path in (folder / "swanlog").rglob("*") if path.is_file())
    assert labels["text"].encode() in sent
    for example in labels["examples"]:
        assert example in log.read_text()
        assert example.strip("…").encode() not in sent


def test_a_secret_stands_in_its_own_file_and_nowhere_else(demo: tuple[Any, Path]) -> None:
    done, folder = demo
    holders = {path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()}
    assert {path.name for path in holders} == {".secrets"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    assert CANARY not in done.stdout + done.stderr
    assert SEEN == []


def test_images_do_not_go_with_other_tasks(dstrain: Type) -> None:
    done = dstrain("demo", "--images", "--task", "dpo")
    assert (done.returncode, "--images does not go with --task dpo" in done.stderr) == (2, True)


def test_without_pillow_images_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(EnvironmentProblem, match="images need Pillow, which is not installed"):
        build(tmp_path / "d", [], images=True)
    assert not (tmp_path / "d").exists()


def test_gen_config_plans_the_parts_that_the_demo_of_images_trains() -> None:
    given, run = demo_command._sizes(Task.SFT, images=True), demo_command._settings(10, balances=False)
    assert {"--no-freeze-vision-tower", "--no-freeze-multi-modal-projector"} <= set(given)
    assert not [key for key in run if key.startswith("freeze")]
