"""`dstrain doctor --network`, and the plans that read what it kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.facts.cluster.measured_links import MeasuredLinks, save
from tests.cli.conftest import Type

CPU = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
PLAN = ("plan", "--hosts", "gpu[01-02]", "--gpu", "h100", "--model", "qwen3-8b", "--top", "1")
ENTRY: dict[str, Any] = {
    "hosts": ("gpu01", "gpu02"),
    "gpu": "h100-sxm",
    "gpus_per_node": 8,
    "backend": "nccl",
    "date": "2026-11-22",
    "inter_bus_bytes_per_s": 8e9,
    "intra_bus_bytes_per_s": 330e9,
}


def keep(home: Path, **changes: Any) -> None:
    save(MeasuredLinks(**(ENTRY | changes)), str(home / ".dstrain" / "links.json"))


def planned(dstrain: Type, home: Path, *words: str) -> dict[str, Any]:
    done = dstrain(*PLAN, "--json", *words, HOME=str(home))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_machine_alone_has_nothing_to_measure(dstrain: Type) -> None:
    done = dstrain("doctor", "--network", **CPU)
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing to measure: one rank on this machine; --hostfile FILE names more hosts" in done.stderr
    answer = json.loads(dstrain("doctor", "--network", "--json", **CPU).stdout)
    assert answer == {"schema": 1, "network": None, "findings": []}


def test_no_save_without_a_measurement_is_a_slip(dstrain: Type) -> None:
    done = dstrain("doctor", "--no-save", **CPU)
    assert (done.returncode, "--no-save goes with --network" in done.stderr) == (2, True)


def test_placeholders_cannot_be_measured(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("CHANGE-ME-1 slots=8\nCHANGE-ME-2 slots=8\n")
    done = dstrain("doctor", "--network", "--hostfile", "hostfile", **CPU)
    assert (done.returncode, "hostfile:1:1: CHANGE-ME-1 is a placeholder" in done.stderr) == (3, True)


def test_slots_without_gpus_are_told(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    done = dstrain("doctor", "--network", "--hostfile", "hostfile", DS_ACCELERATOR="cuda", HOME=str(tmp_path))
    assert (done.returncode, "hides every GPU" in done.stderr) == (5, True)


@pytest.mark.cluster
def test_the_ranks_of_one_host_are_measured_and_a_plan_for_it_reads_that(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    done = dstrain("doctor", "--network", "--hostfile", "hostfile", HOME=str(tmp_path), OMP_NUM_THREADS="1", **CPU)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["network", "  ✓ 2 ranks of localhost, Gloo: all-reduce"]
    assert lines[-1].startswith("  ✓ inside the host ")
    assert f"kept in {tmp_path}/.dstrain/links.json" in " ".join(done.stderr.split())
    here = dstrain("plan", "--gpu", "cpu", "--gpus", "2", "--model", "qwen3-0.6b", "--top", "1", HOME=str(tmp_path))
    assert "measured on 20" in here.stdout
    other = dstrain("plan", "--gpu", "cpu", "--gpus", "4", "--model", "qwen3-0.6b", "--top", "1", HOME=str(tmp_path))
    assert "measured on 20" not in other.stdout


def test_a_plan_counts_with_what_was_measured_and_says_when(dstrain: Type, tmp_path: Path) -> None:
    before = planned(dstrain, tmp_path)
    keep(tmp_path)
    after = planned(dstrain, tmp_path)
    assert (before["cluster"]["inter_link_origin"], after["cluster"]["inter_link_origin"]) == ("assumed", "measured")
    assert after["cluster"]["inter_link"]["bytes_per_s"] == 1e9
    assert after["plans"][0]["speed"]["step_s"] > 1.1 * before["plans"][0]["speed"]["step_s"]
    assert dstrain(*PLAN, HOME=str(tmp_path)).stdout.splitlines()[2:4] == [
        "links    1.00 GB/s for each GPU between nodes, 330 GB/s inside one,",
        "         measured on 2026-11-22 by dstrain doctor --network",
    ]


def test_gen_config_says_it_too_and_leaves_it_in_the_lock(dstrain: Type, tmp_path: Path) -> None:
    keep(tmp_path)
    words = [word for word in PLAN if word not in {"plan", "--top", "1"}]
    done = dstrain("gen-config", *words, HOME=str(tmp_path))
    assert "by dstrain doctor --network" in done.stderr
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert lock["cluster"]["inter_link"]["name"] == "ib400 (measured)"
    assert dstrain("gen-config", HOME=str(tmp_path)).returncode == 0  # reads the lock again


def test_a_file_that_cannot_be_read_is_said_and_breaks_nothing(dstrain: Type, tmp_path: Path) -> None:
    before = planned(dstrain, tmp_path)
    keep(tmp_path)
    (tmp_path / ".dstrain" / "links.json").write_text('{"schema": 9}')
    done = dstrain(*PLAN, "--json", HOME=str(tmp_path))
    assert (done.returncode, json.loads(done.stdout)) == (0, before)
    assert "note: ~/.dstrain/links.json is ignored: schema is 9; this version reads 1" in done.stderr
