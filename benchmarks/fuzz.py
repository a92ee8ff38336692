"""Feeds broken files and messages to what reads them, and counts what ends in anything but an error with a hint.

Example: python benchmarks/fuzz.py --inputs 100000 --seed 7 --processes 2

An input is a real configuration, job, hostfile or message with a few mutations: of its values and keys where it can be
read as JSON or YAML (words and numbers of DeepSpeed's own keys among them), and of its bytes. One seed gives the same
inputs again. A crash is named by its exception and the line that raised it, with the shortest input that gives it.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from benchmarks.mutations import KEY_PLACES, mutated
from dstrain import heartbeat
from dstrain.cli.main import cli
from dstrain.cli.output import explain_file, explain_key
from dstrain.config import jsonc
from dstrain.config.edits.lock import LOCK, Lock
from dstrain.config.edits.regenerate import Decision, Standing, edits_in, regenerate, replaced
from dstrain.config.keys import KEYS
from dstrain.config.lint import engine
from dstrain.config.lint.rule import Subject
from dstrain.errors import DstrainError
from dstrain.facts.cluster import hostfile
from dstrain.findings import lines
from dstrain.job.file import TEXTS, read_job, synonyms
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.launch.nodes import protocol
from dstrain.records import from_data, to_json
from tests.cases import ask
from tests.config.lint.case import MARK
from tests.config.lint.cases_engine import ENGINE_CASES
from tests.config.lint.cases_text import TEXT_CASES

ROOT = Path(__file__).parents[1]
"""The repository."""
HOSTS = "gpu01 slots=8\ngpu02 slots=8\n"
"""The hostfile beside other files."""
SHARE_PLANNED = 0.005
"""Share of the inputs that whole commands read too, which take a hundred times as long."""
BATCH = 500
"""Inputs of one process at a time."""
MESSAGES: tuple[protocol.Order | protocol.Event, ...] = (
    protocol.Look(run_dir="/r", token="t", others=["b"], files={"/m": 1}, packages=["kernels"], exports={}, port=29500),
    protocol.Begin(
        host="a", run_dir="/r", mark="m", command=["python"], environment={"A": "b"}, unset=[], exports={"C": "$A"},
        first_rank=0, num_ranks=8, master_port=29500, mirror=False, timeouts={"grace_s": 5.0},
    ),
    protocol.Alive(steps={"0": [1, "step", 10]}),
    protocol.Wrote(name="logs/a", text="é\n", on_screen=True),
    protocol.Ended(code=None, num_finished=1, num_done=1, reported=1),
)  # fmt: skip
"""Messages between `run` and agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """An exception that is no DstrainError."""

    reader: str
    """The reader of the input."""
    signature: str
    """The exception and the line of dstrain that raised it."""
    input: str
    """The input, as Python writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a number of inputs."""

    inputs: int
    """Number of inputs."""
    calls: Counter[str]
    """Reader to how often it was called."""
    slowest: dict[str, float]
    """Reader to the seconds of its slowest call."""
    crashes: list[Crash]
    """All crashes."""


class Readers:
    """What reads files and messages; files stand in a folder of generated ones."""

    def __init__(self, folder: Path) -> None:
        """Reads the corpus; `folder` is where files are written."""
        self._folder = folder
        self._cluster = ask(model="qwen3-8b", gpus=16).workload.cluster
        golden = [path.parent for path in sorted((ROOT / "tests" / "golden").glob("*/job.yaml"))]
        self._cases = [
            {"hostfile": HOSTS, **{name: (path / name).read_text("utf-8") for name in ("ds_config.json", "job.yaml")}}
            for path in golden
        ]
        mistakes = [case.text.replace(MARK, "").encode() for case in (*TEXT_CASES, *ENGINE_CASES)]
        self.corpus = {
            "ds_config.json": [*self._texts("ds_config.json"), *mistakes],
            "job.yaml": [
                *self._texts("job.yaml"),
                *(path.read_bytes() for path in (ROOT / "launch").glob("*.job.yaml")),
            ],
            "hostfile": [path.read_bytes() for path in sorted((ROOT / "hostfiles").iterdir())],
            "wire": [protocol.encode(message, 1) for message in MESSAGES],
            "heartbeat": [b'{"rank": 1, "step": 2, "phase": "step", "total": 9}'],
        }

    def _texts(self, name: str) -> list[bytes]:
        return [case[name].encode() for case in self._cases]

    def calls(self, rng: random.Random, name: str, raw: bytes) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yields what reads an input, with its name in the report; whole commands read a few of them."""
        text = raw.decode(errors="replace")
        if name == "wire":
            yield "wire", lambda: [protocol.decode(line) for line in protocol.Lines().feed(raw)]
        elif name == "heartbeat":
            yield "heartbeat", lambda: heartbeat.decode(raw)
        else:
            case, new = rng.choice(self._cases), rng.choice(self._cases)[name]
            yield from _of_file(rng, name, text)
            yield f"diff {name}", lambda: edits_in(name, case[name], text)
            yield f"merge {name}", lambda: _merged(rng, name, case[name], text, new)
            if rng.random() < SHARE_PLANNED:
                self._write({**case, name: raw}, case)
                yield "dstrain lint", lambda: _typed("lint", *rng.choice([[], ["--fix", "-n"], ["--json"]]))
                yield "dstrain explain --edits", lambda: _typed("explain", "--edits", *rng.choice([[], ["--json"]]))
                yield "dstrain explain", lambda: _typed("explain", rng.choice(["ds_config.json", "stage"]))
                yield "job file", lambda: read_job(Path("job.yaml"), [text[:40]] if name == "hostfile" else [])

    def _write(self, texts: Mapping[str, str | bytes], base: Mapping[str, str]) -> None:
        for name, text in texts.items():
            (self._folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        (self._folder / LOCK).parent.mkdir(exist_ok=True)
        lock = Lock(dstrain="0", deepspeed="0", base=base, cluster=self._cluster)
        (self._folder / LOCK).write_text(to_json(lock), encoding="utf-8")


def _of_file(rng: random.Random, name: str, text: str) -> Iterator[tuple[str, Callable[[], object]]]:
    if name == "ds_config.json":
        yield "lint", lambda: _linted(text, is_trainers=rng.random() < 0.7)
        yield "explain", lambda: _explained(text)
        key = rng.choice(KEY_PLACES)
        yield "explain a key", lambda: explain_key.lines(explain_key.explain(key, KEYS[key], None, ""))
    elif name == "hostfile":
        yield "hostfile", lambda: hostfile.parse(text, name)
        yield "hosts", lambda: hostfile.expand(text[:200], slots=rng.choice([None, 8]))
    else:
        yield "job file", lambda: _job(text, name)


def _linted(text: str, *, is_trainers: bool) -> None:
    document, findings = engine.read(text, "ds_config.json")
    if document is not None:
        fixed, findings = engine.fixed(Subject(document=document, is_trainers=is_trainers))
        engine.check(fixed)
    for finding in findings:
        lines(finding)


def _explained(text: str) -> None:
    value = jsonc.parse(text, "ds_config.json").value
    if isinstance(value, dict):
        explained = explain_file.explain(Path("ds_config.json"), value, None, "")
        explain_file.lines(explained)
        json.dumps(explain_file.document(explained))


def _job(text: str, name: str) -> None:
    data, locate = parse_yaml(text, name, texts=TEXTS)
    from_data(Job, data, locate=locate, synonyms=synonyms)


def _typed(*words: str) -> None:
    """Runs `dstrain` with these words in the current folder."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit, click.ClickException):
        cli.main(list(words), prog_name="dstrain", standalone_mode=False)


