"""The time limits of a launch, and how a test makes them shorter."""

from __future__ import annotations

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.launch.timeouts import TIMEOUTS, VARIABLE, Timeouts


def test_the_limits_of_a_run_are_the_usual_ones_where_nobody_changes_them() -> None:
    assert TIMEOUTS.changed({}) == TIMEOUTS == Timeouts()


def test_a_node_is_sent_the_limits_that_are_changed_and_has_the_usual_ones_beside() -> None:
    changed = TIMEOUTS.changed({VARIABLE: "silence_s=5,sweep_s=2.5"})
    assert changed.unusual() == {"silence_s": 5, "sweep_s": 2.5}
    assert Timeouts(**changed.unusual()) == changed


@pytest.mark.parametrize("text", ["silence=5", "silence_s", "silence_s=", "silence_s=-1", "silence_s=inf", "5"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentProblem, match="is not NAME=SECONDS"):
        TIMEOUTS.changed({VARIABLE: text})
