"""The parts of sweeps share no test and leave none out."""

from __future__ import annotations

import pytest

from tests.draws import MOST_PARTS, Draw, part_of


@pytest.mark.parametrize("name", ["test_a.py::test[7]", "test_a.py::test[two ranks]", "test_a.py::test"])
@pytest.mark.parametrize(("parts", "at"), [(2, None), (144, None), (6, 4)])
def test_a_test_is_in_one_part(name: str, parts: int, at: int | None) -> None:
    place = part_of(name, parts, at)
    runs = [run for run in range(2 * MOST_PARTS) if Draw(part=run).has(place)]
    assert runs == list(range(place[0], 2 * MOST_PARTS, parts))
    assert Draw(part=None).has(place)


@pytest.mark.parametrize("count", [1, 7, 40, 500, 5000])
def test_what_a_test_draws_is_all_in_the_end(count: int) -> None:
    population = range(count)
    drawn = [Draw(part=part)(population, 10) for part in range(MOST_PARTS)]
    assert all(len(each) >= min(count, 10) for each in drawn)
    assert set().union(*drawn) == set(population)
    assert Draw(part=None)(population, 10) == list(population)
