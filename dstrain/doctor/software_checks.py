"""Checks versions, DeepSpeed's extensions and their locks, and attention kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from dstrain.config.lint.rules.releases import ADVISORIES, Effect
from dstrain.doctor.facts import Facts, Gpus, Software, Toolchain
from dstrain.doctor.requirements import Needs
from dstrain.errors import EnvironmentProblem, not_installed, other_version
from dstrain.facts.attention_kernels import KERNELS, AttentionKernels
from dstrain.facts.deepspeed_ops import OPS
from dstrain.facts.model.traits import COST, FLA, kernel_packages
from dstrain.facts.releases import TESTED, is_in_range, is_tested, known_bad, release
from dstrain.findings import Finding, Notes
from dstrain.launch.command import NO_NUMACTL
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


def check_software(software: Software, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about versions."""
    _ranges(software, notes)
    _advisories(software, notes)
    _kernels(software, needs, notes)
    _compiler(software, facts.gpus, needs, notes)
    if software.torch_cuda is None:
        _without_cuda(software, facts.gpus, needs, notes)
    else:
        _driver(software.torch_cuda, facts.gpus, notes)
        _nvcc(software.torch_cuda, software, needs, notes)


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
        lack = not_installed("dstrain needs", *missing, install=_install(software, *wanted))
        notes.bad(lack.problem, lack.hint)
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
        notes.warn(other_version("dstrain supports", name, spec, version), _install(software, f"{name}{spec}"))
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
    wanted = kernel_packages(needs.model_type)
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
    wanted = FLA in kernel_packages(needs.model_type)
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


def check_ops(tools: Toolchain, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about DeepSpeed's extensions."""
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
        notes.warn(NO_NUMACTL, f"{_INSTALL.get(tools.installer or '', 'install')} numactl")


def _check_locks(tools: Toolchain, needs: Needs, notes: Notes) -> None:
    """Notes the locks that no visible process holds; locks of extensions that the job does not need are harmless."""
    for lock in tools.locks:
        if needs.has_job and Path(lock.path).parent.name not in needs.ops:
            if lock.is_stale and not needs.is_quick:
                notes.warn(f"{lock.held}; this job does not need it", lock.cure)
        elif lock.is_stale:
            what = f"{lock.held}: ranks would wait for it forever, unless another container or host is building"
            notes.bad(what, lock.cure)
        elif not lock.is_abandoned:  # that one `dstrain run` removes itself
            notes.warn(f"{lock.held}; another container or host may be building", f"if none is: {lock.cure}")


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


def check_attention(kernels: AttentionKernels, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds the kernels of one host; of a run on this host alone the one that it takes, too."""
    if needs.on_cpu:
        return
    sources = {kernel.attn: kernels.source(kernel.attn) for kernel in KERNELS}
    names = [f"{attn} ({source})" for attn, source in sources.items() if source is not None]
    notes.ok(f"attention: {', '.join([*names, 'sdpa, eager'])}")
    if needs.num_hosts == 1:
        notes.findings += chosen(needs, {"this machine": kernels})


def chosen(needs: Needs, by_host: Mapping[str, AttentionKernels]) -> list[Finding]:
    """Returns the attention that `dstrain run` takes on these hosts, or why it refuses the one that the job names."""
    if needs.wish is None or needs.on_cpu or not by_host:
        return []
    from dstrain.launch.prepare.attention import choose  # brings the planner, a quarter of a second

    notes = Notes("attention")
    try:
        choice = choose(needs.wish, by_host)
    except EnvironmentProblem as error:
        notes.bad(error.problem, error.hint)
    else:
        if choice.says is not None:
            notes.ok(f"dstrain run takes {choice.says}")
    return notes.findings
