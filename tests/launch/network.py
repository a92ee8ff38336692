"""Real hosts on one machine: network, process and host-name namespaces with an sshd each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SSHD = "/usr/sbin/sshd"
MISSING = "missing sshd, ip, unshare, nsenter or root: real hosts need openssh-server, iproute2 and namespaces"

_INIT = """
hostname "$1"
ip link set lo up
mount -t tmpfs -o size=1g tmpfs /dev/shm
while :; do sleep 1000 & wait; done
"""
"""The first process of a host: what nobody waits for becomes its child, and all processes end with it."""


def is_possible() -> bool:
    """Returns whether this machine can have namespaces with an sshd each."""
    tools = all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter"))
    return os.geteuid() == 0 and Path(SSHD).exists() and tools


class Sshd:
    """The ssh server of a host."""

    def __init__(self, network: Network, number: int) -> None:
        self._network, self._number = network, number

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server, not to its sessions."""
        for pid in self._network.processes(self._number):
            line = _command_line(pid)
            if b"[listener]" in line or line.startswith(SSHD.encode()):
                os.kill(pid, number)

    def end_sessions(self) -> None:
        """Kills the sessions, as an administrator or a full disk does; the server stays."""
        for pid in self._network.processes(self._number):
            if _command_line(pid).startswith(b"sshd: root"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Network:
    """`node0`, `node1` … at 10.77.0.1, 10.77.0.2 …, joined by a bridge that is in a namespace of its own."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.prefix = f"dst{os.getpid()}"
        self.sshds = [Sshd(self, number) for number in range(count)]
        self._unshares: dict[int, subprocess.Popen[bytes]] = {}
        self._inits: dict[int, int] = {}

    def namespace(self, number: int) -> str:
        """Returns the name of a host's network namespace."""
        return f"{self.prefix}n{number}"

    def up(self) -> None:
        """Makes the hosts; `down` must follow, whatever happens."""
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "host_key"))
        switch = f"{self.prefix}sw"
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "br0", "up")
        for number in range(self.count):
            space, port = self.namespace(number), f"p{number}"
            _do("ip", "netns", "add", space)
            _do("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _do("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            self._configure(number)
            self.boot(number)
        for number in range(self.count):
            self._wait_for_ssh(number)

    def boot(self, number: int) -> None:
        """Starts a host's first process and its ssh server."""
        space = self.namespace(number)
        unshare = ["unshare", "--pid", "--mount-proc", "--fork", "--uts", "--ipc", "--kill-child"]
        line = ["ip", "netns", "exec", space, *unshare, "bash", "-c", _INIT, "init", f"node{number}"]
        self._unshares[number] = subprocess.Popen(line, stdin=subprocess.DEVNULL)
        self._inits[number] = self._first_process(self._unshares[number].pid)
        self._start_sshd(number)

    def _first_process(self, parent: int) -> int:
        """Returns the process that `unshare` forked, once its mounts are there."""
        children = Path(f"/proc/{parent}/task/{parent}/children")
        for _ in range(500):
            found = children.read_text().split()
            if found and "tmpfs /dev/shm" in _mounts(int(found[0])):
                return int(found[0])
            time.sleep(0.02)
        raise AssertionError("the first process of a host did not start")

    def _configure(self, number: int) -> None:
        """Writes what `ip netns exec` lays over /etc: names, the client's key, the server's."""
        etc = self._etc(number)
        (etc / "ssh").mkdir(parents=True, exist_ok=True)
        self.know(number, range(self.count))
        (etc / "ssh" / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self.folder}/key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
        )
        self.configure_sshd(number)

    def know(self, number: int, others: Iterable[int]) -> None:
        """Writes which hosts a host knows by name."""
        names = "".join(f"10.77.0.{each + 1} node{each}\n" for each in others)
        (self._etc(number) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def configure_sshd(self, number: int, *more: str) -> None:
        """Writes a host's sshd_config, with more lines where a test wants them; the next session reads it."""
        lines = (
            f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.folder}/key.pub",
            "ListenAddress 0.0.0.0",
            "StrictModes no",
            "PermitRootLogin yes",
            "UsePAM no",
            f"PidFile {self.folder}/sshd{number}.pid",
            *more,
        )
        (self._etc(number) / "ssh" / "sshd_config").write_text("\n".join(lines) + "\n")

    def _etc(self, number: int) -> Path:
        return Path("/etc/netns") / self.namespace(number)

    def _start_sshd(self, number: int) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        log = self.folder / f"sshd{number}.log"
        _do(*self.on(number, SSHD, "-E", str(log), "-f", "/etc/ssh/sshd_config"))

    def restart_sshd(self, number: int) -> None:
        """Ends a host's sshd and starts it again, with its configuration of now."""
        self.stop_sshd(number)
        self._start_sshd(number)
        self._wait_for_ssh(number)

    def stop_sshd(self, number: int) -> None:
        """Ends a host's sshd; its sessions go on."""
        self.sshds[number].send_signal(signal.SIGCONT)
        self.sshds[number].send_signal(signal.SIGTERM)

    def start_sshd(self, number: int) -> None:
        """Starts a host's sshd."""
        self._start_sshd(number)
        self._wait_for_ssh(number)

    def _wait_for_ssh(self, number: int) -> None:
        line = self.on(0, "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", f"node{number}", "true")
        for _ in range(50):
            if subprocess.run(line, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / f"sshd{number}.log").read_text())

    def on(self, number: int, *command: str) -> list[str]:
        """Returns the command line that runs on a host, in the folder in which it is started."""
        enter = f"nsenter --target {self._inits[number]} --net --pid --mount --uts --ipc"
        return ["sh", "-c", f'exec {enter} -- env -C "$PWD" "$@"', "sh", *command]

    def processes(self, number: int) -> list[int]:
        """Returns the processes of a host, by their numbers on this machine; its first one and what that does apart."""
        with suppress(OSError):
            own = _link(self._inits[number])
            every = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
            inside = [pid for pid in every if pid != self._inits[number] and _link(pid) == own]
            return [pid for pid in inside if _command_line(pid) not in (b"", b"sleep\x001000\x00")]
        return []

    def lines(self, number: int) -> list[str]:
        """Returns the command lines of a host's processes, without those of its ssh server."""
        found = []
        for pid in self.processes(number):
            line = _command_line(pid).replace(b"\0", b" ").decode().strip()
            if line and not line.startswith(("sshd:", SSHD)):
                found.append(f"{pid} {line}")
        return found

    def unplug(self, number: int) -> None:
        """Takes a host's link down."""
        _do("ip", "-n", f"{self.prefix}sw", "link", "set", f"p{number}", "down")

    def plug(self, number: int) -> None:
        """Takes a host's link up."""
        _do("ip", "-n", f"{self.prefix}sw", "link", "set", f"p{number}", "up")

    @contextmanager
    def only_ssh(self, number: int, to: int) -> Iterator[None]:
        """Drops what a host sends to another one over TCP but for ssh, as a firewall does, without a word."""
        far, nowhere = f"10.77.0.{to + 1}", "10.77.0.99"
        changes = (
            ("neigh", "replace", nowhere, "lladdr", "02:00:00:00:00:99", "dev", "eth0"),
            ("route", "replace", far, "via", nowhere, "table", "99"),
            ("rule", "add", "to", far, "ipproto", "tcp", "sport", "22", "lookup", "main", "pref", "10"),
            ("rule", "add", "to", far, "ipproto", "tcp", "dport", "22", "lookup", "main", "pref", "11"),
            ("rule", "add", "to", far, "ipproto", "tcp", "lookup", "99", "pref", "12"),
        )
        try:
            for change in changes:
                _do("ip", "-n", self.namespace(number), *change)
            yield
        finally:
            for preference in ("10", "11", "12"):
                subprocess.run(["ip", "-n", self.namespace(number), "rule", "del", "pref", preference])

    def cut_power(self, number: int) -> None:
        """Ends a host at once: nothing of it says good-bye to anybody."""
        self.unplug(number)
        os.kill(self._inits[number], signal.SIGKILL)
        self._unshares[number].wait(10)

    def restore_power(self, number: int) -> None:
        """Starts a host again after `cut_power`."""
        self.plug(number)
        self.boot(number)
        self._wait_for_ssh(number)

    def down(self) -> None:
        """Ends what was started and removes what was made."""
        for number, init in self._inits.items():
            with suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
            self._unshares[number].wait(10)
        for space in [self.namespace(number) for number in range(self.count)] + [f"{self.prefix}sw"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def _mounts(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/mounts").read_text()
    return ""


def _link(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _command_line(pid: int) -> bytes:
    """Returns the words of a process, each with a null byte behind it; nothing once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
