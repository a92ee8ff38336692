"""What nvidia-smi prints on machines that others have described: facts, and the layout that it gives them.

Sources of the tables are named beside them; the XML has those elements of `nvidia-smi -q -x` that the doctor reads, as
they stand in influxdata/telegraf, plugins/inputs/nvidia_smi/testdata: a100-sxm4-v12.xml (driver 535),
dual_a5000-v13.xml (driver 590) and tesla-t4.xml (driver 515).

"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

Links = Callable[[int, int], str]


def topo(
    gpus: int,
    link: Links,
    numa: Sequence[str],
    nics: Sequence[str] = (),
    near: Mapping[int, str] | None = None,
    *,
    is_underlined: bool = False,
) -> str:
    """Returns `nvidia-smi topo -m`: `link` is between two GPUs; `near` says for each GPU its way to each adapter.

    The text of `near` has one word an adapter. Drivers before 550 underline the head even where nobody sees it.
    """
    names = [f"GPU{each}" for each in range(gpus)] + [f"NIC{each}" for each in range(len(nics))]
    head = "\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{head}\x1b[0m" if is_underlined else head]
    ways = {gpu: words.split() for gpu, words in (near or {}).items()}
    for gpu in range(gpus):
        cells = [" X " if other == gpu else link(gpu, other) for other in range(gpus)]
        lines.append("\t".join([f"GPU{gpu}", *cells, *ways.get(gpu, []), "0-55,112-167", numa[gpu], "", "N/A"]))
    for nic in range(len(nics)):
        cells = [ways[gpu][nic] for gpu in range(gpus)] + [
            " X " if other == nic else "SYS" for other in range(len(nics))
        ]
        lines.append("\t".join([f"NIC{nic}", *cells, "", "", "", ""]))
    legend = "".join(f"  NIC{number}: {name}\n" for number, name in enumerate(nics))
    return "\n".join(lines) + "\n" + LEGEND + (f"\nNIC Legend:\n\n{legend}" if nics else "")


def one_near(nics: int, ways: Mapping[int, Sequence[int]], close: str) -> dict[int, str]:
    """Returns for each GPU its way to each adapter: `close` to those in `ways`, SYS to the others."""
    return {gpu: " ".join(close if nic in found else "SYS" for nic in range(nics)) for gpu, found in ways.items()}


def p2p(gpus: int, state: Links) -> str:
    """Returns `nvidia-smi topo -p2p r`."""
    lines = [" \t" + "\t".join(f"GPU{each}" for each in range(gpus)) + "\t"]
    for gpu in range(gpus):
        cells = ["X" if other == gpu else state(gpu, other) for other in range(gpus)]
        lines.append(f" GPU{gpu}\t" + "\t".join(cells) + "\t")
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  GNS  = GPU not supported\n"


# HGX H100 with ten adapters, each GPU next to its own. Source: github.com/NVIDIA/nccl issue 1264
HGX_H100 = topo(
    8,
    lambda a, b: "NV18",
    "00001111",
    [f"mlx5_{each}" for each in range(10)],
    one_near(10, dict(enumerate([[0], [1], [2], [5], [6], [7], [8], [9]])), "PIX"),
)
# DGX A100, two GPUs and two adapters behind each switch, two adapters at no GPU. Sources: NVIDIA/nccl issue 1505,
# rapidsai/ucx-py issue 749
DGX_A100 = topo(
    8,
    lambda a, b: "NV12",
    "33117755",
    [f"mlx5_{each}" for each in range(12)],
    one_near(12, {gpu: [(0, 2, 6, 8)[gpu // 2], (1, 3, 7, 9)[gpu // 2]] for gpu in range(8)}, "PXB"),
    is_underlined=True,
)
# DGX-1 with V100: a hybrid cube mesh. Source: NVIDIA/nccl issue 671
_CUBE = {
    **dict.fromkeys(((0, 1), (0, 2), (1, 3), (2, 3), (4, 5), (4, 6), (5, 7), (6, 7)), 1),
    **dict.fromkeys(((0, 3), (1, 2), (0, 4), (1, 5), (2, 6), (3, 7), (4, 7), (5, 6)), 2),
}
DGX_1 = topo(
    8, lambda a, b: f"NV{_CUBE[min(a, b), max(a, b)]}" if (min(a, b), max(a, b)) in _CUBE else "SYS", "00001111"
)
# A 5090 on one CPU, pairs of 4090 and 5090 on the other. Source: noonghunna/club-3090 issue 46
MIXED = topo(
    5,
    lambda a, b: "SYS" if 0 in (a, b) else "PHB" if (min(a, b), max(a, b)) in {(1, 2), (3, 4)} else "NODE",
    "10000",
)
# Two 5090 behind one host bridge, which have no P2P. Source: noonghunna/club-3090 issue 1229
TWO_5090 = topo(2, lambda a, b: "PHB", "00")
TWO_5090_P2P = p2p(2, lambda a, b: "GNS")

HEALTHY: Mapping[str, str] = {
    "product_name": "NVIDIA H100 80GB HBM3",
    "persistence_mode": "Enabled",
    "mig_mode/current_mig": "Disabled",
    "gpu_recovery_action": "None",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "16x",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "16x",
    "clocks_event_reasons/clocks_event_reason_gpu_idle": "Active",
    "clocks_event_reasons/clocks_event_reason_sw_power_cap": "Not Active",
    "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Not Active",
    "fb_memory_usage/used": "4 MiB",
    "compute_mode": "Default",
    "ecc_mode/current_ecc": "Enabled",
    "ecc_mode/pending_ecc": "Enabled",
    "ecc_errors/volatile/sram_uncorrectable_parity": "0",
    "ecc_errors/volatile/dram_uncorrectable": "0",
    "ecc_errors/aggregate/dram_uncorrectable": "0",
    "remapped_rows/remapped_row_pending": "No",
    "remapped_rows/remapped_row_failure": "No",
    "temperature/gpu_temp": "31 C",
    "gpu_power_readings/current_power_limit": "700.00 W",
    "gpu_power_readings/default_power_limit": "700.00 W",
    "fabric/state": "Completed",
}
"""A GPU with which nothing is wrong: path of an element → its text."""


def smi_xml(*gpus: Mapping[str, str], driver: str = "570.158.01", cuda: str = "12.8") -> str:
    """Returns `nvidia-smi -q -x`; each GPU says in what it differs from a healthy one."""
    bodies = "".join(
        f'<gpu id="00000000:{16 + order:02X}:00.0">{_nested({**HEALTHY, **gpu})}</gpu>\n'
        for order, gpu in enumerate(gpus)
    )
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"<driver_version>{driver}</driver_version><cuda_version>{cuda}</cuda_version>\n{bodies}</nvidia_smi_log>\n"
    )


def _nested(texts: Mapping[str, str]) -> str:
    """Returns elements by their paths; those with the same beginning share their parents."""
    inner: dict[str, dict[str, str]] = {}
    found = ""
    for path, text in texts.items():
        name, slash, rest = path.partition("/")
        if slash:
            inner.setdefault(name, {})[rest] = text
        else:
            found += f"<{name}>{text}</{name}>"
    return found + "".join(f"<{name}>{_nested(below)}</{name}>" for name, below in inner.items())
