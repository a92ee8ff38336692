"""What the ranks of a light checkout run in place of `dstrain.train`: everything that agents see of training, and no
torch.

The ranks meet at rank 0's port, step in lockstep over TCP, send their pulses, log, save whole checkpoints, go on from
the newest one, and heed the signals of `dstrain.train.rank.Leaving`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from dstrain.heartbeat import Phase, Sender
from dstrain.job.schema import Job
from dstrain.records import load_json
from dstrain.rundir import RunDir, mark_whole
from dstrain.train.checkpoints.checkpoints import Verification, choose
from dstrain.train.rank import Leaving, Rank, from_environment, is_port_taken

IMPORT_S = 0.5
STEP_S = 0.05
STEPS = "LIGHT_STEPS"
"""Variable of a job that says what its steps are like by ZeRO stage: seconds, `oom` or `fail` (`1=0.02,3=oom`); those
of `2c` hold if layers are compiled."""
BLOCKS = "LIGHT_BLOCKS"
"""Variable of a job that says where its last rank blocks for ever: a phase, or `step-2` after the second step."""
FLOOD = "LIGHT_FLOOD"
"""Variable of a job that makes every rank print 200 MB after its last step, in `lines` or in `one-line`."""


class Peers:
    """The other ranks: rank 0 has a connection to each of them, they have one to it."""

    def __init__(self, rank: Rank, host: str, port: int) -> None:
        self._is_first = rank.is_first
        if rank.is_first:
            with socket.create_server(("", port)) as server:
                self._sockets = [server.accept()[0] for _ in range(rank.world_size - 1)]
        else:
            self._sockets = [_connect(host, port)]

    def step(self, word: bytes) -> bytes:
        """Returns rank 0's word of one byte once every rank has given its own."""
        if self._is_first:
            words = b"".join([word, *(_receive(peer) for peer in self._sockets)])
            word = max(words).to_bytes()
            for peer in self._sockets:
                peer.sendall(word)
            return word
        self._sockets[0].sendall(word)
        return _receive(self._sockets[0])


def _connect(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.1)


def _receive(peer: socket.socket) -> bytes:
    word = peer.recv(1)
    if not word:
        raise ConnectionError("Connection closed by peer")
    return word


def measured(seconds: float) -> dict[str, Any]:
    """Returns what the metrics of a step of this length say about it."""
    return {"step_s": seconds, "tokens": 64, "tokens_per_s": 64 / seconds, "data_wait_s_by_rank": [0.0, 0.0]}


def save(place: RunDir, step: int, rank: Rank) -> None:
    """Writes a checkpoint that is whole."""
    folder = place.path / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(bytes(1000))
    record = {"step": step, "world_size": rank.world_size, "zero_stage": 2}
    mark_whole(folder, record | {"checksums": {"weights": xxh3_128((folder / "weights").read_bytes()).hexdigest()}})


def step_s(place: RunDir, job: Job) -> float:
    """Returns how long a step takes. Raises MemoryError or OSError if the job wants it to fail."""
    stage = json.loads(place.ds_config.read_text())["zero_optimization"]["stage"]
    said = dict(pair.split("=") for pair in job.env.get(STEPS, "").split(",") if pair)
    word = said.get(f"{stage}c" if job.torch_compile else str(stage), said.get(str(stage), str(STEP_S)))
    if word == "oom":
        place.oom.write_text("{}")
        raise MemoryError(word)
    if word == "fail":
        raise OSError("it fails as it was told")
    return float(word)


def may_block(job: Job, rank: Rank, where: str) -> None:
    """Blocks the last rank for ever if the job wants it to."""
    while job.env.get(BLOCKS) == where and rank.index == rank.world_size - 1:
        time.sleep(1)


def train(place: RunDir, job: Job, rank: Rank, peers: Peers, leaving: Leaving, heartbeat: Sender) -> Phase:
    """Steps to the end, or until somebody wants a checkpoint; returns the last phase."""
    newest = place.newest_checkpoint()
    step = newest.step if job.resume == "auto" else 0
    if step:
        rank.say(f"resuming from checkpoint-{step}")
    assert job.max_steps is not None
    duration, began = step_s(place, job), time.monotonic()
    while step < job.max_steps:
        time.sleep(duration)
        step += 1
        is_leaving = peers.step(b"1" if leaving.is_wanted else b"0") == b"1"
        heartbeat.send(step, Phase.STEP, job.max_steps)
        may_block(job, rank, f"step-{step}")
        if rank.is_first:
            with place.metrics.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0, **measured(time.monotonic() - began)}) + "\n")
            began = time.monotonic()
            print(f"step {step}/{job.max_steps}, loss 1.0", flush=True)
        if is_leaving or step % job.save_steps == 0:
            heartbeat.send(step, Phase.SAVING)
            may_block(job, rank, Phase.SAVING)
            if rank.is_first:
                save(place, step, rank)
            heartbeat.send(step, Phase.STEP, job.max_steps)
        if is_leaving:
            rank.say(f"saved checkpoint-{step} and left, as asked")
            heartbeat.send(step, Phase.LEFT)
            leaving.settle()
            return Phase.LEFT
    for _ in range(2000 if FLOOD in job.env else 0):
        sys.stdout.write("x" * 100_000 if job.env[FLOOD] == "one-line" else ("x" * 99 + "\n") * 1000)
    heartbeat.send(step, Phase.DONE)
    return Phase.DONE


def main(folder: Path) -> None:
    rank = from_environment(os.environ)
    place = RunDir(folder)
    leaving, heartbeat = Leaving(), Sender(os.environ, rank.index)
    heartbeat.send(0, Phase.START)
    job = load_json(Job, place.request)
    resume = choose(place, job.resume, world_size=rank.world_size)
    if resume is not None:
        Verification(resume, place, rank, os.environ).run(heartbeat)
    time.sleep(IMPORT_S)
    heartbeat.send(0, Phase.CONNECTING)
    if rank.is_first and is_port_taken(os.environ):
        heartbeat.send(0, Phase.PORT_TAKEN)
        raise OSError("EADDRINUSE")
    peers = Peers(rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    heartbeat.send(0, Phase.LOADING)
    last = train(place, job, rank, peers, leaving, heartbeat)
    if rank.is_first and last is Phase.DONE:
        place.summary.write_text(json.dumps({"steps": job.max_steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
