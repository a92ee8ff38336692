"""The run directory: the names of the files that the launcher, the ranks and the reports share."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.paths import flush, write_atomic

_SENT = re.compile(r"(metrics|health)\.jsonl|(states|summary)\.json|logs/[^/\0]+\.log|checkpoint-\d+/part\.json")
"""Names of the files that nodes without this file system send."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run directory; it does not have to exist."""

    path: Path
    """The folder, absolute."""

    @property
    def request(self) -> Path:
        """The job, with every path absolute and every override applied (`job.Job` as JSON)."""
        return self.path / "request.json"

    @property
    def facts(self) -> Path:
        """Model and cluster."""
        return self.path / "facts.json"

    @property
    def plan(self) -> Path:
        """The estimate of the effective configuration."""
        return self.path / "plan.json"

    @property
    def ds_config(self) -> Path:
        """The DeepSpeed configuration that the Trainer is given."""
        return self.path / "ds_config.resolved.json"

    @property
    def edits(self) -> Path:
        """What was edited by hand in the files since they were generated; there only where that is known."""
        return self.path / "edits.json"

    @property
    def hostfile(self) -> Path:
        """The hostfile that the launcher is given."""
        return self.path / "hostfile"

    @property
    def start_script(self) -> Path:
        """The command, as a script that starts the run again by hand."""
        return self.path / "start.sh"

    @property
    def rank_program(self) -> Path:
        """What MPICH starts as a rank: a file, since the launcher cannot give it a module."""
        return self.path / "rank.py"

    @property
    def environment(self) -> Path:
        """Environment for the other nodes, in DeepSpeed's `DS_ENV_FILE` form; mode 0600, no secrets."""
        return self.path / "environment"

    @property
    def secrets(self) -> Path:
        """Secrets that the ranks read (`NAME=value` lines); mode 0600."""
        return self.path / ".secrets"

    @property
    def metrics(self) -> Path:
        """One JSON object for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def health(self) -> Path:
        """One JSON object for each thing that looked wrong."""
        return self.path / "health.jsonl"

    @property
    def states(self) -> Path:
        """Bytes of model states measured in the engine on every rank."""
        return self.path / "states.json"

    @property
    def summary(self) -> Path:
        """What rank 0 wrote when training ended well."""
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        """One folder of output files, one for each rank."""
        return self.path / "logs"

    @property
    def state(self) -> Path:
        """How the run stands: what `dstrain status` reads."""
        return self.path / "state.json"

    @property
    def failure(self) -> Path:
        """What went wrong, in words; there only after a run that failed."""
        return self.path / "failure.txt"

    @property
    def token(self) -> Path:
        """A word by which a node knows that this very folder is its own too."""
        return self.path / ".token"

    @property
    def synced(self) -> Path:
        """On a disk that `run --sync` copied to: the mark of the start, and the number of the node that took it."""
        return self.path / ".synced"

    @property
    def code(self) -> Path:
        """dstrain itself, where `run --sync` copied it to."""
        return self.path / ".code"

    @property
    def lock(self) -> Path:
        """Held by the one `dstrain run` that trains in this folder."""
        return self.path / ".lock"

    @property
    def stop_wish(self) -> Path:
        """There when somebody wants this run to stop."""
        return self.path / ".stop"

    def watch_log(self, host: str) -> Path:
        """Returns where the agent of a node writes what it did on its own."""
        return self.logs / f"watch_{host}.log"

    @property
    def final(self) -> Path:
        """The final model or adapter, for `from_pretrained`."""
        return self.path / "final"

    def sent(self, name: str) -> Path | None:
        """Returns the place of a file that another node sends while it runs; None for a name that no rank writes, and
        where a link leads elsewhere."""
        path = self.path / name
        is_ours = _SENT.fullmatch(name) is not None and not path.is_symlink()
        return path if is_ours and path.resolve().is_relative_to(self.path.resolve()) else None

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Returns the checkpoint folders by step, oldest first, whole or not."""
        numbered = []
        for folder in self.path.glob("checkpoint-*"):
            step = folder.name.removeprefix("checkpoint-")
            if step.isdigit() and folder.is_dir():
                numbered.append((int(step), folder))
        return sorted(numbered)

    def whole_checkpoints(self) -> list[tuple[int, Path]]:
        """Returns the checkpoints that can be loaded, by step, oldest first."""
        return [(step, folder) for step, folder in self.checkpoints() if is_whole(folder)]

    def newest_checkpoint(self) -> Newest:
        """Returns the newest checkpoint that can be loaded, and what is wrong with the newer ones."""
        skipped: list[str] = []
        for step, folder in reversed(self.checkpoints()):
            problem = damage(folder)
            if problem is None:
                return Newest(step=step, folder=folder, skipped=tuple(skipped))
            skipped.append(f"{folder.name} {problem}")
        return Newest(step=0, folder=None, skipped=tuple(skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """Where a run goes on that takes the newest checkpoint."""

    step: int
    """The optimizer steps done there; 0 without a checkpoint."""
    folder: Path | None
    """The checkpoint; None if none can be loaded."""
    skipped: tuple[str, ...]
    """Newer checkpoints that cannot be loaded, each with the reason, newest first."""


COMPLETE = "complete.json"
"""A checkpoint is whole when this file stands in it; it is written last, after a barrier of all ranks."""
PART = "part.json"
"""In place of the other in a checkpoint of which ranks wrote parts on several disks; `run` puts them together."""


UNIVERSAL = "latest_universal"
"""A checkpoint that was converted for other numbers of ranks has this file, which names the copy; it is written last.
Source: deepspeed 0.19.8 runtime/engine.py: load_checkpoint"""

UNIVERSAL_PART = ".universal.part"
"""The folder in a checkpoint in which that copy is made."""


def read_record(checkpoint: Path, name: str = COMPLETE) -> dict[str, Any]:
    """Returns what a checkpoint says of itself. Raises OSError or ValueError if it cannot be read."""
    record = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not all(isinstance(record.get(key), int) for key in _RECORDED):
        raise ValueError(f"does not give {', '.join(_RECORDED)} as numbers")
    if not isinstance(record.get("files", {}), dict):
        raise ValueError('"files" is no object')
    return record


_RECORDED = ("step", "world_size", "zero_stage")
"""What every record of a checkpoint holds."""


def file_sizes(checkpoint: Path) -> dict[str, int]:
    """Returns the bytes of each file of a checkpoint but its records, by its path in the folder."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name not in {COMPLETE, PART})
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def mark_whole(checkpoint: Path, record: Mapping[str, Any]) -> None:
    """Writes the record by which a checkpoint is whole, with the size of each file; the last thing that is written."""
    write_atomic(checkpoint / COMPLETE, json.dumps({**record, "files": file_sizes(checkpoint)}) + "\n")
    flush(checkpoint / COMPLETE)


def damage(checkpoint: Path) -> str | None:
    """Returns why a checkpoint cannot be loaded; None for a whole one, whose files all have the size they were given.

    A record of an earlier version lists no files, and is believed.
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


def is_whole(checkpoint: Path) -> bool:
    """Returns whether a checkpoint was written to its end and still has all its bytes."""
    return damage(checkpoint) is None


def rotate(run_dir: RunDir, limit: int | None) -> list[Path]:
    """Deletes the oldest checkpoints down to `limit` whole ones, and half-written ones older than the newest whole one.

    The newest whole one always stays. Returns what was deleted.
    """
    every = run_dir.checkpoints()
    whole = [folder for _, folder in run_dir.whole_checkpoints()]
    if limit is None or not whole:
        return []
    kept = set(whole[-max(limit, 1) :])
    newest = int(whole[-1].name.removeprefix("checkpoint-"))
    gone = [folder for step, folder in every if folder not in kept and step < newest]
    for folder in gone:
        (folder / COMPLETE).unlink(missing_ok=True)  # a deletion that is cut short must not leave a "whole" one
        shutil.rmtree(folder, ignore_errors=True)
    return gone
