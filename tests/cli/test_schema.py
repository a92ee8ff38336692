"""`dstrain schema` prints what editors read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from dstrain.config.schema import config_schema, job_schema

Type = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(("options", "wanted"), [((), config_schema()), (("--job",), job_schema())])
def test_it_prints_a_schema_to_stdout_and_nothing_else(
    dstrain: Type, options: tuple[str, ...], wanted: dict[str, object]
) -> None:
    done = dstrain("schema", *options)
    assert (json.loads(done.stdout), done.stderr, done.returncode) == (wanted, "", 0)
