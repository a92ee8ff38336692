"""`dstrain run`: checks a job, launches DeepSpeed on it, and reports how it ended."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dstrain.choices import OnOom
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.options.typed import TRUST
from dstrain.cli.output.progress import Screen
from dstrain.cli.output.run import before_lines, summary, summary_text
from dstrain.cli.types import Choice
from dstrain.config.edits.regenerate import Edit, of_run
from dstrain.config.remedy import UNADAPTED, Adaptation
from dstrain.doctor.checks import quick
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts import network, probe
from dstrain.facts.cluster.host_sources import SOURCES, HostQuery
from dstrain.facts.cluster.hostfile import Hosts, expand
from dstrain.findings import Severity, errors, lines
from dstrain.heartbeat import NO_RESUME_CHECK, NO_VERIFY
from dstrain.job.file import JobFile, read_job
from dstrain.launch.environment import refuse_secrets
from dstrain.launch.launch import Launch, Recorded, plan_launch
from dstrain.launch.prepare import inputs
from dstrain.launch.prepare.lint_job import check_rules
from dstrain.launch.prepare.prepare import prepare
from dstrain.launch.run import state
from dstrain.launch.run.control import detach, noting_signals
from dstrain.launch.run.supervisor import Policy, Reporter, Supervisor
from dstrain.launch.timeouts import TIMEOUTS, VARIABLE, Timeouts
from dstrain.rundir import words_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options, by name."""

    job: Path
    overrides: tuple[str, ...] = ()
    hostfile: Path | None = None
    master_port: int | None = None
    ignored: tuple[str, ...] = ()
    check_images: bool = False
    max_restarts: int = 0
    on_oom: OnOom = OnOom.TELL
    spares: str | None = None
    hang_after: float = TIMEOUTS.hang_s
    start_timeout: float = TIMEOUTS.start_s
    save_on_term: bool = False
    no_verify: bool = False
    no_resume_check: bool = False
    sync: bool = False
    no_doctor: bool = False
    detached: bool = False
    dry_run: bool = False
    as_json: bool = False


@click.command("run")
@click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job, such as learning_rate=1e-5.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile that replaces the job's.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Port of rank 0.  [default: one that is free]")
@click.option("--ignore", "ignored", multiple=True, metavar="RULE", help="Rule of lint to skip, such as DS802.")
@click.option("--check-images", is_flag=True, help="Read every image and video of the data, not only find it.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restarts of a failed run, from its newest checkpoint.",
)
@click.option(
    "--on-oom",
    type=Choice(OnOom),
    default=OnOom.TELL.value,
    show_default=True,
    help="If a GPU runs out of memory: tell which changes fit, or adapt, restarting with the fastest one that keeps"
    " the global batch.",
)
@click.option(
    "--spare", "spares", metavar="HOSTS", help="Hosts that replace lost ones at a restart, such as gpu17,gpu18."
)
@click.option(
    "--hang-after",
    type=click.FloatRange(0),
    default=TIMEOUTS.hang_s,
    show_default=True,
    help="Seconds without a step, and at least five times the median, that count as a hang; 0 for never.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(0),
    default=TIMEOUTS.start_s,
    show_default=True,
    help="Seconds without progress that count as a hang before the pace is known: at the start, in the first steps, in"
    " a first evaluation or checkpoint; 0 for never.",
)
@click.option("--save-on-term", is_flag=True, help="On SIGTERM, save a checkpoint and exit, as on SIGUSR1.")
@click.option(
    "--no-verify", is_flag=True, help="Resume from a checkpoint without comparing its files with their checksums."
)
@click.option(
    "--no-resume-check",
    is_flag=True,
    help="Resume from a checkpoint without comparing the loss of the loaded model with that of the saved one.",
)
@click.option("--sync", is_flag=True, help="Copy dstrain and the run directory to nodes without access to them.")
@TRUST
@click.option("--no-doctor", is_flag=True, help="Skip the check of this machine before the launch.")
@click.option("--detach", "detached", is_flag=True, help="Run in the background; see status, logs and stop.")
@click.option("-n", "--dry-run", is_flag=True, help="Check everything, print the command and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON to stdout.")
def command(**typed: Any) -> None:
    """Train as a job file describes, on this machine or on the hosts of its hostfile.

    Lints the configuration first, and starts nothing if it finds an error. Precedence, highest first: --set and
    --hostfile, the job file, the defaults. The job's output_dir is the run directory; `bash OUTPUT_DIR/start.sh` starts
    the same run again by hand.

    Agents start DeepSpeed's launcher on each of several hosts. Inside a SLURM allocation the hosts are its nodes, and
    srun reaches them; everywhere else, and with --hostfile, ssh does.

    If a rank dies, a node is lost or the run hangs, dstrain ends all processes on all nodes and prints one report. A
    lost login does not end a run. SIGUSR1 saves a checkpoint and exits with code 75. If a GPU runs out of memory, the
    report names changes that fit; --on-oom adapt makes one for this run, and goes on from the newest checkpoint.

    --sync is for nodes without a shared file system. It copies the run directory, and dstrain if it runs from a
    checkout, to them with rsync, and copies their parts of checkpoints back during training. Every node needs rsync,
    Python with its packages, the model and the data under the same paths.

    \b
    Example:
      dstrain run
      dstrain run job.yaml --set learning_rate=1e-5 --set resume=auto
      dstrain run --hostfile hostfile --max-restarts 3 --spare gpu17 --detach
    """
    _run(Options(**typed))


