"""Parses `nvidia-smi -q -x` of drivers 450 to 590 (schemas 11 to 13)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from dstrain.doctor.gpu_facts import Gpus, GpuState

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


def parse(text: str) -> Gpus | None:
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
