"""The releases of packages that the tests ran, and those that are known not to work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.facts.releases import is_in_range

TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "accelerate": ("1.15.0",),
        "click": ("8.5.1",),
        "datasets": ("5.2.0",),
        "deepspeed": ("0.19.8",),
        "filelock": ("4.2.11",),
        "jinja2": ("3.1.6",),
        "ninja": ("1.13.2",),
        "nvidia-ml-py": ("13.615.71",),
        "peft": ("0.21.2",),
        "psutil": ("7.2.2",),
        "pydantic": ("2.14.3",),
        "rich": ("15.0.0",),
        "ruamel.yaml": ("0.19.1",),
        "swanlab": ("0.10.3",),
        "tokenizers": ("0.23.3",),
        "torch": ("2.13.0",),
        "transformers": ("5.23.0", "5.24.0"),
        "xxhash": ("4.1.0",),
    }
)
"""Package → the tested releases: first the one in constraints.txt, with all tests, then the ones in .ci/matrix."""


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
        range="<5.23",
        reason="its TrainingArguments lack activation_checkpointing, so that no job starts",
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
