"""Ends a forked process that runs a program as Python does, without tearing down what its parent had imported."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from typing import NoReturn


def run_and_exit(module: str) -> NoReturn:
    """Runs a module as `python -m` does and exits with its code.

    Python frees every object when it exits, and thereby copies each page that the process shares with its parent: half
    a second of CPU time, ten times what a short command takes.
    """
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)
