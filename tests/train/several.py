"""Runs several trainings one after another under one launcher: `deepspeed tests/train/several.py ACTION …`.

An action is a run directory; `DIR@kill=STEP` ends it by SIGKILL once that step is in its metrics. Each training is a
process of its own, forked when the imports, most of what a tiny run costs, are done.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

DEADLINE_S = 120


def act(number: int, action: str) -> None:
    """Does one action on this rank; leaves the child's exit code in `DIR.NUMBER.RANK`; waits for the other ranks."""
    rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    folder, _, kill = action.partition("@kill=")
    child = os.fork()
    if child == 0:
        os._exit(_train(folder, rank, port=int(os.environ["MASTER_PORT"]) + 1 + number))
    code = _wait(child, Path(folder) / "metrics.jsonl", int(kill) if kill else None)
    Path(f"{folder}.{number}.{rank}").write_text(str(code))
    deadline = time.monotonic() + DEADLINE_S
    while len(list(Path(folder).parent.glob(f"{Path(folder).name}.{number}.*"))) < world_size:
        if time.monotonic() > deadline:
            sys.exit(f"the other ranks did not finish {action}")
        time.sleep(0.02)


def _train(folder: str, rank: str, *, port: int) -> int:
    from dstrain.train.__main__ import run

    os.environ["MASTER_PORT"] = str(port)
    log = os.open(f"{folder}.log.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        code = run([folder])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _wait(child: int, metrics: Path, kill_at: int | None) -> int:
    """Returns the exit code of the child, which is killed at a step; minus the signal when it died of one."""
    from dstrain.monitor.jsonl_sink import read_jsonl

    deadline = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        reached = kill_at is not None and any(line.get("step", 0) >= kill_at for line in read_jsonl(metrics))
        if reached or time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.01)


if __name__ == "__main__":
    import dstrain.train.session  # noqa: F401  everything slow, before the forks

    for number, action in enumerate(sys.argv[1:]):
        act(number, action)
