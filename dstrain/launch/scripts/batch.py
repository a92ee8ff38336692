"""Scripts for batch schedulers: SLURM, PBS and LSF."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    """What a job asks of a scheduler, beside nodes and GPUs."""

    time_s: int
    """Time limit of the job."""
    warning_s: int = WARNING_S
    """How long before its end it is asked to save and leave."""
    cpus: int | None = None
    memory_bytes: int | None = None
    partition: str | None = None
    """Partition or queue."""
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


def slurm(asked: ScriptContext, batch: Batch) -> str:
    """Returns a script for `sbatch`."""
    days, rest = divmod(batch.time_s, 86400)
    options = {
        "partition": batch.partition,
        "account": batch.account,
        "qos": batch.qos,
        "reservation": batch.reservation,
    }
    time = f"{days}-{_clock(rest)}" if days else _clock(rest)
    return render_script("slurm.sbatch.j2", _values(asked, batch, time, options))


def pbs(asked: ScriptContext, batch: Batch) -> str:
    """Returns a script for `qsub` of PBS Professional or OpenPBS."""
    _refuse(batch, "pbs", "qos", "reservation")
    options = {"q": batch.partition, "A": batch.account}
    return render_script("pbs.sh.j2", _values(asked, batch, _clock(batch.time_s), options))


def lsf(asked: ScriptContext, batch: Batch) -> str:
    """Returns a script for `bsub`."""
    _refuse(batch, "lsf", "qos")
    options = {"q": batch.partition, "P": batch.account, "U": batch.reservation}
    minutes = batch.time_s // 60
    return render_script("lsf.sh.j2", _values(asked, batch, f"{minutes // 60:02}:{minutes % 60:02}", options))


BATCH: Mapping[str, Callable[[ScriptContext, Batch], str]] = MappingProxyType({"slurm": slurm, "pbs": pbs, "lsf": lsf})
"""Every batch scheduler by name."""


def logs(asked: ScriptContext) -> Path:
    """Returns the folder of a scheduler's own output files; SLURM and PBS end a job at once if it is missing."""
    return RunDir(asked.run_dir).logs


def _values(asked: ScriptContext, batch: Batch, time: str, options: Mapping[str, str | None]) -> dict[str, Any]:
    cpus = batch.cpus or CPUS_PER_GPU * asked.gpus
    return asked.values | {
        "name": directive("--name", asked.name),
        "cpus": cpus,
        "slots": asked.nodes * cpus,
        "memory_mib": batch.memory_bytes // 2**20 if batch.memory_bytes else None,
        "time": time,
        "warning_s": batch.warning_s,
        "run_s": batch.time_s - batch.warning_s,
        "directives": [(name, directive(_WORDS[name], value)) for name, value in options.items() if value is not None],
        "logs": directive_path("output_dir", logs(asked)),
    }


_WORDS = MappingProxyType(
    {
        "partition": "--partition",
        "account": "--account",
        "qos": "--qos",
        "reservation": "--reservation",
        "q": "--partition",
        "A": "--account",
        "P": "--account",
        "U": "--reservation",
    }
)
"""Our option behind each option of a scheduler."""


def _refuse(batch: Batch, kind: str, *names: str) -> None:
    """Raises InvalidConfig for options that a scheduler lacks."""
    given = [f"--{name}" for name in names if getattr(batch, name) is not None]
    if given:
        raise InvalidConfig(f"{' and '.join(given)}: {kind} has no such option", hint="Leave it out.")


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
