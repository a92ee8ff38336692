"""The loss of a loaded model beside that with which it was saved."""

from __future__ import annotations

import pytest
import torch

from dstrain.errors import RunFailed
from dstrain.monitor.meter import COUNTS, Counts
from dstrain.train.checkpoints.resume_check import Known, of_first_group, own_batch, verdict


def known(loss: float) -> Known:
    return Known(kind="", batches=[], loss=loss)


@pytest.mark.parametrize(
    ("before", "now", "begins"),
    [
        (7.0, 7.0, "resume check: a loss of 7 when checkpoint-8 was saved, and 7 now (difference 0)"),
        (7.0, 7.0069, "resume check: "),
        (7.0, 7.0071, "warning: resume check: "),
        (7.0, 6.931, "warning: resume check: "),
        (1e-5, 2e-5, "resume check: "),  # rounding, which is large beside almost nothing
    ],
)
def test_a_small_difference_is_said_and_a_larger_one_is_a_warning(before: float, now: float, begins: str) -> None:
    assert verdict("checkpoint-8", known(before), now).startswith(begins)


@pytest.mark.parametrize("now", [7.0701, 6.92, None])
def test_a_large_difference_ends_the_run(now: float | None) -> None:
    with pytest.raises(RunFailed, match="a loss of 7 when checkpoint-8 was saved") as caught:
        verdict("checkpoint-8", known(7.0), now)
    assert "--no-resume-check" in str(caught.value.hint)


def test_what_is_not_a_tensor_cannot_be_stored() -> None:
    tensors = {"input_ids": torch.ones(1, 2)}
    own = own_batch({**tensors, COUNTS: Counts()})
    assert own is not None
    assert own.keys() == tensors.keys()
    assert own_batch({**tensors, "names": ["a"]}) is None
    assert of_first_group(None, 1, None) == []
