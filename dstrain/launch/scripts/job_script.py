"""Writes job scripts, for SLURM or to start by hand, from values that no scheduler misreads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.choices import Attention
from dstrain.config.edits.lock import planned_cluster
from dstrain.config.templates import render_script
from dstrain.errors import InvalidConfig
from dstrain.facts import probe
from dstrain.facts.attention_kernels import of_this_machine
from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.facts.cluster.machines import resolve_hosts
from dstrain.facts.network import DEFAULT_PORT
from dstrain.job.code_variables import TRUSTED
from dstrain.job.file import JobFile
from dstrain.launch import environment
from dstrain.launch.environment import RANK_NAMES, SAFE_PATH, is_forwarded, is_secret, python_path, refuse_secrets
from dstrain.launch.environment import secrets as known_secrets
from dstrain.launch.launch import write_inputs
from dstrain.launch.prepare import inputs
from dstrain.launch.prepare.attention import choose
from dstrain.launch.prepare.prepare import PreparedRun
from dstrain.rundir import RunDir

MAX_GPUS_PER_NODE = 8
"""Assumed GPUs of a node if only their sum is known."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptContext:
    """A job and its machines, ready for any script."""

    job: Path
    """The job file, absolute."""
    run_dir: Path
    """The job's output folder, absolute."""
    name: str
    """The name of the job in its scheduler: letters, digits, dots, dashes and underscores."""
    nodes: int
    gpus: int
    hosts: tuple[str, ...]
    """The nodes by name; empty if fewer names are known."""
    python: str
    """The interpreter on the nodes."""
    overrides: tuple[str, ...]
    """`key=value` words that change the job."""
    secrets: tuple[str, ...]
    """Names of the secrets that the job may need; their values are in no script."""
    exports: Mapping[str, str]
    """Further variables of the ranks, if no launcher brings them."""
    job_env: Mapping[str, str]
    """The part of it that the job defines."""

    @property
    def words(self) -> list[str]:
        """The overrides, and whether the job is trusted, as words of a command line."""
        words = [word for override in self.overrides for word in ("--set", override)]
        return ["--trust-job", *words] if TRUSTED.get() else words

    @property
    def values(self) -> dict[str, Any]:
        """The values that every script takes under the same names."""
        return {
            "nodes": self.nodes,
            "gpus": self.gpus,
            "run_dir": str(self.run_dir),
            "job": str(self.job),
            "folder": str(self.job.parent),
            "python": self.python,
            "bin": str(Path(self.python).parent),
            "words": self.words,
            "secrets": self.secrets,
        }


def describe(
    file: JobFile,
    path: Path,
    *,
    environment: Mapping[str, str],
    python: str,
    nodes: int | None = None,
    gpus: int | None = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
) -> ScriptContext:
    """Returns the values that fill the scripts of a job; `nodes` and `gpus` (altogether) win over the job's hostfile.

    Raises InvalidConfig if the machines are unknown or do not share the GPUs evenly, or if a value has a line break or
    is a secret.
    """
    job = file.job
    run_dir = Path(job.output_dir)
    refuse_secrets(overrides, "others can read the script")
    for what, value in (("job", str(path.resolve())), ("output_dir", job.output_dir), ("--python", python)):
        one_line(what, value)
    for override in overrides:
        one_line("--set", override)
    hosts = _hosts(file, is_said=nodes is not None or gpus is not None)
    num_nodes, per_node = _shape(hosts, nodes, gpus) if hosts else _planned(path.parent, nodes, gpus)
    # other machines than those of the hostfile have no names yet; the scheduler gives them
    named = hosts is not None and len(hosts.hosts) == num_nodes and not hosts.placeholder_lines
    return ScriptContext(
        job=path.resolve(),
        run_dir=run_dir,
        name=name if name is not None else _default_name(file, path),
        nodes=num_nodes,
        gpus=per_node,
        hosts=tuple(host.name for host in hosts.hosts) if hosts is not None and named else (),
        python=python,
        overrides=tuple(overrides),
        secrets=tuple(sorted(name for name in known_secrets(environment, job.env) if _NAME.fullmatch(name))),
        exports=_exports(environment, job.env),
        job_env={name: value for name, value in job.env.items() if not is_secret(name, value)},
    )


