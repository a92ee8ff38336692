"""Real runs that run out of memory: whether the first change that dstrain proposes trains within the same limit.

Examples: python benchmarks/out_of_memory.py
          python benchmarks/out_of_memory.py --cases 50 --json benchmarks/results/out_of_memory-cpu.json
          python benchmarks/out_of_memory.py --first 7 --cases 1 -v

Two ranks on the CPU train a tiny model with dstrain's own entrypoint and DeepSpeed's own engine. A limit on the bytes
of live tensors stands for a GPU: an allocation beyond it raises PyTorch's error. Model, method, ZeRO stage, batch and
limit of a case are drawn by its number. The run fails and writes `oom.json`; dstrain proposes changes as `dstrain run`
does; the first one is made, and the job runs again within the same limit. A limit is lowered by a fifth as long as the
run fits. Step times are planned with the figures of a GPU, to compare the change with the search's: a CPU has none.
Host and device are one memory here: if the first change offloads, the next one that does not is tried.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from dstrain.choices import LossKernel, Method, Precision
from dstrain.config.remedy import changes_in
from dstrain.facts.cluster.gpus import gpu
from dstrain.launch.prepare.prepare import PreparedRun
from dstrain.launch.run.out_of_memory import diagnose
from dstrain.monitor.metrics import current_steps, read_jsonl
from dstrain.oom import OutOfMemory, Phase, ProposedChange
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.estimate import USABLE_GPU_RATIO, assess
from dstrain.plan.labels import label
from dstrain.plan.search.evaluator import Evaluator
from dstrain.plan.search.out_of_memory import _space, shortage, smaller
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import EQUAL_RATIO, _best
from dstrain.plan.speed.step_time import speed
from dstrain.units import MIB
from tests.train.engine import Engine
from tests.train.launching import environment
from tests.train.points import Point, Space, workload_of, write_files, write_run

MODELS = ("qwen3-8b", "llama-3.1-8b", "mistral-7b", "qwen3-30b-a3b")
"""Families whose attention has no matrices on a CPU either; DeepSeek's, with keys wider than values, has them there."""
STEPS = 2
RANKS = 2
SPEEDS_OF = "h100-sxm"
"""The GPU whose figures give step times."""
LOWER = 0.8
"""Share of a limit that is tried next if a run fits into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, and the share of its predicted need that its device has."""

    point: Point
    share: float
    of_states: bool
    """Whether the share is that of the model states, so that the engine is not set up; else that of the peak."""
    eval_micro_batch: int | None
    """Rows of an evaluation that is larger than the training; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a case; bytes are those of PyTorch's tensors on one rank."""

    number: int
    model: str
    configuration: str
    limit_bytes: int
    phase: str
    planned_bytes: int
    """The plan's prediction of the run that failed."""
    change: str | None
    """The change that is tried; None if none is known, or none that a CPU can try."""
    place: int
    """Its place among those proposed, 1 for the first; 0 without one."""
    fits: bool | None
    """Whether the run with the change trained to its end; None without one."""
    peak_bytes: int | None
    """The most bytes that lived with the change."""
    is_cheapest: bool | None
    """Whether no change known to the search is faster than the first one, by the plan; None for an evaluation, which
    has no step, and without a change."""
    seconds: float


def drawn(space: Space, number: int) -> Case:
    """Returns the case of a number."""
    dice = random.Random(number)
    alias = dice.choice(MODELS)
    workload = workload_of(space.model(alias), 1, RANKS)
    while True:
        configuration = changed(
            DEFAULTS,
            method=dice.choice((Method.FULL, Method.LORA)),
            precision=dice.choice((Precision.FP32, Precision.BF16)),
            zero_stage=dice.choice((0, 1, 2, 3)),
            seq_len=dice.choice((64, 128, 256)),
            micro_batch=dice.choice((4, 8, 16)),
            grad_accum=dice.choice((1, 2)),
            packing=dice.random() < 0.7,
            grad_ckpt=dice.random() < 0.3,
            loss=dice.choice((LossKernel.FULL, LossKernel.FULL, LossKernel.CHUNKED)),
            reduce_bucket_size=100_000,
            prefetch_bucket_size=20_000,
        )
        if not broken(workload, configuration):
            break
    point = Point(alias=alias, workload=workload, configuration=configuration)
    kind = dice.random()
    of_states, evaluates = kind < 0.1, kind > 0.9
    rows = 8 * configuration.batch.micro_batch if evaluates else None
    share = dice.uniform(1.1, 1.6) if evaluates else dice.uniform(0.35, 0.95)
    return Case(point=point, share=share, of_states=of_states, eval_micro_batch=rows)


