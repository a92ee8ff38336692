"""Runs several trainings one after another under one launcher: `deepspeed tests/train/several.py ACTION …`.

An action is a run directory; `DIR@kill=STEP` ends it by SIGKILL once that step is in its metrics, and with `@truncate`
after that halves an optimizer shard of the newest checkpoint; `DIR@seed=SEED` trains with another seed. Each training
is a process of its own, forked when the imports, most of what a tiny run costs, are done.
"""

from __future__ import annotations

import json
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
    folder, *words = action.split("@")
    options = dict(word.partition("=")[::2] for word in words)
    if "seed" in options and rank == "0":
        request = Path(folder) / "request.json"
        request.write_text(json.dumps(json.loads(request.read_text()) | {"seed": int(options["seed"])}))
    child = os.fork()
    if child == 0:
        os._exit(_train(folder, rank, port=int(os.environ["MASTER_PORT"]) + 1 + number))
    code = _wait(child, Path(folder) / "metrics.jsonl", int(options["kill"]) if "kill" in options else None)
    if "truncate" in options and rank == "0":
        truncate_newest(Path(folder))
    Path(f"{folder}.{number}.{rank}").write_text(str(code))
    deadline = time.monotonic() + DEADLINE_S
    while len(list(Path(folder).parent.glob(f"{Path(folder).name}.{number}.*"))) < world_size:
        if time.monotonic() > deadline:
            sys.exit(f"the other ranks did not finish {action}")
        time.sleep(0.02)


def truncate_newest(folder: Path) -> None:
    """Halves an optimizer shard of the newest checkpoint, as a power cut may."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shard = next(newest.glob("global_step*/*optim_states.pt"))
    os.truncate(shard, shard.stat().st_size // 2)


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
    from dstrain.monitor.sinks.jsonl import read_jsonl

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
    # everything slow, before the forks
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import dstrain.train.setup  # noqa: F401
    from dstrain.train.rank import import_muon

    import_muon({})
    assert "torch._inductor.compile_fx" not in sys.modules, "a rank compiles Muon again"
    get_checkpoint_conversion_mapping("qwen3")

    for number, action in enumerate(sys.argv[1:]):
        act(number, action)
