"""Lets ranks of several runs import their packages side by side and train one after the other; for `recipes.py`.

A rank waits before it loads anything until the one before has ended. It saves nothing.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import sys
from typing import Any

LOCK = "DSTRAIN_BENCHMARK_LOCK"
"""Variable with the path of the lock, which a rank holds until its process ends."""
_import = builtins.__import__


def _imported(name: str, *arguments: Any, **options: Any) -> Any:
    module = _import(name, *arguments, **options)
    if name == "dstrain.train.setup":
        builtins.__import__ = _import
        _hold_back(module.TrainingSetup, module.Trainer)
    return module


def _hold_back(setup: Any, trainer: Any) -> None:
    prepare = setup.prepare

    def alone(*arguments: Any) -> Any:
        fcntl.flock(os.open(os.environ[LOCK], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        return prepare(*arguments)

    setup.prepare = alone
    sys.modules["dstrain.train.parts.saving"].Saver.save_final = trainer._save_checkpoint = lambda *_, **__: None


if LOCK in os.environ:
    builtins.__import__ = _imported
