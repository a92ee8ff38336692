"""Checks GPUs and driver: memory errors, Xid errors, persistence, throttling, other processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dstrain.doctor.facts import Facts
from dstrain.doctor.finding import Finding, Mark, Notes, listed
from dstrain.doctor.gpu_facts import Gpus, GpuState
from dstrain.doctor.requirements import Needs
from dstrain.facts.cluster.machines import shortage_of
from dstrain.units import MIB

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
    mark: Mark
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
        mark=Mark.ERROR,
        what="{each} uncorrectable memory errors since the driver was loaded: their results cannot be trusted",
        fix=_RESET,
        each=lambda gpu: str(gpu.uncorrectable_now),
    ),
    Fault(
        has=lambda gpu: bool(_FAILED_REPAIRS & set(gpu.repairs)),
        mark=Mark.ERROR,
        what="bad memory that cannot be repaired ({each})",
        fix=_REPLACE,
        each=lambda gpu: ", ".join(sorted(_FAILED_REPAIRS & set(gpu.repairs))),
    ),
    Fault(
        has=lambda gpu: bool(set(gpu.repairs) - _FAILED_REPAIRS),
        mark=Mark.ERROR,
        what="bad memory that the next reset repairs ({each})",
        fix=_RESET,
        each=lambda gpu: ", ".join(sorted(set(gpu.repairs) - _FAILED_REPAIRS)),
    ),
    Fault(
        has=lambda gpu: gpu.recovery is not None,
        mark=Mark.ERROR,
        what='the driver asks for "{each}"',
        fix=_RESET,
        each=lambda gpu: gpu.recovery or "",
    ),
    Fault(
        has=lambda gpu: gpu.fabric in {"In Progress", "Not Started"},
        mark=Mark.ERROR,
        what='the NVSwitch fabric is "{each}": CUDA does not start',
        fix="sudo systemctl restart nvidia-fabricmanager  (of the driver's version)",
        each=lambda gpu: gpu.fabric or "",
    ),
    Fault(
        has=lambda gpu: gpu.compute_mode == "Prohibited",
        mark=Mark.ERROR,
        what="the compute mode prohibits all programs",
        fix="sudo nvidia-smi -i {gpus} -c DEFAULT",
    ),
    Fault(
        has=lambda gpu: gpu.has_mig,
        mark=Mark.WARNING,
        what="cut into slices (MIG), on which DeepSpeed's launcher cannot start ranks",
        fix="sudo nvidia-smi -i {gpus} -mig 0",
    ),
    Fault(
        has=lambda gpu: gpu.uncorrectable_now == 0 and gpu.uncorrectable_ever > 0,
        mark=Mark.WARNING,
        what="uncorrectable memory errors in the past ({each}), none since the driver was loaded",
        fix="watch them: nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpus}",
        each=lambda gpu: str(gpu.uncorrectable_ever),
    ),
    Fault(
        has=lambda gpu: gpu.has_ecc is False and _DATA_CENTRE.search(gpu.name) is not None,
        mark=Mark.WARNING,
        what="ECC is off: memory errors corrupt weights unnoticed",
        fix="sudo nvidia-smi -i {gpus} -e 1 && sudo reboot",
    ),
    Fault(
        has=lambda gpu: bool(gpu.slowdowns),
        mark=Mark.WARNING,
        what="throttled: {each}",
        fix="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpus}; check fans, air flow and power supply",
        each=lambda gpu: ", ".join(gpu.slowdowns) + (f" at {gpu.celsius} °C" if gpu.celsius is not None else ""),
    ),
    Fault(
        has=lambda gpu: (gpu.power_limit_w or 0) < 0.95 * (gpu.default_power_limit_w or 0) and bool(gpu.power_limit_w),
        mark=Mark.WARNING,
        what="power limit {each}",
        fix="sudo nvidia-smi -i {gpus} -pl {gpu.default_power_limit_w:.0f}  (if cooling and power supply allow it)",
        each=lambda gpu: f"{gpu.power_limit_w:.0f} W, by default {gpu.default_power_limit_w:.0f} W",
    ),
    Fault(
        has=lambda gpu: (gpu.link_width or 99) < (gpu.max_link_width or 0),
        mark=Mark.WARNING,
        what="PCIe runs on {each} lanes",
        fix="check slot, riser and BIOS: sudo lspci -vv | grep -E 'NVIDIA|LnkSta:'",
        each=lambda gpu: f"{gpu.link_width} of {gpu.max_link_width}",
    ),
    Fault(
        has=lambda gpu: gpu.is_persistent is False,
        mark=Mark.WARNING,
        what="persistence mode is off: every start reloads the driver, which takes seconds",
        fix="sudo nvidia-smi -pm 1",
    ),
    Fault(
        has=lambda gpu: (gpu.used_mib or 0) * MIB > BUSY_BYTES,
        mark=Mark.WARNING,
        what="in use: {each}",
        fix="nvidia-smi shows the programs; or exclude these GPUs: export CUDA_VISIBLE_DEVICES=…",
        each=lambda gpu: f"{(gpu.used_mib or 0) / 1024:.1f} GiB" + (f" by {', '.join(gpu.users)}" if gpu.users else ""),
        is_unfit=True,
    ),
)
"""Faults of a GPU, one per row."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about GPUs and their driver."""
    smi = facts.gpus
    if smi is None:
        return []
    notes = Notes("gpus")
    if smi.gpus:
        _names(smi, needs, notes)
        _faults(smi.gpus, needs, notes)
    elif needs.on_cpu:
        notes.ok("training is on the CPU (DS_ACCELERATOR=cpu); no GPU is needed")
    elif not smi.has_driver:
        what = "no NVIDIA GPU here: neither a driver nor nvidia-smi"
        fix = "install the driver; or to train on the CPU: export DS_ACCELERATOR=cpu"
        notes.add(Mark.ERROR if needs.has_job else Mark.WARNING, what, fix, is_unfit=True)
    else:
        _no_answer(smi, needs, notes)
    return notes.findings


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
                is_bad = fault.mark is Mark.ERROR and number in used
                by_text.setdefault((fault.what.format(each=fault.each(gpu)), is_bad), []).append(number)
        for (text, is_bad), numbers in by_text.items():
            who = "every GPU" if len(numbers) == len(gpus) > 1 else f"GPU {listed(numbers)}"
            fix = fault.fix.format(gpus=",".join(map(str, numbers)), gpu=gpus[numbers[0]])
            is_unfit = fault.is_unfit and min(numbers) < slots
            lines.setdefault((who, fix, is_bad, is_unfit), []).append(text)
    for (who, fix, is_bad, is_unfit), texts in lines.items():
        notes.add(Mark.ERROR if is_bad else Mark.WARNING, f"{who}: {'; '.join(texts)}", fix, is_unfit=is_unfit)


def _no_answer(smi: Gpus, needs: Needs, notes: Notes) -> None:
    """Adds why nvidia-smi shows no GPU. Before a launch a slow one is only a warning, since NVML has answered."""
    problem = smi.problem or "nvidia-smi shows no GPU"
    mark, fix = Mark.ERROR, "nvidia-smi; sudo dmesg | grep -i nvrm"
    if smi.is_late:
        mark = Mark.WARNING if needs.is_quick else Mark.ERROR
        problem = f"{problem}: the driver hangs, or is reloaded for each query"
        fix = "sudo nvidia-smi -pm 1, and try again; if it hangs: sudo dmesg | grep -i xid, and sudo reboot"
    elif not smi.has_tool:
        problem = "nvidia-smi is not installed"
        fix = "apt-get install nvidia-utils-…, of the driver's version: cat /proc/driver/nvidia/version"
    elif "version mismatch" in problem:
        fix = "sudo reboot  (the driver was updated while an older one is loaded)"
    notes.add(mark, problem, fix, is_unfit=True)
