"""Facts about one machine: plain records that travel over ssh as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dstrain.doctor.gpu_facts import Gpus, KernelLog, Topology
from dstrain.facts.deepspeed_ops import Lock
from dstrain.facts.network_interface import Interface
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a machine is asked."""

    __pydantic_config__ = type_config

    is_quick: bool = False
    """Whether only what matters before a launch is looked at: no hub, no topology, no route."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the environment of the ranks has beside the machine's own; no secrets."""
    others: tuple[str, ...] = ()
    """The other hosts of the run, as the hostfile names them."""
    master: str | None = None
    """The host of rank 0, which every other host must find by this name; None on a single host."""
    port: int | None = None
    """The port on which rank 0 will listen, on its own host."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders that the run writes, by what they are for: `output`, `nvme`."""
    paths: tuple[str, ...] = ()
    """Files and folders that every rank reads."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """Internet addresses to try: name → URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions."""

    python: str
    tested_pythons: tuple[str, ...]
    """Pythons that dstrain is tested with, such as `3.11`; empty where dstrain itself is not installed."""
    packages: Mapping[str, str | None]
    """Version of each package that dstrain needs; None where it is not installed."""
    ranges: Mapping[str, str]
    """Package → the versions that dstrain is tested with, such as `<0.20,>=0.19.8`."""
    same: Mapping[str, str | None]
    """Version of what must be the same on every host."""
    torch_cuda: str | None
    """The CUDA that torch was built for, such as `12.8`; None for a torch without CUDA, or without torch."""
    nvcc: str | None
    """The release of nvcc, such as `12.8`; None if it is not installed."""
    nvcc_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What DeepSpeed's extensions are built with, and which of them are built."""

    compiler: str | None
    """The C++ compiler that PyTorch would use; None where it is not there."""
    has_ninja: bool
    has_python_headers: bool
    has_libaio: bool
    has_cuda_toolkit: bool
    installer: str | None
    """The system's package manager: `apt-get`, `dnf` …"""
    folder: str
    built: tuple[str, ...]
    locks: tuple[Lock, ...]
    """Locks of extensions that no process of this machine is seen to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    """Name of the device, such as `mlx5_0`."""
    port: int
    state: str
    """Such as `ACTIVE` or `DOWN`."""
    gbits_per_s: float
    link_layer: str
    """`InfiniBand` or `Ethernet`."""
    interface: str | None
    """The network interface of the same hardware; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Interfaces, ways to the other hosts, RDMA devices, and the port of rank 0."""

    interfaces: tuple[Interface, ...]
    routes: Mapping[str, str | None]
    """Other host → the own address from which it is reached; None where its name is not known here."""
    default_address: str | None
    """The own address from which the internet would be reached."""
    master_is_known: bool
    """Whether the host of rank 0 is found by its name."""
    rdma: tuple[RdmaPort, ...]
    port_user: str | None
    """Who listens on the port of rank 0; None where it is free, or was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the system allows a process."""

    shm_bytes: int | None
    """Size of /dev/shm; None if it is not mounted."""
    shm_free_bytes: int | None
    memlock_bytes: int | None
    """Memory that a process may lock; None is unlimited."""
    open_files: int | None
    """Files that a process may have open; None is unlimited."""
    open_files_hard: int | None
    """The most it may raise that to; None is unlimited."""
    is_container: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that the run writes, or its nearest parent that is there."""

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
    """An address on the internet that was tried."""

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
    """Where hubs keep what was downloaded, by the hub's name."""
    has_swanlab_login: bool
    """Whether `swanlab login` stored a key."""
    proxies: Mapping[str, str]
    """Variable → proxy; a password in it is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one machine says; a subject is None where it was not looked at, or the look failed."""

    __pydantic_config__ = type_config

    host: str
    """Its own hostname."""
    time_s: float
    """Its clock, in seconds since the epoch."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Subject → why its probe failed."""
    software: Software | None = None
    toolchain: Toolchain | None = None
    gpus: Gpus | None = None
    kernel_log: KernelLog | None = None
    """What the driver of NVIDIA wrote into the kernel's log."""
    topology: Topology | None = None
    """How GPUs and network adapters are connected."""
    network: Network | None = None
    limits: Limits | None = None
    space: Space | None = None
    online: Online | None = None
