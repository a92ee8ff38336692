"""Runs many probes at once, each with a time limit, so that none blocks the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain import child_process
from dstrain.child_process import Completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The result of one probe."""

    value: Any = None
    """None if nothing was found."""
    problem: str | None = None
    """Why nothing was found."""


def all_at_once(
    looks: Mapping[str, Callable[[], Any]], limit_s: float, *, awaited: Collection[str] = ()
) -> dict[str, Seen]:
    """Returns the result of every probe within `limit_s`; slower ones are abandoned, unless they are `awaited` since
    they have time limits of their own.

    Each runs in a daemon thread, since neither name resolution nor a hanging driver can be interrupted.
    """
    results: dict[str, Seen] = {}
    threads = [
        threading.Thread(target=_look, args=(name, look, results), name=f"look {name}", daemon=True)
        for name, look in looks.items()
    ]
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for name, thread in zip(looks, threads, strict=True):
        thread.join(None if name in awaited else max(0.0, end - time.monotonic()))
    late = Seen(problem=f"no answer within {limit_s:g} s")
    return {name: results.get(name, late) for name in looks}


def _look(name: str, look: Callable[[], Any], results: dict[str, Seen]) -> None:
    try:
        results[name] = Seen(value=look())
    except Exception as error:  # a failed probe is a finding and does not stop the others
        results[name] = Seen(problem=f"{type(error).__name__}: {error}".rstrip(": "))


def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Completed:
    """Returns the output of a command in English, within `limit_s` seconds. Raises FileNotFoundError."""
    return child_process.run(command, {**environment, "LC_ALL": "C"}, limit_s)
