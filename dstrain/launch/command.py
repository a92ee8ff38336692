"""The `deepspeed` command of a run, the hostfile that goes with it, and whether a host is this machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.hostfile import Host, Hosts, render
from dstrain.rundir import RunDir

LOCAL = "localhost"
"""The one host of a local run's hostfile."""

_SAFE_WORD = re.compile(r"[\w@+=:,./-]+", re.ASCII)


def is_this_machine(host: str, names: Collection[str]) -> bool:
    """Returns whether a host of a hostfile is this machine, given this machine's names and addresses.

    >>> is_this_machine("me@GPU01", {"gpu01", "10.0.0.1"}), is_this_machine("b", {"a"})
    (True, False)
    """
    name = host.rpartition("@")[2].casefold().rstrip(".")
    if name in {LOCAL, "localhost.localdomain", "::1"} or re.fullmatch(r"127(\.\d+){3}", name):
        return True
    return name in {known.casefold().rstrip(".") for known in names}


def visible_devices(visible: str | None) -> tuple[int, ...] | None:
    """Returns the GPU numbers that a value of CUDA_VISIBLE_DEVICES names, or None where the variable is not set.

    Raises EnvironmentProblem for what DeepSpeed's `--include` cannot say: UUIDs, MIG slices, no GPU at all.

    >>> visible_devices("2,3"), visible_devices(None)
    ((2, 3), None)
    """
    if visible is None:
        return None
    words = [word.strip() for word in visible.split(",")]
    quoted = f'CUDA_VISIBLE_DEVICES is "{visible}"'
    if all(word.isascii() and word.isdigit() for word in words):
        ids = tuple(int(word) for word in words)
        if len(set(ids)) < len(ids):
            raise EnvironmentProblem(f"{quoted}, which names a GPU twice", hint="Name every GPU once.")
        return ids
    if any(word.startswith("MIG-") for word in words):
        hint = "`unset CUDA_VISIBLE_DEVICES`, or name whole GPUs by number: `export CUDA_VISIBLE_DEVICES=0`."
        raise EnvironmentProblem(f"{quoted}; DeepSpeed's launcher cannot start ranks on MIG slices", hint=hint)
    if any(word.startswith("GPU-") for word in words):
        hint = "`nvidia-smi -L` shows the number of each UUID; then `export CUDA_VISIBLE_DEVICES=0,1`, for example."
        raise EnvironmentProblem(f"{quoted}; DeepSpeed's launcher takes numbers, not UUIDs", hint=hint)
    hint = "`unset CUDA_VISIBLE_DEVICES`, or name GPUs by number: `export CUDA_VISIBLE_DEVICES=0,1`."
    raise EnvironmentProblem(f"{quoted}, which leaves no GPU to train on", hint=hint)


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


def command(
    *,
    hosts: Hosts,
    run_dir: RunDir,
    device_ids: Sequence[int] | None,
    is_local: bool,
    python: str,
    master_port: int,
    module: str = "dstrain.train",
) -> list[str]:
    """Returns the launcher's command line; it reads `RUN_DIR/hostfile` and writes one log a rank to `RUN_DIR/logs`.

    The launcher is named as a module, so that PATH cannot pick the one of another environment. `--no_ssh` with a
    hostfile of one host takes the launcher's local path without asking ssh for an address.
    Source: deepspeed 0.19.8 launcher/runner.py: main
    """
    words = [python, "-m", "deepspeed.launcher.runner", "--hostfile", str(run_dir.hostfile)]
    if is_local:
        words += ["--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
        chosen = chosen_devices(hosts, device_ids)
        if chosen is not None:
            words += ["--include", f"{LOCAL}:{','.join(map(str, chosen))}"]
    else:
        _require_safe(run_dir, python)
        # without --force_multi a single host of the hostfile would mean this machine
        words += ["--force_multi", "--launcher", "pdsh", "--master_addr", hosts.hosts[0].name.rpartition("@")[2]]
    words += ["--master_port", str(master_port), "--enable_each_rank_log", str(run_dir.logs)]
    return [*words, "--no_local_rank", "--module", module, str(run_dir.path)]


def _require_safe(run_dir: RunDir, python: str) -> None:
    """Raises InvalidConfig for paths that the remote shell would take apart: the launcher does not quote them."""
    for what, word in (("output_dir", str(run_dir.path)), ("the Python interpreter", python)):
        if not _SAFE_WORD.fullmatch(word):
            problem = f'{what} is "{word}"; the launcher does not quote paths for the other nodes'
            raise InvalidConfig(problem, hint="Use a path of ASCII letters, digits and . _ - / only.")
