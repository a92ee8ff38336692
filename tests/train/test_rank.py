"""What a rank knows before PyTorch is imported."""

from __future__ import annotations

import subprocess

import pytest

from dstrain.paths import python
from dstrain.train.rank import prefer_expandable_segments


def test_a_rank_reports_that_it_starts_before_it_loads_what_is_slow() -> None:
    slow = "torch", "transformers", "deepspeed", "numpy", "pydantic", "dstrain.plan.memory"
    program = f"import sys, dstrain.train.__main__; sys.exit(str([name for name in {slow} if name in sys.modules]))"
    child = subprocess.run(python("-c", program), capture_output=True, text=True, check=False)
    assert child.stderr == "[]\n"


def test_a_signal_that_comes_late_does_not_kill_a_rank_that_has_left() -> None:
    program = (
        "import os, subprocess\n"
        "from dstrain.train.rank import Leaving\n"
        "leaving = Leaving()\n"
        "loop = f'while kill -USR1 {os.getpid()} 2>/dev/null; do :; done'\n"
        "subprocess.Popen(['sh', '-c', loop], stderr=subprocess.DEVNULL)\n"
        "while not leaving.is_wanted: pass\n"
        "leaving.settle()"
    )
    assert subprocess.run(python("-c", program), check=False).returncode == 0


def test_the_allocator_may_grow_its_segments() -> None:
    environment: dict[str, str] = {}
    prefer_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_allocator_settings_stay(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    prefer_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}
