"""`dstrain report --calibrate`, on run directories that simulated machines leave."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calibrate import Machine, true
from dstrain.choices import Attention
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.calibration import Measured, parse
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.workload import RowContents, Workload
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.estimate import assess
from dstrain.records import to_data, to_json
from tests.cli.conftest import Type

HIDDEN = Measured(
    gemm_ratio=0.42,
    attention_ratio=0.36,
    intra_bus_bytes_per_s=2.4e11,
    context_bytes=900 * 2**20,
    nccl_bytes=1500 * 2**20,
    reserved_ratio=1.12,
)
MODEL = "qwen3-0.6b"
SHORT = RowContents(sample_tokens=60.0, attended_tokens=70.0, target_share=0.4)
VERSIONS = {"torch": "2.12.0", "deepspeed": "0.19.6"}


def run(
    folder: Path,
    *,
    num_gpus: int = 8,
    health: tuple[str, ...] = (),
    contents: RowContents | None = None,
    **chosen: Any,
) -> str:
    """Writes what a run on a machine with hidden constants leaves, and returns its folder."""
    cluster = clusters.describe(gpu=gpus.gpu("h100-sxm"), gpu_origin=Origin.MEASURED, gpus=num_gpus)
    model = probe.read_model(MODEL)
    workload = Workload(model=model, cluster=cluster)
    configuration = changed(
        DEFAULTS, **{"attn": Attention.FLASH_ATTENTION_2, "zero_stage": 2, "micro_batch": 4, **chosen}
    )
    folder.mkdir()
    facts = {"model": to_data(model), "cluster": to_data(cluster), "versions": VERSIONS}
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "plan.json").write_text(to_json(assess(workload, configuration)))
    lines = _lines(replace(workload, contents=contents), configuration)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [{"rule": rule, "step": 40, "message": "…"} for rule in health]
    (folder / "health.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return str(folder)


def _lines(workload: Workload, c: Configuration) -> list[dict[str, Any]]:
    """Returns the metrics of ten windows of ten steps; the first one is slow."""
    truth = true(Machine(cluster=workload.cluster, hidden=HIDDEN), workload, c)
    assert truth.speed is not None
    draw, ranks = random.Random(str(c)), workload.cluster.num_gpus
    tokens = 10 * c.batch.tokens * c.step.grad_accum * ranks
    lines = []
    for window in range(10):
        step_s = truth.speed.step_s * draw.gauss(1, 0.01) * (3 if window == 0 else 1)
        lines.append(
            {
                "step": 10 * (window + 1),
                "loss": 2.0,
                "tokens": tokens,
                "tokens_per_s": tokens / step_s / 10,
                "step_s": step_s,
                "padding_share": 0.0,
                "data_wait_share": 0.01,
                "data_wait_s_by_rank": [0.01 * step_s] * ranks,
                "peak_bytes_by_rank": [truth.memory.live_bytes_per_gpu] * ranks,
                "reserved_bytes_by_rank": [truth.memory.reserved_bytes_per_gpu] * ranks,
                "outside_bytes_by_rank": [truth.memory.breakdown_bytes.context] * ranks,
                "alloc_retries": 0,
                **({} if workload.contents is None else asdict(workload.contents)),
            }
        )
    return lines


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Four runs that differ."""
    return [
        run(tmp_path / "a", num_gpus=1, seq_len=1024, grad_accum=4),
        run(tmp_path / "b", seq_len=8192, micro_batch=1),
        run(tmp_path / "c", seq_len=2048, zero_stage=3, overlap_comm=True),
        run(tmp_path / "d", seq_len=4096, zero_stage=1, micro_batch=2, packing=True, contents=SHORT),
    ]


