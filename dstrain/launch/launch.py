"""Plans a launch: its commands, environments and secrets, and the files in the run directory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.config.edits import manual_edits
from dstrain.config.edits.manual_edits import Edit
from dstrain.facts.this_machine import is_this_machine
from dstrain.facts.this_machine import names as machine_names
from dstrain.heartbeat import MARK, SAVE_ON_TERM
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch import environment
from dstrain.launch.command import LaunchSite, launch_hostfile, local, master
from dstrain.launch.cores import binding, is_on_cpu
from dstrain.launch.nodes import launchers
from dstrain.launch.nodes.launchers import LAUNCHERS
from dstrain.launch.nodes.layout import Node, per_node
from dstrain.launch.nodes.spec import new_mark
from dstrain.launch.prepare import resume
from dstrain.launch.prepare.prepare import PreparedRun, cpu_threads, facts_text
from dstrain.launch.start_script import start_script
from dstrain.paths import write_atomic
from dstrain.records import to_json

_RANK_PROGRAM = """\
import runpy

runpy.run_module("dstrain.train", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run ready to start: its commands, and what goes into the run directory."""

    prepared: PreparedRun
    """The checked job."""
    launcher: str | None
    """The way to start ranks on several nodes; None on this machine alone."""
    nodes: tuple[Node, ...]
    mark: str
    """The mark of every process of this start."""
    note: str | None
    exported: Mapping[str, str]
    """Variables of the launcher, in addition to this shell's."""
    secrets: Mapping[str, str]
    """Secrets that the ranks read from a file."""
    master_port: int
    for_nodes: Mapping[str, str]
    """Variables of the other nodes: name → text between a shell's double quotes."""
    takes_another_port: bool = False
    """Whether rank 0 may have another port, since the user named none."""
    saves_on_term: bool = False
    """Whether SIGTERM lets the ranks save a checkpoint before they leave."""
    syncs: bool = False
    """Whether nodes without this file system get copies."""
    user_lines: str = ""
    """The text of the user's environment files for other nodes."""
    file: JobFile | None = None
    """The job as it was read, without what was decided since."""

    @property
    def command(self) -> list[str]:
        """The launcher's command line; of several the first node's."""
        return list(next(node.command for node in self.nodes if node.command is not None))

    @property
    def environment(self) -> dict[str, str]:
        """The launcher's environment."""
        return environment.launcher_environment(os.environ, self.exported, self.secrets)


def plan_launch(
    prepared: PreparedRun,
    *,
    master_port: int,
    launcher: str | None = None,
    takes_another_port: bool = False,
    saves_on_term: bool = False,
    unchecked: tuple[str, ...] = (),
    syncs: bool = False,
    mark: str | None = None,
    user_lines: str | None = None,
) -> Launch:
    """Returns the launch of a checked run; nothing is written or started. The options are fields of `Launch`; None
    selects pdsh, or ssh if pdsh is missing, and a new mark, and reads the environment files."""
    way = _way(prepared, launcher, master_port)
    job_env = _job_environment(prepared, way, (*([SAVE_ON_TERM] if saves_on_term else []), *unchecked))
    mark = mark or new_mark()
    travelling = job_env | _for_other_nodes(prepared, way, mark, master_port)
    user = _user_lines(is_local=prepared.is_local) if user_lines is None else user_lines
    path = environment.python_path(os.environ)
    path = environment.synced_python_path(prepared.run_dir, path) if syncs else path
    exported = environment.exports(job_env, prepared.run_dir, path)
    texts = environment.for_nodes({**os.environ, **exported}, travelling, user)
    carried = environment.secrets(os.environ, job_env, user)
    if way.launcher is not None and LAUNCHERS[way.launcher].is_mpi:
        texts, others = environment.for_mpi(texts, os.environ)
        carried |= others
    return Launch(
        prepared=prepared,
        launcher=way.launcher,
        nodes=way.nodes,
        mark=mark,
        note=way.note,
        master_port=master_port,
        exported=exported,
        secrets=carried,
        for_nodes=texts,
        takes_another_port=takes_another_port,
        saves_on_term=saves_on_term,
        syncs=syncs,
        user_lines=user,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How ranks are started."""

    launcher: str | None
    """None on this machine alone."""
    note: str | None
    nodes: tuple[Node, ...]


def _way(prepared: PreparedRun, launcher: str | None, master_port: int) -> _Way:
    """Returns how the ranks are started; on this machine alone no launcher for several nodes is needed."""
    site = LaunchSite(hosts=prepared.hosts, run_dir=prepared.run_dir, python=sys.executable, master_port=master_port)
    if prepared.is_local:
        variables = {**os.environ, **prepared.job.env}
        bound = binding(prepared.ds_config, variables, prepared.hosts.num_slots)
        line = local(replace(site, cores=bound.cores), prepared.devices)
        return _Way(launcher=None, note=bound.note, nodes=per_node(prepared.hosts, [line], [True]))
    name, note = launchers.choose(launcher, os.environ)
    launchers.check_hosts(name, prepared.hosts)
    names = machine_names()
    here = tuple(is_this_machine(host.name, names) for host in prepared.hosts.hosts)
    site = replace(site, here=here, binds=is_on_cpu(prepared.ds_config))
    return _Way(launcher=name, note=note, nodes=LAUNCHERS[name].nodes(site))


def _job_environment(prepared: PreparedRun, way: _Way, switches: Sequence[str]) -> dict[str, str]:
    """Returns the job's own variables, and what the options and the launcher add to them."""
    variables = dict(prepared.job.env)
    if prepared.on_cpu and "OMP_NUM_THREADS" not in os.environ:
        most = max(host.slots for host in prepared.hosts.hosts)
        variables.setdefault("OMP_NUM_THREADS", str(cpu_threads(most)))
    variables |= dict.fromkeys(switches, "1")
    if way.launcher == "openmpi" and os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def _user_lines(*, is_local: bool) -> str:
    """Returns what the user's environment files hold, and before it where the tools beside this Python are, such as
    ninja: a shell that ssh starts does not know. DeepSpeed reads the files for other nodes only."""
    if is_local:
        return ""
    own = environment.read_user_files(os.environ, home=Path.home(), folder=Path.cwd())
    return f"PATH={Path(sys.executable).parent}:$PATH\n{own}"


def _for_other_nodes(prepared: PreparedRun, way: _Way, mark: str, master_port: int) -> dict[str, str]:
    """Returns what the ranks of other nodes need beside the job's own: the mark by which their agent finds them, and
    for MPI, which tells them their number alone, where rank 0 is."""
    if way.launcher is None:
        return {}
    launcher = LAUNCHERS[way.launcher]
    variables = {MARK: mark} if launcher.has_one_environment else {}
    if launcher.is_mpi:
        variables |= {"MASTER_ADDR": master(prepared.hosts), "MASTER_PORT": str(master_port)}
    return variables


def write_run_dir(launch: Launch, edits: Sequence[Edit] | None = None) -> None:
    """Writes everything that launcher and ranks read, each file whole; secrets and environment with mode 0600.

    `edits` are those by hand; None if the generated files are unknown.
    """
    prepared = launch.prepared
    place = prepared.run_dir
    hostfile = launch_hostfile(prepared.hosts, ids=prepared.devices, is_local=prepared.is_local)
    write_inputs(prepared, job=for_ranks(launch), hostfile=hostfile, secrets=launch.secrets)
    if edits is None:
        place.edits.unlink(missing_ok=True)
    else:
        listed = manual_edits.document(manual_edits.without_secrets(edits, launch.secrets))
        write_atomic(place.edits, json.dumps(listed, indent=2, ensure_ascii=False, default=str) + "\n")
    write_start(launch)
    if launch.launcher == "mpich":
        write_atomic(place.rank_program, _RANK_PROGRAM)


def write_inputs(prepared: PreparedRun, *, job: Job, hostfile: str, secrets: Mapping[str, str]) -> None:
    """Writes what ranks read: request, facts, configuration, estimate, hostfile, and secrets with mode 0600."""
    place = prepared.run_dir
    place.summary.unlink(missing_ok=True)
    place.oom.unlink(missing_ok=True)
    place.unusable.unlink(missing_ok=True)
    write_request(prepared, job)
    write_atomic(place.ds_config, json.dumps(prepared.ds_config, indent=2) + "\n")
    write_atomic(place.hostfile, hostfile)
    environment.write_secrets(place, secrets)


def write_request(prepared: PreparedRun, job: Job) -> None:
    """Writes what depends on the attention: request, facts and estimate."""
    place = prepared.run_dir
    write_atomic(place.request, to_json(job))
    write_atomic(place.facts, facts_text(prepared))
    if prepared.estimate is None:
        place.plan.unlink(missing_ok=True)
    else:
        write_atomic(place.plan, to_json(prepared.estimate))


def write_start(launch: Launch) -> None:
    """Writes what names the port of rank 0."""
    place = launch.prepared.run_dir
    script = start_script(
        launch.command,
        run_dir=place,
        exported=launch.exported,
        secret_names=list(launch.secrets),
        is_node_by_node=sum(node.command is not None for node in launch.nodes) > 1,
    )
    write_atomic(place.start_script, script, mode=0o755)
    write_atomic(place.environment, environment.file_text(launch.for_nodes), mode=0o600)


def for_ranks(launch: Launch) -> Job:
    """Returns the job whose environment holds no secret: request.json is for everyone.

    Where nodes have disks of their own it names the checkpoint, which they could not choose alike.
    """
    job = launch.prepared.job
    job = replace(job, env={name: value for name, value in job.env.items() if name not in launch.secrets})
    if not launch.syncs:
        return job
    saved = resume.find(job)
    return replace(job, resume=str(saved.folder) if saved else "never")
