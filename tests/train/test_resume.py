"""Killed and resumed, on two CPU ranks: as if nothing had happened, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.monitor.metrics import read_jsonl
from tests.train.engine import Engine
from tests.train.launching import copy_half, lines, losses, make_run, require_resumed, said, tensors, truncate_newest

EXACT = ["zero2", "zero3", "zero3_packed", "zero3_lora_packed"]


@pytest.fixture(scope="module")
def exact(root: Path, demo: Path, engine: Engine) -> Path:
    """For each configuration a run that nothing disturbs, and one that is killed and goes on."""
    folder = root / "exact"
    for name in EXACT:
        packs = name.endswith("packed")
        job: dict[str, Any] = {
            "max_steps": 8,
            "save_steps": 3,
            "resume": "auto",
            "packing": packs,
            "preflight": name in ("zero2", "zero3_packed"),
            "micro_batch": 1 if packs else 2,
            "data": str(demo / ("some.jsonl" if packs else "few.jsonl")),  # 5 steps are an epoch
            "seq_len": 256 if packs else 64,
        }
        if "lora" in name:
            job |= {"method": "lora", "lora": {"dropout": 0.2}}
        zero = {"stage": int(name[4])}
        engine.train(make_run(folder / f"{name}-whole", demo, zero=zero, **job))
        cut = make_run(folder / f"{name}-cut", demo, zero=zero, **job)
        engine.train(cut, kill_at=5 if packs else 7)
        if name == "zero2":
            truncate_newest(cut)
        engine.train(cut)
    return folder


@pytest.mark.parametrize("name", EXACT)
def test_a_run_that_was_killed_ends_as_the_undisturbed_one(exact: Path, name: str) -> None:
    require_resumed(exact / f"{name}-cut", exact / f"{name}-whole")
    assert list(losses(exact / f"{name}-whole")) == list(range(1, 9))


@pytest.mark.parametrize("name", EXACT)
def test_a_resumed_run_says_in_the_metrics_where_it_went_on(exact: Path, name: str) -> None:
    events = [line for line in read_jsonl(exact / f"{name}-cut" / "metrics.jsonl") if "event" in line]
    assert [event["event"] for event in events] == ["resume"]
    assert events[0]["from_step"] in {3, 6}


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_taken(exact: Path) -> None:
    text = said(exact / "zero2-cut")
    assert "warning: checkpoint-6 is damaged (global_step6/" in text
    assert "resuming from checkpoint-3" in text


def test_tokens_seen_go_on_counting_after_a_resume(exact: Path) -> None:
    assert lines(exact / "zero2-cut")[-1]["tokens_seen"] == lines(exact / "zero2-whole")[-1]["tokens_seen"]


def test_packed_rows_count_padding_apart_from_tokens(exact: Path) -> None:
    line = lines(exact / "zero3_packed-whole")[0]
    assert 0 < line["padding_share"] < 0.5
    rows = line["tokens"] / (1 - line["padding_share"])
    assert rows % 8 == pytest.approx(0, abs=1e-6)
    assert rows <= 512


def test_an_exported_zero_3_checkpoint_is_the_trained_model(exact: Path, root: Path, engine: Engine) -> None:
    out = root / "exported"
    assert engine.export(exact / "zero3-whole" / "checkpoint-8", out) == 0, said(out)
    exported, final = tensors(out), tensors(exact / "zero3-whole" / "final")
    assert exported.keys() == final.keys()
    # the base is in fp32: the export has the optimizer's weights, the final model those that bf16 has computed with
    assert all(exported[key].bfloat16().float().equal(final[key]) for key in final)
    assert (out / "tokenizer.json").exists()


def test_a_half_written_checkpoint_is_not_exported(exact: Path, root: Path, engine: Engine) -> None:
    copy_half(exact / "zero2-whole" / "checkpoint-8", root / "checkpoint-8")
    assert engine.export(root / "checkpoint-8", root / "nothing") == 3
    assert "was not written to its end" in said(root / "nothing")
    assert not (root / "nothing").exists()
