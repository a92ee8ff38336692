"""One run in a folder at a time, and which runs go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dstrain.errors import Conflict
from dstrain.launch.run.state import StateWriter, is_alive, only_one, read
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.rundir import RunDir, Stage

_HOLD = """\
import sys, time
from pathlib import Path
from dstrain.launch.run.state import only_one
from dstrain.rundir import RunDir

with only_one(RunDir(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_the_same_moment_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "held\n"
            with pytest.raises(Conflict, match="a run is active there"), only_one(RunDir(tmp_path)):
                pass
        finally:
            first.send_signal(signal.SIGKILL)
    with only_one(RunDir(tmp_path)):
        pass


def _of_another_machine(folder: Path, *, beat: float) -> RunDir:
    run_dir = RunDir(folder)
    StateWriter(run_dir).write(stage=Stage.RUNNING, host="elsewhere")
    run_dir.state.write_text(json.dumps(json.loads(run_dir.state.read_text()) | {"beat": beat}))
    return run_dir


@pytest.mark.parametrize("skew_s", [-600, 600])
def test_a_living_run_of_a_machine_with_another_clock_goes_on(tmp_path: Path, skew_s: float) -> None:
    run_dir = _of_another_machine(tmp_path, beat=time.time() + skew_s)
    assert is_alive(read(run_dir), run_dir)
    with pytest.raises(Conflict, match=r"process [0-9]+ on elsewhere"), only_one(run_dir):
        pass


def test_a_run_of_another_machine_that_writes_no_more_is_gone(tmp_path: Path) -> None:
    run_dir = _of_another_machine(tmp_path, beat=time.time())
    written = time.time() - TIMEOUTS.stale_s - 1
    os.utime(run_dir.state, (written, written))
    assert not is_alive(read(run_dir), run_dir)
    with only_one(run_dir):
        pass
