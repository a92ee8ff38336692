"""Which mode SwanLab runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.choices import SwanLabMode
from dstrain.errors import InvalidConfig
from dstrain.monitor.mode import decide_mode, has_login


def test_the_job_wins_over_the_environment() -> None:
    assert (
        decide_mode("offline", {"SWANLAB_MODE": "online", "SWANLAB_API_KEY": "k"}, logged_in=True)
        is SwanLabMode.OFFLINE
    )


def test_the_environment_wins_over_a_key() -> None:
    assert (
        decide_mode(None, {"SWANLAB_MODE": "disabled", "SWANLAB_API_KEY": "k"}, logged_in=True) is SwanLabMode.DISABLED
    )


def test_the_old_word_cloud_means_online() -> None:
    assert decide_mode("cloud", {}, logged_in=False) is SwanLabMode.ONLINE


def test_a_login_file_means_online() -> None:
    assert decide_mode(None, {}, logged_in=True) is SwanLabMode.ONLINE


def test_without_a_key_or_a_login_it_is_offline() -> None:
    assert decide_mode(None, {"SWANLAB_API_KEY": ""}, logged_in=False) is SwanLabMode.OFFLINE


def test_a_word_that_is_no_mode_names_its_source_and_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match='SWANLAB_MODE is "offlin"') as caught:
        decide_mode(None, {"SWANLAB_MODE": "offlin"}, logged_in=False)
    assert caught.value.hint == 'Did you mean "offline"?'


def test_a_login_is_found_in_the_home_folder(tmp_path: Path) -> None:
    assert not has_login(tmp_path)
    (tmp_path / ".swanlab").mkdir()
    (tmp_path / ".swanlab" / ".netrc").write_text("machine x login y password z\n")
    assert has_login(tmp_path)