def limit_of(case: Case) -> int:
    """Returns the bytes of the device of a case."""
    memory = assess(case.point.workload, case.point.configuration).memory
    need = memory.states.device if case.of_states else memory.device_bytes_per_gpu
    return round(case.share * need)


def trained(space: Space, prepared: PreparedRun, limit: int) -> bool:
    """Runs a prepared job on devices of `limit` bytes to its end, or until a rank runs out of memory; returns whether
    it trained to its end."""
    run = prepared.run_dir
    codes = space.engine.run(
        *("tests.train.memory_limit", run.path, limit), log=run.path / "log", ranks=RANKS, is_over=run.oom.exists
    )
    steps = [line["step"] for line in current_steps(read_jsonl(run.metrics)) if "loss" in line]
    return codes == [0] * RANKS and steps[-1:] == [STEPS]


def with_speeds(prepared: PreparedRun) -> PreparedRun:
    """Returns the run on a CPU with the figures of a GPU, so that changes have step times."""
    known = gpu(SPEEDS_OF)
    fast = replace(
        prepared.cluster.gpu,
        bf16_flops_per_s=known.bf16_flops_per_s,
        fp16_flops_per_s=known.fp16_flops_per_s,
        fp32_flops_per_s=known.fp32_flops_per_s,
        hbm_bytes_per_s=known.hbm_bytes_per_s,
    )
    return replace(prepared, cluster=replace(prepared.cluster, gpu=fast))


def is_cheapest(prepared: PreparedRun, step_ratio: float | None, record: OutOfMemory) -> bool:
    """Returns whether a change that lengthens a step by a share is as fast as the fastest one that the search finds."""
    workload, estimate, measured = prepared.workload, prepared.estimate, record.measured
    assert workload is not None
    assert estimate is not None
    assert measured is not None
    short = shortage(workload, estimate, record.phase, measured)
    less = smaller(workload, estimate.configuration, short)
    evaluator = Evaluator(less, USABLE_GPU_RATIO)
    space = list(_space(less, estimate.configuration, record.phase, (0, 1, 2, 3)))
    _, fastest = _best(evaluator, space, 1)
    known = evaluator.estimate(fastest).speed if fastest is not None else None
    now = speed(workload, estimate.configuration)
    if known is None or now is None or step_ratio is None:
        return known is None
    return (1 + step_ratio) * now.step_s <= known.step_s * (1 + EQUAL_RATIO)


def out_of_memory(space: Space, case: Case, folder: Path) -> tuple[PreparedRun, int]:
    """Runs a case until it is out of memory; returns the run, and the limit that it took."""
    data = space.demo / "train.jsonl"
    write_files(case.point, folder, data)
    limit = limit_of(case)
    while True:
        prepared = with_speeds(write_run(folder, *overrides_of(space, case)))
        if not trained(space, prepared, limit):
            assert prepared.run_dir.oom.exists(), (prepared.run_dir.path / "log.0").read_text()[-3000:]
            return prepared, limit
        limit = round(LOWER * limit)


def overrides_of(space: Space, case: Case) -> list[str]:
    """Returns the changes of a case to the job that gen-config writes."""
    rows = case.eval_micro_batch
    evaluation = [f"eval_data={space.demo / 'eval.jsonl'}", "eval_steps=1", f"eval_micro_batch={rows}"]
    return [f"max_steps={STEPS}", *(evaluation if rows is not None else ())]


