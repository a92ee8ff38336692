"""Xid errors in the kernel's log, read and judged."""

from __future__ import annotations

from dataclasses import replace

from dstrain.doctor import kernel_log
from dstrain.doctor.checks import kernel_log as check
from dstrain.doctor.gpu_facts import KernelLog
from dstrain.doctor.requirements import Needs
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


def judged(log: str, *, uptime_s: float = 680200.0, needs: Needs | None = None) -> list[str]:
    found = KernelLog(problem=None, xids=kernel_log.parse(log, uptime_s))
    return said(check.check(facts(kernel_log=found), needs or Needs()))


def test_a_quiet_log_is_one_line() -> None:
    assert judged("[ 1.0] Linux version 6.8\n") == ["✓ no Xid error since boot"]


def test_an_error_that_asks_for_a_reset_names_the_gpu() -> None:
    found = judged(DOUBLE_BIT)
    assert found == ["✗ GPU 3: Xid 48 (uncorrectable memory error), 3 min 20 s ago → sudo nvidia-smi --gpu-reset -i 3"]


def test_a_programs_own_fault_is_a_warning_and_counted() -> None:
    found = judged(f"{PAGE_FAULT}\n{PAGE_FAULT}\n{PAGE_FAULT.replace(':10:', ':11:')}")
    assert found[0].startswith("! GPU 0-1: Xid 31 (a kernel accessed invalid memory), 3 times, last 3 min")


def test_an_old_error_does_not_stand_in_the_way() -> None:
    found = judged(DOUBLE_BIT, uptime_s=680000.0 + 3 * 86400)
    assert found[0].startswith("! GPU 3: Xid 48")


def test_a_gpu_that_is_gone_asks_for_a_reboot() -> None:
    found = judged(OFF_THE_BUS, uptime_s=2000.0)
    assert found == [
        "✗ a GPU at 0000:44:00 that is now missing: Xid 79 (it has fallen off the bus), 2 min 37 s ago → sudo reboot"
    ]


def test_newer_drivers_say_it_in_several_lines() -> None:
    assert judged(IN_LINES, uptime_s=2000.0)[0].startswith("✗ a GPU: Xid 79 (it has fallen off the bus)")


def test_before_a_launch_a_gpu_that_answers_is_let_through() -> None:
    found = judged(f"{DOUBLE_BIT}\n{PAGE_FAULT}", needs=Needs(is_quick=True))
    assert [line[:12] for line in found] == ["! GPU 3: Xid"]


def test_a_row_that_was_replaced_is_a_warning() -> None:
    assert judged(REMAPPED)[0].startswith("! GPU 3: Xid 63 (a bad row of memory will be replaced")


def test_a_log_that_cannot_be_read_is_told() -> None:
    found = KernelLog(problem="dmesg: read kernel buffer failed: Operation not permitted", xids=())
    assert said(check.check(facts(kernel_log=found), Needs()))[0].startswith("! Xid errors cannot be read: dmesg")
    assert check.check(facts(kernel_log=found), Needs(is_quick=True)) == []


def test_without_a_driver_nothing_is_said() -> None:
    known = facts()
    assert known.gpus is not None
    assert check.check(replace(known, gpus=replace(known.gpus, has_driver=False, gpus=())), Needs()) == []
