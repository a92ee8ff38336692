"""The Trainer of a rank, without a launch."""

from __future__ import annotations

import pytest
import torch
import transformers
from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]

from dstrain.train.trainer import Trainer


def test_micro_batches_of_a_step_come_to_the_device_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = DataLoaderShard([torch.zeros(1)] * 4, device=torch.device("meta"))  # type: ignore[no-untyped-call]
    assert {batch.device.type for batch in prepared} == {"meta"}
    monkeypatch.setattr(transformers.Trainer, "get_train_dataloader", lambda self: prepared)
    trainer = object.__new__(Trainer)
    trainer.train_dataset, trainer._progress = [], None
    assert {batch.device.type for batch in trainer.get_train_dataloader()} == {"cpu"}
