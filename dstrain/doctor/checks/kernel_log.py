"""Checks Xid errors that NVIDIA's driver wrote to the kernel log since boot."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dstrain.doctor.facts import Facts
from dstrain.doctor.finding import Finding, Notes, listed
from dstrain.doctor.gpu_facts import Gpus, Xid
from dstrain.doctor.kernel_log import XIDS, Cure, XidKind
from dstrain.doctor.requirements import Needs
from dstrain.units import format_seconds

RECENT_S = 24 * 3600.0
"""Age up to which an error that asks for a reset is an error; the GPU may have been reset since an older one."""
_READ = "sudo dmesg | grep -i xid"


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about Xid errors."""
    log, gpus = facts.kernel_log, facts.gpus
    if log is None or gpus is None or not gpus.has_driver or needs.on_cpu:
        return []
    notes = Notes("kernel_log")
    if log.problem is not None:
        if not needs.is_quick:
            notes.warn(f"Xid errors cannot be read: {log.problem}", _READ)
        return notes.findings
    codes = dict.fromkeys(xid.code for xid in log.xids)
    for code in codes:
        _take_down(code, [xid for xid in log.xids if xid.code == code], gpus, needs, notes)
    if not codes and not needs.is_quick:
        notes.ok("no Xid error since boot")
    return notes.findings


def _take_down(code: int, xids: Sequence[Xid], gpus: Gpus, needs: Needs, notes: Notes) -> None:
    """Adds one kind of error of all GPUs.

    Before a launch, faults of programs are ignored, and a GPU that responds again is only a warning: it may have been
    reset since.
    """
    kind = XIDS.get(code, XidKind(what="see NVIDIA's list of Xid errors", cure=Cure.PROGRAM))
    numbers = {order for order, gpu in enumerate(gpus.gpus) for xid in xids if xid.bus == gpu.bus}
    known = {gpu.bus for gpu in gpus.gpus}
    lost = [xid for xid in xids if xid.bus not in known]
    what = f"{_who(numbers, lost)}: Xid {code} ({kind.what}){_when(xids)}"
    if kind.cure is Cure.PROGRAM:
        if not needs.is_quick:
            notes.warn(what, _READ)
        return
    fix = Cure.REBOOT.value if lost else kind.cure.value.format(gpus=",".join(map(str, sorted(numbers))))
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
