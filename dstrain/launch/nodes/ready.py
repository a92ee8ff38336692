"""Prepares a node for its ranks: checks that they reach rank 0, and builds missing extensions.

`python -m dstrain.launch.nodes.ready TIMEOUTS HOST PORT OP …` is what the node's agent starts; it writes events.
TIMEOUTS is the JSON object of Begin; HOST is where rank 0 will listen, as the ranks get it; empty if no node has to
find it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain import child_process
from dstrain.errors import EnvironmentProblem
from dstrain.facts.deepspeed_ops import OPS, Lock, held_locks, missing_ops, unheld_locks
from dstrain.launch.nodes.connection import Inbox
from dstrain.launch.nodes.process_tree import ProcessTree
from dstrain.launch.nodes.protocol import Begin, Event, Problem, Reached, Ready, Told, encode
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.paths import python
from dstrain.units import format_seconds

_END_S = 8.0
_POLL_S = 0.1


def reach(host: str, port: int, timeouts: Timeouts = TIMEOUTS) -> None:
    """Opens one connection to where rank 0 will listen, as every rank will. Raises EnvironmentProblem without one."""
    results: list[Any] = []
    # in a thread, since getaddrinfo has no time limit; a daemon, or a dead name server would keep the process
    resolver = threading.Thread(target=_resolve, args=(host, port, results), daemon=True)
    resolver.start()
    resolver.join(timeouts.resolve_s)
    if not results or isinstance(results[0], OSError):
        why = results[0].strerror if results else f"its name servers did not answer within {timeouts.resolve_s:.0f} s"
        raise EnvironmentProblem(
            f"it cannot resolve {host}, the host of rank 0: {why}",
            hint=f"Write {host} into /etc/hosts there, or an address that every host knows into the hostfile.",
        )
    # one limit for all addresses of the host, IPv4 and IPv6
    failures, limit_s = [], timeouts.reach_s / len(results[0])
    for family, kind, _, _, address in results[0]:
        with socket.socket(family, kind) as probe:
            probe.settimeout(limit_s)
            try:
                probe.connect(address)
            except OSError as error:
                failures.append(f"{address[0]}: {error.strerror or f'no answer within {limit_s:.0f} s'}")
            else:
                return
    raise EnvironmentProblem(
        f"it cannot connect to {host}, port {port}, where rank 0 will listen ({'; '.join(failures)})",
        hint=f"Check that {host} is the same machine there, and that firewalls allow all ports between the hosts;"
        " --master-port names another one for rank 0.",
    )


def _resolve(host: str, port: int, results: list[Any]) -> None:
    try:
        results.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError as error:
        results.append(error)


def build(ops: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Builds the missing ones of some extensions and reports the time; waits for any process that builds or loads one
    now.

    Removes locks that nobody needs. Raises EnvironmentProblem for a build that fails, or a lock that nobody releases.
    """
    locked = [Path(lock.path).parent.name for lock in _settled(ops, environment, tell)]
    missing = missing_ops(ops, environment)
    for op in ops:
        # a built one with a lock is loaded once here, which waits until its holder is done
        if op not in missing and op not in locked:
            continue

        # a process that dies meanwhile leaves a lock, which is removed or named while the build waits
        def go_on(text: str, op: str = op) -> None:
            for lock in _settled([op], environment, tell):
                tell(f"  {lock.held}; if no other host is building: {lock.cure}")
            tell(text)

        if op in missing:
            tell(f"building {OPS[op]}, once; it takes about a minute on two cores")
        begin = time.monotonic()
        command = python("-m", "dstrain.train.build_ops", op)
        code, output = child_process.run_reporting(command, environment, go_on, f"building {OPS[op]}")
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-15:])
            raise EnvironmentProblem(
                f"{OPS[op]} cannot be built:\n{last}", hint="It needs g++ and ninja: apt-get install g++ ninja-build"
            )
        tell(f"{'built' if op in missing else 'loaded'} {OPS[op]} in {format_seconds(time.monotonic() - begin)}")


def _settled(ops: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]) -> list[Lock]:
    """Returns the locks that somebody elsewhere may hold; removes those that nobody needs."""
    kept = []
    for lock in unheld_locks(ops, environment):
        if lock.is_abandoned:
            Path(lock.path).unlink(missing_ok=True)
            tell(f"removed {lock.path}: the extension is built, and no visible process loads it")
        elif lock.is_stale:
            raise EnvironmentProblem(
                f"{lock.held}: ranks would wait for it forever",
                hint="A build that was killed leaves such a lock. Unless another container or host builds there,"
                f" type on that host: {lock.cure}",
            )
        else:
            kept.append(lock)
    return kept


class Readying:
    """The process that makes a node ready, as its agent sees it."""

    def __init__(self, begin: Begin, environment: Mapping[str, str]) -> None:
        """Starts the process. Raises OSError if that fails."""
        words = [json.dumps(begin.timeouts), begin.master or "", str(begin.master_port), *begin.ops]
        self._process = subprocess.Popen(
            python("-m", "dstrain.launch.nodes.ready", *words),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._family = ProcessTree(begin.mark, self._process.pid)
        assert self._process.stdout is not None
        self._inbox = Inbox(self._process.stdout.fileno())

    def poll(self) -> list[Event]:
        """Returns its events since the last call; the last one says that the node is ready, or why not."""
        was_closed = self._inbox.is_closed
        events: list[Event] = [event for _, event in self._inbox.receive()]
        if self._inbox.is_closed and not was_closed and self._process.wait() not in {0, EnvironmentProblem.exit_code}:
            last = "\n".join(self._inbox.noise) or f"code {self._process.returncode}"
            events.append(Problem(text=f"it could not be prepared: {last}"))
        return events

    def end(self) -> None:
        """Ends the process and what it builds: a ninja that is killed leaves its compilers, which lead groups of their
        own, and a killed build leaves its lock."""
        locks = held_locks(self._family.alive())
        child_process.end(self._process, term_s=_END_S)
        until = time.monotonic() + _END_S
        while self._family.alive() and time.monotonic() < until:
            self._family.send(signal.SIGKILL)
            time.sleep(_POLL_S)
        self._family.collect()
        if self._process.stdout is not None:
            self._process.stdout.close()
        for lock in locks - held_locks() if locks else ():
            lock.unlink(missing_ok=True)


def main(words: Sequence[str]) -> int:
    """Makes this node ready; returns the exit code."""
    limits, host, port, *ops = words

    def tell(event: Event) -> None:
        os.write(sys.stdout.fileno(), encode(event))

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if host:
            reach(host, int(port), Timeouts(**json.loads(limits)))
        tell(Reached())
        build(ops, os.environ, lambda text: tell(Told(text=text)))
    except EnvironmentProblem as error:
        tell(Problem(text=error.problem, hint=error.hint))
        return error.exit_code
    tell(Ready())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
