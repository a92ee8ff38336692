"""CPU seconds per 1,000 tokens on two CPU ranks: dstrain, TRL with packing, LLaMA-Factory with neat packing.

Example: python benchmarks/peers.py /tmp/peers --json benchmarks/results/peers-2-cores.json
         python benchmarks/peers.py /tmp/peers --tools dstrain --experts 16 --rounds 24 --steps 3 --precisions fp32 \\
             --json benchmarks/results/experts-2-cores.json

Each tool trains the same tiny model on the same conversations with the same DeepSpeed configuration, in its own way and
in an environment of its own, which is made from PyPI below the folder. All start together and then take turns, round by
round, so that other load slows all of them equally. Counted are the CPU seconds of all ranks for 1,000 tokens
that are not padding; `ratio` is dstrain's over a tool's. `held-out` is the loss of each model on the same samples after
the last step. Of dstrain's CPU seconds, those of its monitoring are counted too. With `--experts` each layer of the
model has that many, dstrain counts their tokens in every other round, and a line has the ratio of these rounds to the
others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from benchmarks.peer_tools import TOOLS, Case, Run, interpreter, make_case, versions
from benchmarks.tokenization_peers import TAGGED
from dstrain.train import demo
from dstrain.train.data.rendering import IGNORED

HELD_OUT = 64
"""Samples of the demo's evaluation data."""
_SUMMED = ("cpu_s", "monitor_cpu_s", "experts_cpu_s", "tokens", "positions", "targets")
SIZES = {
    "rounds": 5, "steps": 5, "warmup": 5, "seq_len": 512, "micro_batch": 2, "grad_accum": 1, "samples": 2000,
    "hidden_size": 256, "layers": 4, "experts": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round of one tool."""

    zero_stage: int
    precision: str
    tool: str
    number: int
    """Of the round, from 0."""
    cpu_s: float
    """CPU seconds of all ranks per 1,000 tokens that are not padding."""
    wall_s: float
    """Seconds per 1,000 tokens."""
    monitor_share: float
    """Share of dstrain's monitoring in the CPU seconds of the ranks, 0…1."""
    experts_share: float
    """The same of counting the tokens of each expert; 0 in rounds that do not count."""
    launcher_cpu_s: float
    """CPU seconds of the launcher's processes per 1,000 tokens."""
    tokens_per_step: float
    """Tokens of a step on all ranks, without padding."""
    filled: float
    """Share of the positions that are not padding, 0…1."""
    targets: float
    """Share of the tokens that have loss, 0…1."""
    last_loss: float | None
    """The loss that the tool logged last, as it normalizes it; known after the last round."""
    held_out_loss: float | None
    """Mean loss per target of samples that were not trained on, computed alike for all tools, after the last round."""


def measured(ranks: Sequence[Mapping[str, float]], steps: int, **names: Any) -> Measured:
    """Returns the figures of a run from those of its ranks."""
    total = {name: sum(rank[name] for rank in ranks) for name in _SUMMED}
    thousands = total["tokens"] / 1000
    return Measured(
        **names,
        cpu_s=total["cpu_s"] / thousands,
        wall_s=max(rank["wall_s"] for rank in ranks) / thousands,
        monitor_share=total["monitor_cpu_s"] / total["cpu_s"],
        experts_share=total["experts_cpu_s"] / total["cpu_s"],
        launcher_cpu_s=ranks[0]["launcher_cpu_s"] / thousands,
        tokens_per_step=total["tokens"] / steps,
        filled=total["tokens"] / total["positions"],
        targets=total["targets"] / total["tokens"],
        last_loss=ranks[0].get("last_loss"),
        held_out_loss=ranks[0].get("held_out_loss"),
    )


def make_inputs(folder: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Writes the model, the conversations and the samples held out; returns what ranks need to know of them."""
    demo.build(folder)
    (folder / "data").mkdir()
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[: sizes["samples"]]
    (folder / "data" / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TAGGED  # the same text, with the answers marked, as TRL needs it
    tokenizer.save_pretrained(folder / "model")
    shape = {"hidden_size": sizes["hidden_size"], "num_hidden_layers": sizes["layers"], "num_experts": sizes["experts"]}
    demo.make_model(tokenizer, **shape).save_pretrained(folder / "model")
    lines = (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:HELD_OUT]
    rows = []
    for line in lines:
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        rows.append({"input_ids": encoded["input_ids"], "labels": [t if m else IGNORED for t, m in pairs]})
    (folder / "held_out.json").write_text(json.dumps(rows), encoding="utf-8")
    return {"pad": tokenizer.pad_token_id, "held_out": str(folder / "held_out.json"), "parent": os.getpid()}


def rounds(
    tools: Mapping[str, str], cases: Mapping[tuple[int, str], Case], settings: Mapping[str, Any]
) -> Iterator[Measured]:
    """Yields each round of tools, given with their interpreters; in the next round another tool is the first."""
    names = list(tools)
    for (stage, precision), case in cases.items():
        runs = {name: Run(TOOLS[name], case, tools[name], settings) for name in names}
        try:
            for turn in range(settings["rounds"]):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    found = {"zero_stage": stage, "precision": precision, "tool": name, "number": turn}
                    yield measured(runs[name].round(turn), settings["steps"], **found)
            for one in runs.values():
                one.wait()
        finally:
            for one in runs.values():
                one.stop()


_COLUMNS = "CPU s per 1,000 tokens  wall s  filled   loss  held-out   ratio"


def table(results: Sequence[Measured]) -> str:
    """Returns a row for each tool of each case: the median of its runs, and the range of their CPU seconds."""
    lines = [f"{'':16}{'':14}{_COLUMNS}"]
    for key in dict.fromkeys((one.zero_stage, one.precision) for one in results):
        runs = [one for one in results if (one.zero_stage, one.precision) == key]
        own = [one.cpu_s for one in runs if one.tool == "dstrain"]
        for name in dict.fromkeys(one.tool for one in runs):
            mine = [one for one in runs if one.tool == name]
            cpu = sorted(one.cpu_s for one in mine)
            wall, filled = (median(getattr(one, field) for one in mine) for field in ("wall_s", "filled"))
            losses = f"{mine[-1].last_loss or math.nan:7.3f}{mine[-1].held_out_loss or math.nan:10.3f}"
            ratio = f"{median(own) / median(cpu):8.3f}" if own else ""
            figures = f"{f'{median(cpu):.3f} ({cpu[0]:.3f} to {cpu[-1]:.3f})':>22}{wall:8.3f}{filled:8.1%}"
            lines.append(f"{f'ZeRO-{key[0]}, {key[1]}':16}{name:14}{figures}{losses}{ratio}")
    return "\n".join(lines)


def counts(number: int) -> bool:
    """Returns whether a round counts the tokens of experts: yes, no, no, yes, so that a drift cancels out."""
    return number % 4 in (0, 3)


def of_experts(results: Sequence[Measured]) -> str:
    """Returns the cost of counting experts: as measured in the rounds that count, and their ratio to the others.

    The ratio is the median over groups of four rounds, which count and do not in turns.
    """
    lines = []
    for stage in dict.fromkeys(one.zero_stage for one in results):
        runs = [one for one in results if one.zero_stage == stage]
        groups = [[one.cpu_s for one in runs[start : start + 4]] for start in range(0, len(runs) - 3, 4)]
        ratio = median((first + fourth) / (second + third) for first, second, third, fourth in groups)
        share = median(one.experts_share for one in runs if counts(one.number))
        lines.append(
            f"experts, ZeRO-{stage}: {share:.2%} of the CPU seconds, rounds that count over others {ratio:.3f}"
        )
    return "\n".join(lines)


def write(path: Path, results: Sequence[Measured], made_with: Mapping[str, Any]) -> None:
    """Writes the measurements, and what they were made with."""
    report = {**made_with, "measured": [asdict(one) for one in results]}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path, metavar="FOLDER", help="where the environments of the tools are")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=tuple(TOOLS))
    parser.add_argument("--zero-stages", nargs="+", type=int, choices=(1, 2, 3), default=(2, 3))
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), default=("bf16", "fp32"))
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to FILE")
    given = parser.parse_args()
    sizes = {name: getattr(given, name) for name in SIZES}
    tools = {name: interpreter(TOOLS[name], given.environments.resolve()) for name in given.tools}
    found = {name: versions(TOOLS[name], program) for name, program in tools.items()}
    made_with = {"sizes": sizes, "machine": platform.machine(), "cpus": os.cpu_count(), "versions": found}
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "inputs").mkdir()
        inputs = make_inputs(base / "inputs", sizes)
        settings = {**inputs, "monitoring": "timed", **{name: sizes[name] for name in ("rounds", "steps", "warmup")}}
        settings["counting_rounds"] = [*filter(counts, range(sizes["rounds"]))]
        cases = {}
        for stage in given.zero_stages:
            for precision in given.precisions:
                folder = Path(shutil.copytree(base / "inputs", base / f"zero{stage}-{precision}"))
                cases[stage, precision] = make_case(folder, zero_stage=stage, precision=precision, sizes=sizes)
        for one in rounds(tools, cases, settings):
            results.append(one)
            print(f"{one.tool}, ZeRO-{one.zero_stage}, {one.precision}: {one.cpu_s:.3f} CPU s", file=sys.stderr)
            if given.json:  # after each round: another may fail
                write(given.json, results, made_with)
    print(table(results))
    for name in tools:
        print(f"{name}: attention by {TOOLS[name].attention}")
    if own := [one.monitor_share for one in results if one.tool == "dstrain"]:
        print(f"monitoring: {median(own):.2%} of dstrain's CPU seconds ({min(own):.2%} to {max(own):.2%})")
    if sizes["experts"]:
        print(of_experts([one for one in results if one.tool == "dstrain"]))


if __name__ == "__main__":
    main()