def _merged(rng: random.Random, name: str, base: str, yours: str, new: str) -> None:
    """Merges an edited file with a new one, in every way."""
    adopted, reopens = rng.random() < 0.3, rng.random() < 0.3
    file = Standing(name=name, shown=name, base=base, yours=yours, new=new, is_adopted=adopted, reopens=reopens)
    replaced([file])
    regenerate([file], lambda file, clash: rng.choice(list(Decision)))


def run(inputs: int, seed: int) -> Report:
    """Returns the results of a number of inputs."""
    rng = random.Random(seed)
    report = Report(inputs=inputs, calls=Counter(), slowest={}, crashes=[])
    with tempfile.TemporaryDirectory() as name, chdir(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        readers = Readers(Path(name))
        for _ in range(inputs):
            kind = rng.choices(list(readers.corpus), weights=(6, 2, 4, 4, 4))[0]
            raw = mutated(rng, rng.choice(readers.corpus[kind]))
            for reader, call in readers.calls(rng, kind, raw):
                started = time.perf_counter()
                try:
                    call()
                except DstrainError:
                    pass
                except Exception as error:
                    report.crashes.append(Crash(reader=reader, signature=_signature(error), input=repr(raw)))
                report.calls[reader] += 1
                report.slowest[reader] = max(report.slowest.get(reader, 0.0), time.perf_counter() - started)
    return report


def _signature(error: Exception) -> str:
    """Returns the exception and the last line of dstrain on the way to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/dstrain/" in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
    return f"{type(error).__name__} at {where}: {str(error)[:80]!r}"


def _batch(given: tuple[int, int]) -> Report:
    return run(*given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 if any input crashed a reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="Number of inputs.")
    parser.add_argument("--seed", type=int, help="Seed of the inputs.  [default: a new one]")
    parser.add_argument("--processes", type=int, default=1, help="Number of processes.")
    parser.add_argument("--json", type=Path, help="Write every crash to this file.")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    given = [(min(BATCH, options.inputs - done), seed + done) for done in range(0, options.inputs, BATCH)]
    inputs, crashes = 0, list[Crash]()
    calls: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for report in pool.map(_batch, given):
            inputs += report.inputs
            calls += report.calls
            slowest = {name: max(slowest.get(name, 0.0), report.slowest.get(name, 0.0)) for name in calls}
            crashes += report.crashes
            print(f"{inputs:,} inputs, {len(crashes):,} crashes", file=sys.stderr, flush=True)
    _print(inputs, calls, slowest, crashes)
    if options.json:
        options.json.write_text(json.dumps([asdict(crash) for crash in crashes], indent=2), encoding="utf-8")
    return 1 if crashes else 0


def _print(inputs: int, calls: Counter[str], slowest: Mapping[str, float], crashes: Sequence[Crash]) -> None:
    print(f"{inputs:,} inputs, {calls.total():,} calls, {len(crashes):,} crashes")
    for name, count in sorted(calls.items()):
        print(f"  {name:<22} {count:>9,} calls, the slowest {slowest[name]:.2f} s")
    for signature, count in Counter(crash.signature for crash in crashes).most_common():
        shortest = min((crash for crash in crashes if crash.signature == signature), key=lambda crash: len(crash.input))
        print(f"{count:>6} × {shortest.reader}: {signature}\n         {shortest.input[:600]}")


if __name__ == "__main__":
    sys.exit(main())
