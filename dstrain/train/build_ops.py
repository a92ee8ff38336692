"""Builds DeepSpeed's extensions ahead of the ranks: `python -m dstrain.train.build_ops NAME …`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from dstrain.paths import prefer_own_programs

_BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
}
"""Extension → its class in deepspeed.ops.op_builder."""


def main(names: Sequence[str]) -> int:
    """Returns 0 if every extension is built and loads; the compiler writes to stderr.

    Raises SystemExit at SIGTERM, so that PyTorch removes its lock.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    prefer_own_programs(os.environ)
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-untyped]

    for name in names:
        get_accelerator().create_op_builder(_BUILDERS[name]).load(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
