"""Machines with different attention kernels: folders of packages in front of the real ones, and caches of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.facts.attention_kernels import AttentionKernels

ROOT = Path(__file__).parents[1]
BUILD = f"torch213-cxx11-cu128-{os.uname().machine}-linux"
"""A build of a kernel for the PyTorch of these machines."""
_HERE = """
import json, os, sys
from dstrain.facts.attention_kernels import here
from dstrain.records import to_data
print(json.dumps(to_data(here([tuple(pair) for pair in json.loads(sys.argv[1])], os.environ))))
"""


@dataclass(frozen=True)
class Machine:
    """A machine whose PyTorch is 2.13 with CUDA 12.8."""

    folder: Path

    def __post_init__(self) -> None:
        self.install("torch", "2.13.0+cu128", module="torch")
        (self.folder / "torch" / "version.py").write_text("cuda: str | None = '12.8'\nhip: str | None = None\n")

    def install(self, name: str, version: str, *, module: str) -> None:
        """Installs a package that holds nothing."""
        (self.folder / module).mkdir(parents=True, exist_ok=True)
        (self.folder / module / "__init__.py").touch()
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def cache(self, repo: str, version: int, *, build: str = BUILD, commit: str = "0123456789") -> None:
        """Writes a kernel as `kernels` downloads it."""
        folder = self.folder / "hub" / f"kernels--{repo.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / f"v{version}").write_text(commit)
        (folder / "snapshots" / commit / "build" / build).mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes on this machine."""
        paths = os.pathsep.join([str(self.folder), str(ROOT)])
        return {**os.environ, "PYTHONPATH": paths, "HF_HUB_CACHE": str(self.folder / "hub")}

    def kernels(self, *capabilities: Sequence[int], **variables: str) -> AttentionKernels:
        """Returns the kernels that a process on this machine finds for GPUs of these compute capabilities."""
        words = [sys.executable, "-c", _HERE, json.dumps(capabilities)]
        done = subprocess.run(words, env=self.environment | variables, capture_output=True, text=True, check=True)
        data = json.loads(done.stdout)
        return AttentionKernels(**(data | {"downloadable": tuple(data["downloadable"])}))
