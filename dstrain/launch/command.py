"""Builds the `deepspeed` command lines of a run, their hostfile, and the cores of each rank."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dstrain import paths
from dstrain.child_process import run
from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.facts.ds_config import ZERO, section
from dstrain.facts.this_machine import LOCAL
from dstrain.paths import python
from dstrain.rundir import RunDir
from dstrain.units import counted

LAUNCHER = "deepspeed.launcher.runner"
"""The module of DeepSpeed's launcher."""
_PROBE_S = 5.0
_SLOWER = "ranks share all cores, which made steps with CPU Adam 1.16 × as long in DeepSpeed's measurement"
"""Source: DeepSpeed blogs/zenflow-corebinding: Qwen2.5-3B on 2 × A100, ZeRO-2, 2,887 ms without and 2,497 ms with."""
NO_NUMACTL = f"numactl is not installed: {_SLOWER}"
_OWN = ("OMP_NUM_THREADS", "KMP_AFFINITY")
"""Variables of a user who places threads; DeepSpeed overwrites the first and refuses the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The cores that ranks share out, or why they do not."""

    cores: str | None = None
    """Cores in numactl's notation; None: ranks are not bound."""
    note: str | None = None
    """A note on it."""


def binding(ds_config: Mapping[str, Any], environment: Mapping[str, str], num_ranks: int) -> Binding:
    """Returns the cores of `num_ranks` ranks on this machine, which DeepSpeed's launcher shares out by numactl.

    Ranks are bound if optimizer or parameters are on the CPU, and if the user has not placed threads already.
    Source: deepspeed 0.19.8 utils/numa.py: get_numactl_cmd, which takes the first cores of the machine otherwise, those
    that a container may not use included.
    """
    if not is_on_cpu(ds_config):
        return Binding()
    if placed := [name for name in _OWN if name in environment]:
        return Binding(note=f"{' and '.join(placed)} set: ranks are not bound to cores of their own")
    program = shutil.which("numactl", path=environment.get("PATH"))
    if program is None:
        return Binding(note=f"{NO_NUMACTL}; apt-get install numactl")
    cores = usable_cores(os.sched_getaffinity(0), psutil.cpu_count(logical=False) or 0)
    if len(cores) < num_ranks:
        few = f"{counted(len(cores), 'core')} for {counted(num_ranks, 'rank')}"
        return Binding(note=f"{few}, which are not bound to any")
    tried = run([program, "--localalloc", "-C", str(cores[0]), "true"], environment, _PROBE_S)
    if tried.code != 0:
        return Binding(note=f"numactl may not bind here ({tried.last_line or 'no answer'}): {_SLOWER}")
    return Binding(cores=ranges(cores))


def options(cores: str | None) -> list[str]:
    """Returns the launcher's options that share out cores. Source: deepspeed 0.19.8 launcher/runner.py: parse_args."""
    return [] if cores is None else ["--bind_cores_to_rank", f"--bind_core_list={cores}"]


