"""Checks GPUs and driver, Xid errors in the kernel log, and how GPUs are connected."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from dstrain.doctor.facts import Facts, Gpus, GpuState, KernelLog, Topology, Xid
from dstrain.doctor.requirements import Needs
from dstrain.facts.cluster.machines import shortage_of
from dstrain.findings import Notes, Severity, listed
from dstrain.units import MIB, format_seconds

BUSY_BYTES = 500 * MIB
"""GPU memory in use above which another program runs there; an idle GPU holds less."""
_RESET = "sudo nvidia-smi --gpu-reset -i {gpus}  (with nothing running on them), or: sudo reboot"
_REPLACE = "exclude them, and have them replaced: support asks for nvidia-smi -q -i {gpus}"
_DATA_CENTRE = re.compile(r"\b([AHV][18]00|H20|[BH][23]00|G[BH][23]00|A[1-4]0G?|L4|L20|L40S?|T4|P100)\b")
_FAILED_REPAIRS = {"remapped_row_failure", "unrepairable_memory", "sram_threshold_exceeded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that may be wrong with a GPU."""

    has: Callable[[GpuState], bool]
    """Whether a GPU has it."""
    mark: Severity
    what: str
    """The fault; `{each}` stands for the part that differs from GPU to GPU."""
    fix: str
    """The remedy; `{gpus}` stands for the GPUs' numbers, `{gpu}` for the first of them."""
    each: Callable[[GpuState], str] = lambda gpu: ""
    """The part of `what` that differs between GPUs."""
    is_unfit: bool = False
    """Whether it makes the host unfit if one of the run's GPUs has it."""


