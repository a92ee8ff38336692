"""Decides SwanLab's mode before anything starts, so that it never prompts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrain.choices import SwanLabMode
from dstrain.errors import InvalidConfig, did_you_mean


def decide_mode(wanted: str | None, environment: Mapping[str, str], *, logged_in: bool) -> SwanLabMode:
    """Returns the mode: the job's, else `SWANLAB_MODE`, else online with a key or a login, else offline.

    Raises InvalidConfig for an unknown mode.

    >>> str(decide_mode(None, {}, logged_in=False))
    'offline'
    >>> str(decide_mode(None, {"SWANLAB_API_KEY": "k"}, logged_in=False))
    'online'
    >>> str(decide_mode("local", {"SWANLAB_MODE": "online"}, logged_in=True))
    'local'
    """
    for source, word in (("monitor: mode", wanted), ("SWANLAB_MODE", environment.get("SWANLAB_MODE"))):
        if word:
            return _parse(source, word)
    return SwanLabMode.ONLINE if environment.get("SWANLAB_API_KEY") or logged_in else SwanLabMode.OFFLINE


def _parse(source: str, word: str) -> SwanLabMode:
    folded = word.strip().lower()
    if folded == "cloud":  # its name before SwanLab 0.8
        return SwanLabMode.ONLINE
    if folded not in set(SwanLabMode):
        raise InvalidConfig(f'{source} is "{word}"', hint=did_you_mean(word, [str(mode) for mode in SwanLabMode]))
    return SwanLabMode(folded)


def has_login(home: Path) -> bool:
    """Returns whether `swanlab login` has stored a key in `home`."""
    return (home / ".swanlab" / ".netrc").is_file()


def upload_command(folders: Sequence[str]) -> str:
    """Returns the command that uploads the parts of a run to one experiment.

    >>> upload_command(["output/swanlog/run-1", "output/swanlog/run-2"])
    'swanlab sync output/swanlog/run-1 output/swanlog/run-2'
    """
    return shlex.join(["swanlab", "sync", *folders])
