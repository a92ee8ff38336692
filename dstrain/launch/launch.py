"""Plans a launch: its commands, environments and secrets, the files in the run directory, and the inputs kept there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.config.edits import regenerate
from dstrain.config.edits.lock import LOCK
from dstrain.config.edits.regenerate import Edit
from dstrain.config.templates import render_script
from dstrain.facts.data.datafile import found
from dstrain.facts.this_machine import is_this_machine
from dstrain.facts.this_machine import names as machine_names
from dstrain.heartbeat import SAVE_ON_TERM
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch import environment
from dstrain.launch.command import LaunchSite, binding, is_on_cpu, launch_hostfile, local, of_node
from dstrain.launch.environment import RANK_NAMES, user_files
from dstrain.launch.nodes.connection import Node, check_hosts, new_mark, per_node, require_program
from dstrain.launch.prepare import resume
from dstrain.launch.prepare.prepare import PreparedRun, cpu_threads, facts_text
from dstrain.paths import shown, write_atomic
from dstrain.records import to_json
from dstrain.rundir import RunDir


def start_script(
    command: Sequence[str],
    *,
    run_dir: RunDir,
    exported: Mapping[str, str],
    secret_names: Collection[str],
    is_node_by_node: bool = False,
) -> str:
    """Returns the text of `start.sh`; it names the secrets, whose values the ranks read from a file, and holds none.

    `command` starts all ranks or, if `is_node_by_node`, the ranks of the node whose number the script is given.
    """
    values = {
        "run_dir": str(run_dir.path),
        "exports": sorted(exported.items()),
        "unset": [*RANK_NAMES, *sorted(secret_names)],
        "command": list(command),
        "is_node_by_node": is_node_by_node,
        "environment_file": str(run_dir.environment),
    }
    return render_script("deepspeed.sh.j2", values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run ready to start: its commands, and what goes into the run directory."""

    prepared: PreparedRun
    """The checked job."""
    by_srun: bool
    """Whether srun reaches the nodes, as in a SLURM allocation; otherwise ssh does."""
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
        return list(self.nodes[0].command)

    @property
    def environment(self) -> dict[str, str]:
        """The launcher's environment."""
        return environment.launcher_environment(os.environ, self.exported, self.secrets)


def plan_launch(
    prepared: PreparedRun,
    *,
    master_port: int,
    by_srun: bool = False,
    takes_another_port: bool = False,
    saves_on_term: bool = False,
    unchecked: tuple[str, ...] = (),
    syncs: bool = False,
    mark: str | None = None,
    user_lines: str | None = None,
) -> Launch:
    """Returns the launch of a checked run; nothing is written or started. The options are fields of `Launch`; None
    makes a new mark, and reads the environment files."""
    nodes, note = _nodes(prepared, master_port, by_srun=by_srun)
    job_env = _job_environment(prepared, (*([SAVE_ON_TERM] if saves_on_term else []), *unchecked))
    # a restart brings the lines of the first start: the user may be editing the files
    user = _user_lines(is_local=prepared.is_local) if user_lines is None else user_lines
    path = environment.python_path(os.environ)
    # nodes without the checkout import from the copy in the run directory
    path = environment.synced_python_path(prepared.run_dir, path) if syncs else path
    exported = environment.exports(job_env, path)
    return Launch(
        prepared=prepared,
        by_srun=by_srun,
        nodes=nodes,
        mark=mark or new_mark(),
        note=note,
        master_port=master_port,
        exported=exported,
        secrets=environment.secrets(os.environ, job_env, user),
        for_nodes=environment.for_nodes({**os.environ, **exported}, job_env, user),
        takes_another_port=takes_another_port,
        saves_on_term=saves_on_term,
        syncs=syncs,
        user_lines=user,
    )


def _nodes(prepared: PreparedRun, master_port: int, *, by_srun: bool) -> tuple[tuple[Node, ...], str | None]:
    """Returns the nodes with their launchers, and what to say about them; on this machine alone neither ssh nor srun
    is needed."""
    site = LaunchSite(hosts=prepared.hosts, run_dir=prepared.run_dir, python=sys.executable, master_port=master_port)
    if prepared.is_local:
        variables = {**os.environ, **prepared.job.env}
        bound = binding(prepared.ds_config, variables, prepared.hosts.num_slots)
        line = local(replace(site, cores=bound.cores), prepared.devices)
        return per_node(prepared.hosts, [line], [True]), bound.note
    require_program(os.environ, by_srun=by_srun)
    check_hosts(prepared.hosts)
    names = machine_names()
    here = [is_this_machine(host.name, names) for host in prepared.hosts.hosts]
    site = replace(site, binds=is_on_cpu(prepared.ds_config))
    return per_node(prepared.hosts, [of_node(site, number) for number in range(len(here))], here), None


