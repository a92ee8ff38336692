"""The Trainer of a rank, without a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]

from dstrain.train.parts.parallel import Alone
from dstrain.train.trainer import Trainer


def test_micro_batches_of_a_step_come_to_the_device_one_by_one() -> None:
    prepared = DataLoaderShard([torch.zeros(1)] * 4, device=torch.device("meta"))  # type: ignore[no-untyped-call]
    assert {batch.device.type for batch in prepared} == {"meta"}
    trainer: Any = object.__new__(Trainer)
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "dataloader_num_workers": 0}
    trainer.args = SimpleNamespace(**arguments, dataloader_pin_memory=False, process_index=0)
    trainer.train_dataset, trainer.data_collator, trainer._stream = [0] * 4, None, None
    trainer.num_shares, trainer._parallel = 1, Alone()
    trainer.accelerator = SimpleNamespace(prepare=lambda batches: prepared)
    assert {batch.device.type for batch in trainer.get_train_dataloader()} == {"cpu"}


def test_a_resumed_run_has_the_learning_rate_of_the_job_not_that_of_the_checkpoint() -> None:
    def schedule(rate: float) -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    saved, resumed = schedule(3.0), schedule(0.3)
    for _ in range(2):
        saved.optimizer.step()
        saved.step()
    said: list[str] = []
    rates = list(resumed.base_lrs)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.base_lrs == [3.0]  # PyTorch takes the checkpoint's
    options: dict[str, Any] = {"lr_scheduler": resumed, "optimizer": resumed.optimizer, "_rates": rates}
    Trainer._take_rates(cast("Trainer", SimpleNamespace(**options, rank=SimpleNamespace(say=said.append))))
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * 0.9**2)
    resumed.step()
    assert resumed.get_last_lr() == [pytest.approx(0.3 * 0.9**3)]
    assert said == ["learning_rate 0.3 in place of 3, with which the checkpoint was trained"]
