"""Records whole runs of `dstrain run` on two CPU ranks, whose causes are found by its checks, its verdict or its end.

What rules say of metrics can be replayed; these runs are kept as their run directories.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from dstrain.rundir import COMPLETE, RunDir
from dstrain.train.demo import make_model
from tests.train import memory_limit
from tests.train.launching import environment

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "health_traces" / "whole"
DEVICE_BYTES = 96 * 2**20
"""Memory of a device that the allocator of the tests stands for."""
OOM_STEP = 300
"""Steps before the long sample."""
SMALL_BUCKET = 1000
"""Elements of a bucket that is too small."""
KEYS: Mapping[str, object] = {
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "learning_rate": 1e-3,
    "max_grad_norm": 5.0,
    "logging_steps": 10,
    "save_steps": 100_000,
    "monitor.sinks": "[]",
}
"""Keys of the job of every run."""
OTHER_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST] ' }}{% endif %}{% endfor %}"
)
"""Source: the form of Mistral's chat templates, without its special tokens."""
_FILES = (
    *("request.json", "facts.json", "plan.json", "ds_config.resolved.json", "edits.json", "states.json"),
    *("preflight.json", "summary.json", "oom.json", "state.json", "metrics.jsonl", "health.jsonl", "failure.txt"),
)
"""Files of the run directory that a report reads."""
_HOME = "/demo"
"""The folder of the job in what is kept."""
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A run with a cause."""

    name: str
    """Of its page."""
    record: Callable[[Job], None]
    """Trains it in a folder with the demo's model and data; its output folder is `output`."""
    says: tuple[str, ...]
    """What its page has to say: what is wrong, and what to change."""

    @property
    def path(self) -> Path:
        """The file that keeps it."""
        return FOLDER / f"{self.name}.json"

    def write(self, folder: Path) -> RunDir:
        """Writes its run directory into a folder, and returns it."""
        for name, content in json.loads(self.path.read_text(encoding="utf-8")).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".jsonl":
                text = "".join(f"{json.dumps(line)}\n" for line in content)
            else:
                text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8")
        return RunDir(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A folder in which commands are typed."""

    folder: Path
    variables: Mapping[str, str]

    def type(self, *words: object, code: int = 0, **variables: str) -> None:
        """Runs a dstrain command. Raises RuntimeError with the end of what it printed if its exit code is another."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dstrain.cli", *map(str, words)],
            cwd=self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != code:
            raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stderr[-3000:]}")

    def plan(self, *words: object, model: Path | str = "./model", data: str = "train.jsonl") -> None:
        """Writes the files of a job for two CPU ranks."""
        where = ("--gpus", 2, "--gpu", "cpu", "--output-dir", "output")
        self.type("gen-config", "--model", model, "--data", data, *where, "--zero-stage", 2, *words)

    def run(self, code: int = 0, /, variables: Mapping[str, str] | None = None, **settings: object) -> None:
        """Trains with keys of the job that differ from what was planned."""
        settings = {**KEYS, **settings}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.type("run", "--no-doctor", *words, code=code, **(variables or {}))


def wrong_template(job: Job) -> None:
    """Trains a model in its own template, and then on in that of another family."""
    sizes = ("--seq-len", 256, "--global-batch", 16)
    job.plan(*sizes, "--packing")
    job.run(max_steps=150, learning_rate=5e-3)
    shutil.move(job.folder / "output" / "final", job.folder / "tuned")
    shutil.rmtree(job.folder / "output")
    (job.folder / "template.jinja").write_text(OTHER_TEMPLATE, encoding="utf-8")
    for name in ("ds_config.json", "job.yaml"):
        (job.folder / name).unlink()
    job.plan(*sizes, model="./tuned")
    job.run(max_steps=60, chat_template="template.jinja")


