"""`dstrain explain --edits`: the manual edits, and what the planner says of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dstrain.cli.edits import effect_text
from dstrain.config.edits.lock import read_lock
from dstrain.config.jsonc import read
from dstrain.facts import probe
from dstrain.facts.workload import Workload
from dstrain.job.file import read_job
from dstrain.launch.prepare.job_context import request_of
from dstrain.plan.estimate import estimate
from dstrain.plan.estimate_records import Effect, effect
from tests.cli.conftest import Type, edit
from tests.cli.test_gen_config import PLAN


def estimated(folder: Path) -> Any:
    """Returns the planner's estimate of the files as they stand."""
    lock = read_lock(folder)
    assert lock is not None
    assert lock.cluster is not None
    config = read((folder / "ds_config.json").read_text(), "x").value
    job = read_job(folder / "job.yaml").job
    return estimate(Workload(model=probe.read_model("qwen3-32b"), cluster=lock.cluster), request_of(job), config)


def test_without_edits_it_says_so(dstrain: Type) -> None:
    dstrain(*PLAN)
    assert dstrain("explain", "--edits").stdout == "no edits since the files were generated\n"


def test_without_a_lock_nobody_knows(dstrain: Type) -> None:
    done = dstrain("explain", "--edits")
    assert (done.returncode, "dstrain gen-config --adopt" in done.stderr) == (3, True)


