"""Which mode SwanLab runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.choices import SwanLabMode
from dstrain.errors import InvalidConfig
from dstrain.monitor.sinks.sink import decide_mode, has_login

KEY = {"SWANLAB_API_KEY": "k"}


@pytest.mark.parametrize(
    ("job", "environment", "logged_in", "mode"),
    [
        ("offline", {"SWANLAB_MODE": "online", **KEY}, True, SwanLabMode.OFFLINE),  # the job wins
        (None, {"SWANLAB_MODE": "disabled", **KEY}, True, SwanLabMode.DISABLED),  # then the environment
        (None, KEY, False, SwanLabMode.ONLINE),
        ("cloud", {}, False, SwanLabMode.ONLINE),  # the old word
        (None, {}, True, SwanLabMode.ONLINE),
        (None, {"SWANLAB_API_KEY": ""}, False, SwanLabMode.OFFLINE),
    ],
)
def test_the_job_wins_over_the_environment_and_that_over_a_login(
    job: str | None, environment: dict[str, str], logged_in: bool, mode: SwanLabMode
) -> None:
    assert decide_mode(job, environment, logged_in=logged_in) is mode


def test_a_word_that_is_no_mode_names_its_source_and_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match='SWANLAB_MODE is "offlin"') as caught:
        decide_mode(None, {"SWANLAB_MODE": "offlin"}, logged_in=False)
    assert caught.value.hint == 'Did you mean "offline"?'


def test_a_login_is_found_in_the_home_folder(tmp_path: Path) -> None:
    assert not has_login(tmp_path)
    (tmp_path / ".swanlab").mkdir()
    (tmp_path / ".swanlab" / ".netrc").write_text("machine x login y password z\n")
    assert has_login(tmp_path)
