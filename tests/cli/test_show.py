"""`dstrain show`: templates, which are listed, printed and copied, and the schemas that editors read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrain.config.schema import config_schema, job_schema
from tests.cli.conftest import Type


def test_list_names_every_way_of_zero(dstrain: Type) -> None:
    found = json.loads(dstrain("show", "template", "--json").stdout)["templates"]
    assert len(found) == 9
    assert all(found.values())
    lines = [line for name, purpose in found.items() for line in (name, f"    {purpose}")]
    assert dstrain("show", "template").stdout.splitlines() == lines


def test_eject_copies_a_template_with_its_partials_and_never_overwrites(dstrain: Type, tmp_path: Path) -> None:
    assert dstrain("show", "template", "zero2.json.j2").stdout.startswith("{#")
    dstrain("show", "template", "zero3.json.j2", "--dir", "mine")
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {"zero3.json.j2", "_zero3.json.j2", "_trainer.json.j2"} <= names
    assert "zero2.json.j2" not in names
    (tmp_path / "mine" / "zero3.json.j2").write_text("mine")
    assert dstrain("show", "template", "--dir", "mine").returncode == 6
    assert (tmp_path / "mine" / "zero3.json.j2").read_text() == "mine"
    done = dstrain("show", "template", "zero3_ofload_all.json.j2")
    assert (done.returncode, 'Did you mean "zero3_offload_all.json.j2"?' in done.stderr) == (3, True)
    done = dstrain("show", "completion", "bsh")
    assert (done.returncode, "did you mean bash?" in done.stderr) == (2, True)


@pytest.mark.parametrize(("options", "wanted"), [((), config_schema()), (("job",), job_schema())])
def test_it_prints_a_schema_to_stdout_and_nothing_else(
    dstrain: Type, options: tuple[str, ...], wanted: dict[str, object]
) -> None:
    done = dstrain("show", "schema", *options)
    assert (json.loads(done.stdout), done.stderr, done.returncode) == (wanted, "", 0)
