"""Checks before the first step, on two CPU ranks: what they find, and that the run after them is the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM

from dstrain.job.schema import Job
from dstrain.monitor.health.history import Facts
from dstrain.monitor.metrics import read_jsonl
from dstrain.monitor.outcomes import Check, CheckName, Preflight
from dstrain.records import load_json
from dstrain.rundir import RunDir
from dstrain.train import memory
from dstrain.train.data.collate import Collator, PackedRows, Packing, shift
from dstrain.train.loss import loss_of
from dstrain.train.preflight import samples
from dstrain.train.preflight.checks import LIMIT_S, Checks, Row
from dstrain.train.preflight.worst_batch import drawn, heaviest
from dstrain.train.rank import Rank
from tests.train.engine import Engine
from tests.train.launching import codes, make_run, said

RUNS: dict[str, dict[str, Any]] = {
    "zero2": {"zero": {"stage": 2, "overlap_comm": True}, "grad_accum": 2},
    "zero3": {"zero": {"stage": 3}, "packing": True, "seq_len": 192, "grad_accum": 2, "micro_batch": 1},
}


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """Each configuration with and without checks. Its model has dropout."""
    folder = root / "checked"
    for name, job in RUNS.items():
        for checks in (True, False):
            more: dict[str, Any] = {"eval_data": str(demo / "eval.jsonl")} if checks else {}
            run = make_run(
                folder / f"{name}-{checks}", demo, preflight=checks, max_steps=2, warmup_ratio=0.0, **more, **job
            )
            engine.train(run)
    return folder


def checks(run: Path) -> dict[CheckName, Check]:
    record = load_json(Preflight, RunDir(run).preflight)
    assert record.seconds >= sum(check.seconds for check in record.checks) - 1e-3
    return {check.name: check for check in record.checks}


def steps(run: Path) -> list[tuple[float, float]]:
    assert codes(run) == [[0, 0]], said(run)[-3000:]
    lines = read_jsonl(run / "metrics.jsonl")
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradient_norms_are_the_same_with_checks_to_the_last_bit(runs: Path, name: str) -> None:
    assert len(steps(runs / f"{name}-True")) == 2
    assert steps(runs / f"{name}-True") == steps(runs / f"{name}-False")


def test_every_check_passes_and_is_a_line_of_the_log(runs: Path) -> None:
    for name, extra in (("zero2", set()), ("zero3", {CheckName.PACKING})):
        run = runs / f"{name}-True"
        found = checks(run)
        assert set(found) == set(CheckName) - {CheckName.PACKING, CheckName.TEMPLATE, CheckName.GENERATION} | extra
        assert all(check.passed for check in found.values())
        assert all(check.line in said(run) for check in found.values())
    assert not (runs / "zero2-False" / "preflight.json").exists()


def test_the_heaviest_micro_batch_has_the_longest_sample(runs: Path) -> None:
    figures = checks(runs / "zero2-True")[CheckName.WORST_BATCH].figures
    assert (figures["rows"], figures["tokens_per_row"]) == (2, 64)


def test_states_of_adamw_are_there_before_the_first_step(runs: Path) -> None:
    for name in RUNS:
        assert checks(runs / f"{name}-True")[CheckName.WORST_BATCH].figures["reserved_bytes"] == 0


@pytest.mark.parametrize("is_fused", [True, False])
def test_states_made_before_the_first_step_are_those_that_adamw_makes_in_it(is_fused: bool) -> None:
    parameters = [torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([parameter], lr=0.1, fused=is_fused) for parameter in parameters]
    engine = SimpleNamespace(optimizer=optimizers[0], device="cpu")
    assert memory.states_to_come(engine, bytes_per_state=None) == 2 * 6 * 4
    memory.allocate_states(engine)
    assert memory.states_to_come(engine, bytes_per_state=None) == 0
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    early, late = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert list(early) == list(late)
    assert all(torch.equal(early[name], late[name]) and early[name].dtype == late[name].dtype for name in late)
    assert torch.equal(*parameters)


def test_labels_are_shown_around_the_first_text_with_loss(runs: Path) -> None:
    shown = checks(runs / "zero2-True")[CheckName.LABELS].examples
    assert len(shown) == 2
    assert all("assistant⏎⟦" in example and "\n" not in example for example in shown)


def test_a_check_that_would_exceed_the_limit_does_not_begin_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, rank = Job(model="m", data="d", output_dir="o"), Rank(index=0, world_size=1, local_index=0)
    place = RunDir(tmp_path)
    some = Checks(job=job, run_dir=place, rank=rank, group=None, tokenizer=None, facts=Facts(), step_s=None)
    some.begin(planned_steps=100)
    cheap = Check(name=CheckName.LABELS, passed=True, text="cheap")
    some._pass_s = LIMIT_S / 10
    trainer: Any = None
    some.check(Row(CheckName.LABELS, lambda checks, trainer: [cheap], passes=lambda trainer: 9), trainer)
    some.check(Row(CheckName.EVALUATION, lambda checks, trainer: [cheap], passes=lambda trainer: 11), trainer)
    some.write(step=0)
    assert [check.passed for check in load_json(Preflight, place.preflight).checks] == [True, None]
    assert "- evaluation: skipped: all checks together would take more than 1 min" in capsys.readouterr().err


def test_the_limit_grows_with_the_planned_run(tmp_path: Path) -> None:
    job, rank = Job(model="m", data="d", output_dir="o"), Rank(index=0, world_size=1, local_index=0)
    options: dict[str, Any] = {"group": None, "tokenizer": None, "facts": Facts(), "step_s": 10.0}
    some = Checks(job=job, run_dir=RunDir(tmp_path), rank=rank, **options)
    assert some.begin(planned_steps=100) == LIMIT_S
    assert some.begin(planned_steps=10_000) == pytest.approx(3_000.0)  # 3 % of 100,000 s


def rows(*lengths: int) -> datasets.Dataset:
    columns: dict[str, Any] = {"input_ids": [list(range(3, 3 + n)) for n in lengths], "length": list(lengths)}
    return datasets.Dataset.from_dict(columns | {"labels": columns["input_ids"]})


def test_heaviest_rows_are_the_longest_and_among_these_those_with_the_longest_samples() -> None:
    assert heaviest(rows(3, 9, 4, 9), 2) == [1, 3]
    assert heaviest(rows(3, 9, 4, 9), 2, among=[0, 2, 2]) == [2, 0]
    assert heaviest(rows(5), 2) == [0, 0]
    packed = PackedRows(samples=rows(4, 4, 7, 1).with_format("arrow"), rows=Packing.of([[0, 1], [2, 3]]))
    assert heaviest(packed, 1) == [1]


def test_the_draws_of_a_short_run_are_those_of_its_first_steps() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    numbers = list(range(40))
    batches = accelerator.prepare(DataLoader(numbers, batch_size=4, sampler=RandomSampler(numbers, num_samples=44)))  # type: ignore[arg-type]
    expected = drawn(batches, 20)
    assert drawn(batches, 20) == expected
    assert [int(number) for batch in batches for number in batch][:20] == expected


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, initializer_range=0.5))  # type: ignore[arg-type]
    made.eval()
    return made


def compared(model: LlamaForCausalLM, *left_out: str) -> samples.PackedLoss:
    """Returns the losses of packed samples under a model that does not get some of its inputs."""
    data = PackedRows(samples=rows(9, 12, 7).with_format("arrow"), rows=Packing.of([[0, 1, 2]]))
    collator = Collator(pad_token_id=0, packing=True)

    def totals_of(batch: Mapping[str, Any]) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key not in (*left_out, "labels")}
        with torch.no_grad():
            return loss_of(model(**inputs).logits, shift(batch["labels"]))

    members = samples.some_samples(data)
    assert members == [0, 1, 2]
    return samples.compare_samples(data, members, batch_of=lambda row: collator([row]), totals_of=totals_of, group=None)


def test_a_packed_row_has_the_loss_of_its_samples(model: LlamaForCausalLM) -> None:
    assert compared(model).agrees(samples.tolerance(torch.float32, tf32=False))


def test_a_model_that_ignores_positions_has_another_loss_of_a_packed_row(model: LlamaForCausalLM) -> None:
    pair = compared(model, "position_ids")
    found = pair.found(3, samples.tolerance(torch.float32, tf32=False), "float32")
    assert not found.passed
    assert "rounding in float32 explains 0.1%" in found.text
    assert not pair.agrees(samples.tolerance(torch.bfloat16, tf32=False))


def test_a_checkpoint_is_written_and_removed_before_the_first_step(runs: Path) -> None:
    for name in RUNS:
        run, found = runs / f"{name}-True", checks(runs / f"{name}-True")[CheckName.SAVING]
        assert "was written and removed in" in found.text
        assert not RunDir(run).save_trial.exists()
        final = sum(file.stat().st_size for file in (run / "checkpoint-2").rglob("*") if file.is_file())
        written, planned = found.figures["written_bytes"], found.figures["checkpoint_bytes"]
        assert isinstance(written, float)
        assert 0.3 * final < written < final  # without the states of the optimizer
        assert planned == pytest.approx(final, rel=0.15)
