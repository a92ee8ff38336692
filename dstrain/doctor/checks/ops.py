"""Checks DeepSpeed's extensions: built, buildable, or missing something, and locks left by killed builds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from dstrain.doctor.facts import Facts, Toolchain
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.facts.deepspeed_ops import OPS
from dstrain.units import format_seconds

_CPU_ONLY = "deepspeed_shm_comm"
_INSTALL: Mapping[str, str] = MappingProxyType(
    {
        "apt-get": "apt-get install",
        "dnf": "dnf install",
        "yum": "yum install",
        "zypper": "zypper install",
        "pacman": "pacman -S",
        "apk": "apk add",
    }
)
"""Package manager → how it installs."""
_RED_HAT = {"dnf", "yum", "zypper"}
COMPILER, NINJA, HEADERS, LIBAIO, CUDA = "C++ compiler", "ninja", "Python.h", "libaio", "nvcc"
"""Requirements of a build."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about DeepSpeed's extensions."""
    notes, tools = Notes("ops"), facts.toolchain
    if tools is None:
        return []
    _check_locks(tools, needs, notes)
    relevant = [op for op in OPS if needs.on_cpu or op != _CPU_ONLY]
    missing = {op: lacks(op, tools, on_cpu=needs.on_cpu) for op in relevant if op not in tools.built}
    built = [op for op in relevant if op in tools.built]
    possible = [op for op, parts in missing.items() if not parts]
    texts = [f"{', '.join(built)} built"] if built else []
    texts += [f"{', '.join(possible)} can be, on first use"] if possible else []
    if texts:
        notes.ok("; ".join(texts))
    for parts in dict.fromkeys(parts for parts in missing.values() if parts):
        ops = [op for op, lacking in missing.items() if lacking == parts]
        what = f"{', '.join(ops)} cannot be built: no {', no '.join(parts)}"
        needed = [op for op in ops if op in needs.ops]
        fix = cure(parts, tools.installer)
        if needed:
            notes.bad(f"{what}; this job needs {', '.join(needed)}", fix)
        elif not needs.is_quick:
            notes.warn(what, fix)
    if "fused_adam" in missing and "fused_adam" in needs.ops and not needs.on_cpu:
        _check_architectures(tools.architectures, notes)
    if "cpu_adam" in needs.ops and not tools.has_numactl and not needs.is_quick:  # the launch says it itself
        what = "numactl is not installed: ranks that step the optimizer on the CPU share all cores"
        notes.warn(what, f"{_INSTALL.get(tools.installer or '', 'install')} numactl")
    return notes.findings


def _check_locks(tools: Toolchain, needs: Needs, notes: Notes) -> None:
    """Notes the locks that no visible process holds; locks of extensions that the job does not need are harmless."""
    for lock in tools.locks:
        idle = format_seconds(lock.idle_s)
        held = f"{lock.path} is held by no visible process"
        if needs.has_job and Path(lock.path).parent.name not in needs.ops:
            if lock.is_stale and not needs.is_quick:
                notes.warn(f"{held}, and its folder has not changed for {idle}; this job does not need it", lock.cure)
        elif lock.is_stale:
            what = f"{held}, and its folder has not changed for {idle}"
            notes.bad(
                f"{what}: ranks would wait for it forever, unless another container or host is building", lock.cure
            )
        elif not lock.is_abandoned:  # that one `dstrain run` removes itself
            notes.warn(f"{held}; another container or host may be building", f"if none is: {lock.cure}")


def _check_architectures(listed: str, notes: Notes) -> None:
    """Notes architectures such as 9.0a, which containers for Hopper set, and at which a build with CUDA code ends.

    Source: deepspeed 0.19.8 op_builder/builder.py: compute_capability_args.
    """
    readable = re.sub(r"(\d+\.\d+)[a-z]+", r"\1", listed)
    if readable != listed:
        what = f"TORCH_CUDA_ARCH_LIST is {listed}: DeepSpeed, which builds fused_adam, knows numbers alone"
        notes.bad(what, f'export TORCH_CUDA_ARCH_LIST="{readable}"')


def lacks(op: str, tools: Toolchain, *, on_cpu: bool) -> tuple[str, ...]:
    """Returns missing needs of an extension. Source: deepspeed 0.19.8 op_builder: async_io, fused_adam, cpu."""
    needed = {COMPILER: tools.compiler is not None, NINJA: tools.has_ninja, HEADERS: tools.has_python_headers}
    if op == "async_io":
        needed[LIBAIO] = tools.has_libaio
    if op in {"async_io", "fused_adam"} and not on_cpu:
        needed[CUDA] = tools.has_cuda_toolkit
    return tuple(part for part, is_there in needed.items() if not is_there)


def cure(parts: Iterable[str], installer: str | None) -> str:
    """Returns the command that installs the missing parts.

    >>> cure([COMPILER, LIBAIO], "apt-get")
    'apt-get install g++ libaio-dev'
    """
    is_rpm = installer in _RED_HAT
    packages = {
        COMPILER: "gcc-c++" if is_rpm else "gcc" if installer == "pacman" else "g++",
        HEADERS: "python3-devel" if is_rpm else "python3-dev",
        LIBAIO: "libaio-devel" if is_rpm else "libaio" if installer == "pacman" else "libaio-dev",
    }
    wanted = [packages[part] for part in parts if part in packages]
    ways = [f"{_INSTALL.get(installer or '', 'install')} {' '.join(wanted)}"] if wanted else []
    ways += ["pip install ninja"] if NINJA in parts else []
    ways += ["install the CUDA toolkit of torch's version, and: export CUDA_HOME=…"] if CUDA in parts else []
    return "; ".join(ways)
