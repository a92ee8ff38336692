"""Supervises a run from its first start to its end, and decides on restarts and spare hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.choices import OnOom
from dstrain.config.edits.regenerate import Edit
from dstrain.config.remedy import UNADAPTED, Adaptation
from dstrain.errors import DstrainError, InvalidConfig, RunFailed, SavedAndLeft
from dstrain.facts.attention_kernels import AttentionKernels
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.deepspeed_ops import needed_ops
from dstrain.heartbeat import Phase
from dstrain.launch.command import master
from dstrain.launch.failure.logs import HeldOutput
from dstrain.launch.failure.outcome import Outcome, start_line
from dstrain.launch.failure.report import explain
from dstrain.launch.filesync import distribute
from dstrain.launch.launch import Launch, for_ranks, plan_launch, write_request, write_run_dir, write_start
from dstrain.launch.nodes import connection
from dstrain.launch.nodes.connection import LaunchSpec, Node, StopRequests, connect
from dstrain.launch.nodes.coordinator import Coordinator
from dstrain.launch.nodes.members import Unreachable
from dstrain.launch.nodes.protocol import Hello
from dstrain.launch.prepare import resume
from dstrain.launch.prepare.attention import choose
from dstrain.launch.prepare.inputs import of_ranks
from dstrain.launch.prepare.prepare import PreparedRun, with_attention
from dstrain.launch.run.out_of_memory import Diagnosis, diagnose, note_adaptation
from dstrain.launch.run.state import StateWriter, note_restart
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.oom import ProposedChange
from dstrain.paths import shown
from dstrain.records import to_json
from dstrain.rundir import RUN, RunDir, Stage, damage, line_of, put_aside, resumed, unusable_checkpoint


def launch_spec(launch: Launch, *, timeouts: Timeouts = TIMEOUTS) -> LaunchSpec:
    """Returns the specification of a launch, with these time limits."""
    prepared = launch.prepared
    python_path = launch.exported.get("PYTHONPATH", "")
    return LaunchSpec(
        nodes=launch.nodes,
        run_dir=launch.prepared.run_dir,
        mark=launch.mark,
        open=lambda nodes: connect(nodes, launch.environment, python_path, by_srun=launch.by_srun),
        environment={"PYTHONPATH": python_path} if python_path else {},
        unset=tuple(launch.secrets),
        exports=launch.for_nodes,
        master_port=launch.master_port,
        takes_another_port=launch.takes_another_port,
        master=None if prepared.is_local else master(prepared.hosts),
        ops=tuple(needed_ops(prepared.ds_config, on_gpu=not prepared.on_cpu)),
        files={} if prepared.is_local else connection.files_of(prepared.job),
        packages=() if prepared.is_local else of_ranks(prepared.job, prepared.model),
        saved_bytes=prepared.checkpoint_bytes,
        timeouts=timeouts,
    )


def start(launch: Launch, coordinator: Coordinator, spec: LaunchSpec, say: Callable[[str], None]) -> Outcome:
    """Runs the launch to its end; no process of it is left behind on any node that can be reached.

    `say` gets the attention that all nodes have.
    """

    def check(hellos: Mapping[Node, Hello]) -> tuple[LaunchSpec, dict[int, dict[str, str]]]:
        port = next((hello.port for node, hello in hellos.items() if node.number == 0), None)
        last = launch if port in {None, launch.master_port} else _on_port(launch, port or 0)
        variables = _meet(last, hellos)
        request = decide_attention(last, hellos, say)
        final = replace(spec, nodes=last.nodes, exports=last.for_nodes, master_port=last.master_port, request=request)
        return final, {node.number: own for node, own in variables.items()}

    return coordinator.run(check)


def decide_attention(launch: Launch, hellos: Mapping[Node, Hello], say: Callable[[str], None]) -> str | None:
    """Decides the attention of several nodes, says it, and writes it into the run directory; returns the request that
    ranks read. None if it was decided before. Raises EnvironmentProblem if nodes lack the kernel that the job names."""
    prepared = launch.prepared
    if prepared.is_local or prepared.on_cpu:
        return None
    by_host = {node.host: _kernels(hello) for node, hello in hellos.items()}
    choice = choose(prepared.attention.wish, by_host)
    if choice.says is not None:
        say(f"attn     {choice.says}")
    decided = replace(launch, prepared=with_attention(prepared, choice))
    request = for_ranks(decided)
    write_request(decided.prepared, request)
    return to_json(request)


def _kernels(hello: Hello) -> AttentionKernels:
    return AttentionKernels(
        packages=hello.attention_packages,
        cached=hello.attention_cached,
        downloadable=tuple(hello.attention_downloadable),
    )


def _on_port(launch: Launch, port: int) -> Launch:
    """Returns the same launch with another port for rank 0, and writes it down for those who start it by hand."""
    changed = plan_launch(
        launch.prepared,
        master_port=port,
        by_srun=launch.by_srun,
        saves_on_term=launch.saves_on_term,
        syncs=launch.syncs,
        mark=launch.mark,
        user_lines=launch.user_lines,
    )
    write_start(changed)
    return changed


def _meet(launch: Launch, hellos: Mapping[Node, Hello]) -> dict[Node, dict[str, str]]:
    """Returns the variables by which each node's ranks use the network interface that leads to the others, unless the
    user has named one. Raises EnvironmentProblem if the nodes cannot run together."""
    prepared = launch.prepared
    connection.require_compatible(
        hellos,
        prepared.run_dir,
        launch.master_port,
        on_cpu=prepared.on_cpu,
        files=connection.files_of(prepared.job),
        may_be_apart=launch.syncs,
        keeps_best=prepared.job.keeps_best,
    )
    return connection.own_interfaces(hellos, launch.for_nodes.keys())


_POLL_S = 1.0
_MOST_PORTS = 3
MOST_ADAPTATIONS = 3
"""How often a run changes itself after it ran out of memory; each time it counts with a smaller GPU."""
_OWN_FAULT = frozenset({2, 3, 4, 5, 6})
"""Exit codes of ranks that another start would repeat. Source: dstrain.errors"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policy if a run fails."""

    max_restarts: int = 0
    on_oom: OnOom = OnOom.TELL
    """Whether a run that ran out of GPU memory goes on with a change that fits."""
    spares: tuple[str, ...] = ()
    """Hosts that replace lost ones."""
    timeouts: Timeouts = TIMEOUTS
    command: tuple[str, ...] = RUN
    """The words that start the run again (`rundir.words_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """The outputs of a run."""

    say: Callable[[str], None]
    """Prints a message of `run` itself."""
    pass_on: Callable[[str], None]
    """Prints output of rank 0."""
    progress: Callable[[Phase, int | None, int], None] = lambda phase, done, total: None
    """A phase that counts something, its progress and its total (0: unknown), about once a second."""


class Supervisor:
    """All starts of one run."""

    def __init__(
        self,
        plan: Callable[[Hosts | None, bool, Adaptation], Launch],
        requests: StopRequests,
        policy: Policy,
        reporter: Reporter,
        edits: Sequence[Edit] | None,
    ) -> None:
        """`plan` prepares a start: on these hosts (None: the job's), from the newest checkpoint or not, adapted."""
        self._plan = plan
        self._requests = requests
        self._policy = policy
        self._reporter = reporter
        self._edits = edits
        self._spares = list(policy.spares)
        self._next_look = 0.0
        self._ports = 0
        self._hosts: Hosts | None = None  # the job's
        self._diagnosis: Diagnosis | None = None
        self._adaptation = UNADAPTED
        self._times_adapted = 0
        self._num_aside = 0
        """Starts that ended because a checkpoint could not be used: the next one has another."""

    def drive(self, launch: Launch) -> None:
        """Runs to the end. Raises RunFailed, Interrupted or SavedAndLeft if the training did not finish."""
        run_dir = launch.prepared.run_dir
        writer = StateWriter(run_dir, self._policy.command)
        run_dir.failure.unlink(missing_ok=True)
        run_dir.stop_wish.unlink(missing_ok=True)
        try:
            if launch.prepared.job.resume == "auto":
                for folder in run_dir.damaged_checkpoints():
                    self._put_aside(folder, damage(folder) or "")
            self._drive(launch, writer)
        except SavedAndLeft as error:
            writer.write(stage=Stage.SAVED, exit_code=error.exit_code)
            raise
        except DstrainError as error:
            writer.write(stage=Stage.STOPPED if self._requests.stop else Stage.FAILED, exit_code=error.exit_code)
            with suppress(OSError):
                run_dir.failure.write_text(f"{error}\n", encoding="utf-8")
            raise
        if self._times_adapted:
            self._reporter.say(f"note     this run was adapted, see {run_dir.adaptations}; its files are unchanged")
        writer.write(stage=Stage.ENDED, exit_code=0)

    def _drive(self, launch: Launch, writer: StateWriter) -> None:
        attempt = 1
        while True:
            hosts = launch.prepared.hosts
            nodes = tuple(host.name for host in hosts.hosts)
            writer.write(stage=Stage.STARTING, attempt=attempt, nodes=nodes, start=None)
            gone, error = self._start(launch, writer)
            if error is None:
                return
            # the same start would run out of memory again, so this restart is not one of `max_restarts`
            if not gone and (remedy := self._remedy(error)) is not None:
                launch = self._adapted(launch, error, remedy, attempt)
                attempt += 1
                continue
            # nor is this one: the checkpoint was at fault, and the next start has another
            if self._is_without_checkpoint(launch):
                launch = self._next(launch, error, "")
                attempt += 1
                continue
            failed = attempt - self._times_adapted - self._num_aside
            if failed > self._policy.max_restarts or not self._is_worth_it(error):
                raise error
            self._reporter.say(f"start {failed} of {self._policy.max_restarts + 1} failed: {error.problem}")
            time.sleep(self._policy.timeouts.pause_s)  # ports and memory of the ranks that were killed become free
            attempt += 1
            launch = self._again(launch, gone, error)

    def _start(self, launch: Launch, writer: StateWriter) -> tuple[tuple[str, ...], DstrainError | None]:
        """Returns the hosts that were lost, and the error with which the start ended, if it did."""
        prepared = launch.prepared
        self._diagnosis = None
        write_run_dir(launch, self._edits)
        if prepared.elastic is not None:
            try:
                resume.convert(prepared.elastic, launch.environment, self._reporter.say)
            except InvalidConfig as error:  # such as files that are not as they were saved
                return (), error
        spec = launch_spec(launch, timeouts=self._policy.timeouts)
        output = HeldOutput(self._reporter.pass_on)
        coordinator = self._coordinator(prepared, spec, output, writer)
        try:
            with distribute(launch, self._reporter.say) as gatherer:
                outcome = start(launch, coordinator, spec, self._reporter.say)
                if not outcome.succeeded and not outcome.left_at:
                    output.drop()  # `explain` has it if it is the cause
                if gatherer is not None:
                    gatherer.finish(lambda: writer.beat(writer.step), has_trained=outcome.succeeded)
        except Unreachable as error:
            return error.hosts, error
        finally:
            output.release()
        # ranks that saved and left as asked have not trained to the end: neither a success nor a failure
        if outcome.left_at is not None and outcome.stopped_by is None and not outcome.deaths:
            raise _left(outcome, prepared.run_dir, self._policy.command)
        if outcome.succeeded:
            return (), None
        if outcome.is_port_taken and launch.takes_another_port and self._ports < _MOST_PORTS:
            self._ports += 1
            self._reporter.say("another process took the port of rank 0 before it; starting again with another one")
            return self._start(launch, writer)
        lost = tuple(node.host for node in outcome.lost)
        return lost, self._explained(outcome, prepared)

    def _coordinator(
        self, prepared: PreparedRun, spec: LaunchSpec, output: HeldOutput, writer: StateWriter
    ) -> Coordinator:
        def tick(phase: Phase, done: int | None, total: int) -> None:
            output.tick(done if phase is Phase.STEP else None)
            self._tick(prepared.run_dir, writer, phase, done, total)

        return Coordinator(
            spec,
            self._requests,
            output.take,
            tick,
            self._reporter.say,
            lambda begun: self._tell_start(start_line(begun, prepared.hosts), writer),
        )

    def _explained(self, outcome: Outcome, prepared: PreparedRun) -> DstrainError:
        self._diagnosis = None if outcome.stopped_by is not None else diagnose(prepared)
        if self._diagnosis is None:
            return explain(outcome, hosts=prepared.hosts, run_dir=prepared.run_dir, command=self._policy.command)
        resumes = prepared.run_dir.newest_checkpoint(for_resume=True).folder is not None
        return explain(
            outcome,
            hosts=prepared.hosts,
            run_dir=prepared.run_dir,
            command=self._policy.command,
            evidence=self._diagnosis.evidence,
            remedies=self._diagnosis.hint(resumes=resumes, command=self._policy.command),
        )

    def _tell_start(self, line: str, writer: StateWriter) -> None:
        self._reporter.say(line)
        writer.write(start=line)

    def _tick(self, run_dir: RunDir, writer: StateWriter, phase: Phase, done: int | None, total: int) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _POLL_S
        step = done if phase is Phase.STEP else None
        if step is not None and writer.state.stage is Stage.STARTING:
            writer.write(stage=Stage.RUNNING)
        writer.beat(step)
        self._reporter.progress(phase, done, total)
        if run_dir.stop_wish.exists():
            self._requests.stop.append("dstrain stop")
            run_dir.stop_wish.unlink(missing_ok=True)

    def _is_without_checkpoint(self, failed: Launch) -> bool:
        """Puts the checkpoint aside that ranks could not use, and returns whether they are to start from another one.

        Raises RunFailed without an older one: training does not start over by itself. A checkpoint that the job names
        stays.
        """
        run_dir, unusable = failed.prepared.run_dir, unusable_checkpoint(failed.prepared.run_dir)
        if unusable is None or failed.prepared.job.resume != "auto" or self._requests.stop:
            return False
        folder, why = unusable
        aside = self._put_aside(folder, why)
        self._num_aside += 1
        if aside is not None and run_dir.newest_checkpoint(for_resume=True).folder is None:
            raise RunFailed(
                f"{folder.name} {why}, and there is no older one",
                hint=f"`{line_of(self._policy.command)}` starts over; its files are in {shown(str(aside))}.",
            )
        return aside is not None

    def _put_aside(self, folder: Path, why: str) -> Path | None:
        """Renames a damaged checkpoint, with one line; returns its new place, or None if it stays."""
        try:
            aside = put_aside(folder)
        except OSError as error:
            self._reporter.say(f"warning: {folder.name} {why}, and stays in its place: {error.strerror}")
            return None
        self._reporter.say(f"warning: {folder.name} {why}: put aside as {aside.name}")
        return aside

    def _is_worth_it(self, error: DstrainError) -> bool:
        if isinstance(error, RunFailed):
            is_repeated = error.rank_exit_code in _OWN_FAULT or error.stopped_by is not None
            return not self._requests.stop and not is_repeated
        return not self._requests.stop and isinstance(error, Unreachable)

    def _again(self, failed: Launch, gone: Sequence[str], error: DstrainError) -> Launch:
        """Returns the next start: spares for hosts that were lost, without them fewer hosts."""
        after = replaced(failed.prepared.hosts, gone, self._spares)
        if after is None:
            raise error
        changes = [f"{old} → {new}" for old, new in after.changes.items()]
        self._hosts = after.hosts if changes else self._hosts
        return self._next(failed, error, ", ".join(changes))

    def _next(self, failed: Launch, error: DstrainError, words: str) -> Launch:
        """Returns the next start, from the newest checkpoint; reports and records its beginning and the changes."""
        newest = failed.prepared.run_dir.newest_checkpoint(for_resume=True)
        launch = self._plan(self._hosts, newest.folder is not None, self._adaptation)
        where = f"from step {newest.step}" if newest.folder else "from the beginning"
        self._reporter.say(f"starting again {where}{', ' if words else ''}{words}")
        note_restart(failed.prepared.run_dir, cause=error.problem, from_step=newest.step, change=words)
        for note in launch.prepared.notes:
            self._reporter.say(f"note     {note}")
        return launch

    def _remedy(self, error: DstrainError) -> ProposedChange | None:
        """Returns the fastest change that keeps the batch, if this run may make one."""
        is_wanted = self._policy.on_oom is OnOom.ADAPT and isinstance(error, RunFailed) and not self._requests.stop
        if not is_wanted or self._diagnosis is None or self._times_adapted >= MOST_ADAPTATIONS:
            return None
        return next((remedy for remedy in self._diagnosis.record.fixes if remedy.keeps_batch), None)

    def _adapted(self, failed: Launch, error: DstrainError, remedy: ProposedChange, attempt: int) -> Launch:
        """Returns the next start with a change, which it says and writes down."""
        assert self._diagnosis is not None
        self._reporter.say(f"out of memory: {error.problem}")
        self._times_adapted += 1
        self._adaptation = self._adaptation.also(remedy)
        note_adaptation(self._diagnosis, remedy, attempt=attempt)
        self._reporter.say(
            f"adapting {self._times_adapted} of at most {MOST_ADAPTATIONS} times: {remedy.change}"
            f"{f' ({remedy.price})' if remedy.price else ''}; overridden for this run: {remedy.settings}"
        )
        time.sleep(self._policy.timeouts.pause_s)
        return self._next(failed, error, remedy.change)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The hosts of the next start."""

    hosts: Hosts
    changes: dict[str, str]
    """Lost host → its replacement."""


def replaced(hosts: Hosts, gone: Sequence[str], spares: list[str]) -> Replaced | None:
    """Returns the hosts without those that are gone: a spare replaces a lost one while there is one, and is removed
    from `spares`. None if no host is left."""
    kept: list[Host] = []
    changes: dict[str, str] = {}
    for host in hosts.hosts:
        if host.name not in gone:
            kept.append(host)
        elif spares:
            spare = spares.pop(0)
            changes[host.name] = spare
            kept.append(replace(host, name=spare))
        else:
            changes[host.name] = "left out"
    return Replaced(hosts=replace(hosts, hosts=tuple(kept)), changes=changes) if kept else None


def _left(outcome: Outcome, run_dir: RunDir, command: Sequence[str]) -> SavedAndLeft:
    return SavedAndLeft(
        f"saved {run_dir.path / f'checkpoint-{outcome.left_at}'} and left, as asked",
        hint=f"`{resumed(command)}` continues from there.",
    )
