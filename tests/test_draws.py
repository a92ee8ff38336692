"""The parts of sweeps share no test and leave none out, and are the same in every run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COLLECTED
from tests.draws import CASES, NUM_PARTS, PLACES, TESTS, Draw, part_of

ROOT = Path(__file__).parent.parent
SOME = ("tests/cli/test_bombs.py", "tests/facts/model/test_families.py")


@pytest.mark.parametrize("is_fast", [False, True])
def test_every_test_is_in_one_part_of_those_of_its_sweep(is_fast: bool, request: pytest.FixtureRequest) -> None:
    made = {f"{place}[{number}]" for place in (*CASES, *TESTS, *PLACES) for number in range(200)}
    collected: list[str] = request.config.stash[COLLECTED]
    for place in {part_of(name, is_whole=True, is_fast=is_fast) for name in made | {*collected}}:
        runs = [part for part in range(NUM_PARTS) if Draw(part=part).has(place)]
        parts = place[1] if place else 1
        assert NUM_PARTS % parts == 0
        assert runs == list(range(runs[0], NUM_PARTS, parts)), place
        assert Draw(part=None).has(place)


def test_every_place_has_tests(request: pytest.FixtureRequest) -> None:
    if not request.config.option.is_whole:
        pytest.skip("only a run of all tests knows all of them")
    names = request.config.stash[COLLECTED]
    assert not [place for place in (*CASES, *TESTS, *PLACES) if not any(name.startswith(place) for name in names)]


@pytest.mark.parametrize("count", [1, 7, 40, 500, 5000])
def test_what_a_test_draws_is_all_in_the_end(count: int) -> None:
    population = range(count)
    drawn = [Draw(part=part)(population, 10) for part in range(NUM_PARTS)]
    assert all(len(each) >= min(count, 10) for each in drawn)
    assert set().union(*drawn) == set(population)
    assert Draw(part=None)(population, 10) == list(population)


def test_two_collections_are_equal() -> None:
    line = [sys.executable, "-P", "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--collect-only", *SOME]
    shown = [
        subprocess.run(
            [*line, "-v", "--part", "1"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "test_a_bomb_does_not_go_off" in shown[0]
    first, second = (re.findall("^ *<.*", text, re.MULTILINE) for text in shown)
    assert first == second
