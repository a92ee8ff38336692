"""Tokens per CPU second and peak memory of tokenizing conversations: dstrain, and `datasets.map` with `num_proc`.

Example: python benchmarks/tokenization.py --samples 100000 400000 --json tokenization.json
         python benchmarks/tokenization.py --samples 1000000 --pairs 1 --sides dstrain answers text --repeat 2
         python benchmarks/tokenization.py --samples 20000 --pairs 1 --peers /tmp/peers --repeat 2

All sides read the same JSON lines, made of docstrings of Python's standard library, with the same small tokenizer, and
write a cache. `answers` is what TRL does for loss on answers only: a template with generation tags, one conversation at
a time. `trl` and `llamafactory` are the tools' own preparation of their training data, in environments of their own.
`text` renders and tokenizes in batches and keeps no labels, which is less than training on answers needs.
`stream` is dstrain with `streaming: true`: as many workers read about a pass of the data, and write nothing. CPU
seconds are those of a process and its children, without imports. Sides take turns with `--repeat`. Memory is that of
the largest process, which includes the pages of files that it maps, and the proportional set size of all processes
together, sampled twice a second: their own memory, and their share of what they share.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from benchmarks import tokenization_peers
from benchmarks.peer_tools import TOOLS, interpreter
from benchmarks.tokenization_peers import SEQ_LEN, TAGGED, counted, num_tokens
from benchmarks.tokenization_peers import SIDES as PEERS
from dstrain.job.schema import Job
from dstrain.train import demo

SIDES = ("dstrain", "stream", "answers", "text", *PEERS)


def conversations(count: int, num_pairs: int) -> Iterator[str]:
    """Yields lines of JSON: conversations of so many questions and answers, the same each time."""
    pairs, rng = list(demo.pairs_of_standard_library()), random.Random(0)
    for _ in range(count):
        turns = [text for pair in rng.choices(pairs, k=num_pairs) for text in pair]
        roles = ("user", "assistant") * num_pairs
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        yield json.dumps({"messages": messages}) + "\n"


def by_dstrain(folder: Path, tokenizer: Any, processes: int) -> int:
    """Returns the tokens that dstrain makes."""
    from dstrain.train.data.prepare import prepare

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processes])
    job = Job(model="model", output_dir="out", data=str(folder / "train.jsonl"), seq_len=SEQ_LEN)
    return prepare(job, tokenizer, training=True).num_tokens


def by_stream(folder: Path, tokenizer: Any, processes: int, samples: int) -> int:
    """Returns the tokens of the first micro-batches of dstrain's stream, about a pass."""
    from torch.utils.data import DataLoader

    from dstrain.train.data.stream import StreamCollator, StreamProgress
    from dstrain.train.job_data import streamed

    options: dict[str, Any] = {"seq_len": SEQ_LEN, "streaming": True, "max_steps": 1}
    data, _ = streamed(Job(model="model", output_dir="out", data=str(folder / "train.jsonl"), **options), tokenizer)
    progress = StreamProgress(data.dataset, data.digest, rank=0, num_ranks=1, workers=processes)
    collate = StreamCollator(lambda rows: {"tokens": sum(len(row["input_ids"]) for row in rows)})
    loader: Any = DataLoader(data.dataset, batch_size=64, collate_fn=collate, num_workers=processes)
    return sum(batch["tokens"] for batch in islice(progress.noted(loader), samples // 64))


def by_map(folder: Path, tokenizer: Any, processes: int, *, with_labels: bool) -> int:
    """Returns the tokens that `datasets.map` makes."""
    import datasets  # type: ignore[import-untyped]

    def text(batch: Mapping[str, Any]) -> dict[str, Any]:
        out = tokenizer.apply_chat_template(batch["messages"], return_dict=True, truncation=True, max_length=SEQ_LEN)
        return {"input_ids": out["input_ids"]}

    def answers(row: Mapping[str, Any]) -> dict[str, Any]:
        out = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True, chat_template=TAGGED
        )
        pairs = zip(out["input_ids"], out["assistant_masks"], strict=True)
        return {"input_ids": out["input_ids"], "labels": [token if mask else -100 for token, mask in pairs]}

    rows = datasets.load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    options: dict[str, Any] = {"num_proc": processes, "remove_columns": rows.column_names}
    made = rows.map(answers, **options) if with_labels else rows.map(text, batched=True, **options)
    return num_tokens(made)


def measure(side: str, folder: Path, processes: int) -> dict[str, Any]:
    """Measures one side in this process."""
    # loaded here, so that no side's figures have the import of `datasets`
    from transformers import AutoTokenizer

    import dstrain.train.data.prepare
    import dstrain.train.job_data  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if side == "dstrain":
        return {"side": side, **counted(lambda: by_dstrain(folder, tokenizer, processes))}
    if side == "stream":
        with (folder / "train.jsonl").open("rb") as file:
            samples = sum(1 for _ in file)
        return {"side": side, **counted(lambda: by_stream(folder, tokenizer, processes, samples))}
    return {"side": side, **counted(lambda: by_map(folder, tokenizer, processes, with_labels=side == "answers"))}


def measured(side: str, folder: Path, processes: int, peers: Path | None) -> dict[str, Any]:
    """Measures one side in a process and with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"}
        line = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--processes", str(processes)]
        if side in PEERS and peers is not None:
            program = [interpreter(TOOLS[side], peers), "-P", tokenization_peers.__file__]
            line = [*program, side, str(folder), str(processes)]
        with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as process:
            peak_bytes = peak_tree_bytes(process)
            assert process.stdout is not None
            figures: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
        return {**figures, "peak_tree_bytes": peak_bytes}


def peak_tree_bytes(process: subprocess.Popen[str]) -> int:
    """Returns the peak proportional set size of a process and those that it started, when it has ended."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(pss_bytes, tree(process.pid))))
        time.sleep(0.5)
    return peak


def tree(pid: int) -> list[int]:
    """Returns the ids of a process and of those that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return [pid]  # has ended
    return [pid, *(one for child in children for one in tree(int(child)))]


def pss_bytes(pid: int) -> int:
    """Returns the proportional set size of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[100_000])
    parser.add_argument("--pairs", type=int, default=2, help="Questions and answers of a conversation.")
    parser.add_argument("--repeat", type=int, default=1, help="Times that every side is measured, in turns.")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="[default: all, peers with --peers]")
    parser.add_argument("--peers", type=Path, help="Folder of the peers' environments, made from PyPI if missing.")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="Also write the figures to this file.")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.folder, options.processes)))
        return
    if options.peers is None and set(PEERS) & set(options.sides or ()):
        parser.error("trl and llamafactory need --peers")
    sides = options.sides or [side for side in SIDES if options.peers is not None or side not in PEERS]
    results = []
    heads = f"{'tokens/CPU s':>12}  {'CPU s':>8}  {'wall s':>8}  {'peak MiB':>8}  {'tree MiB':>8}"
    print(f"{'samples':>9}  {'side':<12}  {heads}", flush=True)
    for samples in options.samples:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            demo.make_tokenizer([text for pair in demo.pairs_of_standard_library() for text in pair]).save_pretrained(
                folder / "model"
            )
            (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
            with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(conversations(samples, options.pairs))
            for side in sides * options.repeat:
                one = {"samples": samples, **measured(side, folder, options.processes, options.peers)}
                results.append(one)
                rates = f"{one['tokens_per_cpu_s']:>12,}  {one['cpu_s']:>8}  {one['wall_s']:>8}"
                peaks = f"{one['peak_bytes'] / 2**20:>8,.0f}  {one['peak_tree_bytes'] / 2**20:>8,.0f}"
                print(f"{samples:>9,}  {side:<12}  {rates}  {peaks}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
