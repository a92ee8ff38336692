"""Checks versions against the supported and the tested ones, and torch's CUDA against the driver's and nvcc's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from dstrain.config.lint.advisories import ADVISORIES, Effect
from dstrain.doctor.facts import Facts, Software
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.gpu_facts import Gpus
from dstrain.doctor.requirements import Needs
from dstrain.facts.model.kernel_packages import COST, FLA, kernel_packages
from dstrain.facts.releases import is_in_range, release
from dstrain.facts.window import TESTED, is_tested, known_bad
from dstrain.units import counted

_HOPPER = re.compile(r"\bG?H(?:20|100|200|800)\b")
"""GPUs of compute capability 9.0, in NVML's names."""
_WRONG_TRITON = ">=3.4.0,<3.7.1"
"""Source: flash-linear-attention 0.5.2, the message of its check, which names tilelang as the other way."""
_LEADING = ("torch", "deepspeed", "transformers")
"""Packages that are named even if all versions are fine."""
_MINORS_MIX = frozenset({10, 11, 12})
"""CUDA majors within which DeepSpeed lets nvcc and torch differ. Source: deepspeed 0.19.8 op_builder/builder.py:
cuda_minor_mismatch_ok."""
_OLDEST_DRIVERS: Mapping[int, str] = MappingProxyType({11: "450", 12: "525", 13: "580"})
"""CUDA major → the oldest driver that runs it. Source: CUDA 13.0 release notes, table 2."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about versions."""
    notes, software = Notes("software"), facts.software
    if software is None:
        return []
    _ranges(software, notes)
    _advisories(software, notes)
    _kernels(software, needs, notes)
    _compiler(software, facts.gpus, needs, notes)
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
        wanted = [f"{name}{software.ranges[name]}" for name in missing]
        notes.bad(f"not installed: {', '.join(missing)}", _install(software, *wanted))
    refused = [_is_refused(software, name, version, notes) for name, version in software.packages.items() if version]
    if not missing and not any(refused):
        named = ", ".join(f"{name} {software.packages[name]}" for name in _LEADING if name in software.packages)
        number = len(software.packages) - len(_LEADING)
        notes.ok(f"Python {software.python}, {named} and {number} more, {_as_tested(software)}")


def _is_refused(software: Software, name: str, version: str, notes: Notes) -> bool:
    """Adds a warning for a version that is known bad or out of range, and returns whether it is."""
    bad, spec = known_bad(name, version), software.ranges[name]
    if bad is not None:
        fix = _install(software, f"{name}=={TESTED[name][0]}")
        notes.warn(f"{name} {version} is known bad: {bad.reason}", fix)
    elif not is_in_range(version, spec):
        notes.warn(f"{name} {version} is outside the supported range {spec}", _install(software, f"{name}{spec}"))
    else:
        return False
    return True


def _install(software: Software, *wanted: str) -> str:
    """Returns the command that installs packages and keeps the torch that is there, which fits this machine's CUDA."""
    torch = software.packages.get("torch")
    kept = [] if torch is None or any(name.startswith("torch") for name in wanted) else [f"torch=={torch}"]
    return f"pip install {' '.join(repr(name) for name in [*wanted, *kept])}"


def _as_tested(software: Software) -> str:
    """Returns whether packages in their ranges have tested versions, and which do not."""
    others = [
        f"{name} (tested: {', '.join(TESTED[name])})"
        for name, version in software.packages.items()
        if name in TESTED and version is not None and not is_tested(name, version)
    ]
    return f"in the supported ranges; untested: {', '.join(others)}" if others else "as tested"


def _advisories(software: Software, notes: Notes) -> None:
    """Adds the known faults of the installed DeepSpeed; `dstrain lint` says which settings have them."""
    versions = {name: version for name, version in software.packages.items() if version is not None}
    faults = [row for row in ADVISORIES if row.kind is not Effect.DEFAULT and row.affects(versions) is not False]
    if faults:
        fixed = max((row.fixed for row in faults), key=release)
        kinds = "; ".join(
            f"{kind}: {', '.join(row.id for row in faults if row.kind is kind)}"
            for kind in dict.fromkeys(row.kind for row in faults)
        )
        what = f"deepspeed {versions['deepspeed']} has known faults with some settings ({kinds})"
        upgrade = _install(software, f"deepspeed>={fixed}")
        notes.warn(what, f"dstrain lint  names those of a configuration; or: {upgrade}")


def _kernels(software: Software, needs: Needs, notes: Notes) -> None:
    """Adds packages with kernels that the model calls and that are not here: slow, and packed rows are refused."""
    wanted = kernel_packages(needs.model_type) if needs.model_type else ()
    missing = [name for name in wanted if needs.on_cpu or software.kernels.get(name) is None]
    if missing and needs.packs_rows:
        where = ", which run on GPUs only" if needs.on_cpu else f"; missing: {', '.join(missing)}"
        what = f"{needs.model_type} keeps the samples of packed rows apart by kernels of {' and '.join(wanted)}{where}"
        notes.bad(what, "packing: false" + ("" if needs.on_cpu else f", or: {_install(software, *missing)}"))
    elif missing and not needs.on_cpu:
        cost = f"; {COST}" if FLA in missing else ""
        what = f"{needs.model_type} trains without {' and '.join(missing)}, slower and in more memory than planned"
        notes.warn(what + cost, _install(software, *missing))


def _compiler(software: Software, gpus: Gpus | None, needs: Needs, notes: Notes) -> None:
    """Adds a Triton with which kernels of linear attention have wrong gradients on Hopper: newer ones refuse it."""
    wanted = needs.model_type is not None and FLA in kernel_packages(needs.model_type)
    version, triton = software.kernels.get(FLA), software.compilers.get("triton")
    is_hopper = gpus is not None and any(_HOPPER.search(gpu.name) for gpu in gpus.gpus)
    if not wanted or needs.on_cpu or not is_hopper or version is None or triton is None:
        return
    if is_in_range(triton, _WRONG_TRITON) and software.compilers.get("tilelang") is None:
        what = (
            f"{FLA} {version} with triton {triton} on Hopper: the gated backward pass raises an error or, in releases "
        )
        notes.bad(what + "without that check, has wrong gradients (its issue 640)", _install(software, "tilelang"))


def _without_cuda(software: Software, gpus: Gpus | None, needs: Needs, notes: Notes) -> None:
    count = len(gpus.gpus) if gpus else 0
    if count and not needs.on_cpu and (torch := software.packages.get("torch")) is not None:
        what = f"torch {torch} is built without CUDA, and this machine has {counted(count, 'GPU')}"
        notes.bad(what, "pip install --force-reinstall 'torch>=2.9'")


def _driver(torch_cuda: str, gpus: Gpus | None, notes: Notes) -> None:
    if gpus is None or gpus.cuda is None:
        return
    wanted = release(torch_cuda)[0]
    if wanted > release(gpus.cuda)[0]:
        what = f"torch is built for CUDA {torch_cuda}, and driver {gpus.driver} runs CUDA up to {gpus.cuda}"
        index = f"https://download.pytorch.org/whl/cu{release(gpus.cuda)[0]}…"
        oldest = _OLDEST_DRIVERS.get(wanted)
        newer = f"install driver {oldest} or newer" if oldest else "install a newer driver"
        notes.bad(what, f"{newer}, or: pip install torch --index-url {index}")


def _nvcc(torch_cuda: str, software: Software, needs: Needs, notes: Notes) -> None:
    if software.nvcc is None:
        return  # the check of extensions reports it
    here, there = release(software.nvcc)[:2], release(torch_cuda)[:2]
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