FAULTS: tuple[Fault, ...] = (
    Fault(
        has=lambda gpu: gpu.uncorrectable_now > 0,
        mark=Severity.ERROR,
        what="{each} uncorrectable memory errors since the driver was loaded: their results cannot be trusted",
        fix=_RESET,
        each=lambda gpu: str(gpu.uncorrectable_now),
    ),
    Fault(
        has=lambda gpu: bool(_FAILED_REPAIRS & set(gpu.repairs)),
        mark=Severity.ERROR,
        what="bad memory that cannot be repaired ({each})",
        fix=_REPLACE,
        each=lambda gpu: ", ".join(sorted(_FAILED_REPAIRS & set(gpu.repairs))),
    ),
    Fault(
        has=lambda gpu: bool(set(gpu.repairs) - _FAILED_REPAIRS),
        mark=Severity.ERROR,
        what="bad memory that the next reset repairs ({each})",
        fix=_RESET,
        each=lambda gpu: ", ".join(sorted(set(gpu.repairs) - _FAILED_REPAIRS)),
    ),
    Fault(
        has=lambda gpu: gpu.recovery is not None,
        mark=Severity.ERROR,
        what='the driver asks for "{each}"',
        fix=_RESET,
        each=lambda gpu: gpu.recovery or "",
    ),
    Fault(
        has=lambda gpu: gpu.fabric in {"In Progress", "Not Started"},
        mark=Severity.ERROR,
        what='the NVSwitch fabric is "{each}": CUDA does not start',
        fix="sudo systemctl restart nvidia-fabricmanager  (of the driver's version)",
        each=lambda gpu: gpu.fabric or "",
    ),
    Fault(
        has=lambda gpu: gpu.compute_mode == "Prohibited",
        mark=Severity.ERROR,
        what="the compute mode prohibits all programs",
        fix="sudo nvidia-smi -i {gpus} -c DEFAULT",
    ),
    Fault(
        has=lambda gpu: gpu.has_mig,
        mark=Severity.WARNING,
        what="cut into slices (MIG), on which DeepSpeed's launcher cannot start ranks",
        fix="sudo nvidia-smi -i {gpus} -mig 0",
    ),
    Fault(
        has=lambda gpu: gpu.uncorrectable_now == 0 and gpu.uncorrectable_ever > 0,
        mark=Severity.WARNING,
        what="uncorrectable memory errors in the past ({each}), none since the driver was loaded",
        fix="watch them: nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpus}",
        each=lambda gpu: str(gpu.uncorrectable_ever),
    ),
    Fault(
        has=lambda gpu: gpu.has_ecc is False and _DATA_CENTRE.search(gpu.name) is not None,
        mark=Severity.WARNING,
        what="ECC is off: memory errors corrupt weights unnoticed",
        fix="sudo nvidia-smi -i {gpus} -e 1 && sudo reboot",
    ),
    Fault(
        has=lambda gpu: bool(gpu.slowdowns),
        mark=Severity.WARNING,
        what="throttled: {each}",
        fix="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpus}; check fans, air flow and power supply",
        each=lambda gpu: ", ".join(gpu.slowdowns) + (f" at {gpu.celsius} °C" if gpu.celsius is not None else ""),
    ),
    Fault(
        has=lambda gpu: (gpu.power_limit_w or 0) < 0.95 * (gpu.default_power_limit_w or 0) and bool(gpu.power_limit_w),
        mark=Severity.WARNING,
        what="power limit {each}",
        fix="sudo nvidia-smi -i {gpus} -pl {gpu.default_power_limit_w:.0f}  (if cooling and power supply allow it)",
        each=lambda gpu: f"{gpu.power_limit_w:.0f} W, by default {gpu.default_power_limit_w:.0f} W",
    ),
    Fault(
        has=lambda gpu: (gpu.link_width or 99) < (gpu.max_link_width or 0),
        mark=Severity.WARNING,
        what="PCIe runs on {each} lanes",
        fix="check slot, riser and BIOS: sudo lspci -vv | grep -E 'NVIDIA|LnkSta:'",
        each=lambda gpu: f"{gpu.link_width} of {gpu.max_link_width}",
    ),
    Fault(
        has=lambda gpu: gpu.is_persistent is False,
        mark=Severity.WARNING,
        what="persistence mode is off: every start reloads the driver, which takes seconds",
        fix="sudo nvidia-smi -pm 1",
    ),
    Fault(
        has=lambda gpu: (gpu.used_mib or 0) * MIB > BUSY_BYTES,
        mark=Severity.WARNING,
        what="in use: {each}",
        fix="nvidia-smi shows the programs; or exclude these GPUs: export CUDA_VISIBLE_DEVICES=…",
        each=lambda gpu: f"{(gpu.used_mib or 0) / 1024:.1f} GiB" + (f" by {', '.join(gpu.users)}" if gpu.users else ""),
        is_unfit=True,
    ),
)
"""Faults of a GPU, one per row."""


