"""Facts about the GPUs of one machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU as `nvidia-smi -q -x` shows it; None stands for what it does not report."""

    bus: str
    """Its address, such as `0000:1b:00`."""
    name: str
    """Its name in NVML."""
    used_mib: int | None = None
    """Memory in use, in MiB."""
    users: tuple[str, ...] = ()
    """Programs that use it."""
    is_persistent: bool | None = None
    has_ecc: bool | None = None
    uncorrectable_now: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    uncorrectable_ever: int = 0
    """The same over the GPU's life."""
    repairs: tuple[str, ...] = ()
    """Memory repairs that are due or failed, by the names of their XML elements."""
    recovery: str | None = None
    """The recovery that the driver requests, such as `Reset` or `Reboot`."""
    slowdowns: tuple[str, ...] = ()
    """Why its clocks are reduced, without idleness and ordinary power capping."""
    celsius: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    has_mig: bool = False
    """Whether it is partitioned into MIG instances."""
    compute_mode: str | None = None
    """Who may use it: `Default`, `Exclusive_Process`, `Prohibited`."""
    link_width: int | None = None
    """PCIe lanes in use."""
    max_link_width: int | None = None
    """PCIe lanes of GPU and slot."""
    fabric: str | None = None
    """State of its NVSwitch fabric, such as `Completed` or `In Progress`; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The output of nvidia-smi."""

    has_driver: bool
    """Whether an NVIDIA driver or nvidia-smi is installed."""
    has_tool: bool = True
    problem: str | None = None
    """The error message of nvidia-smi."""
    is_late: bool = False
    """Whether nvidia-smi did not answer in time."""
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver runs."""
    gpus: tuple[GpuState, ...] = ()

    @property
    def kinds(self) -> str:
        """The GPUs by name, such as `8 × NVIDIA H100`."""
        return ", ".join(f"{count} × {name}" for name, count in Counter(gpu.name for gpu in self.gpus).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One kind of driver error in the kernel log, for one GPU."""

    bus: str | None
    """The GPU's address; None if the line does not name it."""
    code: int
    """NVIDIA's number of the error."""
    count: int
    age_s: float | None
    """Seconds since the last one; None if the log has no times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """The kernel's log since boot."""

    problem: str | None
    """Why it cannot be read."""
    xids: tuple[Xid, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The output of `nvidia-smi topo -m` and `-p2p r`."""

    devices: tuple[str, ...]
    """GPUs (`GPU0`, `GPU1` …), then network adapters by their RDMA names."""
    links: tuple[tuple[str, ...], ...]
    """For each device its connection to every other one: `NV18`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`."""
    numa: tuple[str, ...]
    """The NUMA node of each GPU; empty if it is not reported."""
    p2p: tuple[tuple[str, ...], ...]
    """For each GPU whether it can read every other one: `OK`, `CNS`, `GNS` …; empty if it is not reported."""

    @property
    def num_gpus(self) -> int:
        """How many of the devices are GPUs."""
        return sum(device.startswith("GPU") for device in self.devices)
