"""The screen of a run without a terminal."""

import itertools

import pytest

from dstrain.cli.output import progress
from dstrain.heartbeat import Phase


def test_without_a_terminal_a_phase_that_counts_says_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = itertools.count(0.0, progress.LINE_S / 2)
    monkeypatch.setattr("dstrain.cli.output.progress.time.monotonic", lambda: next(seconds))
    with progress.Screen() as shown:
        for done in (0, 1000, 2000, 3000, 4000):
            shown.progress(Phase.TOKENIZING, done, 5000)
        for _ in range(3):
            shown.progress(Phase.WEIGHTS, 0, 0)
        for done in range(9):
            shown.progress(Phase.STEP, done, 9)
    lines = [
        "tokenizing: 2,000 of 5,000 samples, 400/s, 7.50 s left",
        "tokenizing: 4,000 of 5,000 samples, 400/s, 2.50 s left",
        "loading weights",
    ]
    assert capsys.readouterr().err.splitlines() == lines
