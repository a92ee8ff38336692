"""Facts about one machine: plain records that travel over ssh as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dstrain.facts.attention_kernels import AttentionKernels
from dstrain.facts.deepspeed_ops import Lock
from dstrain.facts.network import Interface
from dstrain.records import type_config


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A query to a machine."""

    __pydantic_config__ = type_config

    is_quick: bool = False
    """Whether to probe only what matters before a launch: no hub, no topology, no route."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks in addition to the machine's own; no secrets."""
    others: tuple[str, ...] = ()
    """The other hosts of the run, as the hostfile names them."""
    master: str | None = None
    """The host of rank 0, whose name every other host must resolve; None on a single host."""
    port: int | None = None
    """The port on which rank 0 will listen, on its own host."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders that the run writes, by purpose: `output`, `nvme`."""
    paths: tuple[str, ...] = ()
    """Files and folders that every rank reads."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """Internet addresses to try: name → URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions."""

    python: str
    tested_pythons: tuple[str, ...]
    """Versions of Python that dstrain is tested with, such as `3.11`; empty if dstrain is not installed."""
    packages: Mapping[str, str | None]
    """Version of each package that dstrain needs; None if it is not installed."""
    ranges: Mapping[str, str]
    """Package → the versions that dstrain is tested with, such as `<0.20,>=0.19.8`."""
    kernels: Mapping[str, str | None]
    """Version of each package with kernels of linear attention; None if it is not installed."""
    compilers: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each package that compiles these kernels; None if it is not installed."""
    same: Mapping[str, str | None]
    """Versions that must be the same on every host."""
    torch_cuda: str | None
    """The CUDA that torch was built for, such as `12.8`; None for a torch without CUDA, or without torch."""
    nvcc: str | None
    """The release of nvcc, such as `12.8`; None if it is not installed."""
    nvcc_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The tools that build DeepSpeed's extensions, and the extensions that are built."""

    compiler: str | None
    """The C++ compiler that PyTorch would use; None if it is missing."""
    has_ninja: bool
    has_python_headers: bool
    has_libaio: bool
    has_numactl: bool
    has_cuda_toolkit: bool
    installer: str | None
    """The system's package manager: `apt-get`, `dnf` …"""
    built: tuple[str, ...]
    locks: tuple[Lock, ...]
    """Locks of extensions that no visible process holds."""
    architectures: str = ""
    """TORCH_CUDA_ARCH_LIST: architectures that CUDA code is compiled for; empty: the present GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    """Name of the device, such as `mlx5_0`."""
    state: str
    """Such as `ACTIVE` or `DOWN`."""
    gbits_per_s: float
    link_layer: str
    """`InfiniBand` or `Ethernet`."""
    interface: str | None
    """The network interface of the same hardware; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Interfaces, routes to the other hosts, RDMA devices, and the port of rank 0."""

    interfaces: tuple[Interface, ...]
    routes: Mapping[str, str | None]
    """Other host → this machine's address that reaches it; None if its name cannot be resolved."""
    default_address: str | None
    """This machine's address for the default route."""
    master_is_known: bool
    """Whether the name of rank 0's host can be resolved."""
    rdma: tuple[RdmaPort, ...]
    port_user: str | None
    """The program that listens on the port of rank 0; None if it is free, or was not checked."""

    @property
    def active_ports(self) -> list[RdmaPort]:
        """The RDMA ports that work."""
        return [port for port in self.rdma if port.state == "ACTIVE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The system's limits for a process."""

    shm_bytes: int | None
    """Size of /dev/shm; None if it is not mounted."""
    shm_free_bytes: int | None
    memlock_bytes: int | None
    """Memory that a process may lock; None is unlimited."""
    open_files: int | None
    """Files that a process may have open; None is unlimited."""
    open_files_hard: int | None
    """The hard limit; None is unlimited."""
    is_container: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that the run writes, or its nearest existing parent."""

    path: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """RAM and disks."""

    ram_bytes: int
    """RAM that this machine, or its container, has."""
    available_bytes: int
    folders: Mapping[str, Folder]
    unreadable: tuple[str, ...]
    """Paths that ranks read but this user cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An internet address that was tried."""

    url: str
    """The address; a password in it is masked."""
    took_s: float | None
    """Seconds until it answered; None if it did not."""
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """Hubs, caches and proxies."""

    endpoints: Mapping[str, Endpoint]
    """The result of each attempt, by name."""
    is_offline: bool
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids asking Hugging Face."""
    caches: Mapping[str, Folder]
    """The download cache of each hub."""
    has_swanlab_login: bool
    """Whether `swanlab login` stored a key."""
    proxies: Mapping[str, str]
    """Variable → proxy; a password in it is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one machine; a subject is None if it was not probed, or its probe failed."""

    __pydantic_config__ = type_config

    host: str
    """Its own hostname."""
    time_s: float
    """Its clock, in seconds since the epoch."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Subject → why its probe failed."""
    software: Software | None = None
    attention: AttentionKernels | None = None
    toolchain: Toolchain | None = None
    gpus: Gpus | None = None
    kernel_log: KernelLog | None = None
    """Errors of NVIDIA's driver in the kernel log."""
    topology: Topology | None = None
    """How GPUs and network adapters are connected."""
    network: Network | None = None
    limits: Limits | None = None
    space: Space | None = None
    online: Online | None = None
