"""Imports and plans make objects faster than garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

from dstrain.garbage import OBJECTS_BETWEEN_COLLECTIONS, collect_seldom, without_garbage_collection


def test_garbage_is_collected_again_after_imports() -> None:
    try:
        with without_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_collections_become_rare() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold()[0] == OBJECTS_BETWEEN_COLLECTIONS
    finally:
        gc.set_threshold(*before)


def test_nothing_is_collected_at_the_exit() -> None:
    program = "\n".join((
        "import gc, atexit",
        "from dstrain.garbage import collect_seldom",
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))",
        "collect_seldom()",
    ))  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")