def _run(options: Options) -> None:
    """Carries out the command."""
    check_rules(options.ignored)
    refuse_secrets(options.overrides, "every user can read command lines")
    launch = launch_of(options, allocated(options))
    prepared = launch.prepared
    say_lines(before_lines(prepared))
    if launch.note is not None:
        say(f"note     {launch.note}")
    if options.dry_run:
        inputs.check_run_dir(prepared.run_dir, resume=prepared.job.resume, creates=False)
        if not options.no_doctor:
            examine(launch)
        _answer_dry(launch, as_json=options.as_json)
        return
    # first: the checkpoints of a run that is alive would be reported as an earlier run's
    state.refuse_living(prepared.run_dir)
    inputs.check_run_dir(prepared.run_dir, resume=prepared.job.resume)
    if not options.no_doctor:
        examine(launch)
    if options.detached:
        # after all checks, whose findings need a terminal
        detach(prepared.run_dir, sys.argv[1:], say)
        return
    # two runs that start at once have both passed `refuse_living`
    with state.only_one(prepared.run_dir):
        _train(options, launch)
    figures = summary(prepared.run_dir)
    say(summary_text(figures, prepared.run_dir))
    if options.as_json:
        answer_json(figures)


def examine(launch: Launch) -> None:
    """Prints warnings about this machine. Raises EnvironmentProblem for errors."""
    findings = quick(launch.prepared, launch.environment)
    for finding in findings:
        if finding.severity is Severity.WARNING:
            for line in lines(finding):
                say(line)
    if blocking := errors(findings):
        rows = "\n".join(finding.line for finding in blocking)
        raise EnvironmentProblem(rows, hint="`dstrain doctor` says more; --no-doctor starts the run anyway.")


def time_limits(options: Options) -> Timeouts:
    """Returns the time limits of the ranks; says if a variable for tests changes them."""
    if VARIABLE in os.environ:
        say(f"note     {VARIABLE}, which is for tests, changes time limits: {os.environ[VARIABLE]}")
    return replace(TIMEOUTS, hang_s=options.hang_after, start_s=options.start_timeout).changed(os.environ)


def _train(options: Options, launch: Launch) -> None:
    """Runs the job to its end, restarts included."""
    spares = tuple(host.name for host in expand(options.spares, 1, "--spare").hosts) if options.spares else ()
    policy = Policy(
        max_restarts=options.max_restarts,
        on_oom=options.on_oom,
        spares=spares,
        timeouts=time_limits(options),
        command=words_of(sys.argv[1:], options.job),
    )
    with (
        noting_signals(state.run_log(launch.prepared.run_dir), saves_on_term=options.save_on_term) as stop_requests,
        Screen() as screen,
    ):
        recorded = Recorded(launch, options.job)

        def plan_again(changed: Hosts | None, resumes: bool, adaptation: Adaptation) -> Launch:
            # a restart has the inputs of the first start, so edits made meanwhile are only reported
            for line in recorded.edited():
                screen.say(line)
            return launch_again(options, recorded, launch, changed, adaptation, resumes=resumes)

        run = Supervisor(
            plan_again,
            stop_requests,
            policy,
            Reporter(say=screen.say, pass_on=screen.pass_on, progress=screen.progress),
            _edits(options.job, launch),
        )
        run.drive(launch)


