"""The run directory: files that the launcher, the ranks and the reports share, its state, and how to continue it."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, overload

from dstrain.paths import flush, shown, write_atomic
from dstrain.records import type_config

_SENT = re.compile(
    r"(metrics|health|samples)\.jsonl|(states|summary|oom|unusable|preflight)\.json|logs/[^/\0]+\.log|checkpoint-\d+/part\.json"
)
"""Names of the files that nodes with a file system of their own send."""


class _Entry:
    """An attribute that is the path of a file or folder of the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, run_dir: None, owner: type) -> _Entry: ...
    @overload
    def __get__(self, run_dir: RunDir, owner: type) -> Path: ...
    def __get__(self, run_dir: RunDir | None, owner: type) -> Path | _Entry:
        return self if run_dir is None else run_dir.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run directory; it does not have to exist."""

    path: Path
    """The folder, absolute."""

    request = _Entry("request.json")
    """The job as JSON (`job.schema.Job`), with absolute paths and all overrides applied."""
    facts = _Entry("facts.json")
    """Facts about model and cluster."""
    plan = _Entry("plan.json")
    """The estimate of the effective configuration."""
    ds_config = _Entry("ds_config.resolved.json")
    """The DeepSpeed configuration for the Trainer."""
    edits = _Entry("edits.json")
    """Hand edits to the generated files; missing if they are not known."""
    hostfile = _Entry("hostfile")
    """The launcher's hostfile."""
    start_script = _Entry("start.sh")
    """A script that starts the run again."""
    environment = _Entry("environment")
    """Environment variables for the other nodes, which `start.sh` reads; mode 0600, no secrets."""
    secrets = _Entry(".secrets")
    """Secrets for the ranks, as `NAME=value` lines; mode 0600."""
    metrics = _Entry("metrics.jsonl")
    """One JSON object per logged step."""
    health = _Entry("health.jsonl")
    """One JSON object per warning about a step."""
    samples = _Entry("samples.jsonl")
    """One JSON object per generated text (`monitor.outcomes`)."""
    states = _Entry("states.json")
    """Measured bytes of model states, of every rank."""
    preflight = _Entry("preflight.json")
    """The checks before the first step of the last start (`dstrain.monitor.outcomes`)."""
    summary = _Entry("summary.json")
    """Written by rank 0 after training has succeeded."""
    logs = _Entry("logs")
    """Folder of log files, one per rank."""
    oom = _Entry("oom.json")
    """Memory of a rank that ran out of it in the last start, and changes that fit (`dstrain.oom`)."""
    unusable = _Entry("unusable.json")
    """The checkpoint that a rank of the last start could not use, and why (`unusable_checkpoint`)."""
    adaptations = _Entry("adaptations.jsonl")
    """One JSON object per change by which `run --on-oom adapt` started again."""
    restarts = _Entry("restarts.jsonl")
    """One JSON object per restart of a failed run: when, why, from which step, and what changed."""
    inputs = _Entry(".inputs")
    """Folder with copies of the configuration and its plan, which restarts read."""
    state = _Entry("state.json")
    """State of the run, for `dstrain status`."""
    failure = _Entry("failure.txt")
    """The report of a failed run."""
    token = _Entry(".token")
    """A random word; a node that reads the same one shares this folder."""
    synced = _Entry(".synced")
    """On a disk that `run --sync` copied to: the mark of the start and the number of the node."""
    code = _Entry(".code")
    """A copy of dstrain, made by `run --sync`."""
    lock = _Entry(".lock")
    """Held by the one `dstrain run` that trains in this folder."""
    stop_wish = _Entry(".stop")
    """Exists if the run was asked to stop."""
    save_trial = _Entry(".save-trial")
    """A folder that the check of saving writes before the first step, and removes."""
    tune = _Entry("tune")
    """Folder of the short runs of `dstrain tune`, a run directory each."""
    trial = _Entry("trial.json")
    """Conclusion of `dstrain tune` from a short run (`launch.run.trial`)."""
    final = _Entry("final")
    """The final model or adapter, for `from_pretrained`."""

    def watch_log(self, host: str) -> Path:
        """Returns the log file of a node's agent."""
        return self.logs / f"watch_{host}.log"

    def sent(self, name: str) -> Path | None:
        """Returns the path of a file that another node sends; None if ranks write no such file, or if a link leads out
        of the folder."""
        path = self.path / name
        is_ours = _SENT.fullmatch(name) is not None and not path.is_symlink()
        return path if is_ours and path.resolve().is_relative_to(self.path.resolve()) else None

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Returns the checkpoint folders by step, oldest first, complete or not."""
        numbered = []
        for folder in self.path.glob("checkpoint-*"):
            step = folder.name.removeprefix("checkpoint-")
            if step.isdigit() and folder.is_dir():
                numbered.append((int(step), folder))
        return sorted(numbered)

    def whole_checkpoints(self) -> list[tuple[int, Path]]:
        """Returns the complete checkpoints by step, oldest first."""
        return [(step, folder) for step, folder in self.checkpoints() if is_whole(folder)]

    def best_checkpoint(self) -> Path | None:
        """Returns the complete checkpoint of the lowest evaluation loss, by the newest one; None if no loss decides."""
        newest = self.newest_checkpoint().folder
        step = None if newest is None else best_step(newest)
        best = self.path / f"checkpoint-{step}"
        return best if step is not None and is_whole(best) else None

    def damaged_checkpoints(self) -> list[Path]:
        """Returns the checkpoints that were written to their end and cannot be loaded any more, oldest first."""
        ended = [folder for _, folder in self.checkpoints() if (folder / COMPLETE).exists()]
        return [folder for folder in ended if damage(folder) is not None]

    def newest_checkpoint(self, *, for_resume: bool = False) -> Newest:
        """Returns the newest complete checkpoint, and why newer ones are skipped; for a resume, one with all states."""
        skipped: list[str] = []
        for step, folder in reversed(self.checkpoints()):
            problem = damage(folder) or (lacks_states(folder) if for_resume else None)
            if problem is None:
                return Newest(step=step, folder=folder, skipped=tuple(skipped))
            skipped.append(f"{folder.name} {problem}")
        return Newest(step=0, folder=None, skipped=tuple(skipped))


RUN = ("dstrain", "run")
"""Starts a run whose command line is unknown."""


class Stage(StrEnum):
    """The stage of a run."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    SAVED = "saved and left"
    FAILED = "failed"
    STOPPED = "stopped"


