"""Builds the `deepspeed` command lines of a run and the hostfile that they read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstrain import paths
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.facts.this_machine import LOCAL
from dstrain.rundir import RunDir

MODULE = "dstrain.train"
"""What every rank runs."""

_SAFE_WORD = re.compile(r"[\w@+=:,./-]+", re.ASCII)


def chosen_devices(hosts: Hosts, ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the GPU numbers that a local run uses: the first `slots` of the visible ones."""
    if ids is None:
        return None
    slots = hosts.hosts[0].slots
    if len(ids) < slots:
        shown = ",".join(map(str, ids))
        raise EnvironmentProblem(
            f"{hosts.name} asks for {slots} GPUs, but CUDA_VISIBLE_DEVICES={shown} shows only {len(ids)}",
            hint=f"Write slots={len(ids)}, or make {slots} GPUs visible.",
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


def local(
    *,
    hosts: Hosts,
    run_dir: RunDir,
    device_ids: Sequence[int] | None,
    python: str,
    master_port: int,
    module: str = MODULE,
) -> list[str]:
    """Returns the launcher's command line for ranks on this machine; it reads `RUN_DIR/hostfile` and writes one log a
    rank to `RUN_DIR/logs`.

    The launcher is named as a module, so that PATH cannot pick the one of another environment. `--no_ssh` with a
    hostfile of one host takes the launcher's local path without asking ssh for an address.
    Source: deepspeed 0.19.8 launcher/runner.py: main
    """
    words = [*_runner(python, run_dir), "--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    chosen = chosen_devices(hosts, device_ids)
    if chosen is not None:
        words += ["--include", f"{LOCAL}:{','.join(map(str, chosen))}"]
    return [*words, *_port_and_logs(master_port, run_dir), *_module(module, run_dir)]


def of_node(
    number: int, *, hosts: Hosts, run_dir: RunDir, python: str, master_port: int, module: str = MODULE
) -> list[str]:
    """Returns the launcher's command line for one of several nodes, each of which starts its own ranks."""
    words = [*_runner(python, run_dir), "--no_ssh", "--node_rank", str(number), *_master(hosts)]
    return [*words, *_port_and_logs(master_port, run_dir), *_module(module, run_dir)]


def pdsh(*, hosts: Hosts, run_dir: RunDir, python: str, master_port: int, module: str = MODULE) -> list[str]:
    """Returns the command line of a launcher that starts the ranks of all nodes over pdsh."""
    _require_safe(run_dir, python)
    # without --force_multi a single host of the hostfile would mean this machine
    words = [*_runner(python, run_dir), "--force_multi", "--launcher", "pdsh", *_master(hosts)]
    return [*words, *_port_and_logs(master_port, run_dir), *_module(module, run_dir)]


def mpi(kind: str, *, hosts: Hosts, run_dir: RunDir, python: str, master_port: int) -> list[str]:
    """Returns the command line of a launcher that starts all ranks by `mpirun`, of OpenMPI or MPICH.

    MPICH is given a file instead of a module, because the launcher puts a file of its own between `-m` and the module.
    Source: deepspeed 0.19.8 launcher/multinode_runner.py
    """
    _require_safe(run_dir, python)
    words = [*_runner(python, run_dir), "--force_multi", "--no_ssh_check", "--launcher", kind, *_master(hosts)]
    words += ["--master_port", str(master_port), "--no_local_rank"]
    if kind == "mpich":
        return [*words, str(run_dir.rank_program), str(run_dir.path)]
    return [*words, "--module", MODULE, str(run_dir.path)]


def master(hosts: Hosts) -> str:
    """Returns the name of rank 0's node, without a user."""
    return hosts.hosts[0].name.rpartition("@")[2]


def _runner(python: str, run_dir: RunDir) -> list[str]:
    return paths.python("-m", "deepspeed.launcher.runner", "--hostfile", str(run_dir.hostfile), program=python)


def _master(hosts: Hosts) -> list[str]:
    return ["--master_addr", master(hosts)]


def _port_and_logs(master_port: int, run_dir: RunDir) -> list[str]:
    return ["--master_port", str(master_port), "--enable_each_rank_log", str(run_dir.logs)]


def _module(module: str, run_dir: RunDir) -> list[str]:
    return ["--no_local_rank", "--module", module, str(run_dir.path)]


def _require_safe(run_dir: RunDir, python: str) -> None:
    """Raises InvalidConfig for paths that the remote shell would take apart: the launcher does not quote them."""
    for what, word in (("output_dir", str(run_dir.path)), ("the Python interpreter", python)):
        if not _SAFE_WORD.fullmatch(word):
            problem = f'{what} is "{word}"; the launcher does not quote paths for the other nodes'
            raise InvalidConfig(problem, hint="Use a path of ASCII letters, digits and . _ - / only.")
