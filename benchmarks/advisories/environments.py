"""Environments in which one DeepSpeed after another runs: a venv with torch, and a folder for each DeepSpeed.

DeepSpeed is an sdist whose setup.py imports torch, so it is built without isolation, and without extensions.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
"""A release whose index has a wheel without CUDA: others bring gigabytes of CUDA libraries with them."""
_NEEDED = ("einops", "hjson", "msgpack", "ninja", "numpy", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm")
"""What DeepSpeed imports on a CPU."""
_BUILDS = ("setuptools", "wheel")
_PIP = ("-m", "pip", "--disable-pip-version-check", "install", "-q")


def _free_port() -> int:
    """Returns a port of this machine on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _problem(started: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], limit_s: float) -> str | None:
    """Waits for ranks, and returns what the first one that failed printed; others may wait for it for ever."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        codes = [process.poll() for process in started]
        failed = [log.read_text(encoding="utf-8") for code, log in zip(codes, logs, strict=True) if code]
        if failed or None not in codes:
            return failed[0] if failed else None
        time.sleep(0.2)
    return f"no end within {limit_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """The environments below one folder."""

    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter of the venv."""
        return self.folder / "torch" / "bin" / "python"

    def make(self, versions: Sequence[str]) -> None:
        """Makes what is missing. Raises CalledProcessError if pip fails."""
        if not self.python.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-m", "venv", self.folder / "torch"], check=True)
            self._install("-c", str(ROOT / "constraints.txt"), TORCH, *_NEEDED, *_BUILDS)
        for version in versions:
            if not self._deepspeed(version).exists():
                print(f"installing deepspeed {version}", file=sys.stderr, flush=True)
                folder = str(self._deepspeed(version))
                self._install("--no-deps", "--no-build-isolation", "--target", folder, f"deepspeed=={version}")

    def _install(self, *words: str) -> None:
        environment = self._environment() | {"DS_BUILD_OPS": "0"}
        subprocess.run([str(self.python), *_PIP, *words], check=True, env=environment)

    def run(self, script: Path, answer: Path, *, version: str, ranks: int, limit_s: float) -> str | None:
        """Runs a script on CPU ranks with one DeepSpeed; it gets the path of its answer.

        Returns what the ranks that failed printed; None if none did.
        """
        together = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment = self._environment() | together | {"PYTHONPATH": str(self._deepspeed(version))}
        logs = [answer.with_name(f"rank-{rank}.log") for rank in range(ranks)]
        started = []
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                line = [str(self.python), str(script), str(answer)]
                started.append(subprocess.Popen(line, env=own, stdout=output, stderr=subprocess.STDOUT))
        try:
            return _problem(started, logs, limit_s)
        finally:
            for process in started:
                process.kill()
                process.wait()

    def _deepspeed(self, version: str) -> Path:
        return self.folder / f"deepspeed-{version}"

    def _environment(self) -> dict[str, str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja, for an op that DeepSpeed builds
        extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(self.folder / "extensions"))
        return dict(os.environ) | {"DS_ACCELERATOR": "cpu", "PATH": path, "TORCH_EXTENSIONS_DIR": extensions}
