"""The evaluation loss on one, two and three ranks against the loss of each sample alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dstrain.train import demo
from dstrain.train.data.collate import shift
from dstrain.train.loss import loss_of, mean_loss
from tests.train import evaluating
from tests.train.engine import Engine


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> list[Any]:
    """What every rank measured: ranks, packing, micro-batch, loss, targets, forwards."""
    folder = tmp_path_factory.mktemp("evaluating")
    codes = engine.run("tests.train.evaluating", folder, log=folder / "log", ranks=evaluating.RANKS)
    assert codes == [0] * evaluating.RANKS, (folder / "log.0").read_text()[-4000:]
    return [line for file in sorted(folder.glob("rank*.json")) for line in json.loads(file.read_text())]


def test_the_loss_is_that_of_each_sample_alone_on_any_ranks_in_any_micro_batch_packed_or_not(lines: list[Any]) -> None:
    model = demo.make_model(evaluating.Tokens(), hidden_size=64, num_hidden_layers=2).eval()
    total, number = 0.0, 0
    for sample in evaluating.rows_of(packing=False):
        ids, labels = (torch.from_numpy(sample[name])[None] for name in ("input_ids", "labels"))
        targets = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss.detach()) * targets
        number += targets
    assert len(lines) == (1 + 2 + 3) * 2 * len(evaluating.MICRO_BATCHES)
    for _, _, _, loss, targets, _ in lines:
        assert loss == pytest.approx(total / number, rel=1e-6)
        assert targets == number


def test_every_rank_does_as_many_forwards(lines: list[Any]) -> None:
    forwards: dict[tuple[Any, ...], set[int]] = {}
    for *way, _, _, number in lines:
        forwards.setdefault(tuple(way), set()).add(number)
    assert all(len(numbers) == 1 for numbers in forwards.values())


def test_a_first_token_is_no_target() -> None:
    logits = torch.zeros(1, 3, 4)
    loss, targets = loss_of(logits, shift(torch.tensor([[1, -100, 2]]))).tolist()
    assert (loss, targets) == (pytest.approx(1.3862943611198906), 1)


def test_data_without_a_target_have_no_loss() -> None:
    batch = {"labels": torch.full((1, 2), -100)}
    loss, targets = mean_loss(lambda batch: loss_of(torch.zeros(1, 2, 4), batch["labels"]), [batch], None)
    assert (loss != loss, targets) == (True, 0)
