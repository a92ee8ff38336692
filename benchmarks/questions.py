"""Thirty questions, from one card to 256, and what an expert says of each choice; gen-config must write what plan says.

Examples: python benchmarks/questions.py
          python benchmarks/questions.py --only 17 18

Exits with 1 if the files of gen-config are not, byte for byte, those of the plan.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dstrain.cli.main import cli
from dstrain.cli.options.question import PlanInputs, plan_inputs
from dstrain.cli.verbs.plan import command
from dstrain.config.files import generated
from dstrain.errors import DoesNotFit
from dstrain.plan.labels import label
from dstrain.plan.search.decide import decide

JOB = {"data": "train.jsonl", "eval_data": None, "hub": "hf", "output_dir": "output"}
"""Options that gen-config adds to a plan, for a job file."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer an expert signs."""

    words: str
    """Options of plan and gen-config."""
    why: str
    """Why the expert signs."""


QUESTIONS = (
    Question("--model qwen3-0.6b --gpus 1 --gpu 4090 --seq-len 2048", "states and activations fit: nothing to divide"),
    Question(
        "--model qwen3-8b --gpus 1 --gpu 4090 --method lora", "with a fused loss it fits whole with checkpointing"
    ),
    Question("--model qwen3-8b --gpus 1 --gpu 4090 --method qlora", "the standard recipe of this card"),
    Question("--model qwen3-14b --gpus 1 --gpu 4090 --method qlora", "fits whole with checkpointing, 3 GiB to spare"),
    Question(
        "--model qwen3-8b --gpus 2 --gpu 3090 --method lora", "fits whole: offload and SP 2 gain less than they risk"
    ),
    Question("--model qwen3-32b --gpus 2 --gpu 3090 --method qlora", "18 GiB of 4-bit weights leave a card too little"),
    Question("--model qwen3-8b --gpus 1 --gpu a100-80g", "even with 8-bit AdamW 87 GiB: some states go to RAM"),
    Question("--model qwen3-4b --gpus 4 --gpu 4090", "plain ZeRO-3 with checkpointing, no offload"),
    Question(
        "--model qwen3-14b --gpus 8 --gpu 4090", "236 GB of states exceed the GPUs; the wall, assumed RAM, is named"
    ),
    Question("--model qwen2.5-7b --gpus 8 --gpu l40s", "over PCIe ZeRO-2 sends less than ZeRO-3, and fits"),
    Question("--model llama-3.1-8b --gpus 8 --gpu a100-40g", "ZeRO-3; half of the layers fit without recomputation"),
    Question("--model llama-3.1-8b --gpus 8 --gpu a100-80g --seq-len 8192", "plain ZeRO-3, nothing is recomputed"),
    Question("--model qwen3-8b --gpus 8 --gpu h100-sxm", "states divided by 8 leave room for all activations"),
    Question(
        "--model qwen3-8b --gpus 8 --gpu h100-sxm --seq-len 65536",
        "SP over the node, a layer in four recomputed, YaRN said; offload would gain 4 %, which is within the error",
    ),
    Question(
        "--model qwen3-32b --gpus 8 --gpu h100-sxm", "plain ZeRO-3 with checkpointing: with a fused loss no offload"
    ),
    Question("--model qwen3-32b --gpus 8 --gpu h200", "plain ZeRO-3; every other layer fits without recomputation"),
    Question("--model qwen3-32b --gpus 16", "plain ZeRO-3 with checkpointing; hpZ gains nothing beyond the error"),
    Question(
        "--model qwen3-32b --gpus 16 --seq-len 32768", "with a fused loss and layers' inputs in RAM 32 k fit without SP"
    ),
    Question(
        "--model qwen3-32b --gpus 32 --gpu h100-sxm --seq-len 131072", "SP inside the node, checkpointing, YaRN said"
    ),
    Question(
        "--model qwen3-32b --gpus 8 --gpu a100-80g --method lora", "SP 2 in place of recomputation: a third faster"
    ),
    Question("--model llama-3.1-70b --gpus 8 --gpu h100-sxm --method lora", "divided frozen weights, SP 2 over NVLink"),
    Question(
        "--model llama-3.1-70b --gpus 8 --gpu h100-sxm --method qlora --seq-len 8192",
        "whole 4-bit weights, SP over NVLink in place of recomputation: 12 % faster than that",
    ),
    Question("--model llama-3.1-70b --gpus 32 --gpu h100-sxm", "plain ZeRO-3 with checkpointing"),
    Question("--model llama-3.1-70b --gpus 256 --gpu h100-sxm", "plain ZeRO-3, one sample a GPU"),
    Question(
        "--model llama-3.1-70b --gpus 16 --gpu a100-80g --interconnect eth25",
        "half of the optimizer in RAM: larger micro-batches pay for slow links",
    ),
    Question("--model qwen3-30b-a3b --gpus 16 --gpu a800-80g", "plain ZeRO-3; hpZ gains nothing"),
    Question("--model mixtral-8x7b --gpus 16 --gpu h100-sxm", "plain ZeRO-3; EP would gain no more than the error"),
    Question(
        "--model qwen3-vl-30b-a3b --gpus 8 --gpu h200",
        "plain ZeRO-3 with checkpointing: sharing experts would gain 7 %, within the error, and take 38 GiB more",
    ),
    Question("--model qwen3-vl-8b --gpus 4 --gpu a100-80g --method lora", "frozen weights fit whole"),
    Question(
        "--model deepseek-v3 --gpus 256 --gpu h100-sxm", "a layer's experts are too many for one GPU: ranks share them"
    ),
)
"""Methods, lengths, families and links as unlike as can be. Verdicts: the developers', on the plan of each question."""


def asked(words: Sequence[str]) -> PlanInputs:
    """Returns the inputs that `dstrain plan` reads from its options."""
    options = command.make_context("plan", list(words), **cli.context_settings).params
    return plan_inputs({name: options[name] for name in options.keys() - {"top", "verbose", "as_json", "html"}})


def planned(words: Sequence[str]) -> tuple[str, dict[str, str] | None]:
    """Returns the label of the plan, and its files; None if nothing fits."""
    question = asked(words)
    try:
        plan = decide(question.workload, question.request)
    except DoesNotFit:
        return "does not fit", None
    job = {"model": question.workload.model.source, **JOB}
    files = generated(plan, question.workload, question.hosts, template_dir=None, job=job)
    return label(plan.chosen.configuration), files


def written(words: Sequence[str]) -> dict[str, str] | None:
    """Returns the files that gen-config writes, None if it writes none."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                cli.main(["gen-config", *words, "--data", "train.jsonl"], prog_name="dstrain", standalone_mode=False)
        except DoesNotFit:
            return None
        return {path.name: path.read_text(encoding="utf-8") for path in Path().iterdir() if path.is_file()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = range(1, len(QUESTIONS) + 1)
    parser.add_argument("--only", type=int, nargs="+", choices=everything, metavar="N", help="numbers of the questions")
    numbers = parser.parse_args().only or everything
    differing = []
    for number in numbers:
        question = QUESTIONS[number - 1]
        words = shlex.split(question.words)
        name, files = planned(words)
        if files != written(words):
            differing.append(str(number))
        print(f"{number:2} {question.words}\n   {name}\n   signed: {question.why}")
    print(f"{len(numbers)} questions; gen-config differs from plan in {len(differing)} {' '.join(differing)}".rstrip())
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
