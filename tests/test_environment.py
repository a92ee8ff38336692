"""The tests pass in the environment of a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USERS = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "LANG": "zh_CN.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "NO_COLOR": "1",
}
"""What users export, some of it on dstrain's own advice."""
TESTS = (
    "tests/cli/test_show.py",
    "tests/cli/test_explain.py::test_a_key_is_explained_without_a_job_and_says_what_numbers_need",
    "tests/cli/test_data.py::test_on_a_terminal_what_has_loss_is_green_and_a_sample_cannot_change_the_terminal",
    "tests/launch/prepare/test_inputs.py",
)
"""Some of those that failed with these variables."""

pytestmark = pytest.mark.commands


def run(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", *words]
    environment = {**os.environ, **USERS, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_variables_of_the_user_change_no_test() -> None:
    done = run("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fork_server_that_cannot_start_says_why() -> None:
    done = run("-m", "tests.cli.fork_server")
    assert done.returncode != 0
    assert "dstrain lint ended with 3" in done.stderr
    assert "ds_config.json: 2 errors" in done.stderr
