"""A program, one rank: evaluates a QLoRA model as on a CPU with AVX512-BF16, and fails if that packs its weights."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dstrain.choices import Method, Precision
from dstrain.job.schema import Job
from dstrain.train.model import load_model


def stored(module: Any) -> torch.Tensor:
    """Returns the bytes of 4-bit weights, which are no numbers in the dtype that they are stored as."""
    weight: torch.Tensor = module.weight.data
    return weight.view(torch.uint8)


def main(model: str) -> None:
    from bitsandbytes.nn import modules  # which `make qlora` installs

    modules.has_avx512bf16 = lambda: True
    job = Job(model=model, output_dir="unused", method=Method.QLORA, precision=Precision.BF16)
    loaded = load_model(job, model, {}).eval()
    linear = [module for module in loaded.modules() if isinstance(module, modules.Linear4bit)]
    before = [stored(module).clone() for module in linear]
    with torch.no_grad():
        loaded(torch.arange(8)[None])
    assert linear
    assert all(torch.equal(stored(module), weight) for module, weight in zip(linear, before, strict=True))


if __name__ == "__main__":
    main(sys.argv[1])
