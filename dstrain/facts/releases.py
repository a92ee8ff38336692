"""The releases of installed packages, their ranges, and the releases that were tested or are known not to work."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "accelerate": ("1.15.0", "1.13.0", "1.11.0"),
        "annotated-types": ("0.8.0",),
        "click": ("8.5.1",),
        "datasets": ("5.2.0", "4.8.4"),
        "deepspeed": ("0.19.8",),
        "filelock": ("4.2.11",),
        "jinja2": ("3.1.6",),
        "ninja": ("1.13.2",),
        "nvidia-ml-py": ("13.615.71", "12.560.30"),
        "peft": ("0.21.2", "0.20.0", "0.18.1"),
        "psutil": ("7.2.2",),
        "pydantic": ("2.14.3", "2.12.5", "2.12.3"),
        "rich": ("15.0.0",),
        "ruamel.yaml": ("0.19.1",),
        "swanlab": ("0.10.3",),
        "tokenizers": ("0.23.3", "0.23.1", "0.22.2"),
        "torch": ("2.13.0",),
        "transformers": (
            "5.23.0",
            "5.24.0",
            "5.22.2",
            "5.20.2",
            "5.18.0",
            "5.16.1",
            "5.12.1",
            "5.9.0",
            "5.6.2",
        ),
        "xxhash": ("4.1.0",),
    }
)
"""Package → the tested releases: first the one in constraints.txt, with all tests, then the ones in .ci/matrix."""
BESIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "llamafactory 0.9.5": (
            *("transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "datasets==4.0.0"),
            *("tokenizers==0.22.2", "pydantic==2.12.3"),
        ),
        "axolotl 0.19.0": (
            *("transformers==5.16.1", "accelerate==1.13.0", "peft==0.20.0", "datasets==4.8.4"),
            *("tokenizers==0.23.1", "pydantic==2.12.5", "nvidia-ml-py==12.560.30"),
        ),
    }
)
"""Another tool → the releases that pip takes for it and dstrain in one environment, which .ci/matrix runs, too. Tests
of what is known bad in them fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """A range of releases that does not work."""

    package: str
    range: str
    """Such as `>=5.25,<5.26`."""
    reason: str
    """The failure with it."""


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        package="transformers",
        range="<5.6",
        reason="it forgets which weights it converted, so that no job starts",
    ),
    KnownBad(
        package="transformers",
        range=">=5.6,<5.6.1",
        reason="its flash attention fails in every model without attention sinks: set attn: sdpa",
    ),
    KnownBad(
        package="datasets",
        range=">=4,<4.0.1",
        reason="it cannot read rows beside a torchvision without io.VideoReader, as the newest ones are",
    ),
    KnownBad(
        package="deepspeed",
        range="<0.19.8",
        reason="it lacks runtime/chunked_cross_entropy.py (`loss: chunked`) and reads keys that lint refuses",
    ),
)
"""Every range that is known not to work."""


def is_tested(package: str, version: str) -> bool:
    """Returns whether the tests ran a version, whatever it was built for.

    >>> is_tested("torch", "2.13.0+cu130"), is_tested("torch", "2.14.1")
    (True, False)
    """
    return version.partition("+")[0] in TESTED.get(package, ())


def known_bad(package: str, version: str) -> KnownBad | None:
    """Returns the range that is known not to work in which a version is."""
    return next((bad for bad in KNOWN_BAD if bad.package == package and is_in_range(version, bad.range)), None)
