"""Probes GPUs through nvidia-smi, their connections, and the driver's errors in the kernel log."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from dstrain.doctor.facts import Gpus, GpuState, KernelLog, Question, Topology, Xid
from dstrain.doctor.probes import all_at_once, run
from dstrain.facts import kernel_messages
from dstrain.facts.kernel_messages import seconds_of

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANGE = re.compile(r"[\d,-]+|N/A")


def parse_topology(matrix: str, p2p: str = "") -> Topology | None:
    """Returns how GPUs and network adapters are connected, or None if the text is no such table."""
    lines = _COLOUR.sub("", matrix).splitlines()
    head = next((line for line in lines if re.match(r"\s+GPU0\b", line)), None)
    if head is None:
        return None
    columns = head.partition("CPU Affinity")[0].split()
    rows = _rows(lines, columns)
    if len(rows) != len(columns):
        return None
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    gpus = [name for name in columns if name.startswith("GPU")]
    return Topology(
        devices=tuple(legend.get(name, name) for name in columns),
        links=tuple(tuple(rows[name][: len(columns)]) for name in columns),
        numa=tuple(_numa(rows[name][len(columns) :]) for name in gpus),
        p2p=_p2p(p2p, len(gpus)),
    )


def _rows(lines: list[str], columns: list[str]) -> dict[str, list[str]]:
    """Returns the cells of each row, by the device's name."""
    rows = {}
    for line in lines:
        words = line.split()
        if words and words[0] in columns and len(words) > len(columns) and "X" in words[1 : len(columns) + 1]:
            rows[words[0]] = words[1:]
    return rows


def _numa(rest: list[str]) -> str:
    """Returns the NUMA node, which follows the cores; empty if it is not reported."""
    cells = [word for word in rest if _RANGE.fullmatch(word)]
    return cells[1] if len(cells) > 1 and cells[1] != "N/A" else ""


def _p2p(text: str, num_gpus: int) -> tuple[tuple[str, ...], ...]:
    columns = [f"GPU{number}" for number in range(num_gpus)]
    rows = _rows(_COLOUR.sub("", text).splitlines(), columns)
    return tuple(tuple(rows[name][:num_gpus]) for name in columns) if len(rows) == num_gpus else ()


_HARMLESS_REASONS = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "sync_boost", "display_clocks_setting")
"""Why clocks may be low without anything being wrong."""
_REPAIRS = (
    "retired_pages/pending_retirement",
    "retired_pages/pending_blacklist",
    "remapped_rows/remapped_row_pending",
    "remapped_rows/remapped_row_failure",
    "ecc_errors/unrepairable_memory",
    "ecc_errors/channel_repair_pending",
    "ecc_errors/tpc_repair_pending",
    "ecc_errors/aggregate/sram_threshold_exceeded",
)
"""Elements that are `Yes` if memory is due for repair, or cannot be repaired."""


def parse_nvidia_smi(text: str) -> Gpus | None:
    """Returns the content of nvidia-smi's XML, or None if the text is no such XML."""
    start = text.find("<?xml")
    try:
        root = ElementTree.fromstring(text[max(start, 0) :])
    except ElementTree.ParseError:
        return None
    if root.tag != "nvidia_smi_log":
        return None
    return Gpus(
        has_driver=True,
        driver=_text(root, "driver_version"),
        cuda=_text(root, "cuda_version"),
        gpus=tuple(_gpu(element) for element in root.findall("gpu")),
    )


def address(text: str) -> str:
    """Returns an address of the PCI bus in one form, without the function: nvidia-smi and the kernel differ.

    >>> address("00000000:81:00.0"), address("PCI:0000:81:00"), address("81:00.0")
    ('0000:81:00', '0000:81:00', '0000:81:00')
    """
    parts = text.lower().removeprefix("pci:").partition(".")[0].split(":")
    domain = parts[-3] if len(parts) > 2 else "0"
    return f"{int(domain, 16):04x}:{':'.join(parts[-2:])}"


