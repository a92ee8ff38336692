"""An error of rank 0 is shown once the run has survived it, or as the cause."""

from __future__ import annotations

import pytest

from dstrain.launch.failure.logs import HeldOutput

LOST = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"


@pytest.fixture
def shown() -> list[str]:
    return []


def test_what_a_failed_run_held_back_is_not_shown(shown: list[str]) -> None:
    output = HeldOutput(shown.append)
    output.take(f"step 3\n{LOST}")
    output.take("more of it\n")
    output.tick(3)
    output.drop()
    output.release()
    assert shown == ["step 3\n"]


@pytest.mark.parametrize("steps", [(3, 4, 5), (None, 1, 2, 3)])
def test_an_error_that_the_run_survives_is_shown_after_the_next_steps(
    shown: list[str], steps: tuple[int | None, ...]
) -> None:
    output = HeldOutput(shown.append)
    output.take(LOST)
    for step in steps:
        assert not shown
        output.tick(step)
    assert shown == [LOST]


def test_an_error_is_not_held_back_for_ever(shown: list[str]) -> None:
    now = [0.0]
    output = HeldOutput(shown.append, lambda: now[0])
    output.take(LOST)
    now[0] = 61.0
    output.tick(None)
    assert shown == [LOST]
