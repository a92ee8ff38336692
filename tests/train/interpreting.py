"""Trains as a rank whose Triton kernels are interpreted on the CPU: `python -m tests.train.interpreting RUN_DIR`.

Prints each kernel that runs, once. Needs TRITON_INTERPRET=1 from the start. Triton 3.9's interpreter hands floats to
kernels as they are, though these convert them, and gives nothing for functions of CUDA's libdevice; Liger's norms need
both, GeGLU the latter. The kernels of experts are tuned by time, for which Triton asks the driver of a GPU.
"""

from __future__ import annotations

import runpy
from typing import Any


def complete_interpreter() -> set[str]:
    """Gives Triton's interpreter what it lacks; before Liger's kernels are imported. Returns the kernels that ran."""
    import numpy as np
    import triton.language as tl  # type: ignore[import-not-found]  # only where Liger is installed
    from triton.language.extra import libdevice  # type: ignore[import-not-found]
    from triton.runtime import autotuner, interpreter  # type: ignore[import-not-found]

    convert = interpreter._implicit_cvt

    def convert_floats_too(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    launched = set[str]()
    launch = interpreter.GridExecutor.__call__

    def launch_by_name(self: Any, *arguments: Any, **options: Any) -> None:
        if self.fn.__name__ not in launched:
            launched.add(self.fn.__name__)
            print("interpreting", self.fn.__name__, flush=True)
        launch(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = launch_by_name
    interpreter._implicit_cvt = convert_floats_too
    autotuner.Autotuner._bench = lambda *_, **__: [0.0]  # the first configuration is as good as any
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    return launched


if __name__ == "__main__":
    complete_interpreter()
    runpy.run_module("dstrain.train", run_name="__main__", alter_sys=True)
