"""Tokens per second of one tiny job on CPU ranks: padded samples, packed rows, and rows without padding or borders.

Example: python benchmarks/throughput.py --json throughput.json

A token counts when it is not padding. The bound is the same text cut into full rows with nothing to keep apart: what
packing would reach if its rows were full and its mask were free.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer

from dstrain.choices import Precision
from dstrain.job.schema import Job
from dstrain.train import demo
from dstrain.train.data.collate import Collator
from dstrain.train.data.prepare import prepare

WARMUP_STEPS = 3
MODES = ("padded", "packed", "bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the measurement."""

    ranks: int
    """Processes, of one thread each."""
    steps: int
    """Number of timed optimizer steps."""
    seq_len: int
    """Tokens in a packed row."""
    samples: int
    """Samples in a micro-batch when padded."""
    rows: int
    """Rows in a micro-batch when packed."""
    hidden_size: int
    """Width of the model."""
    layers: int
    """Layers of the model."""
    precision: Precision
    """Dtype of the weights and of all arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line of the table."""

    mode: str
    """`padded`, `packed` or `bound`."""
    tokens_per_s: float
    """Tokens that are not padding, of all ranks together."""
    step_s: float
    """Seconds of one optimizer step."""
    filled: float
    """Share of the positions that are not padding, 0…1."""


def rows_of(mode: str, options: Options, folder: Path, tokenizer: Any) -> tuple[Any, Collator]:
    """Returns the dataset of the micro-batches and the collator."""
    packing = mode == "packed"
    job = Job(
        model=str(folder / "model"),
        output_dir=str(folder / "run"),
        data=str(folder / "train.jsonl"),
        seq_len=options.seq_len,
        packing=packing,
        micro_batch=1,
    )
    dataset = prepare(job, tokenizer, training=True).dataset
    if mode == "bound":
        stream = list(chain.from_iterable(dataset["input_ids"]))
        starts = range(0, len(stream) - options.seq_len, options.seq_len)
        dataset = [{"input_ids": (row := stream[at : at + options.seq_len]), "labels": row} for at in starts]
    return dataset, Collator(pad_token_id=tokenizer.pad_token_id, packing=packing)


def micro_batches(dataset: Any, size: int, *, rank: int, ranks: int) -> Iterator[list[Any]]:
    """Yields a rank's micro-batches without end, in an order from a seed."""
    order: list[int] = []
    shuffled = random.Random(0)
    while True:
        if len(order) < size * ranks:
            order = list(range(len(dataset)))
            shuffled.shuffle(order)
        members, order = order[: size * ranks], order[size * ranks :]
        yield [dataset[index] for index in members[rank::ranks]]


def train(rank: int, options: Options, folder: Path) -> None:
    """Runs one rank; rank 0 writes the measurements to `measured.json`."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=options.ranks)
    lines = run_steps(rank, options, folder)
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps([asdict(line) for line in lines]), encoding="utf-8")
    distributed.destroy_process_group()


def run_steps(rank: int, options: Options, folder: Path) -> list[Measured]:
    """Returns a line for every mode. Modes take turns, step by step, so other load slows all of them equally."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = demo.make_model(tokenizer, hidden_size=options.hidden_size, num_hidden_layers=options.layers)
    dtype = torch.bfloat16 if options.precision is Precision.BF16 else torch.float32
    model = torch.nn.Module.to(model, dtype)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sources = {}
    for mode in MODES:
        dataset, collate = rows_of(mode, options, folder, tokenizer)
        size = options.samples if mode == "padded" else options.rows
        sources[mode] = micro_batches(dataset, size, rank=rank, ranks=options.ranks), collate
    totals = {mode: torch.zeros(3, dtype=torch.float64) for mode in MODES}
    for step in range(WARMUP_STEPS + options.steps):
        for mode, (batches, collate) in sources.items():
            distributed.barrier()
            started = time.perf_counter()
            rows = next(batches)
            batch = collate(rows)
            parallel(**batch | {"use_cache": False}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            distributed.barrier()
            seconds = time.perf_counter() - started
            if step >= WARMUP_STEPS:
                tokens = sum(len(row["input_ids"]) for row in rows)
                totals[mode] += torch.tensor([tokens, batch["input_ids"].numel(), seconds / options.ranks])
    for total in totals.values():
        distributed.all_reduce(total)
    return [_line(mode, *total.tolist(), steps=options.steps) for mode, total in totals.items()]


def _line(mode: str, tokens: float, positions: float, seconds: float, *, steps: int) -> Measured:
    return Measured(mode=mode, tokens_per_s=tokens / seconds, step_s=seconds / steps, filled=tokens / positions)


def measure(options: Options) -> tuple[int, list[Measured]]:
    """Returns the parameters of the model and a line for every mode."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo.build(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        model = demo.make_model(tokenizer, hidden_size=options.hidden_size, num_hidden_layers=options.layers)
        spawn(train, (options, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        lines = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        return model.num_parameters(), [Measured(**line) for line in lines]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"ranks": 2, "steps": 10, "seq_len": 256, "samples": 32, "rows": 16, "hidden_size": 384, "layers": 3}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--precision", type=Precision, default=Precision.BF16, help="bf16 or fp32 (default: bf16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to FILE")
    given = vars(parser.parse_args())
    target = given.pop("json")
    options = Options(**given)
    os.environ["OMP_NUM_THREADS"] = "1"
    params, lines = measure(options)
    print(f"{params / 1e6:.1f} M parameters, {options.ranks} CPU ranks, {options.precision}, {options.steps} steps")
    print(f"{'':8}{'tokens/s':>10}{'step s':>9}{'filled':>8}{'of bound':>10}")
    for line in lines:
        share = line.tokens_per_s / lines[-1].tokens_per_s
        print(f"{line.mode:8}{line.tokens_per_s:10,.0f}{line.step_s:9.3f}{line.filled:8.1%}{share:10.1%}")
    if target:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__}
        report = {
            "options": asdict(options), "params": params, **machine, "measured": [asdict(line) for line in lines]
        }  # fmt: skip
        target.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
