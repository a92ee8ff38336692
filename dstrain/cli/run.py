"""`dstrain run`: checks a job, launches DeepSpeed on it, and reports how it ended."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.output.doctor import lines as finding_lines
from dstrain.cli.output.progress import Screen
from dstrain.cli.output.run import before_lines, summary, summary_text
from dstrain.cli.types import Named
from dstrain.config.edits.manual_edits import Edit, of_run
from dstrain.doctor.finding import Mark, errors
from dstrain.doctor.quick import quick
from dstrain.errors import DstrainError, EnvironmentProblem
from dstrain.facts import ports, probe
from dstrain.facts.cluster.host_sources import SOURCES, HostQuery
from dstrain.facts.cluster.hostfile import Hosts, expand
from dstrain.job.file import read_job
from dstrain.launch.environment import refuse_secrets
from dstrain.launch.launch import Launch, plan_launch
from dstrain.launch.nodes.launchers import LAUNCHERS
from dstrain.launch.prepare import preflight
from dstrain.launch.prepare.lint_job import check_rules
from dstrain.launch.prepare.prepare import prepare
from dstrain.launch.run import state
from dstrain.launch.run.control import noting_signals
from dstrain.launch.run.detach import detach
from dstrain.launch.run.supervisor import Policy, Reporter, Supervisor
from dstrain.launch.timeouts import TIMEOUTS, VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed; every field is the option of its name."""

    job: Path
    overrides: tuple[str, ...]
    hostfile: Path | None
    launcher: str | None
    master_port: int | None
    ignored: tuple[str, ...]
    max_restarts: int
    spares: str | None
    hang_after: float
    start_timeout: float
    save_on_term: bool
    sync: bool
    no_doctor: bool
    detached: bool
    dry_run: bool
    as_json: bool


@click.command("run", short_help="Train as a job file says.")
@click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a line of the job, such as learning_rate=1e-5.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile to use in place of the job's.")
@click.option(
    "--launcher",
    type=Named(lambda: LAUNCHERS),
    metavar="NAME",
    help=f"How ranks of several nodes are started: {', '.join(LAUNCHERS)}.  [default: pdsh, else ssh]",
)
@click.option("--master-port", type=click.IntRange(1, 65535), help="Port of rank 0.  [default: 29500, or a free one]")
@click.option("--ignore", "ignored", multiple=True, metavar="RULE", help="A rule of lint to leave out, such as DS802.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often a run that failed is started again, from its newest checkpoint.",
)
@click.option("--spare", "spares", metavar="HOSTS", help="Hosts that replace lost ones at a restart: gpu17,gpu18.")
@click.option(
    "--hang-after",
    type=click.FloatRange(0),
    default=TIMEOUTS.hang_s,
    show_default=True,
    help="Seconds without a step, and five times the median, that are a hang; 0 for never.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(0),
    default=TIMEOUTS.start_s,
    show_default=True,
    help="Seconds without progress before the first step that are a hang; 0 for never.",
)
@click.option("--save-on-term", is_flag=True, help="At SIGTERM save a checkpoint and leave, as at SIGUSR1.")
@click.option("--sync", is_flag=True, help="Copy dstrain and the run directory to nodes that do not see them.")
@click.option("--no-doctor", is_flag=True, help="Do not look first at what of this machine is in the way.")
@click.option("--detach", "detached", is_flag=True, help="Go on in the background; see status, logs and stop.")
@click.option("-n", "--dry-run", is_flag=True, help="Check everything, print the command, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON to stdout.")
def command(**typed: Any) -> None:
    """Train as a job file says, on this machine or over its hostfile.

    Lints the configuration first, and starts nothing where it finds an error. Precedence, strongest first: --set and
    --hostfile, the job file, the defaults. The job's output_dir is the run directory; `bash OUTPUT_DIR/start.sh` starts
    the same run again by hand.

    When a rank dies, a node is lost or nothing moves, everything on all nodes is ended and told in one report. A login
    that drops does not end a run. SIGUSR1 saves a checkpoint and leaves with exit code 75.

    --sync is for nodes without a file system in common: the run directory, and dstrain where it runs from a checkout,
    are copied to them over ssh, and what their ranks write of a checkpoint is copied back while training goes on.
    Python with its packages, the model and the data must be on every node, under the same paths.

    \b
    Example:
      dstrain run
      dstrain run job.yaml --set learning_rate=1e-5 --set resume=auto
      dstrain run --hostfile hostfile --max-restarts 3 --spare gpu17 --detach
    """
    _run(Options(**typed))


