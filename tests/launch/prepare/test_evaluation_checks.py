"""Keys of a job that need evaluations, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Interval
from dstrain.config.lint.rule import JobContext
from dstrain.errors import InvalidConfig, Place
from dstrain.job.data_source import DataSource
from dstrain.job.file import JobFile
from dstrain.job.limits import require_for_media
from dstrain.job.schema import Job, Samples
from dstrain.launch.prepare.checks import EVALUATION, findings, require
from dstrain.launch.prepare.prepare import unplanned

DATA = {"eval_data": "b.jsonl"}
EPOCH = Interval.EPOCH
TEXTS = Samples(prompts=("Who are you?",))


def file(**values: Any) -> JobFile:
    job = Job(model="m", output_dir="o", **values)
    return JobFile(job=job, locate=lambda keys: Place(file=f"job.yaml: {keys[0]}", line=1, column=1))


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    [
        ({"load_best": True}, "load_best compares evaluations, but eval_data is not set", "or remove load_best."),
        (
            {**DATA, "early_stopping": 2},
            "eval_steps is not set, and the only one is that at the end",
            "eval_steps: 500",
        ),
        (
            {**DATA, "early_stopping": 2, "eval_steps": 100},
            "early_stopping needs a checkpoint of each evaluation, but eval_steps is 100 and save_steps is 500",
            "save_steps: 100",
        ),
        (
            {**DATA, "load_best": True, "eval_strategy": EPOCH},
            "load_best needs a checkpoint of each evaluation, but eval_strategy is epoch and save_strategy is steps",
            "save_strategy: epoch",
        ),
        ({**DATA, "load_best": True, "eval_steps": 0.1, "save_steps": 0.2}, "eval_steps is 0.1", "save_steps: 0.1"),
        ({"samples": Samples()}, "samples has neither prompts nor eval_prompts", "prompts: [Who are you?]"),
        ({"samples": TEXTS}, "samples are generated at each evaluation, but eval_data is not", "generate_every: 100"),
        ({"samples": Samples(eval_prompts=2)}, "eval_prompts is 2, but eval_data is not set", "or write prompts."),
    ],
)
def test_what_lacks_evaluations_is_refused_with_what_to_write(values: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        require(EVALUATION, JobContext(job=file(**values)))
    assert said in str(caught.value)
    assert hint in str(caught.value.hint)
    assert "\n" not in caught.value.problem


@pytest.mark.parametrize(
    "values",
    [
        {**DATA, "early_stopping": 2, "eval_steps": 100, "save_steps": 100},
        {**DATA, "load_best": True, "eval_steps": 100, "save_steps": 50},
        {**DATA, "load_best": True, "eval_strategy": EPOCH, "save_strategy": EPOCH},
        {"samples": Samples(prompts=("Who are you?",), generate_every=10)},
        {**DATA, "samples": TEXTS},
    ],
)
def test_what_has_its_evaluations_is_accepted(values: dict[str, Any]) -> None:
    require(EVALUATION, JobContext(job=file(**values)))


@pytest.mark.parametrize(
    ("val_split", "says"),
    [
        (5.0, None),
        (6.0, "val_split is 6, which holds out 6 of 6 samples"),
        (0.05, "val_split is 0.05, which holds out 0 of 6 samples"),
    ],
)
def test_a_split_that_leaves_nothing_is_refused_before_any_work(
    tmp_path: Path, val_split: float, says: str | None
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3 + '{"text": "b"}')  # the last line is not ended
    (tmp_path / "b.json").write_text('[{"text": "a"}, {"text": "b"}, {"text": "c"}]')
    data = (str(tmp_path / "*.jsonl"), DataSource(path=str(tmp_path / "b.json"), max_samples=2))
    found = findings(EVALUATION, JobContext(job=file(data=data, val_split=val_split)))
    assert [finding.problem for finding in found] == ([says] if says else [])
    assert all(finding.place.file == "job.yaml: val_split" for finding in found)
    elsewhere = (*data, str(tmp_path / "missing.jsonl"))
    assert findings(EVALUATION, JobContext(job=file(data=elsewhere, val_split=val_split))) == []


def test_a_run_that_may_end_early_is_told_once() -> None:
    (note,) = unplanned(file(early_stopping=2).job)
    assert "planned times are those of all steps, for which the learning rate (cosine) is scheduled, too" in note
    assert unplanned(file(load_best=True).job) == []
    assert unplanned(file(samples=TEXTS).job) == [
        "the time of generated samples is not planned; the log has what they take"
    ]


def test_samples_are_refused_with_images() -> None:
    with pytest.raises(InvalidConfig, match="samples is set, which data with images do not support"):
        require_for_media(file(samples=TEXTS).job, ["images"], packs=True)
