"""The values that fill every job script: the job and its machines, checked so that no scheduler misreads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.config.edits.lock import planned_cluster
from dstrain.errors import InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import resolve_hosts
from dstrain.job.code_variables import TRUSTED
from dstrain.job.file import JobFile
from dstrain.launch.environment import SAFE_PATH, is_forwarded, is_secret, python_path, refuse_secrets
from dstrain.launch.environment import secrets as known_secrets

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
    """The name of the job where it runs: letters, digits, dots, dashes and underscores."""
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
    """Returns a name from the job: its monitor's, that of its output folder, or that of its own folder."""
    run_dir = Path(file.job.output_dir)
    own = run_dir.name if run_dir.name != "output" else path.resolve().parent.name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", file.job.monitor.name or own).strip("-._")
    return plain[:40].rstrip("-._") or "dstrain"


def _exports(environment: Mapping[str, str], job_env: Mapping[str, str]) -> dict[str, str]:
    """Returns what goes from this shell and the job to the ranks, without secrets."""
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
    """Returns a value for the body of a script; raises InvalidConfig where it has line breaks or control characters."""
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
