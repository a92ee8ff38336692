"""What people and other programs write is read, or refused with an error; nothing else ends a reader."""

import pytest

from benchmarks.fuzz import run

pytestmark = pytest.mark.sweep


def test_broken_inputs_end_in_no_exception() -> None:
    report = run(300, seed=7)
    assert report.crashes == []
    assert {"lint", "explain", "job file", "hostfile", "wire", "heartbeat", "merge job.yaml"} <= set(report.calls)