def _job_environment(prepared: PreparedRun, switches: Sequence[str]) -> dict[str, str]:
    """Returns the job's own variables, and what the options add to them."""
    variables = dict(prepared.job.env)
    if prepared.on_cpu and "OMP_NUM_THREADS" not in os.environ:
        most = max(host.slots for host in prepared.hosts.hosts)
        variables.setdefault("OMP_NUM_THREADS", str(cpu_threads(most)))
    return variables | dict.fromkeys(switches, "1")


def _user_lines(*, is_local: bool) -> str:
    """Returns the user's environment files, preceded by a PATH line for the tools beside this Python, such as
    ninja: a shell that ssh starts does not know. DeepSpeed reads the files for other nodes only."""
    if is_local:
        return ""
    own = environment.read_user_files(os.environ, home=Path.home(), folder=Path.cwd())
    return f"PATH={Path(sys.executable).parent}:$PATH\n{own}"


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
        listed = regenerate.document(regenerate.without_secrets(edits, launch.secrets))
        write_atomic(place.edits, json.dumps(listed, indent=2, ensure_ascii=False, default=str) + "\n")
    write_start(launch)


def write_inputs(prepared: PreparedRun, *, job: Job, hostfile: str, secrets: Mapping[str, str]) -> None:
    """Writes the inputs of the ranks: request, facts, configuration, estimate, hostfile, and secrets with mode 0600."""
    place = prepared.run_dir
    place.summary.unlink(missing_ok=True)
    place.oom.unlink(missing_ok=True)
    place.unusable.unlink(missing_ok=True)
    write_request(prepared, job)
    write_atomic(place.ds_config, json.dumps(prepared.ds_config, indent=2) + "\n")
    write_atomic(place.hostfile, hostfile)
    environment.write_secrets(place, secrets)


def write_request(prepared: PreparedRun, job: Job) -> None:
    """Writes the files that depend on the attention: request, facts and estimate."""
    place = prepared.run_dir
    write_atomic(place.request, to_json(job))
    write_atomic(place.facts, facts_text(prepared))
    if prepared.estimate is None:
        place.plan.unlink(missing_ok=True)
    else:
        write_atomic(place.plan, to_json(prepared.estimate))


def write_start(launch: Launch) -> None:
    """Writes the files that name the port of rank 0."""
    place = launch.prepared.run_dir
    script = start_script(
        launch.command,
        run_dir=place,
        exported=launch.exported,
        secret_names=list(launch.secrets),
        is_node_by_node=len(launch.nodes) > 1,
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


class Recorded:
    """The inputs of one run: the job, and copies of its configuration and its plan in the run directory."""

    def __init__(self, launch: Launch, path: Path) -> None:
        """Copies what the launch has read; `path` is the job file. Raises EnvironmentProblem if that fails."""
        prepared = launch.prepared
        assert launch.file is not None
        self._file, self._folder = launch.file, prepared.run_dir.inputs
        job = self._file.job
        shutil.rmtree(self._folder, ignore_errors=True)
        write_atomic(self._folder / Path(job.ds_config).name, prepared.ds_text)
        with suppress(OSError, UnicodeDecodeError):
            write_atomic(self._folder / LOCK, (Path(job.ds_config).parent / LOCK).read_text(encoding="utf-8"))
        files = [path, Path(job.ds_config), *([Path(job.hostfile)] if job.hostfile else [])]
        files += [] if prepared.is_local else user_files(os.environ, home=Path.home(), folder=Path.cwd())
        self._files = {file.absolute(): _content(file) for file in files}
        self._data = {file: _stamp(file) for file in self._data_files()}

    def file(self, overrides: Sequence[str]) -> JobFile:
        """Returns the job as it was read, with more `key=value` overrides, and with the copied configuration."""
        file = self._file.changed(overrides)
        copy = self._folder / Path(file.job.ds_config).name
        return replace(file, job=replace(file.job, ds_config=str(copy)))

    def edited(self) -> list[str]:
        """Returns a line about the files, and one about the data, that changed since the last call."""
        files = [file for file, content in self._files.items() if _content(file) != content]
        now = {file: _stamp(file) for file in self._data_files()}
        data = [file for file in {**self._data, **now} if self._data.get(file) != now.get(file)]
        self._files |= {file: _content(file) for file in files}
        self._data = now
        lines = []
        if files:
            lines.append(f"note     {_listed(files)} changed since the run began: the edit is for the next run")
        if data:
            lines.append(f"warning  {_listed(data)} changed since the run began: it continues with other data")
        return lines

    def _data_files(self) -> Iterable[Path]:
        return [Path(name) for path in self._file.job.data_paths for name in found(path)]


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _listed(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{', '.join(shown(str(file)) for file in files[:3])}{more}"