def _hosts(file: JobFile, *, is_said: bool) -> Hosts | None:
    """Returns the job's hosts; None if it names no hostfile, or a missing one although --nodes or --gpus is given."""
    path = Path(file.job.hostfile) if file.job.hostfile is not None else None
    if path is None or (is_said and not path.exists()):
        return None
    return resolve_hosts(path, place=file.locate(("hostfile",)))


def _shape(hosts: Hosts, nodes: int | None, gpus: int | None) -> tuple[int, int]:
    """Returns nodes and GPUs of each, from a hostfile and what was said."""
    if nodes is None and gpus is None:
        counts = {host.slots for host in hosts.hosts}
        if len(counts) > 1:
            raise InvalidConfig(
                f"{hosts.name}: hosts have {', '.join(map(str, sorted(counts)))} slots; a script needs equal nodes",
                hint="Give --nodes and --gpus, or make the slots equal.",
            )
        return len(hosts.hosts), hosts.hosts[0].slots
    return _divided(nodes, gpus, per_node=hosts.hosts[0].slots)


def _planned(folder: Path, nodes: int | None, gpus: int | None) -> tuple[int, int]:
    """Returns nodes and GPUs of each without a hostfile: as said, as planned, or as found on this machine."""
    if nodes is not None or gpus is not None:
        return _divided(nodes, gpus, per_node=MAX_GPUS_PER_NODE)
    if (cluster := planned_cluster(folder)) is not None:
        return cluster.num_nodes, cluster.gpus_per_node
    local = len(probe.local_gpus())
    if not local:
        raise InvalidConfig(
            "the number of GPUs is unknown: the job has no hostfile, and this machine has no GPU",
            hint="Give it: --nodes 2 --gpus 16 (GPUs in total).",
        )
    return 1, local


