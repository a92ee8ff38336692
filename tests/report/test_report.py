"""Reports of whole, damaged and repeated runs."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.cli.verbs import status
from dstrain.launch.run import state
from dstrain.launch.run.state import StateWriter, note_restart
from dstrain.monitor.run_record import read
from dstrain.report.page import page
from dstrain.report.report import Report, differing, report
from dstrain.report.text import document, lines, side_by_side, side_by_side_lines
from dstrain.rundir import RunDir, Stage
from tests.draws import Draw
from tests.report.runs import BEGAN, NIGHT, gpu_run, night, out_of_memory

Damage = Callable[[Path], object]


def reported(folder: Path) -> Report:
    return report(read(RunDir(folder)), now=BEGAN)


def test_a_restart_has_its_cause_and_repeated_steps_count_once(tmp_path: Path) -> None:
    one = reported(night(tmp_path / "run"))
    assert (one.stage, one.step, one.total_steps, one.missing[0][:26]) == (
        "ended",
        60,
        60,
        "ranks trained on a CPU: no",
    )
    (restart,) = one.restarts
    assert (restart.from_step, restart.change) == (15, "")
    assert restart.cause is not None
    assert restart.cause.startswith("rank 1 failed first")
    assert [step for step, _ in one.losses] == list(range(1, 61))
    assert [step for step, _ in one.evaluations] == [15, 30, 45, 60]


def test_a_resume_that_no_restart_explains_was_made_by_hand(tmp_path: Path) -> None:
    folder = night(tmp_path / "run")
    (folder / "restarts.jsonl").unlink()
    assert [(one.from_step, one.cause) for one in reported(folder).restarts] == [(15, None)]


def test_steps_of_an_earlier_run_in_the_folder_do_not_count(tmp_path: Path) -> None:
    folder = night(tmp_path / "run")
    metrics, health = folder / "metrics.jsonl", folder / "health.jsonl"
    first = json.loads(metrics.read_text().splitlines()[0])
    earlier = [{**first, "step": step, "loss": 99.0, "time_s": first["time_s"] - 1000 + step} for step in (1, 2, 90)]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in earlier) + metrics.read_text())
    told = {"rule": "loss_spike", "severity": "warning", "message": "…"}
    found = [{**told, "step": 90, "time_s": first["time_s"] - 910}, {**told, "step": 7, "time_s": first["time_s"] + 5}]
    health.write_text("".join(f"{json.dumps(line)}\n" for line in found))
    state = folder / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"began": first["time_s"] - 3}))
    one = reported(folder)
    assert [step for step, _ in one.losses] == list(range(1, 61))
    assert max(loss for _, loss in one.losses) < 99
    assert [mark.first_step for mark in one.marks] == [7]


def test_a_restart_is_recorded_as_it_is_read(tmp_path: Path) -> None:
    folder = night(tmp_path / "run")
    (folder / "restarts.jsonl").unlink()
    note_restart(RunDir(folder), cause="node2 was lost\nLogs: …", from_step=15, change="node2 → node9")
    (restart,) = reported(folder).restarts
    assert (restart.cause, restart.change) == ("node2 was lost\nLogs: …", "node2 → node9")
    assert any("from step 15 at " in line for line in lines(reported(folder)))


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _replace(text: str) -> Damage:
    return lambda path: path.write_text(text)


def _bury(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Damage] = {
    "missing": lambda path: path.unlink(),
    "half": _halve,
    "null": _replace("null"),
    "list": _replace("[1, null, {}]"),
    "object": _replace('{"ranks": 3, "cluster": 4, "step": "x", "loss": [], "zero_optimization": 7}'),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "folder": _bury,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", sorted(path.name for path in NIGHT.iterdir()))
def test_a_damaged_file_takes_what_it_tells_and_no_more(tmp_path: Path, name: str, damage: str) -> None:
    folder = night(tmp_path / "run")
    whole = lines(reported(folder))
    DAMAGES[damage](folder / name)
    one = reported(folder)
    text = lines(one)
    assert json.loads(json.dumps(document(one)))["run_dir"] == str(folder)
    assert side_by_side_lines(side_by_side([one, reported(NIGHT)]))
    if damage in {"bytes", "folder"} and not name.endswith((".jsonl", ".sh")):
        assert any(f"{name} " in problem for problem in one.missing), one.missing
    if name in {"metrics.jsonl", "state.json", "plan.json"}:
        assert text != whole, "nothing of the file was in the report"


JUNK: tuple[Any, ...] = (None, [], {}, "x", -1, 1e308, True, [1], {"a": 1}, 0)


def _replaced(value: Any, rng: random.Random) -> Any:
    """Returns a value of JSON in which one part has become junk."""
    inner = list(value) if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not inner or rng.random() < 0.1:
        return rng.choice(JUNK)
    key = rng.choice(inner)
    changed = {**value} if isinstance(value, dict) else [*value]
    changed[key] = _replaced(value[key], rng)
    return changed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with every file that a report reads, and one as GPUs leave it."""
    folder = tmp_path_factory.mktemp("whole")
    one = night(folder / "night")
    told = {"rule": "loss_spike", "step": 9, "severity": "warning", "message": "…"}
    (one / "health.jsonl").write_text(json.dumps(told) + "\n")
    (one / "adaptations.jsonl").write_text(json.dumps({"change": "", "set": ["a=1"], "ds_config": {"b": 1}}) + "\n")
    return one, out_of_memory(gpu_run(folder / "gpu"))


