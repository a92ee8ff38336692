"""A training job over real hosts, for tests that do it harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.launch.timeouts import VARIABLE
from dstrain.rundir import RunDir, is_whole
from tests.launch.network import Network

ROOT = Path(__file__).parents[2]
DSTRAIN = (sys.executable, "-m", "dstrain.cli")
PATIENCE_S = 300.0
"""After which a test fails that waits: a machine that has other things to do may take many times as long."""
LIGHT_RANK = Path(__file__).parent / "light_rank.py"
LIGHT_LAUNCHER = Path(__file__).parent / "light_launcher"
"""Folder that, in PYTHONPATH, lets DeepSpeed's launcher import only what it uses."""


def light_checkout(folder: Path) -> Path:
    """Makes a checkout of this dstrain whose ranks run `light_rank.py`, for tests of what watches the ranks.

    DeepSpeed's launcher imports only what it uses."""
    for name in ("dstrain", "ds_templates", "hostfiles", "launch"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(LIGHT_RANK, folder / "dstrain" / "train" / "__main__.py")
    shutil.copy(LIGHT_LAUNCHER / "sitecustomize.py", folder)
    return folder


def write_job(folder: Path, demo: Path, *, interface: str, **changes: Any) -> None:
    """Writes a job of two ranks that train the demo's model without end, checkpointing every few steps."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        # the default bucket takes 2 GB, which every step would allocate anew
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000, "allgather_bucket_size": 1000000},
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    job = {
        "model": str(demo / "model"),
        "data": str(demo / "train.jsonl"),
        "output_dir": "output",
        "precision": "fp32",
        "seq_len": 64,
        "micro_batch": 1,
        "max_steps": 100000,
        "logging_steps": 1,
        "save_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "grad_ckpt": False,
        "preflight": False,
        "monitor": {"sinks": []},
        "env": {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
    }
    (folder / "job.yaml").write_text(json.dumps(job | changes))


def losses(place: RunDir) -> dict[int, float]:
    """Returns the loss of each step of a run, the last word on it."""
    if not place.metrics.exists():
        return {}
    lines = [json.loads(line) for line in place.metrics.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@dataclass
class Ended:
    """How a command ended."""

    code: int
    said: str
    wall_s: float


class Job:
    """The demo's model, two ranks on two hosts, and steps without end."""

    def __init__(
        self, network: Network, demo: Path, folder: Path, *, checkout: Path = ROOT, is_light: bool = True
    ) -> None:
        """Writes the job; with `is_light`, DeepSpeed's launcher imports only what it uses."""
        self.network = network
        self.python_path = os.pathsep.join(map(str, [checkout, *([LIGHT_LAUNCHER] if is_light else [])]))
        self.limits = ""
        self.folder = folder
        self.place = RunDir(folder / "output")
        write_job(folder, demo, interface="eth0", hostfile="hostfile")
        (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in ("node0", "node1")))

    def start(self, *words: str, head: int = 0) -> subprocess.Popen[str]:
        """Starts `dstrain run` on a host."""
        return self._popen(["run", *words], head)

    def call(self, *words: str, head: int = 0) -> Ended:
        """Types a dstrain command on a host and waits for its end."""
        began = time.monotonic()
        process = self._popen(list(words), head)
        said = process.communicate(timeout=PATIENCE_S)[0]
        return Ended(process.returncode, said, time.monotonic() - began)

    def _popen(self, words: list[str], head: int) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SWANLAB_", "WANDB_"))}
        environment |= {"PYTHONPATH": self.python_path, "HF_HUB_OFFLINE": "1"}
        if self.limits:
            environment[VARIABLE] = self.limits
        return subprocess.Popen(
            self.network.on(head, *DSTRAIN, *words),
            cwd=self.folder, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end_of(self, process: subprocess.Popen[str]) -> Ended:
        """Waits for the end of a run from now on."""
        began = time.monotonic()
        try:
            said = process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            self.clear()
            raise AssertionError(f"still there after {PATIENCE_S} s: {process.communicate(timeout=20)[0]}") from None
        return Ended(process.returncode, said, time.monotonic() - began)

    def losses(self) -> dict[int, float]:
        """Returns the loss of each step, the last word on it."""
        return losses(self.place)

    def wait_for_checkpoint(self, process: subprocess.Popen[str], *, after: int = 0) -> int:
        """Returns the step of the newest whole checkpoint, once there is one beyond `after` and training went on."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            assert process.poll() is None, process.communicate()[0]
            whole = [step for step, folder in self.place.checkpoints() if is_whole(folder) and step > after]
            if whole and max(self.losses(), default=0) > whole[-1]:
                return whole[-1]
            time.sleep(0.1)
        raise AssertionError("no checkpoint: " + "\n".join(path.read_text() for path in self.place.logs.glob("*.log")))

    def wait_for_step(self, process: subprocess.Popen[str] | None, number: int) -> None:
        """Waits until so many steps are logged."""
        until = time.monotonic() + PATIENCE_S
        while max(self.losses(), default=0) < number:
            assert process is None or process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "\n".join(path.read_text() for path in self.place.logs.glob("*.log"))
            time.sleep(0.1)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Waits until something is so."""
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until
            time.sleep(0.1)

    def find(self, node: int, *words: str) -> int:
        """Returns the Python process of a host whose command line has all the words, by its number on this machine."""
        for line in self.network.lines(node):
            pid, program, *_ = line.split()
            if "python" in program and all(word in line for word in words):
                return int(pid)
        raise AssertionError((words, self.network.lines(node)))

    def kill(self, node: int, *words: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the process of a host whose command line has all the words."""
        os.kill(self.find(node, *words), number)

    def left_over(self, nodes: Sequence[int] = (0, 1, 2), *, within_s: float = 0) -> list[str]:
        """Returns what still runs on the hosts after a while: nothing, if all is well."""
        until = time.monotonic() + within_s
        while True:
            found = [f"node{node}: {line}" for node in nodes for line in self.network.lines(node)]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.5)

    def clear(self, *, within_s: float = 0) -> list[str]:
        """Kills what still runs on the hosts after a while, and returns it."""
        left = self.left_over(within_s=within_s)
        for line in left:
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[1]), signal.SIGKILL)
        return left

    def goes_on(self, *words: str, head: int = 0) -> Ended:
        """Resumes from the newest checkpoint for a few steps."""
        newest = self.place.checkpoints()[-1][0]
        return self.call("run", "--set", "resume=auto", "--set", f"max_steps={newest + 3}", *words, head=head)

    def state(self) -> dict[str, Any]:
        """Returns the state file."""
        found: dict[str, Any] = json.loads(self.place.state.read_text())
        return found
