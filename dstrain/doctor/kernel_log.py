"""Reads the errors of NVIDIA's driver in the kernel log, and explains their numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from dstrain.doctor.gpu_facts import Xid
from dstrain.doctor.nvidia_smi import address
from dstrain.facts.kernel_messages import seconds_of


class Cure(Enum):
    """The cure of an error."""

    PROGRAM = "the program that ran then was at fault, or its GPU"
    """The machine needs no repair."""
    RESET = "sudo nvidia-smi --gpu-reset -i {gpus}"
    REBOOT = "sudo reboot"
    """The machine must be rebooted; if the error returns, the hardware must be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidKind:
    """The meaning of a number."""

    what: str
    cure: Cure


_ROWS = (
    (13, "a kernel faulted, often by an index out of range", Cure.PROGRAM),
    (31, "a kernel accessed invalid memory", Cure.PROGRAM),
    (32, "a corrupted stream of commands", Cure.PROGRAM),
    (43, "a program stopped by its own fault", Cure.PROGRAM),
    (45, "a program's work was removed after an error or at its end", Cure.PROGRAM),
    (46, "the GPU stopped", Cure.RESET),
    (48, "uncorrectable memory error", Cure.RESET),
    (62, "its microcontroller halted", Cure.RESET),
    (63, "a bad row of memory will be replaced at the next reset", Cure.PROGRAM),
    (64, "a bad row of memory could not be replaced", Cure.RESET),
    (74, "NVLink error", Cure.RESET),
    (79, "it has fallen off the bus", Cure.REBOOT),
    (92, "many single-bit memory errors", Cure.PROGRAM),
    (94, "uncorrectable memory error, which ended one program", Cure.PROGRAM),
    (95, "uncorrectable memory error, which may have reached every program", Cure.RESET),
    (109, "a program could not be switched out", Cure.RESET),
    (110, "security fault", Cure.RESET),
    (119, "its system processor (GSP) did not answer", Cure.RESET),
    (120, "its system processor (GSP) failed", Cure.RESET),
    (136, "NVLink could not be trained", Cure.RESET),
    (140, "uncorrectable memory error", Cure.RESET),
    (143, "it could not be started", Cure.RESET),
    (155, "NVLink went down", Cure.RESET),
    (158, "it stopped responding", Cure.RESET),
)
XIDS: Mapping[int, XidKind] = MappingProxyType({code: XidKind(what=what, cure=cure) for code, what, cure in _ROWS})
"""NVIDIA's number → what it means. Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"""

_XID = re.compile(r"NVRM: Xid \(((?:PCI:)?[0-9a-fA-F]+(?:[:.][0-9a-fA-F]+)+)[^)]*\): (\d+)")
_OFF_THE_BUS = re.compile(r"NVRM: .*fallen off the bus")


def parse(text: str, uptime_s: float | None) -> tuple[Xid, ...]:
    """Returns the errors in the output of `dmesg`, one per GPU and number.

    >>> line = "[680111.646286] NVRM: Xid (PCI:0000:10:1c): 63, pid=1850, Row Remapper: New row marked for remapping"
    >>> parse(line, 680171.6)[0].code
    63
    """
    xids: dict[tuple[str | None, int], Xid] = {}
    for line in text.splitlines():
        match = _XID.search(line)
        if match is None and _OFF_THE_BUS.search(line) is None:
            continue
        bus, code = (address(match[1]), int(match[2])) if match else (None, 79)
        at = seconds_of(line)
        age = max(0.0, uptime_s - at) if at is not None and uptime_s is not None else None
        before = xids.get((bus, code))
        xids[bus, code] = Xid(bus=bus, code=code, count=1 + (before.count if before else 0), age_s=age)
    if any(code == 79 and bus is not None for bus, code in xids):
        xids.pop((None, 79), None)  # newer drivers repeat it in several lines
    return tuple(xids.values())
