"""Xid errors in the kernel's log, read and judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstrain.doctor import gpu_probes as probe
from dstrain.doctor.facts import KernelLog
from dstrain.doctor.requirements import Needs
from tests.doctor import samples
from tests.doctor.samples import facts, said

# GPU 3 of the samples is at 0000:13:00. Sources of the forms: huggingface's training notes ("Row Remapper"),
# NVIDIA/NVSentinel issue 155 (several lines)
REMAPPED = "[680111.646286] NVRM: Xid (PCI:0000:13:00): 63, pid=1850, Row Remapper: New row marked for remapping"
PAGE_FAULT = "[680001.0] NVRM: Xid (PCI:0000:10:00): 31, pid=1587983, name=exe, Ch 0000000a, MMU Fault: ENGINE GRAPHICS"
DOUBLE_BIT = "[680000.0] NVRM: Xid (PCI:0000:13:00): 48, pid=1850, DBE (double bit error)"
OFF_THE_BUS = "[  1843.3] NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
IN_LINES = (
    "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5)\nNVRM: fallen off the bus and is not"
)


NEEDS = Needs()


def judged(log: str, *, uptime_s: float, needs: Needs) -> list[str]:
    found = KernelLog(problem=None, xids=probe.parse_xids(log, uptime_s))
    return said(samples.found("kernel_log", facts(kernel_log=found), needs))


ANOTHER = PAGE_FAULT.replace(":10:", ":11:")
QUICK = Needs(is_quick=True)


@pytest.mark.parametrize(
    ("log", "uptime_s", "needs", "line"),
    [
        ("[ 1.0] Linux version 6.8\n", 680200, NEEDS, "✓ no Xid error since boot"),
        (
            *(DOUBLE_BIT, 680200, NEEDS),
            "✗ GPU 3: Xid 48 (uncorrectable memory error), 3 min 20 s ago → sudo nvidia-smi --gpu-reset -i 3",
        ),
        (
            *(f"{PAGE_FAULT}\n{PAGE_FAULT}\n{ANOTHER}", 680200, NEEDS),  # a program's own fault
            "! GPU 0-1: Xid 31 (a kernel accessed invalid memory), 3 times, last 3 min",
        ),
        (DOUBLE_BIT, 680000 + 3 * 86400, NEEDS, "! GPU 3: Xid 48"),  # an old error
        (
            *(OFF_THE_BUS, 2000, NEEDS),
            "✗ a GPU at 0000:44:00 that is now missing: Xid 79 (it has fallen off the bus), 2 min 37 s ago "
            "→ sudo reboot",
        ),
        (IN_LINES, 2000, NEEDS, "✗ a GPU: Xid 79 (it has fallen off the bus)"),  # as newer drivers say it
        (f"{DOUBLE_BIT}\n{PAGE_FAULT}", 680200, QUICK, "! GPU 3: Xid"),  # a GPU that answers is let through
        (REMAPPED, 680200, NEEDS, "! GPU 3: Xid 63 (a bad row of memory will be replaced"),
    ],
)
def test_an_error_names_the_gpu_and_what_it_asks_for(log: str, uptime_s: float, needs: Needs, line: str) -> None:
    (found,) = judged(log, uptime_s=uptime_s, needs=needs)
    assert found.startswith(line)


def test_a_log_that_cannot_be_read_is_told() -> None:
    found = KernelLog(problem="dmesg: read kernel buffer failed: Operation not permitted", xids=())
    assert said(samples.found("kernel_log", facts(kernel_log=found), Needs()))[0].startswith(
        "! Xid errors cannot be read: dmesg"
    )
    assert samples.found("kernel_log", facts(kernel_log=found), Needs(is_quick=True)) == []


def test_without_a_driver_nothing_is_said() -> None:
    known = facts()
    assert known.gpus is not None
    assert (
        samples.found("kernel_log", replace(known, gpus=replace(known.gpus, has_driver=False, gpus=())), Needs()) == []
    )
