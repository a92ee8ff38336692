"""Writes a script for SLURM's sbatch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dstrain.config.templates.templates import render_script
from dstrain.errors import InvalidConfig
from dstrain.launch.scripts.script_context import ScriptContext, directive, directive_path
from dstrain.rundir import RunDir

WARNING_S = 180
"""How long before the end of its time a job is asked to save and leave, at least."""
SPARE_S = 60
"""The part of it that is more than a step and a checkpoint take by the plan: what runs in between, and the exit."""
CPUS_PER_GPU = 8
"""CPU cores that a job asks for with each GPU by default: a rank, its data loaders, and offloaded Adam."""
_UNITS = MappingProxyType({"d": 86400, "h": 3600, "m": 60, "s": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Resources of a job besides nodes and GPUs."""

    time_s: int
    """Time limit of the job."""
    warning_s: int = WARNING_S
    """How long before its end it is asked to save and leave."""
    cpus: int | None = None
    memory_bytes: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None


def warning_s(step_s: float, checkpoint_s: float) -> int:
    """Returns how long before the end of its time a job is asked to save, so that a step and a checkpoint fit in it.

    >>> warning_s(1.5, 20.0), warning_s(24.0, 229.0)
    (180, 330)
    """
    return max(WARNING_S, 30 * math.ceil((step_s + checkpoint_s + SPARE_S) / 30))


def parse_time(text: str, warning_s: int = WARNING_S) -> int:
    """Returns seconds. Raises InvalidConfig for an invalid time, or one too short for a run to save before its end.

    >>> parse_time("1d12h"), parse_time("90m"), parse_time("04:00:00"), parse_time("2-00:00:00")
    (129600, 5400, 14400, 172800)
    """
    clock = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    words = re.fullmatch(r"(?:\d{1,5}[dhms])+", text)
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        total_s = days * 86400 + hours * 3600 + minutes * 60 + seconds
    elif words:
        total_s = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    else:
        raise InvalidConfig(f'--time "{text}" is not a time', hint="Write 24h, 90m, 1d12h or 04:00:00.")
    if total_s < 2 * warning_s:
        raise InvalidConfig(
            f"--time {text}: a job is asked to save {warning_s} s before its end",
            hint=f"Give it {4 * warning_s}s or more.",
        )
    return total_s


def script(asked: ScriptContext, batch: Batch) -> str:
    """Returns a script for `sbatch`. Raises InvalidConfig for a value that SLURM could misread."""
    days, rest = divmod(batch.time_s, 86400)
    cpus = batch.cpus or CPUS_PER_GPU * asked.gpus
    asks = ((name, getattr(batch, name)) for name in ("partition", "account", "qos", "reservation"))
    values = asked.values | {
        "name": directive("--name", asked.name),
        "cpus": cpus,
        "memory_mib": batch.memory_bytes // 2**20 if batch.memory_bytes else None,
        "time": f"{days}-{_clock(rest)}" if days else _clock(rest),
        "warning_s": batch.warning_s,
        "directives": [(name, directive(f"--{name}", value)) for name, value in asks if value is not None],
        "logs": directive_path("output_dir", logs(asked)),
    }
    return render_script("slurm.sbatch.j2", values)


def logs(asked: ScriptContext) -> Path:
    """Returns the folder of SLURM's own output files; SLURM ends a job at once if it is missing."""
    return RunDir(asked.run_dir).logs


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
