"""A program, one rank: loads 4-bit models, and fails if an evaluation packs weights, or if a tower is quantized.

It evaluates as on a CPU with AVX512-BF16.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dstrain.choices import Method, Precision
from dstrain.facts.model.families import from_config
from dstrain.job.schema import Job
from dstrain.train.model import load_model
from tests.train.engine_cases import SEEING


def stored(module: Any) -> torch.Tensor:
    """Returns the bytes of 4-bit weights, which are no numbers in the dtype that they are stored as."""
    weight: torch.Tensor = module.weight.data
    return weight.view(torch.uint8)


def require_whole_tower() -> None:
    """Fails if other linears of a vision-language model are quantized than the plan has in 4 bits."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config: dict[str, Any] = SEEING
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config)).save_pretrained("seeing")
    job = Job(model="seeing", output_dir="unused", method=Method.QLORA, precision=Precision.BF16)
    planned = {group.name for group in from_config(SEEING, name="", source="").tensors if group.is_quantizable}
    names = {name.replace(".base_layer", "") for name in quantized(load_model(job, "seeing", {}))}
    assert all(".language_model.layers." in name for name in names)
    assert {".".join([*name.split(".")[-2:], "weight"]) for name in names} == planned


def quantized(model: Any) -> dict[str, Any]:
    """Returns the linears in 4 bits."""
    from bitsandbytes.nn import modules  # which `make qlora` installs

    return {name: module for name, module in model.named_modules() if isinstance(module, modules.Linear4bit)}


def main(model: str) -> None:
    from bitsandbytes.nn import modules  # which `make qlora` installs

    modules.has_avx512bf16 = lambda: True
    job = Job(model=model, output_dir="unused", method=Method.QLORA, precision=Precision.BF16)
    loaded = load_model(job, model, {}).eval()
    linear = list(quantized(loaded).values())
    before = [stored(module).clone() for module in linear]
    with torch.no_grad():
        loaded(torch.arange(8)[None])
    assert linear
    assert all(torch.equal(stored(module), weight) for module, weight in zip(linear, before, strict=True))
    require_whole_tower()


if __name__ == "__main__":
    main(sys.argv[1])
