"""What the tests launch as ranks: a module that does as `RUN_DIR/behaviour` says, without torch.

Rank 0 writes its environment and process number down; ranks wait for each other through files in the run directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dstrain.heartbeat import Phase, Sender


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    (folder / f"environment-{rank}.json").write_text(json.dumps(dict(os.environ)))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    print(f"hello from rank {rank}", flush=True)
    behaviour = (folder / "behaviour").read_text()
    while len(list(folder.glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    if behaviour == "raise":
        fail(rank)
    elif behaviour == "leave":
        for step in range(1, 21):
            Sender(os.environ, int(rank)).send(step, Phase.STEP, 60)
            time.sleep(0.1)  # the kernel keeps few messages, and rank 1 is to be seen
        time.sleep(0 if rank == "1" else 100)
    elif behaviour != "end":
        if behaviour == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == "0":
            hide(folder)
            (folder / "cpu_adam").mkdir()
            os.open(folder / "cpu_adam" / "lock", os.O_CREAT | os.O_EXCL)  # as whoever builds or loads an extension
        else:
            Sender(os.environ, int(rank)).send(3, Phase.TOKENIZING, 10)
        (folder / f"ready-{rank}").touch()
        time.sleep(100)


def hide(folder: Path) -> None:
    """Starts two processes that are hard to find: one without its environment, one in a session of its own."""
    first = subprocess.Popen(["sleep", "100"], env={})
    second = subprocess.Popen(["sleep", "100"], start_new_session=True)
    (folder / "hidden").write_text(f"{first.pid} {second.pid}")


def fail(rank: str) -> None:
    if rank == "1":
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError("rank 1 is at fault") from error
    time.sleep(0.7)
    raise ConnectionError("Connection closed by peer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
