"""The calibration file: what is read from it, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.calibration import NOTHING, Calibration, parse, read


def _file(inside: str) -> str:
    return f'{{"schema": 1, "gpus": {{"h100-sxm": {{{inside}}}}}}}'


def test_what_was_measured_is_read_and_the_rest_is_left_open() -> None:
    found = parse(_file('"gemm_ratio": 0.61, "context_bytes": 700000000'), "c.json")
    measured = found.of("h100-sxm")
    assert (measured.gemm_ratio, measured.context_bytes, measured.launch_s) == (0.61, 700_000_000, None)
    assert found.of("a100-80g") == NOTHING


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "c.json:1:2: not JSON"),
        ("[]", "c.json: not an object"),
        pytest.param("[" * 100_000, "c.json: nested too deeply", id="100,000 brackets"),
        ("{}", 'c.json: /schema: "schema" is missing; this version reads 1'),
        ('{"schema": 2}', "c.json: /schema: schema is 2; this version reads 1"),
        ('{"schema": true}', "c.json: /schema: schema is true; this version reads 1"),
        ('{"schema": 1, "gpu": {}}', 'c.json: /gpu: unknown key "gpu"; did you mean "gpus"?'),
        ('{"schema": 1, "gpus": []}', "c.json: /gpus: not an object"),
        ('{"schema": 1, "gpus": {"h100-sxm": 7}}', "c.json: /gpus/h100-sxm: not an object"),
        ('{"schema": 1, "gpus": {"h100": {}}}', '"h100" is not the name of a GPU; write "h100-sxm"'),
        ('{"schema": 1, "gpus": {"h100-smx": {}}}', 'c.json: /gpus/h100-smx: "h100-smx" is not the name of a GPU'),
        ('{"schema": 1, "gpus": {"cpu": {}}}', "c.json: /gpus/cpu: no time is predicted for a CPU; remove it"),
        (_file('"gemm_rato": 0.6'), '/gpus/h100-sxm/gemm_rato: unknown key "gemm_rato"; did you mean "gemm_ratio"?'),
        (_file('"gemm_ratio": 61'), "c.json: /gpus/h100-sxm/gemm_ratio: gemm_ratio is 61; input should be less than"),
        (_file('"gemm_ratio": 0'), "gemm_ratio is 0; input should be greater than 0"),
        (_file('"launch_s": NaN'), "launch_s is NaN; input should be a finite number"),
        (_file('"launch_s": "8 us"'), 'launch_s is "8 us"; input should be a valid number'),
        (_file('"reserved_ratio": 0.9'), "reserved_ratio is 0.9; input should be greater than or equal to 1"),
        (_file('"context_bytes": 0.5'), "context_bytes is 0.5; input should be a valid integer"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse(text, "c.json")
    assert problem in caught.value.problem


def test_all_problems_are_said_together() -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse('{"schema": 1, "gpus": {"a100-80g": {"hbm_ratio": 2}, "v1oo": {}}}', "c.json")
    assert [line.split(":")[1].strip() for line in caught.value.problem.split("\n")] == [
        "/gpus/a100-80g/hbm_ratio",
        "/gpus/v1oo",
    ]


def test_the_users_own_file_is_read_by_default_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read() == Calibration()
    (tmp_path / ".dstrain").mkdir()
    (tmp_path / ".dstrain" / "calibration.json").write_text(_file('"gemm_ratio": 0.61'))
    assert read().of("h100-sxm").gemm_ratio == 0.61


def test_a_file_that_was_named_must_be_there_and_whole(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such file"):
        read(str(tmp_path / "c.json"))
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match=r"c\.json: cannot be read"):
        read(str(tmp_path / "c.json"))
