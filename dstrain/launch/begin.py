"""The run directory is written, and the launcher is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstrain.facts.ops import missing_ops, needed_ops
from dstrain.launch import build, environment
from dstrain.launch.command import command, launch_hostfile
from dstrain.launch.prepare import Prepared, cpu_threads, facts_text
from dstrain.launch.process import Outcome, supervise
from dstrain.launch.script import start_script
from dstrain.paths import write_atomic
from dstrain.records import to_json
from dstrain.render import manual
from dstrain.render.manual import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run ready to start: its command, and what goes into the run directory."""

    prepared: Prepared
    """What was checked."""
    command: list[str]
    """The launcher's command line."""
    exported: Mapping[str, str]
    """What the launcher's environment has beside this shell's own."""
    secrets: Mapping[str, str]
    """Secrets that the ranks read from a file."""
    master_port: int
    """The port of rank 0."""
    environment_file: str
    """What goes to the other nodes."""

    @property
    def environment(self) -> dict[str, str]:
        """The launcher's environment."""
        return environment.launcher_environment(os.environ, self.exported, self.secrets)


def plan_launch(prepared: Prepared, *, master_port: int) -> Launch:
    """Returns the launch of a checked run; nothing is written or started."""
    job_env = dict(prepared.job.env)
    if prepared.on_cpu and "OMP_NUM_THREADS" not in os.environ:
        job_env.setdefault("OMP_NUM_THREADS", str(cpu_threads(prepared.hosts.num_slots)))
    # DeepSpeed reads .deepspeed_env for other nodes only
    user = "" if prepared.is_local else environment.read_user_files(os.environ, home=Path.home(), folder=Path.cwd())
    line = command(
        hosts=prepared.hosts,
        run_dir=prepared.run_dir,
        device_ids=prepared.devices,
        is_local=prepared.is_local,
        python=sys.executable,
        master_port=master_port,
    )
    return Launch(
        prepared=prepared,
        command=line,
        master_port=master_port,
        exported=environment.exports(job_env, prepared.run_dir, environment.python_path(os.environ)),
        secrets=environment.secrets(os.environ, job_env, user),
        environment_file=environment.environment_file(os.environ, job_env, user),
    )


def write_run_dir(launch: Launch, edits: Sequence[Edit] | None = None) -> None:
    """Writes everything that launcher and ranks read, each file whole; secrets and environment with mode 0600.

    `edits` are those by hand; None where nobody knows what was generated.
    """
    prepared = launch.prepared
    place = prepared.run_dir
    hostfile = launch_hostfile(prepared.hosts, ids=prepared.devices, is_local=prepared.is_local)
    script = start_script(launch.command, run_dir=place, exported=launch.exported, secret_names=list(launch.secrets))
    place.summary.unlink(missing_ok=True)
    write_atomic(place.request, to_json(_without_secrets(launch)))
    write_atomic(place.facts, facts_text(prepared))
    write_atomic(place.ds_config, json.dumps(prepared.ds_config, indent=2) + "\n")
    if edits is None:
        place.edits.unlink(missing_ok=True)
    else:
        listed = manual.document(manual.without_secrets(edits, launch.secrets))
        write_atomic(place.edits, json.dumps(listed, indent=2, ensure_ascii=False, default=str) + "\n")
    write_atomic(place.hostfile, hostfile)
    write_atomic(place.start_script, script, mode=0o755)
    write_atomic(place.environment, launch.environment_file, mode=0o600)
    environment.write_secrets(place, launch.secrets)
    if prepared.estimate is None:
        place.plan.unlink(missing_ok=True)
    else:
        write_atomic(place.plan, to_json(prepared.estimate))


def _without_secrets(launch: Launch) -> object:
    """Returns the job whose environment holds no secret: request.json is for everyone."""
    from dataclasses import replace

    job = launch.prepared.job
    return replace(job, env={name: value for name, value in job.env.items() if name not in launch.secrets})


def build_ops(launch: Launch, tell: Callable[[str], None]) -> None:
    """Builds what DeepSpeed would compile in every rank, where all ranks are on this machine."""
    if not launch.prepared.is_local:
        return
    ops = needed_ops(launch.prepared.ds_config, on_gpu=not launch.prepared.on_cpu)
    build.refuse_stale_locks(ops, launch.environment)
    build.build(missing_ops(ops, launch.environment), launch.environment, tell)


def start(launch: Launch, on_output: Callable[[str], None]) -> Outcome:
    """Runs the launch to its end; no process of it is left behind."""
    prepared = launch.prepared
    uses_shared_memory = prepared.on_cpu and prepared.is_local
    if uses_shared_memory:
        remove_shared_buffers(launch.master_port)  # a rank could take an old one for its neighbour's
    try:
        return supervise(
            launch.command,
            env=launch.environment,
            run_dir=prepared.run_dir,
            num_ranks=prepared.hosts.num_slots,
            is_local=prepared.is_local,
            on_output=on_output,
        )
    finally:
        if uses_shared_memory:
            remove_shared_buffers(launch.master_port)


def remove_shared_buffers(master_port: int, folder: Path = Path("/dev/shm")) -> None:
    """Removes what DeepSpeed's CPU collectives leave in shared memory: 66 MiB of RAM for each rank of every run.

    Source: deepspeed 0.19.8 csrc/cpu/comm/shm.cpp: shm_initialize, which never unlinks its files.
    """
    for buffer in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{master_port}_*"):
        with suppress(OSError):
            buffer.unlink()