def _gpu(gpu: Element) -> GpuState:
    return GpuState(
        bus=address(gpu.get("id", "0:0:0")),
        name=_text(gpu, "product_name") or "a GPU",
        used_mib=_int(gpu, "fb_memory_usage/used"),
        users=_users(gpu),
        is_persistent=_switch(gpu, "persistence_mode"),
        has_ecc=_switch(gpu, "ecc_mode/current_ecc"),
        uncorrectable_now=_uncorrectable(gpu, "volatile"),
        uncorrectable_ever=_uncorrectable(gpu, "aggregate"),
        repairs=tuple(path.rpartition("/")[2] for path in _REPAIRS if _text(gpu, path) == "Yes"),
        recovery=_recovery(gpu),
        slowdowns=_slowdowns(gpu),
        celsius=_int(gpu, "temperature/gpu_temp"),
        power_limit_w=_power(gpu, ("current_power_limit", "enforced_power_limit", "power_limit")),
        default_power_limit_w=_power(gpu, ("default_power_limit",)),
        has_mig=_switch(gpu, "mig_mode/current_mig") is True,
        compute_mode=_text(gpu, "compute_mode"),
        link_width=_int(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        max_link_width=_int(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        fabric=_text(gpu, "fabric/state"),
    )


def _text(parent: Element, path: str) -> str | None:
    """Returns an element's text, or None if it is missing or empty."""
    text = (parent.findtext(path) or "").strip()
    return None if text in {"", "N/A", "[N/A]", "None", "Unknown Error"} or "deprecated" in text else text


def _int(parent: Element, path: str) -> int | None:
    number = _number(parent, path)
    return None if number is None else int(number)


def _number(parent: Element, path: str) -> float | None:
    """Returns the number with which a text such as `450 MiB` or `16x` begins."""
    match = re.match(r"\d+(?:\.\d+)?", _text(parent, path) or "")
    return float(match[0]) if match else None


def _switch(parent: Element, path: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(_text(parent, path) or "")


def _uncorrectable(gpu: Element, period: str) -> int:
    """Returns uncorrectable memory errors: `*_uncorrectable*` since Turing, `double_bit` before."""
    counts = gpu.find(f"ecc_errors/{period}")
    if counts is None:
        return 0
    paths = [child.tag for child in counts if "uncorrectable" in child.tag] or ["double_bit/total"]
    return sum(_int(counts, path) or 0 for path in paths)


def _recovery(gpu: Element) -> str | None:
    """Returns the recovery that the driver requests, such as `Reset` (elements of drivers 535 and 570)."""
    action = _text(gpu, "gpu_recovery_action")
    if action is None and _text(gpu, "gpu_reset_status/reset_required") == "Yes":
        return "Reset"
    return action


def _slowdowns(gpu: Element) -> tuple[str, ...]:
    """Returns why the clocks are low; `clocks_throttle_reasons` was the element's name before driver 535."""
    names = []
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in _children(gpu.find(name)):
            short = reason.tag.removeprefix(f"{name.removesuffix('s')}_")
            if (reason.text or "").strip() == "Active" and short not in _HARMLESS_REASONS:
                names.append(short.replace("_", " "))
    return tuple(names)


def _power(gpu: Element, names: Iterable[str]) -> float | None:
    paths = [f"{folder}/{name}" for name in names for folder in ("gpu_power_readings", "power_readings")]
    return next((watts for path in paths if (watts := _number(gpu, path)) is not None), None)


def _users(gpu: Element) -> tuple[str, ...]:
    """Returns compute programs that hold memory on the GPU."""
    users = []
    for process in gpu.findall("processes/process_info"):
        if "C" in (process.findtext("type") or ""):
            name = (process.findtext("process_name") or "?").split("/")[-1].split(" ")[0]
            users.append(f"{name} ({(process.findtext('pid') or '?').strip()})")
    return tuple(users)


def _children(parent: Element | None) -> list[Element]:
    return [] if parent is None else list(parent)


SMI_S = 3.0
"""How long nvidia-smi may take; without persistence mode it loads the driver first."""
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")


def look(question: Question, environment: Mapping[str, str]) -> Gpus:
    """Returns the GPUs and their state."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return Gpus(has_driver=any(Path(path).exists() for path in _DRIVERS), has_tool=False)
    said = run([tool, "-q", "-x"], environment, SMI_S)
    if said.is_late:
        return Gpus(has_driver=True, is_late=True, problem=f"no answer from nvidia-smi within {SMI_S:g} s")
    return parse_nvidia_smi(said.out) or Gpus(
        has_driver=True, problem=said.last_line or f"nvidia-smi ended with {said.code}"
    )


def look_topology(question: Question, environment: Mapping[str, str]) -> Topology | None:
    """Returns how GPUs and network adapters are joined; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return None
    said = all_at_once(
        {
            "-m": partial(run, [tool, "topo", "-m"], environment, SMI_S),
            "-p2p": partial(run, [tool, "topo", "-p2p", "r"], environment, SMI_S),
        },
        SMI_S + 0.2,
    )
    matrix, p2p = said["-m"].value, said["-p2p"].value
    return parse_topology(matrix.out, p2p.out if p2p else "") if matrix else None


def look_kernel_log(question: Question, environment: Mapping[str, str]) -> KernelLog:
    """Returns the driver's errors since boot."""
    messages = kernel_messages.read(environment)
    return KernelLog(problem=messages.problem, xids=parse_xids(messages.text, kernel_messages.uptime_s()))


_XID = re.compile(r"NVRM: Xid \(((?:PCI:)?[0-9a-fA-F]+(?:[:.][0-9a-fA-F]+)+)[^)]*\): (\d+)")
_OFF_THE_BUS = re.compile(r"NVRM: .*fallen off the bus")


def parse_xids(text: str, uptime_s: float | None) -> tuple[Xid, ...]:
    """Returns the errors in the output of `dmesg`, one per GPU and number.

    >>> line = "[680111.646286] NVRM: Xid (PCI:0000:10:1c): 63, pid=1850, Row Remapper: New row marked for remapping"
    >>> parse_xids(line, 680171.6)[0].code
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
