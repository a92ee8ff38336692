"""`dstrain show`: templates, which are listed, printed and copied, and the schemas that editors read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import config_schema, job_schema

Type = Callable[..., Any]


def test_list_names_every_way_of_zero(dstrain: Type) -> None:
    found = json.loads(dstrain("show", "template", "--json").stdout)["templates"]
    assert len(found) == 9
    assert all(found.values())
    lines = [line for name, purpose in found.items() for line in (name, f"    {purpose}")]
    assert dstrain("show", "template").stdout.splitlines() == lines


def test_eject_copies_a_template_with_its_partials(dstrain: Type, tmp_path: Path) -> None:
    dstrain("show", "template", "zero3.json.j2", "--dir", "mine")
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {"zero3.json.j2", "_zero3.json.j2", "_trainer.json.j2"} <= names
    assert "zero2.json.j2" not in names


def test_eject_never_overwrites(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "zero3.json.j2").write_text("mine")
    assert dstrain("show", "template", "--dir", "mine").returncode == 6
    assert (tmp_path / "mine" / "zero3.json.j2").read_text() == "mine"


def test_an_unknown_template_gets_the_nearest_name(dstrain: Type) -> None:
    done = dstrain("show", "template", "zero3_ofload_all.json.j2")
    assert done.returncode == 3
    assert 'Did you mean "zero3_offload_all.json.j2"?' in done.stderr


def test_a_named_template_is_printed(dstrain: Type) -> None:
    assert dstrain("show", "template", "zero2.json.j2").stdout.startswith("{#")


@pytest.mark.parametrize(("options", "wanted"), [((), config_schema()), (("job",), job_schema())])
def test_it_prints_a_schema_to_stdout_and_nothing_else(
    dstrain: Type, options: tuple[str, ...], wanted: dict[str, object]
) -> None:
    done = dstrain("show", "schema", *options)
    assert (json.loads(done.stdout), done.stderr, done.returncode) == (wanted, "", 0)
