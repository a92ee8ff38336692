"""Processor seconds of deciding a plan: the thirty questions of `questions.py`, and random ones.

Example: python benchmarks/search_times.py --random 300 --seed 1

Each question is answered in a process of its own, which remembers nothing of the others. Imports are not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shlex
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.questions import QUESTIONS, asked
from dstrain.errors import DoesNotFit, InvalidConfig
from dstrain.facts.cluster.gpus import GPUS
from dstrain.facts.model.families import known
from dstrain.garbage import collect_seldom
from dstrain.plan.search.decide import decide

BARS_S = (0.7, 2.5)
"""Limits of the median and of the maximum."""
SHOWN = 10
"""The slowest questions, which are listed."""


def drawn(rng: random.Random) -> str:
    """Returns the options of a random question."""
    gpu = rng.choice([name for name, row in GPUS.items() if not row.is_cpu])
    words = f"--model {rng.choice(known())} --gpus {2 ** rng.randrange(7)} --gpu {gpu}"
    words += f" --method {rng.choice(('full', 'full', 'lora', 'qlora'))}"
    length, memory = rng.choice((None, None, 1024, 8192, 32768)), rng.choice((None, None, 64, 256, 1024))
    words += f" --seq-len {length}" if length else ""
    return words + (f" --host-memory {memory}GiB" if memory else "")


def timed(words: str) -> tuple[float, str, str]:
    """Returns the processor seconds of an answer, what it is, and the question."""
    collect_seldom()
    try:
        question = asked(shlex.split(words))
        started = time.process_time()
        answer = "fits"
        try:
            decide(question.workload, question.request)
        except DoesNotFit:
            answer = "does not fit"
        return time.process_time() - started, answer, words
    except InvalidConfig as error:
        return 0.0, f"refused: {error.problem.splitlines()[0]}", words


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=300, metavar="N", help="random questions (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the random questions (default: 0)")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    groups = {"questions": [question.words for question in QUESTIONS]}
    groups["random"] = [drawn(rng) for _ in range(options.random)]
    times: list[tuple[float, str, str]] = []
    print(f"{'':10}{'answered':>9}{'median s':>10}{'90 % s':>8}{'max s':>7}{'sum s':>8}")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name, questions in groups.items():
            answers = [answer for answer in pool.map(timed, questions, chunksize=1) if answer[0]]
            seconds = sorted(answer[0] for answer in answers)
            tenth = seconds[int(0.9 * len(seconds))]
            row = f"{len(seconds):9}{statistics.median(seconds):10.2f}{tenth:8.2f}{seconds[-1]:7.2f}{sum(seconds):8.1f}"
            print(f"{name:10}{row}")
            times += answers
    print(f"bars: median {BARS_S[0]} s, maximum {BARS_S[1]} s; over the second: ", end="")
    print(sum(seconds > BARS_S[1] for seconds, _, _ in times))
    for taken, answer, words in sorted(times, reverse=True)[:SHOWN]:
        print(f"{taken:6.2f}  {answer:12}  {words}")


if __name__ == "__main__":
    main()
