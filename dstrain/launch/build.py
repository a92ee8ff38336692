"""Builds DeepSpeed's extensions once, before the ranks would all wait for them in silence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dstrain.errors import EnvironmentProblem
from dstrain.facts.ops import OPS, stale_locks
from dstrain.launch import child
from dstrain.paths import python
from dstrain.units import format_seconds


def refuse_stale_locks(ops: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises EnvironmentProblem when an earlier build was killed: PyTorch would wait for its lock for ever."""
    for lock in stale_locks(ops, environment):
        raise EnvironmentProblem(
            f"{lock}: left behind by a build that was killed; the ranks would wait for it for ever",
            hint=f"If no run on another machine that shares this folder is building: rm {lock}",
        )


def remove_locks(environment: Mapping[str, str], *, since: float) -> list[Path]:
    """Removes the locks that ranks of this run left behind when they were killed, and returns them: those that came
    after `since`, in seconds since the epoch, and that no process here holds."""
    found = []
    for lock in stale_locks(list(OPS), environment):
        with suppress(OSError):
            if lock.stat().st_mtime >= since:
                lock.unlink()
                found.append(lock)
    return found


def build(ops: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Builds extensions in a child process, telling how long it takes; raises EnvironmentProblem when one fails."""
    for op in ops:
        tell(f"building {OPS[op]}, once; it takes about a minute on two cores")
        begin = time.monotonic()
        try:
            code, output = child.run(python("-m", "dstrain.train.ops", op), environment, tell, f"building {OPS[op]}")
        except BaseException:
            for lock in stale_locks([op], environment):
                lock.unlink(missing_ok=True)
            raise
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-15:])
            raise EnvironmentProblem(
                f"{OPS[op]} cannot be built:\n{last}", hint="It needs g++ and ninja: apt-get install g++ ninja-build"
            )
        tell(f"built {OPS[op]} in {format_seconds(time.monotonic() - begin)}")
