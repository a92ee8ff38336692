"""Each name of an earlier version is refused, with the way that remains."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click
import pytest

from dstrain import removed
from dstrain.cli.group import explained
from dstrain.cli.main import VERBS, cli
from dstrain.errors import InvalidConfig, Place
from dstrain.job.file import job_of

JOB = {"model": "m", "output_dir": "out"}


def refusal(*words: str) -> str:
    """Returns the message that a command line ends in."""
    try:
        cli.main(list(words), prog_name="dstrain", standalone_mode=False)
    except click.ClickException as error:
        return explained(error).format_message()
    except SystemExit:
        return ""
    return ""


@pytest.mark.parametrize("path", list(removed.COMMANDS))
def test_a_command_line_of_an_earlier_version_is_refused_with_the_way_that_remains(path: str) -> None:
    required = ("--model", "qwen3-8b", "--gpus", "1") if "=" in path and not path.startswith("demo") else ()
    assert removed.COMMANDS[path] in refusal(*path.replace("=", " ").split(), *required)


@pytest.mark.parametrize("name", list(removed.JOB))
def test_a_key_of_an_earlier_version_is_refused_with_the_way_that_remains(name: str, tmp_path: Path) -> None:
    key, _, value = name.partition("=")
    data: dict[str, object] = {}
    for part in reversed(key.split(".")):
        data = {part: data or value or 1}
    with pytest.raises(InvalidConfig, match="gone") as caught:
        job_of(JOB | data, lambda keys: Place(file="job.yaml"), tmp_path)
    assert removed.JOB[name] in str(caught.value)


@pytest.mark.parametrize("path", list(removed.COMMANDS))
def test_the_way_that_remains_names_no_command_that_is_gone(path: str) -> None:
    words = removed.COMMANDS[path].split()
    verbs = [verb.strip("`.,") for before, verb in pairwise(words) if before.endswith("dstrain")]
    assert set(verbs) <= set(VERBS)