def test_each_edit_has_the_estimators_numbers(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    before = estimated(tmp_path)
    edit(tmp_path / "ds_config.json", '"overlap_comm": true', '"overlap_comm": false')
    overlap = effect(before, estimated(tmp_path))
    edit(tmp_path / "job.yaml", "seq_len: 4096", "seq_len: 1024")
    together = effect(before, estimated(tmp_path))
    shown = dstrain("explain", "--edits").stdout
    assert f"zero_optimization.overlap_comm true → false: {effect_text(overlap)}\n" in shown
    assert f"all together: {effect_text(together)}\n" in shown
    found = json.loads(dstrain("explain", "--edits", "--json").stdout)
    assert found["edits"][0]["effect"]["device_bytes_per_gpu"] == overlap.device_bytes_per_gpu != 0
    assert found["edits"][0]["effect"]["step_ratio"] == overlap.step_ratio != 0
    assert found["together"]["device_bytes_per_gpu"] == together.device_bytes_per_gpu


def test_what_the_planner_has_no_opinion_on_has_no_numbers(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    edit(tmp_path / "job.yaml", "learning_rate: 1e-05", "learning_rate: 2e-5")
    edit(tmp_path / "hostfile", "CHANGE-ME-1", "gpu01")
    shown = dstrain("explain", "--edits").stdout
    assert "learning_rate 1e-05 → 2e-05: no effect on memory or speed\n" in shown
    assert "gpu01 (none) → 8" in shown
    assert "all together" not in shown


def test_without_facts_of_the_model_the_edits_are_listed(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    edit(tmp_path / "job.yaml", "seq_len: 4096", "seq_len: 1024")
    edit(tmp_path / ".dstrain" / "lock.json", '"model": "qwen3-32b"', '"model": "./gone"')
    done = dstrain("explain", "--edits")
    assert (done.returncode, "seq_len 4096 → 1024\n" in done.stdout) == (0, True)
    assert "no estimate: " in done.stderr
    assert "gone" in done.stderr


def test_an_edit_that_makes_no_sense_is_named_and_the_others_are_estimated(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    edit(tmp_path / "job.yaml", 'method: "full"', 'method: "lara"')
    edit(tmp_path / "job.yaml", "seq_len: 4096", "seq_len: 1024")
    shown = dstrain("explain", "--edits").stdout
    assert 'method "full" → "lara": no estimate: ' in shown
    assert "step time" in shown


def test_a_degree_that_does_not_divide_the_heads_has_no_numbers(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    with (tmp_path / "job.yaml").open("a") as file:
        file.write("tp: 128\n")
    done = dstrain("explain", "--edits")
    assert (done.returncode, "no estimate: TP must divide the GPUs of a node" in " ".join(done.stdout.split())) == (
        0,
        True,
    )


def test_a_removed_file_is_listed(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    (tmp_path / "hostfile").unlink()
    assert dstrain("explain", "--edits").stdout == "hostfile: removed; gen-config writes it again\n"


def test_what_is_not_counted_is_said_in_lints_words(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--gpu", "a100", "--model", "qwen3-8b", "--zero-stage", "2")
    edit(
        tmp_path / "ds_config.json", '"stage": 2,', '"stage": 2, "offload_param": {"device": "cpu"}, "round_robin": 1,'
    )
    edit(tmp_path / "job.yaml", "packing: false", "packing: true")
    edit(tmp_path / "hostfile", "localhost slots=8", "localhost slots=4")
    shown = dstrain("explain", "--edits").stdout
    assert 'zero_optimization.offload_param (none) → {"device": "cpu"}: an error, DS201: ' in shown
    assert "no effect that the planner estimates" not in shown
    assert "packing false → true: " in shown
    assert "so an epoch has fewer steps; the time includes sdpa's mask" in shown
    assert "localhost 8 → 4: changes the machines: run dstrain gen-config to plan for them" in shown


def test_an_edit_is_judged_beside_all_others_as_lint_does(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--gpu", "a100", "--model", "qwen3-8b", "--zero-stage", "2")
    zenflow = '"stage": 2, "zenflow": {"topk_ratio": 0.1}, '
    edit(tmp_path / "ds_config.json", '"stage": 2,', zenflow)
    assert "zenflow (none) → {" + '"topk_ratio": 0.1}: an error, DS307: ' in dstrain("explain", "--edits").stdout
    edit(tmp_path / "ds_config.json", zenflow, f'{zenflow}"offload_optimizer": {{"device": "cpu"}}, ')
    adamw = '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n'
    edit(tmp_path / "ds_config.json", '"zero_optimization"', f'{adamw}"zero_optimization"')
    edit(tmp_path / "job.yaml", "grad_accum: 8", "grad_accum: 1")
    done = dstrain("explain", "--edits")
    assert ("an error" in done.stdout, "errors" in done.stderr) == (False, False), done
    edit(tmp_path / "ds_config.json", '"train_batch_size": "auto"', '"train_batch_size": 17')
    edit(tmp_path / "job.yaml", "seed: 42", "seed: 42\noptimizer: adamw_bf16")
    edit(tmp_path / "ds_config.json", adamw, "")
    edit(tmp_path / "job.yaml", 'precision: "bf16"', 'precision: "fp32"')
    done, linted = dstrain("explain", "--edits"), dstrain("lint", "--json")
    assert 'train_batch_size "auto" → 17: an error, DS410: ' in done.stdout
    assert re.search(r'optimizer \(none\) → "adamw_bf16": .*an error, DS808: dstrain run refuses it', done.stdout)
    num_errors = sum(finding["severity"] == "error" for finding in json.loads(linted.stdout)["findings"])
    assert f"the files have {num_errors} errors: dstrain lint shows them" in done.stderr


def test_measured_links_that_cannot_be_read_are_said(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--gpu", "a100", "--model", "qwen3-8b", "--zero-stage", "2")
    edit(tmp_path / "job.yaml", "packing: false", "packing: true")
    links = tmp_path / "home" / ".dstrain" / "links.json"
    links.parent.mkdir(parents=True)
    links.write_text('{"schema": 2}')
    for words in (("explain", "--edits"), ("lint",), ("explain", "reduce_bucket_size")):
        done = dstrain(*words, HOME=str(tmp_path / "home"))
        assert " ".join(done.stderr.split()).count("schema is 2; this version reads 1") == 1, (words, done.stderr)


def test_the_two_keys_of_bf16_states_are_judged_together(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--gpu", "a100", "--model", "qwen3-8b", "--zero-stage", "2")
    both = '"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true'
    edit(tmp_path / "ds_config.json", '"bf16": {', f'"bf16": {{ {both},')
    rows = json.loads(dstrain("explain", "--edits", "--json").stdout)["edits"]
    alone, together = rows[0]["effect"], json.loads(dstrain("explain", "--edits", "--json").stdout)["together"]
    assert [row["key"] for row in rows] == ["bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"]
    assert all(row["effect"] == together for row in rows), rows
    assert alone["device_bytes_per_gpu"] < 0
    assert "both keys of bf16 states together" in dstrain("explain", "--edits").stdout


def test_lint_diff_and_explain_have_one_number_for_a_bucket(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--model", "qwen3-8b", "--zero-stage", "2", "--loss", "full")
    edit(tmp_path / "ds_config.json", '"reduce_bucket_size": 200000000', '"reduce_bucket_size": 1000000000')
    assert (
        "200000000 → 1000000000: +4.5 GiB" in dstrain("explain", "--edits").stdout
    )  # 8e8 elements, 2 bytes, three copies
    assert "write 200000000, which takes 4.47 GiB less" in dstrain("lint").stdout
    explained = " ".join(dstrain("explain", "reduce_bucket_size").stdout.split())
    assert "1000000000 (5.59 GiB of each GPU at most: two buckets and the copy that is reduced)" in explained
    assert "200000000 −4.5 GiB" in explained


@pytest.mark.parametrize(
    ("count", "host", "slower", "faster", "fits", "text"),
    [
        (-429496730, 0, 0.06, -0.0566, True, "−0.4 GiB, +6 % step time"),
        (0, 2**30, 0.0, 0.0, True, "±0.0 GiB, +1.0 GiB of RAM a node, ±0 % step time"),
        (2**40, 0, 1.0, 0.0, False, "+1024.0 GiB, step time × 2.0, ±0 % tokens/s, no longer fits"),
        (2**20, 0, None, None, True, "+1.00 MiB"),
    ],
)
def test_an_effect_in_words(
    count: int, host: int, slower: float | None, faster: float | None, fits: bool, text: str
) -> None:
    found = Effect(
        device_bytes_per_gpu=count,
        host_bytes_per_node=host,
        step_ratio=slower,
        tokens_ratio=faster,
        fits_before=True,
        fits=fits,
    )
    assert effect_text(found) == text


def test_an_optimizer_in_the_configuration_has_its_effect_and_explanation(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    edit(tmp_path / "ds_config.json", "{", '{"zero_allow_untested_optimizer": true, "optimizer": {"type": "Lion"},')
    assert re.search(r"optimizer \(none\) → .*: −[\d.]+ GiB", dstrain("explain", "--edits").stdout)
    edit(tmp_path / "ds_config.json", '"Lion"', '"Lamb"')
    text = "Lamb is planned as AdamW: its own states and time are not counted"
    assert text in dstrain("explain", "--edits").stdout
    assert text in dstrain("explain", "optimizer.type").stdout
    assert text in " ".join(dstrain("explain").stdout.split())
