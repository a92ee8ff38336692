"""The run directory: names of the files in which the launcher, the ranks and the reports meet."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

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
        found = []
        for folder in self.path.glob("checkpoint-*"):
            step = folder.name.removeprefix("checkpoint-")
            if step.isdigit() and folder.is_dir():
                found.append((int(step), folder))
        return sorted(found)


COMPLETE = "complete.json"
"""A checkpoint is whole when this file stands in it; it is written last, after a barrier of all ranks."""
PART = "part.json"
"""In place of the other in a checkpoint of which ranks wrote parts on several disks; `run` puts them together."""


UNIVERSAL = "latest_universal"
"""A checkpoint that was converted for other numbers of ranks has this file, which names the copy; it is written last.
Source: deepspeed 0.19.8 runtime/engine.py: load_checkpoint"""

UNIVERSAL_PART = ".universal.part"
"""The folder in a checkpoint in which that copy is made."""


def is_whole(checkpoint: Path) -> bool:
    """Returns whether a checkpoint was written to its end."""
    return (checkpoint / COMPLETE).is_file()


def rotate(run_dir: RunDir, limit: int | None) -> list[Path]:
    """Deletes the oldest checkpoints down to `limit` whole ones, and half-written ones older than the newest whole one.

    The newest whole one always stays. Returns what was deleted.
    """
    every = run_dir.checkpoints()
    whole = [folder for _, folder in every if is_whole(folder)]
    if limit is None or not whole:
        return []
    kept = set(whole[-max(limit, 1) :])
    newest = int(whole[-1].name.removeprefix("checkpoint-"))
    gone = [folder for step, folder in every if folder not in kept and step < newest]
    for folder in gone:
        (folder / COMPLETE).unlink(missing_ok=True)  # a deletion that is cut short must not leave a "whole" one
        shutil.rmtree(folder, ignore_errors=True)
    return gone
