"""Keeps the user's environment out of the tests: what a shell exports changes what dstrain and its packages do."""

from __future__ import annotations

import os
import re

KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TMPDIR|CI|LD_LIBRARY_PATH|CUDA_HOME|TORCH_EXTENSIONS_DIR|NODE_EXTRA_CA_CERTS"
    r"|DSTRAIN_TEST_ALL|(PYTEST|COV|PIP|SSL)_\w+|\w+_CA_BUNDLE"
)
"""Names of the variables that tests take from outside: where things are, and what says how to test."""
FIXED = {"LANG": "C.UTF-8", "TERM": "xterm"}


def clean() -> None:
    """Leaves in the environment of this process, and so of all that it starts, what tests expect."""
    for name in [name for name in os.environ if not KEPT.fullmatch(name)]:
        del os.environ[name]
    os.environ.update(FIXED)