LIVING = frozenset({Stage.STARTING, Stage.RUNNING})
"""The stages of an active run."""
GONE = "gone"
"""Stage of a run whose process ended without recording its exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a run."""

    __pydantic_config__ = type_config

    stage: Stage
    host: str
    """The machine on which `dstrain run` runs."""
    pid: int
    """Its process there."""
    start_ticks: int
    """When that process started, in clock ticks since boot: with `pid` it is this one and no other."""
    began: float
    """When the run began, in seconds since the epoch."""
    beat: float
    attempt: int = 1
    """1 for the first start, more after restarts."""
    step: int | None = None
    """Optimizer steps done."""
    nodes: tuple[str, ...] = ()
    start: str | None = None
    """Progress of the ranks before their first step; None if nothing was reported yet."""
    exit_code: int | None = None
    """Exit code of `dstrain run`."""
    command: tuple[str, ...] = RUN
    """The words that start it again (`launch.again.words_of`)."""


def cause_of(failure: str | None) -> str:
    """Returns the cause, which is the first line of the report of a failed run (`RunDir.failure`)."""
    return (failure or "").strip().partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest complete checkpoint."""

    step: int
    """Its optimizer steps; 0 without a checkpoint."""
    folder: Path | None
    """None if no checkpoint is complete."""
    skipped: tuple[str, ...]
    """Newer checkpoints and their damage, newest first."""


COMPLETE = "complete.json"
"""The file that makes a checkpoint complete; written last, after a barrier of all ranks."""
PART = "part.json"
"""The same for the part of a checkpoint on one of several disks; `dstrain run` gathers the parts."""


UNIVERSAL = "latest_universal"
"""The file that names the universal copy of a checkpoint, which any number of ranks can load; written last.
Source: deepspeed 0.19.8 runtime/engine.py: load_checkpoint"""

UNIVERSAL_SUMS = "latest_universal.json"
"""The checksums of the files of that copy, by their names in the checkpoint."""

UNIVERSAL_PART = ".universal.part"
"""The folder of an unfinished universal copy."""


def read_record(checkpoint: Path, name: str = COMPLETE) -> dict[str, Any]:
    """Returns the record of a checkpoint. Raises OSError or ValueError if it cannot be read."""
    record = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not all(isinstance(record.get(key), int) for key in _RECORDED):
        raise ValueError(f"does not give {', '.join(_RECORDED)} as numbers")
    if not isinstance(record.get("files", {}), dict):
        raise ValueError('"files" is no object')
    if "crc32" in record and record["crc32"] != _crc32(record):
        raise ValueError("it is not as it was written: its own checksum differs")
    return record


def _crc32(record: Mapping[str, Any]) -> int:
    """Returns the checksum of a record without its checksum."""
    rest = {key: value for key, value in record.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


_RECORDED = ("step", "world_size", "zero_stage")
"""Numbers in every record."""


def file_sizes(checkpoint: Path) -> dict[str, int]:
    """Returns the bytes of each file of a checkpoint by relative path, without its records."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name not in {COMPLETE, PART})
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def mark_whole(checkpoint: Path, record: Mapping[str, Any]) -> None:
    """Marks a checkpoint as complete: writes its record, which may have `checksums`, with the size of each file."""
    whole = {**record, "files": file_sizes(checkpoint)}
    write_atomic(checkpoint / COMPLETE, json.dumps({**whole, "crc32": _crc32(whole)}) + "\n")
    flush(checkpoint / COMPLETE)