def out_of_memory(job: Job) -> None:
    """Trains on short samples of which one, after 300 steps, is long, on a device with little memory.

    The checks before the first step are off: they try the longest sample. The first change that the run proposes has
    to train it to its end.
    """
    lines = sorted((job.folder / "train.jsonl").read_text(encoding="utf-8").splitlines(), key=len)
    rows = [json.loads(line) for line in lines[: 8 * (OOM_STEP + 20)]]
    long = {"messages": [message for row in rows[-20:] for message in row["messages"]]}
    rows[_drawn_at(8 * OOM_STEP + 3, len(rows))] = long
    (job.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    sizes = ("--seq-len", 1024, "--global-batch", 8, "--micro-batch", 4, "--no-grad-ckpt", "--loss", "full")
    job.plan(*sizes, data="rows.jsonl")
    site = job.folder / "site"
    site.mkdir()
    shutil.copyfile(memory_limit.__file__, site / "sitecustomize.py")
    variables = {
        "DSTRAIN_TEST_DEVICE_BYTES": str(DEVICE_BYTES),
        "DSTRAIN_TEST_LIMIT_FROM": str(site),
        "PYTHONPATH": f"{job.variables['PYTHONPATH']}:{site}",
    }
    settings = {"preflight": "false", "save_steps": 100, "save_total_limit": 1, "logging_steps": 20}
    job.run(1, variables, max_steps=OOM_STEP + 20, **settings)
    shutil.copytree(job.folder / "output", job.folder / "failed")
    fix = json.loads((job.folder / "output" / "oom.json").read_text(encoding="utf-8"))["fixes"][0]["set"]
    changed = dict(item.split("=", 1) for item in fix)
    job.run(0, variables, max_steps=OOM_STEP + 20, **settings, **changed, resume="auto")
    shutil.rmtree(job.folder / "output")
    (job.folder / "failed").rename(job.folder / "output")


def _drawn_at(place: int, count: int) -> int:
    """Returns the index of the row that the first epoch takes at a place, with the job's default seed.

    Source: accelerate 1.15 data_loader.py: SeedableRandomSampler.
    """
    return int(torch.randperm(count, generator=torch.Generator().manual_seed(42))[place])


def small_bucket(job: Job) -> None:
    """Trains a model of many small tensors with a tiny `reduce_bucket_size`, over a link that was measured before."""
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "model")
    make_model(tokenizer, hidden_size=64, num_hidden_layers=12).save_pretrained(job.folder / "model")
    (job.folder / "hostfile").write_text("localhost slots=2\n", encoding="utf-8")
    job.type("doctor", "--network", "--hostfile", "hostfile")
    job.plan("--seq-len", 128, "--global-batch", 4)
    path = job.folder / "ds_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["zero_optimization"]["reduce_bucket_size"] = SMALL_BUCKET
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    job.run(max_steps=60)


WHOLE_RUNS: Sequence[WholeRun] = (
    WholeRun(
        name="wrong-template",
        record=wrong_template,
        says=("the model does not know it", "remove chat_template from the job, and it trains in its own"),
    ),
    WholeRun(
        name="out-of-memory-at-step-300",
        record=out_of_memory,
        says=("Out of GPU memory", f"of step {OOM_STEP + 1}", "micro_batch="),
    ),
    WholeRun(
        name="small-bucket",
        record=small_bucket,
        says=("zero_optimization.reduce_bucket_size", f"(now {SMALL_BUCKET})", "dstrain doctor --network"),
    ),
)
"""Runs whose causes the recorded metrics of a run alone do not show."""


def record(runs: Sequence[WholeRun], say: Callable[[str], None]) -> None:
    """Trains and keeps runs."""
    FOLDER.mkdir(exist_ok=True)
    for one in runs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary).resolve()
            variables = environment(folder)
            program = [sys.executable, "-m", "dstrain.train.demo", str(folder)]
            subprocess.run(program, check=True, capture_output=True, env=variables)
            one.record(Job(folder=folder, variables=variables))
            text = json.dumps(dict(_kept(RunDir(folder / "output"))), separators=(",", ":"), ensure_ascii=False)
            for path, name in ((str(folder), _HOME), (sys.prefix, "/venv")):
                text = text.replace(path, name)
            one.path.write_text(f"{text}\n", encoding="utf-8")
        say(f"{one.name}: {one.path.stat().st_size:,} bytes")


def _kept(run: RunDir) -> Iterator[tuple[str, Any]]:
    """Yields the files of a run directory that a report reads: name and content, numbers with four digits."""
    for path in filter(Path.exists, (run.path / name for name in _FILES)):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            yield path.name, [short(json.loads(line)) for line in text.splitlines()]
        else:
            content: Any = short(json.loads(text)) if path.suffix == ".json" else text
            yield path.name, content | {"host": "localhost"} if path == run.state else content
    for _, folder in run.whole_checkpoints():
        record = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        rest = {key: value for key, value in record.items() if key not in ("checksums", "crc32")}
        yield f"{folder.name}/{COMPLETE}", {**rest, "files": {}}


def short(value: Any) -> Any:
    """Returns JSON data whose numbers below a million have four digits; times since the epoch keep theirs."""
    if isinstance(value, dict):
        return {key: short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [short(one) for one in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and abs(value) < 1e9 else value
