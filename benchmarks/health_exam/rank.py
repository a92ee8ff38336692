"""The program of a rank that has a cause of trouble: `python -m benchmarks.health_exam.rank RUN_DIR`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # type: ignore[import-untyped]

from benchmarks.health_exam.causes import inject
from dstrain.train import setup
from dstrain.train.__main__ import run

SETTINGS = "injection.json"
"""The file of the run directory with the cause."""


def main(folder: Path) -> int:
    """Trains as `dstrain.train` does, with the cause, and returns the exit code."""
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    CPU_Accelerator.is_fp16_supported = lambda self: True  # PyTorch computes it on every CPU, only slowly
    original = setup.TrainingSetup.trainer

    def trainer(self: setup.TrainingSetup, *arguments: Any) -> Any:
        made = original(self, *arguments)
        inject(made, self.rank.index, settings)
        return made

    setup.TrainingSetup.trainer = trainer  # type: ignore[method-assign, assignment]
    return run([str(folder)])


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
