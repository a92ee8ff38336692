"""Evaluates one model on one, two and three gloo ranks: `tests.train.evaluating FOLDER`, a JSON file for each rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dstrain.train import demo
from dstrain.train.data.collate import Collator, PackedRows, packed, shift
from dstrain.train.loss import Share, loss_of, mean_loss
from dstrain.train.rank import Rank

RANKS = 3
MICRO_BATCHES = (1, 2, 4)


class Tokens:
    """Stands for a tokenizer where only the ids matter."""

    pad_token_id = 0
    eos_token_id = 2

    def __len__(self) -> int:
        return 256


def samples() -> list[list[int]]:
    """Returns 11 samples, which no number of ranks above 1 divides."""
    random = np.random.default_rng(0)
    return [random.integers(3, 256, size).tolist() for size in random.integers(5, 40, 11)]


def rows_of(packing: bool) -> Any:
    """Returns the samples, the first half of each without loss, as they are or in rows."""
    labels = [[-100] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in samples()]
    columns = datasets.Dataset.from_dict({"input_ids": samples(), "labels": labels})
    if not packing:
        return columns.with_format("numpy")
    rows = packed(np.array([len(ids) for ids in samples()]), 64, seed=0)
    return PackedRows(samples=columns.with_format("arrow"), rows=rows)


def totals(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return loss_of(model(**batch).logits, shift(batch["labels"]))


def measured(model: Any, index: int, world_size: int, group: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the mean loss, targets and forwards of a rank for each way to put samples together."""
    rank = Rank(index=index, world_size=world_size, local_index=index)
    for packing in (False, True):
        for size in MICRO_BATCHES:
            collate = Collator(pad_token_id=0, packing=packing)
            share: Any = Share(rows=rows_of(packing), index=rank.index, count=rank.world_size)
            loader: DataLoader[Any] = DataLoader(share, batch_size=size, collate_fn=collate)
            with torch.no_grad():
                loss, targets = mean_loss(lambda batch: totals(model, batch), loader, group)
            yield world_size, packing, size, loss, targets, len(loader)


def run(index: int, folder: Path) -> None:
    """Runs one rank: alone, then beside one, then beside two others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=index, world_size=RANKS)
    groups = [dist.new_group(list(range(size))) for size in range(1, RANKS + 1)]
    model = demo.make_model(Tokens(), hidden_size=64, num_hidden_layers=2).eval()
    lines: list[Any] = []
    for world_size, group in enumerate(groups, start=1):
        if index < world_size:
            lines += measured(model, index, world_size, group if world_size > 1 else None)
    (folder / f"rank{index}.json").write_text(json.dumps(lines))
    dist.barrier()


if __name__ == "__main__":
    run(int(os.environ["RANK"]), Path(sys.argv[1]))
