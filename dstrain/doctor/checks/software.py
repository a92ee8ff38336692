"""Checks versions against the supported and the tested ones, and torch's CUDA against the driver's and nvcc's."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dstrain.doctor.facts import Facts, Software
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.gpu_facts import Gpus
from dstrain.doctor.requirements import Needs

_LEADING = ("torch", "deepspeed", "transformers")
"""Packages that are named even if all versions are fine."""
TESTED: Mapping[str, str] = MappingProxyType(
    {
        "accelerate": "1.15.0",
        "click": "8.5.1",
        "datasets": "5.2.0",
        "deepspeed": "0.19.8",
        "filelock": "4.2.11",
        "jinja2": "3.1.6",
        "ninja": "1.13.2",
        "nvidia-ml-py": "13.615.71",
        "peft": "0.21.2",
        "psutil": "7.2.2",
        "pydantic": "2.14.3",
        "rich": "15.0.0",
        "ruamel.yaml": "0.19.1",
        "swanlab": "0.10.3",
        "torch": "2.13.0",
        "transformers": "5.23.0",
    }
)
"""Package → the version that the tests ran. Source: constraints.txt, which a test compares."""
_MINORS_MIX = frozenset({10, 11, 12})
"""CUDA majors within which DeepSpeed lets nvcc and torch differ. Source: deepspeed 0.19.8 op_builder/builder.py:
cuda_minor_mismatch_ok."""
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
)
_OLDEST_DRIVERS: Mapping[int, str] = MappingProxyType({11: "450", 12: "525", 13: "580"})
"""CUDA major → the oldest driver that runs it. Source: CUDA 13.0 release notes, table 2."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about versions."""
    notes, software = Notes("software"), facts.software
    if software is None:
        return []
    _ranges(software, notes)
    if software.torch_cuda is None:
        _without_cuda(software, facts.gpus, needs, notes)
    else:
        _driver(software.torch_cuda, facts.gpus, notes)
        _nvcc(software.torch_cuda, software, needs, notes)
    return notes.findings


def _ranges(software: Software, notes: Notes) -> None:
    if not software.ranges:
        notes.warn("dstrain is not installed as a package here, so its tested versions are unknown", "pip install -e .")
        return
    minor = ".".join(software.python.split(".")[:2])
    if minor not in software.tested_pythons:
        tested = f"{software.tested_pythons[0]} to {software.tested_pythons[-1]}"
        notes.warn(f"Python {software.python} is outside the tested range, {tested}", f"python{tested[-4:]} -m venv")
    missing = [name for name, version in software.packages.items() if version is None]
    if missing:
        wanted = " ".join(f"'{name}{software.ranges[name]}'" for name in missing)
        notes.bad(f"not installed: {', '.join(missing)}", f"pip install {wanted}")
    outside = {
        name: version
        for name, version in software.packages.items()
        if version is not None and not is_in_range(version, software.ranges[name])
    }
    for name, version in outside.items():
        spec = software.ranges[name]
        notes.warn(f"{name} {version} is outside the supported range {spec}", f"pip install '{name}{spec}'")
    if not missing and not outside:
        named = ", ".join(f"{name} {software.packages[name]}" for name in _LEADING if name in software.packages)
        number = len(software.packages) - len(_LEADING)
        notes.ok(f"Python {software.python}, {named} and {number} more, {_as_tested(software)}")


def _as_tested(software: Software) -> str:
    """Returns whether packages in their ranges have the tested versions, and which do not."""
    others = [
        f"{name} {TESTED[name]}"
        for name, version in software.packages.items()
        if name in TESTED and version is not None and version.partition("+")[0] != TESTED[name]
    ]
    return f"in the supported ranges; tested with {', '.join(others)}" if others else "as tested"


def is_in_range(version: str, spec: str) -> bool:
    """Returns whether a version is in a range of releases; what comes before or after a release counts as it.

    >>> is_in_range("2.13.0+cpu", ">=2.9"), is_in_range("0.20.0rc1", "<0.20,>=0.19.8"), is_in_range("5.24", "<5.24")
    (True, False, False)
    """
    return all(_holds(_release(version), part) for part in spec.split(","))


def _holds(release: tuple[int, ...], part: str) -> bool:
    match = re.match(r"(>=|<=|<|>|==|!=)(.+)", part)
    return match is None or _COMPARE[match[1]](release, _release(match[2]))


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a release, four of them: 2.13 is 2.13.0.0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple([*numbers, 0, 0, 0, 0][:4])


def _without_cuda(software: Software, gpus: Gpus | None, needs: Needs, notes: Notes) -> None:
    count = len(gpus.gpus) if gpus else 0
    if count and not needs.on_cpu and (torch := software.packages.get("torch")) is not None:
        what = f"torch {torch} is built without CUDA, and this machine has {count} GPUs"
        notes.bad(what, "pip install --force-reinstall 'torch>=2.9'")


def _driver(torch_cuda: str, gpus: Gpus | None, notes: Notes) -> None:
    if gpus is None or gpus.cuda is None:
        return
    wanted = _release(torch_cuda)[0]
    if wanted > _release(gpus.cuda)[0]:
        what = f"torch is built for CUDA {torch_cuda}, and driver {gpus.driver} runs CUDA up to {gpus.cuda}"
        index = f"https://download.pytorch.org/whl/cu{_release(gpus.cuda)[0]}…"
        oldest = _OLDEST_DRIVERS.get(wanted)
        newer = f"install driver {oldest} or newer" if oldest else "install a newer driver"
        notes.bad(what, f"{newer}, or: pip install torch --index-url {index}")


def _nvcc(torch_cuda: str, software: Software, needs: Needs, notes: Notes) -> None:
    if software.nvcc is None:
        return  # the check of extensions reports it
    here, there = _release(software.nvcc)[:2], _release(torch_cuda)[:2]
    if here == there or (here[0] == there[0] and here[0] in _MINORS_MIX):
        notes.ok(f"nvcc {software.nvcc} matches torch's CUDA {torch_cuda}")
        return
    what = f"{software.nvcc_path} is of CUDA {software.nvcc}, torch of {torch_cuda}: DeepSpeed refuses to build with it"
    fix = f"export CUDA_HOME=/usr/local/cuda-{torch_cuda}  (with that toolkit installed)"
    if here[0] == there[0]:
        fix += ", or: export DS_SKIP_CUDA_CHECK=1"
    if "fused_adam" in needs.ops and needs.environment.get("DS_SKIP_CUDA_CHECK") != "1":
        notes.bad(what, fix)
    else:
        notes.warn(what, fix)