def launch_of(options: Options, hosts: Hosts | None, adaptation: Adaptation = UNADAPTED) -> Launch:
    """Returns the checked launch."""
    hostfile = [f"hostfile={options.hostfile.resolve()}"] if options.hostfile else []
    job = read_job(options.job, [*options.overrides, *adaptation.overrides, *hostfile])
    return _planned(options, job, hosts, adaptation, opens_images=options.check_images)


def launch_again(
    options: Options, recorded: Recorded, first: Launch, hosts: Hosts | None, adaptation: Adaptation, *, resumes: bool
) -> Launch:
    """Returns the checked launch of a restart, with the inputs of the first start; one that `resumes` starts from the
    newest complete checkpoint."""
    job = recorded.file([*adaptation.overrides, *(["resume=auto"] if resumes else [])])
    again = _planned(options, job, hosts or first.prepared.hosts, adaptation, user_lines=first.user_lines)
    named = replace(again.prepared.job, ds_config=first.prepared.job.ds_config)
    return replace(again, prepared=replace(again.prepared, job=named))


def _planned(
    options: Options,
    job: JobFile,
    hosts: Hosts | None,
    adaptation: Adaptation,
    *,
    opens_images: bool = False,
    user_lines: str | None = None,
) -> Launch:
    """Returns the checked launch of a job that was read."""
    prepared = prepare(
        job, os.environ, ignored=options.ignored, hosts=hosts, changes=adaptation.changes, opens_images=opens_images
    )
    # runs of one machine may start together, so each takes a free port; several hosts must agree on one beforehand
    port, named = (network.local_port if prepared.is_local else network.wanted_port)(options.master_port, os.environ)
    launch = plan_launch(
        prepared,
        master_port=port,
        takes_another_port=named is None,
        by_srun=is_by_srun(options),
        saves_on_term=options.save_on_term,
        unchecked=(
            *([NO_VERIFY] if options.no_verify else []),
            *([NO_RESUME_CHECK] if options.no_resume_check else []),
        ),
        syncs=options.sync,
        user_lines=user_lines,
    )
    return replace(launch, file=job)


def is_by_srun(options: Options) -> bool:
    """Returns whether the run uses the SLURM allocation that this shell belongs to."""
    return "SLURM_JOB_ID" in os.environ and options.hostfile is None


def allocated(options: Options) -> Hosts | None:
    """Returns the hosts of the SLURM allocation that the run uses; None if there is none, or if it is one node of which
    SLURM counts no GPUs: that runs as it would without SLURM."""
    if not is_by_srun(options):
        return None
    probes: dict[str, Any] = {"read": probe.read_text, "details": probe.slurm_job}
    try:
        return SOURCES["slurm"](HostQuery(environment=os.environ, **probes))
    except InvalidConfig:
        if os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
            raise
        return None


def _answer_dry(launch: Launch, *, as_json: bool) -> None:
    if as_json:
        path = str(launch.prepared.run_dir.path)
        reached = None if launch.prepared.is_local else "srun" if launch.by_srun else "ssh"
        answer_json({"schema": 1, "run_dir": path, "launcher": reached, "command": launch.command})
    else:
        answer(shlex.join(launch.command))


def _edits(path: Path, launch: Launch) -> list[Edit] | None:
    """Returns the hand edits in the files of the run; None if they are unknown."""
    job = launch.prepared.job
    names = [str(path), job.ds_config, *([job.hostfile] if job.hostfile else [])]
    try:
        return of_run([Path(name).resolve() for name in names])
    except DstrainError as error:
        say(f"hand edits are not recorded: {error.problem}")
        return None
