"""A real SLURM cluster on one machine: munge, a controller, and two nodes `n0` and `n1`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "unshare", "nsenter")
MISSING = "missing munged, slurmctld, slurmd or root: a real scheduler needs slurm-wlm, munge and mount namespaces"
NODES = ("n0", "n1")
KILL_WAIT_S = 20
"""Between SIGTERM and SIGKILL for a job that is cancelled, requeued or out of time."""
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
KillWait={kill_wait_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{parameters}NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 Gres=gpu:2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""


def is_possible() -> bool:
    """Returns whether this machine can be a cluster: all programs, and root, who may give it an /etc/hosts."""
    if os.geteuid() != 0 or not all(shutil.which(name, path=_PATH) for name in PROGRAMS):
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


class Slurm:
    """Two nodes of two CPUs and two counted GPUs, and a controller: on 127.0.0.1, in one folder, gone after `down`.

    ::

        slurm = Slurm(folder)
        try:
            slurm.up()
            slurm.run("srun", "-N2", "hostname")
            number = slurm.submit("--partition=low", "job.sbatch")
            slurm.wait(number, "COMPLETED", timeout_s=60)
        finally:
            slurm.down()  # ends the daemons and every process of every job

    `run` types a command as on a login node, `popen` starts one: SLURM_CONF is set, and `n0` and `n1` are names of
    127.0.0.1, for them and for the jobs: all live in a mount namespace with an /etc/hosts of its own.

    Both partitions have both nodes: `low`, the default, and `high`, whose jobs preempt those of `low` where there is no
    room. A preempted job's steps get SIGTERM at once, and `grace_s` later everything of it is killed and requeued; with
    `user_signal=True` it is the signal of the job's `--signal` that is sent, as with many sites
    (SlurmctldParameters=preempt_send_user_signal).

    The nodes are one machine to everything but SLURM: processes, files, ports, /dev/shm and the host name are shared.
    GPUs are counted and there are none: `--gpus-per-node=2` is granted, and CUDA_VISIBLE_DEVICES is then 0,1.
    Without accounting, jobs that have ended are known for five minutes.
    """

    def __init__(self, folder: Path, *, grace_s: int = 30, user_signal: bool = False) -> None:
        self.folder, self.grace_s, self.user_signal = folder, grace_s, user_signal
        self.conf = folder / "slurm.conf"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        """Starts the cluster and waits until both nodes are idle; `down` must follow, whatever happens."""
        self._write()
        self._start_namespace()
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *self._munge_files())
        _until((self.folder / "munge.socket").exists, "munged does not answer", timeout_s=10)
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        _until(self._is_idle, lambda: self._said(), timeout_s=30)

    def _write(self) -> None:
        """Writes the configuration, the key that all parts share, and the names."""
        (self.folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        text = _CONF.format(
            folder=self.folder,
            host=host,
            ports=_free_ports(3),
            kill_wait_s=KILL_WAIT_S,
            grace_s=self.grace_s,
            parameters="SlurmctldParameters=preempt_send_user_signal\n" if self.user_signal else "",
        )
        self.conf.write_text(text)
        for number in range(2):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"NodeName=n[0-1] Name=gpu File={self.folder}/gpu[0-1]\n")
        (self.folder / "munge.key").write_bytes(os.urandom(64))
        (self.folder / "munge.key").chmod(0o600)
        names = "".join(f"127.0.0.1 {node}\n" for node in NODES)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)

    def _munge_files(self) -> list[str]:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        return [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]

    def _start_namespace(self) -> None:
        """Starts what holds the mount namespace in which everything lives."""
        script = f'mount --bind "{self.folder}/hosts" /etc/hosts && echo ready && exec sleep infinity'
        line = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        holder = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self.daemons.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n", "no mount namespace"
        holder.stdout.close()

    def _daemon(self, *command: str) -> None:
        """Starts a part of the cluster."""
        with (self.folder / "daemons.log").open("ab") as log:
            line = self.line(*command)
            self.daemons.append(
                subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment())
            )

    def line(self, *command: str, cwd: Path | None = None) -> list[str]:
        """Returns the command line that runs a command in the namespace."""
        enter = ["nsenter", f"--mount=/proc/{self.daemons[0].pid}/ns/mnt", "--", "sh", "-c", 'cd "$0" && exec "$@"']
        return [*enter, str(cwd or self.folder), *command]

    def environment(self, **variables: str) -> dict[str, str]:
        """Returns this process's environment without another job's variables, with SLURM_CONF and more."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "PATH": _PATH, "SLURM_CONF": str(self.conf), **variables}

    def run(
        self, *command: str, cwd: Path | None = None, timeout_s: float = 60, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as on a login node, in the cluster's folder unless told otherwise; its code is not judged."""
        line, variables = self.line(*command, cwd=cwd), self.environment(**(env or {}))
        return subprocess.run(line, env=variables, capture_output=True, text=True, timeout=timeout_s)

    def popen(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command as on a login node, with stdout and stderr in one pipe; `down` ends it at the latest."""
        line, variables = self.line(*command, cwd=cwd), self.environment(**(env or {}))
        return subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def submit(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """Returns the number of the job that `sbatch` makes of these words."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def field(self, job: int | str, name: str) -> str:
        """Returns what `scontrol show job` says of a job (`JobState`, `Restarts`, `Reason` …); `12_1` is a task."""
        said = self.run("scontrol", "show", "job", "--oneliner", str(job))
        found = re.search(rf"(?:^|\s){name}=(\S*)", said.stdout)
        assert found, said.stdout + said.stderr
        return found[1]

    def wait(self, job: int | str, *states: str, timeout_s: float) -> str:
        """Returns the first of these states that a job is seen in; raises AssertionError if none comes in time.

        A job that is requeued is PENDING, for about two minutes of `BeginTime`; `hurry` ends them.
        """
        seen: list[str] = []

        def arrived() -> bool:
            seen.append(self.field(job, "JobState"))
            return seen[-1] in states

        _until(arrived, lambda: f"job {job} was {' '.join(dict.fromkeys(seen))}, never {states}", timeout_s=timeout_s)
        return seen[-1]

    def hurry(self, job: int | str) -> None:
        """Lets a requeued job start in some seconds and not in two minutes.

        At once would be too soon: within the second in which its last start was ended, a node refuses it as killed.
        """
        self.run("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def _is_idle(self) -> bool:
        return (
            self.run("sinfo", "--noheader", "--Node", "--format=%T", "--partition=low").stdout.split() == ["idle"] * 2
        )

    def _said(self) -> str:
        """Returns the ends of the logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)

    def down(self) -> None:
        """Ends every job, the daemons, and whatever else still lives in the namespace: all of it was started here."""
        if not self.daemons:
            return
        with ExitStack() as ending:
            for daemon in self.daemons:
                ending.callback(daemon.wait)
            space = _space(self.daemons[0].pid)
            for _ in range(50):
                there = [pid for pid in _pids() if space is not None and _space(pid) == space]
                for pid in there:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not there:
                    break
                time.sleep(0.05)
            for daemon in self.daemons:
                daemon.kill()


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _space(pid: int) -> str | None:
    """Returns the mount namespace of a process; None where it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return None


def _free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _until(is_done: Callable[[], bool], otherwise: str | Callable[[], str], *, timeout_s: float) -> None:
    """Waits until something is so; raises AssertionError where it is not in time."""
    end = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > end:
            raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        time.sleep(0.1)