def _divided(nodes: int | None, gpus: int | None, *, per_node: int) -> tuple[int, int]:
    """Returns nodes and GPUs of each, where one or both were said."""
    if gpus is None:
        return nodes or 1, per_node
    count = nodes or max(1, -(-gpus // per_node))
    if gpus % count:
        raise InvalidConfig(
            f"{gpus} GPUs do not divide evenly among {count} nodes",
            hint=f"Give --gpus {count * max(1, gpus // count)}.",
        )
    return count, gpus // count


def _default_name(file: JobFile, path: Path) -> str:
    """Returns a name from the job: its monitor's, its output folder's, or its own folder's."""
    run_dir = Path(file.job.output_dir)
    own = run_dir.name if run_dir.name != "output" else path.resolve().parent.name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", file.job.monitor.name or own).strip("-._")
    return plain[:40].rstrip("-._") or "dstrain"


def _exports(environment: Mapping[str, str], job_env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of this shell and the job that go to the ranks, without secrets."""
    path = python_path(environment)
    variables = {**({"PYTHONPATH": path} if path else {}), **SAFE_PATH}
    for name, value in environment.items():
        if is_forwarded(name) and _NAME.fullmatch(name) and not is_secret(name, value) and value.isprintable():
            variables[name] = value
    for name, value in job_env.items():
        if not is_secret(name, value):
            one_line(f"env.{name}", value)
            variables[name] = value
    return variables


def one_line(what: str, value: str) -> str:
    """Returns a value for the body of a script; raises InvalidConfig if it has line breaks or control characters."""
    if not value.isprintable():
        raise InvalidConfig(f"{what} is {value!r}: a script cannot hold line breaks or control characters")
    return value


_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+,=-]*")
_PATH = re.compile(r"/[A-Za-z0-9_.+@:,=/-]*")


def directive(what: str, value: str) -> str:
    """Returns a value for a scheduler's own line (`#SBATCH`), which is quoted in no known way.

    Raises InvalidConfig for anything but letters, digits and `_ . : / @ + , = -`.

    >>> directive("--partition", "gpu,gpu-long")
    'gpu,gpu-long'
    """
    if _WORD.fullmatch(value) is None:
        raise InvalidConfig(
            f'{what} is "{value}"; a scheduler\'s line takes letters, digits and _ . : / @ + , = - only',
            hint="Use a name without spaces and quotes.",
        )
    return value


def directive_path(what: str, path: Path) -> str:
    """Returns an absolute path for a scheduler's own line; raises InvalidConfig as `directive` does."""
    if _PATH.fullmatch(str(path)) is None:
        raise InvalidConfig(
            f'{what} is "{path}"; schedulers take paths of ASCII letters, digits and . _ - + @ : , = / only',
            hint="Name another output_dir.",
        )
    return str(path)


def stand_ins(nodes: int, gpus: int) -> Hosts:
    """Returns hosts with any names, for a number of nodes with that many GPUs each."""
    if nodes == 1:
        return Hosts(hosts=(Host(name="localhost", slots=gpus),), name="--nodes and --gpus")
    hosts = tuple(Host(name=f"node-{number}", slots=gpus) for number in range(nodes))
    return Hosts(hosts=hosts, name="--nodes and --gpus")


def decided(prepared: PreparedRun, variables: Mapping[str, str]) -> PreparedRun:
    """Returns a run with its attention decided: of several nodes, of which none can ask the others, what all have.

    Raises EnvironmentProblem if this machine lacks the kernel that the job names.
    """
    choice = prepared.attention
    if prepared.is_local or prepared.on_cpu:
        return prepared
    if choice.wish.asked.is_flash:
        choice = choose(choice.wish, {"this machine": of_this_machine({**variables, **prepared.job.env})})
    elif choice.wish.asked is Attention.AUTO:
        choice = replace(choice, says=f"{choice.attn}; no node can be asked for a better one, which attn may name")
    return replace(prepared, attention=choice)


def write_run_dir(prepared: PreparedRun, variables: Mapping[str, str]) -> None:
    """Writes the inputs of the ranks. All nodes may do this at once, since a file that already holds its text is not
    touched.

    Raises Conflict if the folder holds checkpoints of another run.
    """
    job = prepared.job
    inputs.check_run_dir(prepared.run_dir, resume=job.resume)
    secrets = environment.secrets(variables, job.env)
    open_env = {name: value for name, value in job.env.items() if name not in secrets}
    write_inputs(prepared, job=replace(job, env=open_env), hostfile=render(prepared.hosts), secrets=secrets)


def bash(asked: ScriptContext, port: int | None = None) -> str:
    """Returns a script that starts the nodes of the job's hostfile, one by one or all over ssh."""
    hosts = asked.hosts or (("localhost",) if asked.nodes == 1 else ())
    if not hosts:
        raise InvalidConfig(
            f"the names of the {asked.nodes} nodes are not known", hint="Write them into the job's hostfile."
        )
    return render_script("bash.sh.j2", _values(asked, port) | {"hosts": hosts, "is_several": len(hosts) > 1})


def _values(asked: ScriptContext, port: int | None) -> dict[str, Any]:
    master = asked.hosts[0].rpartition("@")[2] if asked.hosts else ""
    if asked.nodes == 1:
        master = "127.0.0.1"
    return asked.values | {
        "name": asked.name,
        "all_gpus": asked.nodes * asked.gpus,
        "master": master,
        "port": port or DEFAULT_PORT,
        "unset": RANK_NAMES,
        "exports": sorted(asked.exports.items()),
    }


WARNING_S = 180
"""How long before the end of its time a job is asked to save and leave, at least."""
SPARE_S = 60
"""The part of it beyond a step and a checkpoint by the plan: the work in between, and the exit."""
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


def slurm(asked: ScriptContext, batch: Batch) -> str:
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
        "logs": directive_path("output_dir", slurm_logs(asked)),
    }
    return render_script("slurm.sbatch.j2", values)


def slurm_logs(asked: ScriptContext) -> Path:
    """Returns the folder of SLURM's own output files; SLURM ends a job at once if it is missing."""
    return RunDir(asked.run_dir).logs


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