def test_the_next_plans_are_those_of_the_machine(dstrain: Type, tmp_path: Path, runs: list[str]) -> None:
    done = dstrain("report", "--calibrate", *runs, "--json", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["gpus"]["h100-sxm"]["runs"]
    for row in rows:
        assert row["planned_step_s"][1] == pytest.approx(row["step_s"], rel=0.03)
        assert row["planned_device_bytes"][1] == pytest.approx(row["device_bytes"], rel=0.01)
    assert max(abs(row["planned_step_s"][0] / row["step_s"] - 1) for row in rows) > 0.05
    written = parse((tmp_path / ".dstrain" / "calibration.json").read_text(), "calibration.json").of("h100-sxm")
    assert written.context_bytes == HIDDEN.context_bytes
    assert written.nccl_bytes == pytest.approx(HIDDEN.nccl_bytes, rel=0.001)
    assert written.reserved_ratio == pytest.approx(HIDDEN.reserved_ratio, rel=0.001)
    assert "4 runs on 1 x h100-sxm, 8 x h100-sxm, torch 2.12.0, deepspeed 0.19.6, " in (written.source or "")
    words = ("plan", "--gpus", "8", "--gpu", "h100", "--model", MODEL, "--json")
    assert dstrain(*words, HOME=str(tmp_path)).stdout != dstrain(*words, HOME=str(tmp_path / "other")).stdout


def test_shared_records_tell_what_the_runs_tell(dstrain: Type, tmp_path: Path, runs: list[str]) -> None:
    for place in runs:
        done = dstrain("report", place, "--share", f"{place}.json")
        assert done.returncode == 0, done.stderr
    records = [f"{place}.json" for place in runs]
    own, shared = (
        json.loads(dstrain("report", "--calibrate", *paths, "-n", "--json").stdout)["gpus"]["h100-sxm"]
        for paths in (runs, records)
    )
    constants = {item["name"]: item["new"] for item in own["constants"]}
    assert {item["name"]: item["new"] for item in shared["constants"]} == pytest.approx(constants, rel=1e-3)
    assert sum(value is not None for value in constants.values()) >= 5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counted": None}, "nothing of this run counts"),
        ({"num_params": 7}, "596,049,920 parameters in place of 7"),
        ({"model": {"model_type": "acme"}}, "acme"),
        ({"settings": {"zero_stage": "three"}}, "/settings/"),
    ],
)
def test_a_record_that_tells_nothing_is_refused(
    dstrain: Type, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    dstrain("report", run(tmp_path / "run"), "--share", "run.json")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    done = dstrain("report", "--calibrate", "run.json", "-n")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert problem in done.stderr


def test_a_dry_run_writes_nothing_and_other_gpus_keep_their_entry(
    dstrain: Type, tmp_path: Path, runs: list[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"schema": 1, "gpus": {"a100-80g": {"gemm_ratio": 0.7}}}')
    before = file.read_text()
    done = dstrain("report", "--calibrate", *runs, "-o", "mine.json", "-n")
    assert (done.returncode, file.read_text()) == (0, before)
    assert "nothing was written" in done.stderr
    assert dstrain("report", "--calibrate", *runs, "-o", "mine.json").returncode == 0
    after = parse(file.read_text(), "mine.json")
    assert after.of("a100-80g") == Measured(gemm_ratio=0.7)
    assert after.of("h100-sxm").context_bytes == HIDDEN.context_bytes


def test_a_constant_that_the_runs_do_not_tell_stays_and_is_named(dstrain: Type, runs: list[str]) -> None:
    done = dstrain("report", "--calibrate", *runs, "-n")
    lines = [line for line in done.stdout.splitlines() if line.startswith("stays")]
    assert any("cpu_adam_bytes_per_s" in line for line in lines), done.stdout
    assert f"next run {MODEL}, as gen-config --seq-len" in " ".join(done.stdout.split())
    alone = dstrain("report", "--calibrate", runs[1], "-n").stdout
    assert "context_bytes: every run has several ranks" in " ".join(alone.split())
    assert "reserved_ratio: one configuration does not tell it" in " ".join(alone.split())


def test_the_next_run_is_named_in_options_that_plan_takes_and_narrows_the_times(dstrain: Type, runs: list[str]) -> None:
    advice = json.loads(dstrain("report", "--calibrate", *runs, "-n", "--json").stdout)["gpus"]["h100-sxm"]["next_run"]
    assert advice["model"] == MODEL
    assert 0 < advice["step_error_after"] < advice["step_error_now"]
    words = ("plan", "--gpus", "8", "--gpu", "h100", "--model", MODEL, *advice["options"], "--json")
    planned = dstrain(*words)
    assert planned.returncode == 0, planned.stderr


def test_a_compiled_run_tells_only_its_memory_outside_of_pytorch(dstrain: Type, tmp_path: Path) -> None:
    compiled = run(tmp_path / "compiled", torch_compile=True)
    document = json.loads(dstrain("report", "--calibrate", compiled, "-n", "--json").stdout)
    (reason,) = document["left_out"]["compiled"]
    assert reason.startswith("its step time and allocator: torch.compile")
    named = {item["name"] for item in document["gpus"]["h100-sxm"]["constants"] if item["new"] is not None}
    assert named <= {"nccl_bytes", "context_bytes"}
    dstrain("report", compiled, "--share", "run.json")
    record = json.loads((tmp_path / "run.json").read_text())
    record["counted"] |= {"step_s": 0.5, "reserved_bytes": 10**10}  # as earlier versions counted them
    (tmp_path / "run.json").write_text(json.dumps(record))
    (shared,) = json.loads(dstrain("report", "--calibrate", "run.json", "-n", "--json").stdout)["left_out"].values()
    assert shared == [reason]


def test_the_time_of_a_slowed_run_does_not_count_and_is_said(dstrain: Type, tmp_path: Path) -> None:
    slow = run(tmp_path / "slow", health=("slowdown",))
    done = dstrain("report", "--calibrate", slow, "--json", HOME=str(tmp_path))
    document = json.loads(done.stdout)
    assert document["left_out"] == {"slow": ["its step time: health rule slowdown at step 40"]}
    named = {item["name"] for item in document["gpus"]["h100-sxm"]["constants"]}
    assert named == {"context_bytes", "nccl_bytes", "reserved_ratio"}
    assert document["gpus"]["h100-sxm"]["next_run"] is None
    assert (
        "left out of slow: its step time: health rule slowdown" in dstrain("report", "--calibrate", slow, "-n").stdout
    )


def test_bad_input_is_one_error_and_the_file_stays(dstrain: Type, tmp_path: Path) -> None:
    good = run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "mine.json"
    file.write_text("{")
    done = dstrain("report", "--calibrate", good, "-o", "mine.json")
    assert (done.returncode, file.read_text(), "mine.json:1:2: not JSON" in done.stderr) == (3, "{", True)
    done = dstrain("report", "--calibrate", good, "empty", "nowhere", HOME=str(tmp_path))
    assert done.returncode == 3
    assert all(f"{name} is not a run directory" in done.stderr for name in ("empty", "nowhere"))
    assert not (tmp_path / ".dstrain").exists()


@pytest.mark.parametrize("name", ["facts.json", "plan.json", "metrics.jsonl"])
def test_a_damaged_run_is_refused_without_a_traceback(dstrain: Type, tmp_path: Path, name: str) -> None:
    folder = Path(run(tmp_path / "run"))
    (folder / name).write_text("[1]" if name != "metrics.jsonl" else "")
    done = dstrain("report", "--calibrate", str(folder), HOME=str(tmp_path))
    assert done.returncode == 3, done.stdout
    assert "Traceback" not in done.stderr
