"""The process that measures one configuration, and what it needs from outside: memory that NVML shows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measured_cases import SHAPES, TIMED_STEPS, Case, ds_config
from dstrain.facts import probe

HERE = Path(__file__).resolve().parent


@contextmanager
def device_bytes(quantities: dict[str, float], *, on_gpu: bool) -> Iterator[None]:
    """Adds to `quantities` the peak of used memory that NVML shows of the first GPU, beyond its use before."""
    if not on_gpu:
        yield
        return
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(probe.local_gpus()[0].index)
    idle = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    most, done = idle, threading.Event()

    def poll() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        quantities["device_bytes"] = most - idle


def spec_of(case: Case) -> dict[str, Any]:
    """Returns the specification for the child process."""
    configuration = case.configuration()
    lora = configuration.model.lora
    adapter = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": "all-linear"}
    return {
        "config": dict(SHAPES[case.shape]),
        "lora": adapter if case.lora else None,
        "seq_len": case.seq_len,
        "micro_batch": case.micro_batch,
        "grad_accum": case.grad_accum,
        "grad_ckpt": case.grad_ckpt,
        "attn": str(configuration.kernels.attn),
        "liger": case.liger,
        "ds_config": ds_config(configuration),
        "steps": TIMED_STEPS,
    }


def environment(*, on_gpu: bool, port: int) -> dict[str, str]:
    """Returns the environment of a child: one rank, and dstrain's allocator settings."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
    return {**kept, **rank, **own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Child:
    """A process that measures one case: it imports its packages at once and touches the device when it is told to."""

    def __init__(self, case: Case, folder: Path, *, on_gpu: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._on_gpu = on_gpu
        spec, self._answer = self._folder / "spec.json", self._folder / "answer.json"
        spec.write_text(json.dumps(spec_of(case)), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "measured_run.py"), str(spec), str(self._answer)],
            env=environment(on_gpu=on_gpu, port=free_port()),
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def measure(self, timeout_s: float) -> dict[str, Any]:
        """Returns the child's answer, or an `outcome` of `failed` with the end of its output if it wrote none."""
        seen: dict[str, float] = {}
        try:
            with device_bytes(seen, on_gpu=self._on_gpu):
                _, errors = self._process.communicate("start\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.close()
            return {"outcome": "failed", "error": f"took more than {timeout_s:.0f} s"}
        if not self._answer.exists():
            said = [line for line in errors.splitlines() if line.strip()]
            return {"outcome": "failed", "error": said[-1] if said else f"exit code {self._process.returncode}"}
        return {**json.loads(self._answer.read_text(encoding="utf-8")), **seen}

    def close(self) -> None:
        """Ends the process if it still runs."""
        self._process.kill()
        self._process.communicate()
