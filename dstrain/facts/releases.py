"""The releases of installed packages, and ranges of releases."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Any

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
)


def installed(package: str) -> str | None:
    """Returns the version of a package in this environment; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a release, four of them: 2.13 is 2.13.0.0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple([*numbers, 0, 0, 0, 0][:4])


def is_in_range(version: str, spec: str) -> bool:
    """Returns whether a version is in a range of releases; pre- and post-releases count as their release.

    >>> is_in_range("2.13.0+cpu", ">=2.9"), is_in_range("0.20.0rc1", "<0.20,>=0.19.8"), is_in_range("5.24", "<5.24")
    (True, False, False)
    """
    return all(_holds(release(version), part) for part in spec.split(","))


def _holds(numbers: tuple[int, ...], part: str) -> bool:
    match = re.match(r"(>=|<=|<|>|==|!=)(.+)", part)
    return match is None or bool(_COMPARE[match[1]](numbers, release(match[2])))
