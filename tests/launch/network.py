"""Real hosts on one machine: network namespaces with addresses, names and an sshd each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SSHD = "/usr/sbin/sshd"
MISSING = "missing sshd, ip or root: real hosts need openssh-server, iproute2 and network namespaces"


def is_possible() -> bool:
    """Returns whether this machine can have namespaces with an sshd each."""
    return os.geteuid() == 0 and Path(SSHD).exists() and shutil.which("ip") is not None


class Network:
    """`node0`, `node1` … at 10.77.0.1, 10.77.0.2 …, joined by a bridge that is in a namespace of its own."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.prefix = f"dst{os.getpid()}"
        self.sshds: list[subprocess.Popen[bytes]] = []

    def namespace(self, number: int) -> str:
        """Returns the name of a host's namespace."""
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
            _do("ip", "-n", space, "link", "set", "lo", "up")
            self._configure(number)
            self.sshds.append(self._start_sshd(number))
        for number in range(self.count):
            self._wait_for_ssh(number)

    def _configure(self, number: int) -> None:
        """Writes what `ip netns exec` lays over /etc: names, the client's key, the server's."""
        etc = self._etc(number)
        (etc / "ssh").mkdir(parents=True, exist_ok=True)
        names = "".join(f"10.77.0.{each + 1} node{each}\n" for each in range(self.count))
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (etc / "ssh" / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self.folder}/key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
        )
        self.configure_sshd(number)

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

    def _start_sshd(self, number: int) -> subprocess.Popen[bytes]:
        Path("/run/sshd").mkdir(exist_ok=True)
        line = self.on(number, SSHD, "-D", "-e", "-f", "/etc/ssh/sshd_config")
        with (self.folder / f"sshd{number}.log").open("wb") as log:
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def restart_sshd(self, number: int) -> None:
        """Ends a host's sshd and starts it again, with its configuration of now."""
        self.sshds[number].send_signal(signal.SIGCONT)
        self.sshds[number].terminate()
        self.sshds[number].wait(10)
        self.sshds[number] = self._start_sshd(number)
        self._wait_for_ssh(number)

    def _wait_for_ssh(self, number: int) -> None:
        line = self.on(0, "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", f"node{number}", "true")
        for _ in range(50):
            if subprocess.run(line, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / f"sshd{number}.log").read_text())

    def on(self, number: int, *command: str) -> list[str]:
        """Returns the command line that runs on a host."""
        return ["ip", "netns", "exec", self.namespace(number), *command]

    def down(self) -> None:
        """Ends what was started and removes what was made."""
        for sshd in self.sshds:
            sshd.send_signal(signal.SIGCONT)
            sshd.kill()
            sshd.wait()
        for space in [self.namespace(number) for number in range(self.count)] + [f"{self.prefix}sw"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
