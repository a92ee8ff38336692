"""Builds the `deepspeed` command lines of a run and the hostfile that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstrain import paths
from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.facts.this_machine import LOCAL
from dstrain.launch import cores
from dstrain.rundir import RunDir
from dstrain.units import counted

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

    The launcher is named as a module, so that PATH cannot select that of another environment. `--no_ssh` with a
    hostfile of one host takes the launcher's local path without asking ssh for an address.
    Source: deepspeed 0.19.8 launcher/runner.py: main
    """
    chosen = chosen_devices(site.hosts, device_ids)
    include = [] if chosen is None else ["--include", f"{LOCAL}:{','.join(map(str, chosen))}"]
    bound = cores.options(site.cores)
    return _line(site, "--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1", *include, *bound)


def of_node(site: LaunchSite, number: int) -> list[str]:
    """Returns the launcher's command line for one of several nodes, each of which starts its own ranks."""
    through = (cores.__name__, str(site.run_dir.path), str(site.hosts.hosts[number].slots)) if site.binds else ()
    return _line(site, "--no_ssh", "--node_rank", str(number), "--master_addr", master(site.hosts), through=through)


def master(hosts: Hosts) -> str:
    """Returns the name of rank 0's node, without a user."""
    return hosts.hosts[0].name.rpartition("@")[2]


def _line(site: LaunchSite, *options: str, through: Sequence[str] = ()) -> list[str]:
    """Returns a command line of the launcher, or of a module that becomes it, with the module's own arguments."""
    hostfile = ["--hostfile", str(site.run_dir.hostfile)]
    words = paths.python("-m", *(through or [cores.LAUNCHER]), *hostfile, *options, program=site.python)
    words += ["--master_port", str(site.master_port), "--enable_each_rank_log", str(site.run_dir.logs)]
    return [*words, "--no_local_rank", "--module", site.module, str(site.run_dir.path)]