def damage(checkpoint: Path) -> str | None:
    """Returns why a checkpoint cannot be loaded; None if it is complete and every file has its recorded size.

    Records of earlier versions list no files.
    """
    try:
        files = read_record(checkpoint).get("files", {})
    except FileNotFoundError:
        return f"was not written to its end (no {COMPLETE})"
    except (OSError, ValueError) as error:
        return f"is damaged ({COMPLETE}: {error})"
    for name, num_bytes in files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            return f"is damaged ({name}: {error.strerror})"
        if size != num_bytes:
            return f"is damaged ({name} has {size:,} of {num_bytes:,} bytes)"
    return None


def put_aside(checkpoint: Path) -> Path:
    """Renames a damaged checkpoint, so that nothing takes it for one, and returns its new place. Raises OSError."""
    names = (checkpoint.with_name(f"{checkpoint.name}.damaged{number or ''}") for number in itertools.count())
    place = next(name for name in names if not name.exists())
    return checkpoint.rename(place)


def note_unusable(run_dir: RunDir, checkpoint: Path, why: str) -> None:
    """Writes that a rank cannot use a checkpoint; the last rank that says so is heard."""
    write_atomic(run_dir.unusable, json.dumps({"checkpoint": str(checkpoint), "why": why}) + "\n")


