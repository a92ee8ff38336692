"""Records: what YAML gives, and how a problem is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.records import from_data


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: m\nseed: 2024-13-45", "f:2:7: 2024-13-45 is not a valid timestamp (month must be in 1..12)"),
        ("a: !!int foo", "f:1:4: foo is not a valid int"),
        ("a: !!float foo", "f:1:4: foo is not a valid float"),
        ("a: !!bool foo", "f:1:4: foo is not a valid bool; in quotes it is text"),
        ("a: [1, 2024-02-30]", "f:1:8: 2024-02-30 is not a valid timestamp"),
        ("a: " + "9" * 5000, "f:1:4: 9999"),
        ("[" * 900, "f: is nested too deeply"),
    ],
    ids=range(7),
)
def test_a_scalar_that_is_no_value_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_yaml(text, "f")
    assert caught.value.problem.startswith(problem)


def test_a_key_that_is_no_scalar_is_read() -> None:
    assert parse_yaml("? [1]\n: 2", "f", texts=frozenset({"env"}))[0] == {"(1,)": 2}


def test_texts_are_what_was_written() -> None:
    text = "env: {A: 4, B: true, C: 3.10, D: 0x10, E: 2024-13-45, F: '7', G: on}\nother: {A: 4}"
    assert parse_yaml(text, "f", texts=frozenset({"env"}))[0] == {
        "env": {"A": "4", "B": "true", "C": "3.10", "D": "0x10", "E": "2024-13-45", "F": "7", "G": "on"},
        "other": {"A": 4},
    }


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"monitor": {"sinks": ["swanlab", "swanlb"]}}, 'x: sinks[1] is "swanlb"; did you mean "swanlab"?'),
        ({"monitor": {"mode": "onlin"}}, 'x: mode is "onlin"; did you mean "online"?'),
        ({"monitor": {"mode": 3}}, 'x: mode is "3"; legal values: online, offline, local, disabled'),
        ({"lr_scheduler_type": "cosin"}, 'x: lr_scheduler_type is "cosin"; did you mean "cosine"?'),
        ({"lora": {"targets": ["q_proj", 1]}}, "x: targets[1] is 1; input should be a valid string"),
        (
            {"rope_scaling": "yarn"},
            'x: rope_scaling is "yarn"; input should be an object with the keys rope_type, factor,',
        ),
    ],
)
def test_a_word_that_is_no_choice_names_the_nearest(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        from_data(Job, {"model": "m", "output_dir": "o"} | more, locate=lambda place: "x")
    assert caught.value.problem.startswith(problem)


def test_a_pair_that_lacks_a_number_is_a_problem_and_no_bug() -> None:
    @dataclass(frozen=True)
    class Grid:
        shape: tuple[int, int]

    with pytest.raises(InvalidConfig, match="x: "):
        from_data(Grid, {"shape": [1]}, locate=lambda place: "x")