def check_gpus(smi: Gpus, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about GPUs and their driver."""
    if smi.gpus:
        _names(smi, needs, notes)
        _faults(smi.gpus, needs, notes)
    elif needs.on_cpu:
        notes.ok("training is on the CPU (DS_ACCELERATOR=cpu); no GPU is needed")
    elif not smi.has_driver:
        what = "no NVIDIA GPU here: neither a driver nor nvidia-smi"
        fix = "install the driver; or to train on the CPU: export DS_ACCELERATOR=cpu"
        notes.add(Severity.ERROR if needs.has_job else Severity.WARNING, what, fix, is_unfit=True)
    else:
        _no_answer(smi, needs, notes)


def _names(smi: Gpus, needs: Needs, notes: Notes) -> None:
    what = f"{smi.kinds}, driver {smi.driver} (CUDA up to {smi.cuda})"
    if len({gpu.name for gpu in smi.gpus}) > 1:
        notes.warn(f"{what}: the slowest sets the pace", "export CUDA_VISIBLE_DEVICES=…  with GPUs of one kind")
    else:
        notes.ok(what)
    count = len(smi.gpus)
    if needs.slots is not None and not needs.on_cpu and count < needs.slots:
        lack = shortage_of(needs.slots, count)
        notes.bad(lack.problem, lack.hint, is_unfit=True)


def _used(count: int, needs: Needs) -> frozenset[int]:
    """Returns the numbers of the GPUs that a run would use: on one host those that CUDA_VISIBLE_DEVICES leaves."""
    words = [word.strip() for word in needs.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if needs.num_hosts > 1 or not words or not all(word.isdigit() for word in words):
        return frozenset(range(count))
    return frozenset(map(int, words))


def _faults(gpus: Sequence[GpuState], needs: Needs, notes: Notes) -> None:
    """Adds the faults of GPUs. GPUs with the same fault share a line, as do faults with the same fix.

    A GPU that no run uses never causes an error.
    """
    used = _used(len(gpus), needs)
    slots = 0 if needs.on_cpu else needs.slots or 0
    lines: dict[tuple[str, str, bool, bool], list[str]] = {}
    for fault in FAULTS:
        by_text: dict[tuple[str, bool], list[int]] = {}
        for number, gpu in enumerate(gpus):
            if fault.has(gpu):
                is_bad = fault.mark is Severity.ERROR and number in used
                by_text.setdefault((fault.what.format(each=fault.each(gpu)), is_bad), []).append(number)
        for (text, is_bad), numbers in by_text.items():
            who = "every GPU" if len(numbers) == len(gpus) > 1 else f"GPU {listed(numbers)}"
            fix = fault.fix.format(gpus=",".join(map(str, numbers)), gpu=gpus[numbers[0]])
            is_unfit = fault.is_unfit and min(numbers) < slots
            lines.setdefault((who, fix, is_bad, is_unfit), []).append(text)
    for (who, fix, is_bad, is_unfit), texts in lines.items():
        notes.add(Severity.ERROR if is_bad else Severity.WARNING, f"{who}: {'; '.join(texts)}", fix, is_unfit=is_unfit)


def _no_answer(smi: Gpus, needs: Needs, notes: Notes) -> None:
    """Adds why nvidia-smi shows no GPU. Before a launch a slow one is only a warning, since NVML has answered."""
    problem = smi.problem or "nvidia-smi shows no GPU"
    mark, fix = Severity.ERROR, "nvidia-smi; sudo dmesg | grep -i nvrm"
    if smi.is_late:
        mark = Severity.WARNING if needs.is_quick else Severity.ERROR
        problem = f"{problem}: the driver hangs, or is reloaded for each query"
        fix = "sudo nvidia-smi -pm 1, and try again; if it hangs: sudo dmesg | grep -i xid, and sudo reboot"
    elif not smi.has_tool:
        problem = "nvidia-smi is not installed"
        fix = "apt-get install nvidia-utils-…, of the driver's version: cat /proc/driver/nvidia/version"
    elif "version mismatch" in problem:
        fix = "sudo reboot  (the driver was updated while an older one is loaded)"
    notes.add(mark, problem, fix, is_unfit=True)


class Cure(Enum):
    """The cure of an error."""

    PROGRAM = "the program that ran then was at fault, or its GPU"
    """The machine needs no repair."""
    RESET = "sudo nvidia-smi --gpu-reset -i {gpus}"
    REBOOT = "sudo reboot"
    """The machine must be rebooted; if the error returns, the hardware must be replaced."""


XIDS: Mapping[int, tuple[str, Cure]] = MappingProxyType(
    {
        13: ("a kernel faulted, often by an index out of range", Cure.PROGRAM),
        31: ("a kernel accessed invalid memory", Cure.PROGRAM),
        32: ("a corrupted stream of commands", Cure.PROGRAM),
        43: ("a program stopped by its own fault", Cure.PROGRAM),
        45: ("a program's work was removed after an error or at its end", Cure.PROGRAM),
        46: ("the GPU stopped", Cure.RESET),
        48: ("uncorrectable memory error", Cure.RESET),
        62: ("its microcontroller halted", Cure.RESET),
        63: ("a bad row of memory will be replaced at the next reset", Cure.PROGRAM),
        64: ("a bad row of memory could not be replaced", Cure.RESET),
        74: ("NVLink error", Cure.RESET),
        79: ("it has fallen off the bus", Cure.REBOOT),
        92: ("many single-bit memory errors", Cure.PROGRAM),
        94: ("uncorrectable memory error, which ended one program", Cure.PROGRAM),
        95: ("uncorrectable memory error, which may have reached every program", Cure.RESET),
        109: ("a program could not be switched out", Cure.RESET),
        110: ("security fault", Cure.RESET),
        119: ("its system processor (GSP) did not answer", Cure.RESET),
        120: ("its system processor (GSP) failed", Cure.RESET),
        136: ("NVLink could not be trained", Cure.RESET),
        140: ("uncorrectable memory error", Cure.RESET),
        143: ("it could not be started", Cure.RESET),
        155: ("NVLink went down", Cure.RESET),
        158: ("it stopped responding", Cure.RESET),
    }
)
"""NVIDIA's number → its meaning and its cure. Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"""

RECENT_S = 24 * 3600.0
"""Age up to which an error that asks for a reset is an error; the GPU may have been reset since an older one."""
_READ = "sudo dmesg | grep -i xid"


def check_kernel_log(log: KernelLog, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about Xid errors."""
    gpus = facts.gpus
    if gpus is None or not gpus.has_driver or needs.on_cpu:
        return
    if log.problem is not None:
        if not needs.is_quick:
            notes.warn(f"Xid errors cannot be read: {log.problem}", _READ)
        return
    codes = dict.fromkeys(xid.code for xid in log.xids)
    for code in codes:
        _take_down(code, [xid for xid in log.xids if xid.code == code], gpus, needs, notes)
    if not codes and not needs.is_quick:
        notes.ok("no Xid error since boot")


def _take_down(code: int, xids: Sequence[Xid], gpus: Gpus, needs: Needs, notes: Notes) -> None:
    """Adds one kind of error of all GPUs.

    Before a launch, faults of programs are ignored, and a GPU that responds again is only a warning: it may have been
    reset since.
    """
    meaning, cure = XIDS.get(code, ("see NVIDIA's list of Xid errors", Cure.PROGRAM))
    numbers = {order for order, gpu in enumerate(gpus.gpus) for xid in xids if xid.bus == gpu.bus}
    known = {gpu.bus for gpu in gpus.gpus}
    lost = [xid for xid in xids if xid.bus not in known]
    what = f"{_who(numbers, lost)}: Xid {code} ({meaning}){_when(xids)}"
    if cure is Cure.PROGRAM:
        if not needs.is_quick:
            notes.warn(what, _READ)
        return
    fix = Cure.REBOOT.value if lost else cure.value.format(gpus=",".join(map(str, sorted(numbers))))
    ages = [xid.age_s for xid in xids if xid.age_s is not None]
    is_old = bool(ages) and min(ages) > RECENT_S
    if is_old or (needs.is_quick and not lost):
        notes.warn(what, f"{fix}  (unless that was done since)")
    else:
        notes.bad(what, fix)


def _who(numbers: Collection[int], lost: Sequence[Xid]) -> str:
    named = [f"GPU {listed(numbers)}"] if numbers else []
    named += [f"a GPU at {xid.bus} that is now missing" if xid.bus else "a GPU" for xid in lost]
    return ", ".join(named)


def _when(xids: Sequence[Xid]) -> str:
    """Returns how often and when."""
    count = sum(xid.count for xid in xids)
    ages = [xid.age_s for xid in xids if xid.age_s is not None]
    often = f", {count} times" if count > 1 else ""
    return often + (f", {'last ' if count > 1 else ''}{format_seconds(min(ages))} ago" if ages else "")


_SWITCHED = 6
"""NVLinks of a pair from which an NVSwitch must join them, with all pairs alike."""
_NO_P2P: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "CNS": ("the chipset does not pass it on", "turn off IOMMU and ACS in the BIOS; lspci -vv | grep ACSCtl"),
        "TNS": ("they are too far apart on PCIe", "put them behind one CPU, or leave it: NCCL goes through RAM"),
        "NS": ("not supported", "nvidia-smi topo -p2p r; update the driver; turn off IOMMU in the BIOS"),
        "DR": ("turned off in the driver's registry", "remove RMForceP2PType from /etc/modprobe.d/*nvidia*"),
        "U": ("for an unknown reason", "nvidia-smi topo -p2p r"),
    }
)
"""nvidia-smi's abbreviation → why a pair of GPUs has no P2P, and what to do."""


def check_topology(topology: Topology, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about the connections between GPUs."""
    if topology.num_gpus < 2 or needs.on_cpu:
        return
    links = nvlinks(topology)
    notes.ok(f"the {topology.num_gpus} GPUs are connected {_how(topology)}")
    counts = set(links.values())
    if max(counts, default=0) >= _SWITCHED and len(counts) > 1:
        fewer = [(a, b) for (a, b), count in sorted(links.items()) if a < b and count < max(counts)]
        what = f"{pairs_text(fewer)}: {min(counts)} NVLinks, elsewhere {max(counts)}: links are down"
        notes.bad(what, "nvidia-smi nvlink -s; sudo reboot")
    if links and needs.environment.get("NCCL_P2P_DISABLE") == "1":
        notes.warn("NCCL_P2P_DISABLE=1 keeps NCCL from using NVLink", "unset NCCL_P2P_DISABLE")
    _p2p(topology, notes)


def nvlinks(topology: Topology) -> dict[tuple[int, int], int]:
    """Returns the number of NVLinks of each connected pair of GPUs, in both orders."""
    counts = {}
    for row in range(topology.num_gpus):
        for column in range(topology.num_gpus):
            match = re.fullmatch(r"NV(\d+)", topology.links[row][column])
            if match is not None:
                counts[row, column] = int(match[1])
    return counts


def _how(topology: Topology) -> str:
    if nvlinks(topology):
        return "by NVLink"
    kinds = {topology.links[a][b] for a in range(topology.num_gpus) for b in range(topology.num_gpus) if a != b}
    over = " and between CPUs" if "SYS" in kinds else ""
    return f"by PCIe{over}, without NVLink"


def _p2p(topology: Topology, notes: Notes) -> None:
    """Adds pairs of GPUs that cannot read each other's memory."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for a, row in enumerate(topology.p2p):
        for b, state in enumerate(row):
            if a < b and state not in {"OK", "X"}:
                pairs.setdefault(state, []).append((a, b))
    linked = set(nvlinks(topology))
    for state, unreachable in pairs.items():
        broken = [pair for pair in unreachable if pair in linked]
        who = pairs_text(broken or unreachable)
        if broken:
            notes.bad(
                f"{who}: NVLinks, and no P2P ({state})", "sudo systemctl status nvidia-fabricmanager; sudo reboot"
            )
        elif state == "GNS":
            notes.ok("no P2P with GPUs of this kind: NCCL goes through shared memory")
        else:
            why, fix = _NO_P2P.get(state, (state, "nvidia-smi topo -p2p r"))
            notes.warn(f"{who}: no P2P, {why}: NCCL goes through RAM", fix)


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Returns pairs of GPUs, folded if they are all pairs of some GPUs, or all pairs with one.

    >>> pairs_text([(0, 1), (0, 2), (1, 2)]), pairs_text([(0, 3), (1, 3), (3, 4)]), pairs_text([(0, 1), (2, 3)])
    ('GPU 0-2', 'GPU 3 with 0-1,4', 'GPU 0 with 1, 2 with 3')
    """
    gpus = {gpu for pair in pairs for gpu in pair}
    if len(pairs) == len(gpus) * (len(gpus) - 1) // 2:
        return f"GPU {listed(gpus)}"
    shared = set.intersection(*(set(pair) for pair in pairs))
    if shared:
        return f"GPU {listed(shared)} with {listed(gpus - shared)}"
    return "GPU " + ", ".join(f"{a} with {b}" for a, b in pairs)
