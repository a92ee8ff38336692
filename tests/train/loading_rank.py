"""A program, one rank: loads a model as a job does and writes how much RAM of its own that took to FOLDER/RANK.json."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from pathlib import Path

import deepspeed  # type: ignore[import-untyped]
import peft  # noqa: F401  # imported before the measurement, and bitsandbytes with it
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

from dstrain.choices import Method, Precision
from dstrain.job.schema import Job
from dstrain.train.model import load_model

M_MMAP_THRESHOLD = -3


def own_bytes() -> int:
    """Returns resident bytes of this process without those of files, which the kernel can drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main(model: str, method: Method, precision: Precision, stage: int, folder: Path) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # freed at once, as tensors of real size (32 MiB) always are
    deepspeed.init_distributed("gloo", verbose=False)
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    ds_config = {**zero, "bf16": {"enabled": precision is Precision.BF16}}
    config = HfDeepSpeedConfig(ds_config)
    job = Job(model=model, output_dir="unused", method=method, precision=precision)
    torch.distributed.barrier()
    before, highest, is_over = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not is_over.wait(0.001):
            highest = max(highest, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = load_model(job, model, ds_config)
    highest = max(highest, own_bytes())
    is_over.set()
    watcher.join()
    torch.distributed.barrier()
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(highest - before))
    del loaded, config


if __name__ == "__main__":
    main(sys.argv[1], Method(sys.argv[2]), Precision(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