@pytest.mark.sweep
def test_no_value_of_a_file_breaks_a_report_or_its_page(tmp_path: Path, whole: tuple[Path, Path], draw: Draw) -> None:
    for number in draw(range(2000), 20):
        rng = random.Random(number)
        folder = tmp_path / f"{number}"
        shutil.copytree(rng.choice(whole), folder)
        path = rng.choice(sorted(folder.glob("*.json*")))
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = rng.randrange(len(texts))
        texts[at] = json.dumps(_replaced(json.loads(texts[at]), rng))
        path.write_text("\n".join(texts))
        one = reported(folder)
        assert lines(one), path.name
        assert json.dumps(document(one))
        assert page([one, one])


def test_an_early_end_and_generated_texts_are_reported(tmp_path: Path) -> None:
    folder = night(tmp_path / "run")
    best = {"step": 30, "loss": 2.5, "stopped_at": 60, "evaluations": 2}
    summary, request = folder / "summary.json", folder / "request.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"best": best}))
    request.write_text(json.dumps(json.loads(request.read_text()) | {"samples": {"eval_prompts": 4}}))
    texts = [
        {"step": step, "prompt": f"Question {number}?", "text": f"Yes.\n{step}", "tokens": 3, "seconds": 0.5}
        for step in (30, 60)
        for number in range(4)
    ]
    (folder / "samples.jsonl").write_text(
        "".join(f"{json.dumps(text)}\n" for text in [*texts, *texts[4:], {"step": 1}])
    )
    one = reported(folder)
    said = " ".join(" ".join(lines(one)).split())
    assert lines(one)[0].endswith(", stopped early")
    assert "did not improve for 2 evaluations; best 2.5000 at step 30" in said
    assert 'step 60, "Question 0?" → "Yes. 60"' in said
    assert "and 1 more: samples.jsonl" in said
    assert [text["step"] for text in document(one)["samples"]] == [60] * 4
    assert document(one)["best"] == best


@pytest.mark.commands
def test_an_out_of_memory_has_its_parts_beside_the_plan_and_changes_that_fit(tmp_path: Path) -> None:
    folder = out_of_memory(gpu_run(tmp_path / "run"))
    typed = ("dstrain", "run", "/jobs/8 gpus.yaml", "--port", "29600")
    StateWriter(RunDir(folder), typed).write(stage=Stage.FAILED, host="localhost")
    one = reported(folder)
    text = lines(one)
    said = " ".join(" ".join(text).split())
    assert "Out of GPU memory: rank 3, backward of step 5; micro-batch of 4 × 4,096 tokens, samples of" in said
    assert "2.00 GiB requested; PyTorch held 76.0 GiB, 70.0 GiB of it in tensors; 1.00 GiB of" in said
    rows = {row[0]: row[1:] for line in text if len(row := re.split(r"  +", line.strip())) == 3}
    assert rows["parameters"] == ["16.0 GiB", "17.0 GiB"]
    assert rows["outside of PyTorch"] == ["1.00 GiB", "-"]
    assert rows["total"] == ["18.0 GiB", "-"], "one part was not measured"
    assert "Largest tensors at the planned peak (layer backward): 36 × 96.0 MiB after mlp.gate_proj" in said
    assert "Largest live blocks of the GPU: 2 × 4.00 GiB" in said
    assert "1. micro-batch 2 × 16 accumulated, ZeRO-3: 55.0 GiB per GPU, a step takes 3 % longer" in said
    again = f"{shlex.join(typed)} --set micro_batch=2 --set grad_accum=16"
    assert f"in ds_config.json zero_optimization.stage: 3; then {again}" in said
    assert document(one)["out_of_memory"] == json.loads((tmp_path / "run" / "oom.json").read_text())


