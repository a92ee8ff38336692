"""The time limits of a launch, and how a test makes them shorter."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.launch.timeouts import TIMEOUTS, VARIABLE, Timeouts


def test_the_limits_of_a_run_are_these_where_nobody_changes_them() -> None:
    assert asdict(TIMEOUTS.changed({})) == {
        "connect_s": 8,
        "close_s": 3,
        "hello_s": 20,
        "beat_s": 2,
        "silence_s": 30,
        "flush_s": 5,
        "resolve_s": 10,
        "reach_s": 8,
        "reached_s": 20,
        "others_s": 1,
        "start_s": 3600,
        "start_word_s": 15,
        "hang_s": 60,
        "stacks_s": 3,
        "grace_s": 10,
        "kill_s": 10,
        "ending_s": 20,
        "sweep_s": 12,
        "pause_s": 5,
        "record_s": 10,
        "stale_s": 60,
        "detach_s": 60,
        "stop_s": 90,
        "save_s": 3600,
    }


def test_a_node_is_sent_the_limits_that_are_changed_and_has_the_usual_ones_beside() -> None:
    changed = TIMEOUTS.changed({VARIABLE: "silence_s=5,sweep_s=2.5"})
    assert changed.unusual() == {"silence_s": 5, "sweep_s": 2.5}
    assert Timeouts(**changed.unusual()) == changed


@pytest.mark.parametrize("text", ["silence=5", "silence_s", "silence_s=", "silence_s=-1", "silence_s=inf", "5"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentProblem, match="is not NAME=SECONDS"):
        TIMEOUTS.changed({VARIABLE: text})