def is_on_cpu(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration keeps optimizer states or parameters on the CPU."""
    zero = section(ds_config, ZERO)
    return any(section(zero, name).get("device") == "cpu" for name in ("offload_optimizer", "offload_param"))


def usable_cores(allowed: set[int], num_physical: int) -> list[int]:
    """Returns the cores that processes may use, without the second threads of a core if they come last.

    >>> usable_cores({0, 1, 2, 3}, 2), usable_cores({6, 7}, 2)
    ([0, 1], [6, 7])
    """
    return sorted(core for core in allowed if core < num_physical) or sorted(allowed)


def ranges(cores: list[int]) -> str:
    """Returns sorted cores in numactl's notation.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def main(words: Sequence[str]) -> None:
    """Becomes the launcher; its log has what keeps ranks from being bound."""
    folder, num_ranks, *rest = words
    config = json.loads(RunDir(Path(folder)).ds_config.read_text(encoding="utf-8"))
    bound = binding(config, os.environ, int(num_ranks))
    if bound.note is not None:
        print(f"dstrain: {bound.note}", file=sys.stderr, flush=True)
    line = python("-m", LAUNCHER, *options(bound.cores), *rest)
    os.execv(line[0], line)


MODULE = "dstrain.train"
"""The program of every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSite:
    """Where ranks are started, and with what."""

    hosts: Hosts
    run_dir: RunDir
    python: str
    """The interpreter, at the same path on every node."""
    master_port: int
    module: str = MODULE
    """The program of every rank."""
    cores: str | None = None
    """Cores of this machine that its ranks share out; None: they are bound to none."""
    binds: bool = False
    """Whether each of several nodes looks for cores that its ranks share out."""


def chosen_devices(hosts: Hosts, ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the GPU numbers that a local run uses: the first `slots` of the visible ones."""
    if ids is None:
        return None
    slots = hosts.hosts[0].slots
    if len(ids) < slots:
        shown = ",".join(map(str, ids))
        raise EnvironmentProblem(
            f"{hosts.name} asks for {counted(slots, 'GPU')}, but CUDA_VISIBLE_DEVICES={shown} shows only {len(ids)}",
            hint=f"Write slots={len(ids)}, or make {counted(slots, 'GPU')} visible.",
        )
    return tuple(ids[:slots])


def launch_hostfile(hosts: Hosts, *, ids: Sequence[int] | None, is_local: bool) -> str:
    """Returns the text of the run directory's hostfile.

    A local run gets one too, so that the launcher never looks at `/job/hostfile`; its slots reach as far as the
    highest GPU number, because `--include` may only name slots that exist.
    """
    if not is_local:
        return render(hosts)
    chosen = chosen_devices(hosts, ids)
    slots = hosts.hosts[0].slots if chosen is None else max(chosen) + 1
    return render(Hosts(hosts=(Host(name=LOCAL, slots=slots),), name="local"))


def local(site: LaunchSite, device_ids: Sequence[int] | None) -> list[str]:
    """Returns the launcher's command line for ranks on this machine; it reads `RUN_DIR/hostfile` and writes one log a
    rank to `RUN_DIR/logs`.

    The launcher is named as a module, so that PATH cannot select another environment's. `--no_ssh` with a
    hostfile of one host takes the launcher's local path without asking ssh for an address.
    Source: deepspeed 0.19.8 launcher/runner.py: main
    """
    chosen = chosen_devices(site.hosts, device_ids)
    include = [] if chosen is None else ["--include", f"{LOCAL}:{','.join(map(str, chosen))}"]
    bound = options(site.cores)
    return _line(site, "--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1", *include, *bound)


def of_node(site: LaunchSite, number: int) -> list[str]:
    """Returns the launcher's command line for one of several nodes, each of which starts its own ranks."""
    through = (__name__, str(site.run_dir.path), str(site.hosts.hosts[number].slots)) if site.binds else ()
    return _line(site, "--no_ssh", "--node_rank", str(number), "--master_addr", master(site.hosts), through=through)


def master(hosts: Hosts) -> str:
    """Returns the name of rank 0's node, without a user."""
    return hosts.hosts[0].name.rpartition("@")[2]


def _line(site: LaunchSite, *options: str, through: Sequence[str] = ()) -> list[str]:
    """Returns a command line of the launcher, or of a module that becomes it, with the module's own arguments."""
    hostfile = ["--hostfile", str(site.run_dir.hostfile)]
    words = paths.python("-m", *(through or [LAUNCHER]), *hostfile, *options, program=site.python)
    words += ["--master_port", str(site.master_port), "--enable_each_rank_log", str(site.run_dir.logs)]
    return [*words, "--no_local_rank", "--module", site.module, str(site.run_dir.path)]


if __name__ == "__main__":
    main(sys.argv[1:])
