"""Parses `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`."""

from __future__ import annotations

import re

from dstrain.doctor.gpu_facts import Topology

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANGE = re.compile(r"[\d,-]+|N/A")


def parse(matrix: str, p2p: str = "") -> Topology | None:
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