def test_a_record_that_no_launcher_completed_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = out_of_memory(gpu_run(tmp_path / "run"))
    written = json.loads((folder / "oom.json").read_text())
    ranks = {key: value for key, value in written.items() if key not in ("states", "predicted", "ledger", "fixes")}
    (folder / "oom.json").write_text(json.dumps(ranks))
    text = "\n".join(lines(reported(folder)))
    assert "Out of GPU memory: rank 3" in text
    assert not any(words in text for words in ("planned peak", "Changes that fit"))


def test_a_failed_run_has_one_cause_and_the_rule_that_ended_it_leads(tmp_path: Path) -> None:
    place = RunDir(night(tmp_path / "run"))
    StateWriter(place).write(stage=Stage.FAILED, exit_code=1)
    cause = "the health rule divergence ended the run: step 40: it diverges."
    place.failure.write_text(f"{cause}\nits log says nothing\nLogs: …\n")
    found = [("padding", "warning", "tell"), ("zero_loss", "critical", "tell"), ("divergence", "critical", "stop")]
    rows = [
        {"rule": rule, "severity": severity, "action": action, "step": 20 + at, "message": "…", "time_s": 2e9}
        for at, (rule, severity, action) in enumerate(found)
    ]
    place.health.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    one = reported(place.path)
    assert [mark.rule for mark in one.marks] == ["divergence", "zero_loss", "padding"]
    head = lines(one)
    assert "ended by the health rule divergence, " in head[0]
    assert head[1] == f"  {cause}"
    assert head[2] == ""
    assert (document(one)["cause"], document(one)["stopped_by"]) == (cause, "divergence")
    assert page([one]).count(cause) == 1
    assert status.document(place, state.read(place))["cause"] == cause


def test_runs_side_by_side_show_the_settings_that_differ(tmp_path: Path) -> None:
    folders = [night(tmp_path / name) for name in ("a", "b")]
    for folder, rate in zip(folders, (0.02, 0.01), strict=True):
        request = folder / "request.json"
        job = json.loads(request.read_text()) | {"learning_rate": rate, "output_dir": str(folder)}
        request.write_text(json.dumps(job))
    reports = [reported(folder) for folder in folders]
    assert differing(reports) == {"learning_rate": (0.02, 0.01)}
    rows = {row[0]: row[1:] for row in side_by_side(reports)}
    assert rows["learning_rate"] == ["0.02", "0.01"]
    assert rows["hand edits"] == ["2", "2"]


def test_a_run_without_checks_before_its_first_step_says_so(tmp_path: Path) -> None:
    folder = night(tmp_path / "night")
    asked = json.loads((folder / "request.json").read_text())
    words = "the checks before the first step were off (preflight: false)"
    for is_on in (True, False):
        (folder / "request.json").write_text(json.dumps(asked | {"preflight": is_on}))
        missing = report(read(RunDir(folder)), now=0).missing
        assert any(text.startswith(words) for text in missing) is not is_on


def test_a_run_of_an_earlier_version_keeps_its_job_without_keys_that_are_gone(tmp_path: Path) -> None:
    folder = night(tmp_path / "night")
    request = folder / "request.json"
    job = json.loads(request.read_text())
    now = read(RunDir(folder)).job
    gone = {"kto": {"beta": 0.1}, "audio_max_seconds": 30, "health": {**job["health"], "divergence": {"warn": 2.0}}}
    request.write_text(json.dumps({**job, **gone, "monitor": {**job["monitor"], "notify": []}}))
    record = read(RunDir(folder))
    assert (record.job, record.unread) == (now, ())
    request.write_text(json.dumps({**job, "task": "kto"}))
    record = read(RunDir(folder))
    assert (record.job, record.unread) == (None, ("request.json is damaged, or of another dstrain",))
