"""What each lever is worth: tokens a second and bytes with it off and on, all else as in the plan that dstrain chooses.

Examples: python benchmarks/levers.py
          python benchmarks/levers.py --only 1 5

A star marks a lever that the plan uses, ! a configuration that does not fit. What no rule allows beside the rest of the
plan is left out, and so is what changes nothing. All figures are predicted. `pytest tests/test_levers.py --update`
writes them into docs/levers.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.questions import asked
from dstrain.choices import Attention, LossKernel, Offload, Optimizer
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration, changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.plan.search.decide import choice
from dstrain.plan.search.rules import broken
from dstrain.units import GIB

WIDTH = 80
PAIRS = (
    "--model qwen3-8b --gpus 1 --gpu 4090 --method lora",
    "--model qwen3-14b --gpus 1 --gpu 4090 --method qlora",
    "--model qwen3-8b --gpus 8 --gpu 4090",
    "--model qwen3-8b --gpus 8 --gpu h100-sxm --seq-len 32768",
    "--model qwen3-32b --gpus 8 --gpu h100-sxm",
    "--model llama-3.1-70b --gpus 16 --gpu a100-80g --interconnect eth25",
)
"""Models and clusters: cards and nodes, adapters and whole models, short and long rows, fast and slow links."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One choice, without it and with it."""

    name: str
    off: Mapping[str, Any]
    on: Mapping[str, Any]


_ALL = {"grad_ckpt": True, "grad_ckpt_every_n_layers": 1}
_KEPT = {"activation_offload": False, "tiled_mlp": False}
LEVERS = (
    Lever("loss without whole logits", {"loss": LossKernel.FULL}, {"loss": LossKernel.FUSED}),
    Lever("all layers recomputed", {**_ALL, **_KEPT, "grad_ckpt": False}, {**_ALL, **_KEPT}),
    Lever("every 2nd instead of all", {**_ALL, **_KEPT}, {**_ALL, **_KEPT, "grad_ckpt_every_n_layers": 2}),
    Lever("layers' inputs in RAM", {**_ALL, "activation_offload": False}, {**_ALL, "activation_offload": True}),
    Lever("tiled MLPs", {**_ALL, "tiled_mlp": False}, {**_ALL, "tiled_mlp": True}),
    Lever("8-bit AdamW", {"optimizer": Optimizer.ADAMW}, {"optimizer": Optimizer.ADAMW_8BIT}),
    Lever("optimizer in RAM", {"offload": Offload.NONE, "offload_ratio": 1.0}, {"offload": Offload.OPTIMIZER}),
    Lever("FlashAttention-2", {"attn": Attention.SDPA}, {"attn": Attention.FLASH_ATTENTION_2}),
    Lever("Liger's kernels", {"liger": False}, {"liger": True}),
    Lever("SP 2", {"sp": 1}, {"sp": 2}),
    Lever("hpZ 8", {"hpz": 1}, {"hpz": 8}),
    Lever("parameters in 8 bits (qwZ)", {"qwz": False}, {"qwz": True}),
)
"""The levers, by the names of `configuration.choices`."""


def rows(workload: Workload, chosen: Configuration) -> list[str]:
    """Returns a line for each lever that the plan could have, or has."""
    lines = []
    for lever in LEVERS:
        pair = [changed(chosen, **values) for values in (lever.off, lever.on)]
        if any(broken(workload, configuration) for configuration in pair):
            continue
        off, on = (assess(workload, configuration) for configuration in pair)
        if (_rate(off), _gib(off)) != (_rate(on), _gib(on)):
            mark = "*" if pair[1] == chosen else " "
            gain = f"{round(100 * (_rate(on) / _rate(off) - 1)):+d} %"
            lines.append(
                f"{mark} {lever.name:28}{_rate(off):9,.0f}{_rate(on):9,.0f}{gain:>8}{_gib(off):>11}{_gib(on):>11}"
            )
    return lines


def _rate(estimate: Estimate) -> float:
    """Returns tokens a second on each GPU."""
    assert estimate.speed is not None, "all GPUs of the pairs have known speeds"
    return estimate.speed.tokens_per_s_per_gpu


def _gib(estimate: Estimate) -> str:
    """Returns the memory of one GPU, marked if the plan does not fit."""
    return f"{estimate.memory.device_bytes_per_gpu / GIB:.1f}{' ' if estimate.fits else '!'}"


def table(words: str) -> list[str]:
    """Returns the lines of one model and cluster."""
    question = asked(shlex.split(words))
    chosen = choice(question.workload, question.request).configuration
    head = f"{'':30}{'tok/s off':>9}{'on':>9}{'gain':>8}{'GiB off':>10} {'on':>9} "
    title = textwrap.wrap(f"{words.replace('--', '')}: {label(chosen)}", WIDTH, break_on_hyphens=False)
    return [*title, head.rstrip(), *(line.rstrip() for line in rows(question.workload, chosen))]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of the pairs")
    options = parser.parse_args()
    everything = range(1, len(PAIRS) + 1)
    numbers = options.only or everything
    if wrong := sorted({*numbers} - {*everything}):
        parser.error(f"--only {wrong[0]}: numbers go from 1 to {len(PAIRS)}")
    for number in numbers:
        print("\n".join(table(PAIRS[number - 1])), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