def tried(space: Space, number: int, *, verbose: bool = False) -> Result:
    """Returns the outcome of a case."""
    began, case, folder = time.monotonic(), drawn(space, number), space.folder / f"case {number}"
    prepared, limit = out_of_memory(space, case, folder)
    diagnosis = diagnose(prepared)
    assert diagnosis is not None
    record = diagnosis.record
    assert prepared.estimate is not None
    if verbose:
        print("\n".join([*diagnosis.evidence, *diagnosis.hint(resumes=False)]), flush=True)
    result = Result(
        number=number,
        model=case.point.alias,
        configuration=label(case.point.configuration),
        limit_bytes=limit,
        phase=record.phase,
        planned_bytes=prepared.estimate.memory.device_bytes_per_gpu,
        change=None,
        place=0,
        fits=None,
        peak_bytes=None,
        is_cheapest=None,
        seconds=0.0,
    )
    if diagnosis.record.fixes and record.phase is not Phase.EVALUATION:
        result = replace(result, is_cheapest=is_cheapest(prepared, diagnosis.record.fixes[0].step_ratio, record))
    for place, remedy in enumerate(diagnosis.record.fixes, 1):
        if not any("offload" in key.rpartition(".")[2] for key in remedy.ds_config):
            result = replace(result, change=remedy.change, place=place)
            result = repeated(space, case, folder, remedy, result, verbose=verbose)
            break
    return replace(result, seconds=round(time.monotonic() - began, 1))


def repeated(space: Space, case: Case, folder: Path, fix: ProposedChange, result: Result, *, verbose: bool) -> Result:
    """Runs a case again with a change."""
    again = write_run(folder, *overrides_of(space, case), *fix.set, changes=changes_in(fix))
    fits = trained(space, again, result.limit_bytes)
    if verbose and not fits:
        print((again.run_dir.path / "log.0").read_text()[-2000:])
    peaks = [json.loads(path.read_text()) for path in again.run_dir.path.glob("device-*.json")]
    return replace(result, fits=fits, peak_bytes=max(peaks, default=None))


def line_of(result: Result) -> str:
    """Returns a case in a line."""
    fits = {None: "not tried", True: "fits", False: "DOES NOT FIT"}[result.fits]
    place = "" if result.place < 2 else f" (change {result.place})"
    peak = "" if result.peak_bytes is None else f" {result.peak_bytes / result.limit_bytes:4.0%} of the limit"
    cost = "" if result.is_cheapest is not False else ", NOT THE CHEAPEST"
    return (
        f"{result.number:3} {result.model}: {result.configuration}; {result.limit_bytes / MIB:.1f} MiB, {result.phase}"
        f" → {result.change or 'no change is known'}{place}: {fits}{peak}{cost} ({result.seconds:.0f} s)"
    )


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yields the figures of all cases."""
    done = [result for result in results if result.fits is not None]
    first = sum(result.place == 1 for result in done)
    yield f"cases: {len(results)}, of which {len(done)} ran again, {first} with the first change"
    yield f"trained within the limit: {sum(result.fits is True for result in done)} of {len(done)}"
    priced = [result for result in results if result.is_cheapest is not None]
    yield f"as fast as the search's choice: {sum(result.is_cheapest is True for result in priced)} of {len(priced)}"
    yield f"no change known, or only with offload: {sum(result.change is None for result in results)}"
    yield ", ".join(f"{phase} {count}" for phase, count in Counter(r.phase for r in results).most_common())


def tables(results: Sequence[Result]) -> dict[str, Any]:
    """Returns all as data."""
    return {"ranks": RANKS, "cases": [asdict(result) for result in results]}


def main() -> None:
    """Runs the cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12, metavar="N", help="cases to run again with a change")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what dstrain says of each case")
    given = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        program = [sys.executable, "-m", "dstrain.train.demo", str(home / "demo")]
        subprocess.run(program, check=True, capture_output=True, env=environment(home))
        with Engine(home) as engine:
            space = Space(folder=home, demo=home / "demo", engine=engine)
            for number in count(given.first):
                if sum(result.fits is not None for result in results) == given.cases:
                    break
                results.append(tried(space, number, verbose=given.verbose))
                print(line_of(results[-1]), flush=True)
                if given.json is not None:
                    given.json.write_text(json.dumps(tables(results), indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
