"""Sinks never reach training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dstrain.choices import SwanLabMode
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.monitor.sinks import registry
from dstrain.monitor.sinks.registry import Guarded, open_sinks
from dstrain.monitor.sinks.sink import End, Say, Setup, Table


def setup(folder: Path) -> Setup:
    return Setup(project="p", name="n", mode=SwanLabMode.OFFLINE, run_dir=folder, config={}, is_resumed=False)


class Broken:
    """Fails in everything it does."""

    place = "nowhere"
    facts: Mapping[str, str] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no route to host")

    def show(self, table: Table) -> None:
        raise ConnectionError("no route to host")

    def finish(self, end: str, error: str | None) -> None:
        raise ConnectionError("no route to host")


def test_a_sink_that_fails_is_said_once_and_left_alone() -> None:
    said: list[str] = []
    sink = Guarded("broken", Broken(), said.append)
    sink.log({"loss": 1.0}, 1)
    sink.log({"loss": 1.0}, 2)
    sink.finish(End.SUCCESS)
    assert len(said) == 1
    assert "no route to host" in said[0]


def test_a_word_that_is_no_sink_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match='monitor: sinks has "swanlb"') as caught:
        open_sinks(["swanlb"], setup(tmp_path), print)
    assert caught.value.hint == 'Did you mean "swanlab"?'


def test_a_missing_package_is_said_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(EnvironmentProblem, match="wandb, which is not installed"):
        open_sinks(["wandb"], setup(tmp_path), print)


def test_a_sink_that_does_not_start_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(setup: Setup, say: Say) -> None:
        raise OSError("disk full")

    said: list[str] = []
    monkeypatch.setattr(registry, "SINKS", {"swanlab": fail})
    assert open_sinks(["swanlab"], setup(tmp_path), said.append) == []
    assert "disk full" in said[0]