def _run(options: Options) -> None:
    """Does what was typed."""
    check_rules(options.ignored)
    refuse_secrets(options.overrides, "every user can read command lines")
    hosts = _allocated() if options.launcher == "slurm" and options.hostfile is None else None
    launch = _plan(options, hosts, goes_on=False)
    prepared = launch.prepared
    say_lines(before_lines(prepared))
    if launch.note is not None:
        say(f"note     {launch.note}")
    if options.dry_run:
        preflight.check_dry(prepared.run_dir, resume=prepared.job.resume, needed_bytes=_checkpoint_bytes(launch))
        _answer_dry(launch, as_json=options.as_json)
        return
    state.refuse_living(prepared.run_dir)
    preflight.check(prepared.run_dir, resume=prepared.job.resume, needed_bytes=_checkpoint_bytes(launch))
    if not options.no_doctor:
        _examine(launch)
    if options.detached:
        detach(prepared.run_dir, sys.argv[1:], say)
        return
    with state.only_one(prepared.run_dir):
        _train(options, launch, hosts)
    found = summary(prepared.run_dir)
    say(summary_text(found, prepared.run_dir))
    if options.as_json:
        answer_json(found)


def _examine(launch: Launch) -> None:
    """Says what of this machine is not as it should be. Raises EnvironmentProblem for what is in the way."""
    found = quick(launch.prepared, launch.environment)
    for finding in found:
        if finding.mark is Mark.WARNING:
            for line in finding_lines(finding):
                say(line)
    in_the_way = errors(found)
    if in_the_way:
        rows = [f"{finding.what}{f' → {finding.fix}' if finding.fix else ''}" for finding in in_the_way]
        raise EnvironmentProblem("\n".join(rows), hint="`dstrain doctor` says more; --no-doctor starts all the same.")


def _train(options: Options, launch: Launch, hosts: Hosts | None) -> None:
    """Runs to the end, through restarts."""
    run_dir = launch.prepared.run_dir
    spares = tuple(host.name for host in expand(options.spares, 1, "--spare").hosts) if options.spares else ()
    timeouts = replace(TIMEOUTS, hang_s=options.hang_after, start_s=options.start_timeout).changed(os.environ)
    if VARIABLE in os.environ:
        say(f"note     {VARIABLE}, which is for tests, changes time limits: {os.environ[VARIABLE]}")
    policy = Policy(max_restarts=options.max_restarts, spares=spares, timeouts=timeouts)
    with (
        noting_signals(state.run_log(run_dir), saves_on_term=options.save_on_term) as stop_requests,
        Screen() as screen,
    ):
        run = Supervisor(
            lambda changed, goes_on: _plan(options, changed or hosts, goes_on=goes_on),
            stop_requests,
            policy,
            Reporter(say=screen.say, pass_on=screen.pass_on, progress=screen.progress),
            _edits(options.job, launch),
        )
        run.drive(launch)


def _plan(options: Options, hosts: Hosts | None, *, goes_on: bool) -> Launch:
    """Returns the checked launch; one that goes on takes the newest whole checkpoint."""
    given = [*options.overrides, *([f"hostfile={options.hostfile.resolve()}"] if options.hostfile else [])]
    if goes_on:
        given.append("resume=auto")
    prepared = prepare(read_job(options.job, given), os.environ, ignored=options.ignored, hosts=hosts)
    port, named = ports.wanted_port(options.master_port, os.environ)
    if prepared.is_local:
        port = ports.port(options.master_port, os.environ)
    return plan_launch(
        prepared,
        master_port=port,
        takes_another_port=named is None,
        launcher=options.launcher,
        saves_on_term=options.save_on_term,
        syncs=options.sync,
    )


def _allocated() -> Hosts | None:
    """Returns the hosts of the SLURM allocation; None outside of one, which the launcher tells."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return SOURCES["slurm"](HostQuery(environment=os.environ, read=probe.read_text, file=None, slots=None, match=None))


def _answer_dry(launch: Launch, *, as_json: bool) -> None:
    if as_json:
        path = str(launch.prepared.run_dir.path)
        answer_json({"schema": 1, "run_dir": path, "launcher": launch.launcher, "command": launch.command})
    else:
        answer(shlex.join(launch.command))


def _edits(path: Path, launch: Launch) -> list[Edit] | None:
    """Returns what was edited by hand in the files of the run; None where that is not known."""
    job = launch.prepared.job
    names = [str(path), job.ds_config, *([job.hostfile] if job.hostfile else [])]
    try:
        return of_run([Path(name).resolve() for name in names])
    except DstrainError as error:
        say(f"hand edits are not on record: {error.problem}")
        return None


def _checkpoint_bytes(launch: Launch) -> int:
    """Returns the disk that one more checkpoint takes."""
    needs = launch.prepared.estimate
    return needs.memory.checkpoint_bytes if needs else 0