def unusable_checkpoint(run_dir: RunDir) -> tuple[Path, str] | None:
    """Returns the checkpoint of this folder that a rank of the last start could not use, and why; None without one."""
    try:
        record = json.loads(run_dir.unusable.read_text(encoding="utf-8"))
        folder, why = run_dir.path / Path(record["checkpoint"]).name, str(record["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (folder, why) if folder in [each for _, each in run_dir.checkpoints()] else None


def lacks_states(checkpoint: Path) -> str | None:
    """Returns why no run can resume from a complete checkpoint; None if one can."""
    return "holds the weights alone (save_only_model)" if read_record(checkpoint).get("only_model") else None


def best_step(checkpoint: Path) -> int | None:
    """Returns the step of the lowest evaluation loss until a checkpoint; None if the job does not keep the best one.

    Source: transformers 5.23 trainer_callback.py: TrainerState.best_global_step.
    """
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")).get("best_global_step")
    except (OSError, ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None


def is_whole(checkpoint: Path) -> bool:
    """Returns whether a checkpoint is complete."""
    return damage(checkpoint) is None


def rotate(run_dir: RunDir, limit: int | None) -> list[Path]:
    """Deletes older checkpoints than the newest `limit` complete ones (at least 1), except the best; returns them."""
    whole = [folder for _, folder in run_dir.whole_checkpoints()]
    if limit is None or not whole:
        return []
    kept = {*whole[-max(limit, 1) :], run_dir.path / f"checkpoint-{best_step(whole[-1])}"}
    newest = int(whole[-1].name.removeprefix("checkpoint-"))
    deleted = [folder for step, folder in run_dir.checkpoints() if folder not in kept and step < newest]
    for folder in deleted:
        (folder / COMPLETE).unlink(
            missing_ok=True
        )  # an interrupted deletion must not leave a checkpoint that looks complete
        shutil.rmtree(folder, ignore_errors=True)
    return deleted


_SHARD = re.compile(r"(?:zero_pp_rank_|offloaded_tensors/rank)(\d+)")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Weights in a checkpoint for other programs: resuming ranks read DeepSpeed's."""


def shard_numbers(files: Iterable[str], written_by: int) -> dict[str, int]:
    """Returns the rank that each shard belongs to; none if ranks of tensor parallelism share their numbers."""
    numbers = {name: int(match[1]) for name in files if (match := _SHARD.search(name))}
    return numbers if len(set(numbers.values())) == written_by else {}


def for_other_programs(name: str) -> bool:
    """Returns whether a file of a checkpoint has weights that no resuming rank reads."""
    return "/" not in name and name.endswith(_WEIGHTS)


def needed(files: Iterable[str], ranks: Collection[int], *, written_by: int, num_ranks: int) -> list[str]:
    """Returns the files of a checkpoint that some of `num_ranks` ranks read when they resume from it.

    Another number than `written_by` reads the universal copy, and of the shards rank 0's model states alone. Source:
    deepspeed 0.19.8 runtime/engine.py: _get_all_ckpt_names, _get_all_zero_checkpoint_state_dicts

    >>> shards = ["s/zero_pp_rank_0_mp_rank_00_optim_states.pt", "s/zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    >>> needed([*shards, "latest", "model.safetensors"], {1}, written_by=2, num_ranks=2)
    ['s/zero_pp_rank_1_mp_rank_00_optim_states.pt', 'latest']
    >>> needed([*shards, "latest"], {1}, written_by=2, num_ranks=3)
    ['latest']
    """
    read = [name for name in files if not for_other_programs(name)]
    numbers = shard_numbers(read, written_by)
    if not numbers:
        return read
    if num_ranks != written_by:
        return [name for name in read if name not in numbers or (numbers[name] == 0 and "_model_states" in name)]
    return [name for name in read if name not in numbers or numbers[name] in ranks]


def words_of(typed: Sequence[str], job: Path) -> tuple[str, ...]:
    """Returns the words that start a run again: those typed after `dstrain`, with the job file's absolute path, and
    without what they say about resuming.

    >>> words_of(["run", "--set", "resume=auto", "--set", "seed=1"], Path("/jobs/job.yaml"))
    ('dstrain', 'run', '/jobs/job.yaml', '--set', 'seed=1')
    """
    rest = [word for word in typed[1:] if word != str(job)]
    kept: list[str] = []
    for word in rest:
        if word.startswith("resume=") and kept[-1:] == ["--set"]:
            kept.pop()
        elif not word.startswith("--set=resume="):
            kept.append(word)
    return (*RUN, str(job.absolute()), *kept)


def line_of(words: Sequence[str], *more: str) -> str:
    """Returns the line to type in the current folder."""
    command, rest = words[:2], words[2:]
    return shlex.join([*command, *(shown(word) for word in rest[:1]), *rest[1:], *more])


def run_line(job: Path) -> str:
    """Returns the line that runs a job file.

    >>> run_line(Path("job.yaml")), run_line(Path("runs/a b/job.yaml"))
    ('dstrain run', "dstrain run 'runs/a b/job.yaml'")
    """
    return line_of(RUN) if job == Path("job.yaml") else line_of((*RUN, str(job)))


def resumed(words: Sequence[str]) -> str:
    """Returns the line that continues from the newest checkpoint."""
    return line_of(words, "--set", "resume=auto")
