"""The command itself: its help, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Type = Callable[..., Any]


def test_help_is_short_for_h(dstrain: Type) -> None:
    assert dstrain("-h").stdout == dstrain("--help").stdout


def test_an_unknown_verb_gets_the_nearest_one(dstrain: Type) -> None:
    done = dstrain("gen-conf")
    assert (done.returncode, "gen-config" in done.stderr) == (2, True)


def test_no_color_means_no_escape_codes(dstrain: Type) -> None:
    done = dstrain("gen-config", "--model", "nope", "--gpus", "1", NO_COLOR="1", FORCE_COLOR="1")
    assert "\x1b[3" not in done.stderr
