"""Stores the results of `dstrain doctor --network`, one entry per set of hosts, for later plans.

    {"schema": 1, "measured": [{"hosts": ["gpu01", "gpu02"], "gpu": "h100-sxm", "gpus_per_node": 8, "backend": "nccl",
      "date": "2026-11-22", "inter_bus_bytes_per_s": 3.4e11, "intra_bus_bytes_per_s": 3.6e11, "latency_s": 4e-5}]}

An entry applies to exactly its hosts with its GPUs. Errors in this file never stop a plan: unreadable entries are
skipped and reported. To discard a measurement, remove its entry or delete the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.calibration import Calibration
from dstrain.facts.cluster.cluster import Cluster, Link, Origin
from dstrain.paths import write_together
from dstrain.records import from_data, to_data, type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All-reduces of one size."""

    __pydantic_config__ = type_config

    num_bytes: int
    """Bytes of the reduced tensor."""
    seconds: float
    """Time of one call on the slowest rank, the median of several."""
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A measurement over all ranks of all hosts."""

    __pydantic_config__ = type_config

    backend: str
    """`nccl` or `gloo`."""
    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    """Ranks on each of them."""
    gpu: str | None
    """NVML's name of rank 0's GPU; None on the CPU."""
    gpu_memory_mib: int
    """Its memory, 0 on the CPU."""
    latency_s: float
    """Time of the smallest all-reduce."""
    timings: tuple[Timing, ...]
    """From the smallest size to the largest one."""
    seconds: float
    """Duration of the measurement."""

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth of the largest all-reduce."""
        return self.timings[-1].bus_bytes_per_s


def bus_bytes_per_s(num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Returns the bus bandwidth of an all-reduce: bytes over seconds, times 2 (n - 1) / n.

    Source: nccl-tests doc/PERFORMANCE.md

    >>> bus_bytes_per_s(8e9, 1.0, 8)
    14000000000.0
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


SCHEMA = 1
"""Version of the file format."""

DEFAULT_PATH = "~/.dstrain/links.json"

_SUFFIX = " (measured)"
_LOOPBACK = frozenset({"localhost", "localhost.localdomain", "127.0.0.1", "::1"})

Rate = Annotated[float, Gt(0)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """The links of one set of hosts."""

    __pydantic_config__ = type_config

    hosts: tuple[str, ...]
    """Host names, as returned by `names`."""
    gpu: str
    """Name of the GPU in dstrain's table; `cpu` without GPUs."""
    gpus_per_node: Count
    """Participating GPUs of each host."""
    backend: str
    """`nccl` or `gloo`."""
    date: str
    """The day, as 2026-11-22."""
    inter_bus_bytes_per_s: Rate | None = None
    """Bus bandwidth of a large all-reduce over all GPUs of all hosts; None for one host."""
    intra_bus_bytes_per_s: Rate | None = None
    """The same over the GPUs of one host; None for several hosts."""
    latency_s: Rate | None = None
    """Time of the smallest all-reduce over all ranks, for the verdict on small buckets; the planner does not use it."""

    @property
    def source(self) -> str:
        """Date and command of the measurement, for people."""
        return f"measured on {self.date} by dstrain doctor --network"

    @property
    def _key(self) -> tuple[object, ...]:
        return (frozenset(self.hosts), self.gpu, self.gpus_per_node)


def names(hosts: Iterable[str], own: str) -> tuple[str, ...]:
    """Returns host names in canonical form: without user and case, and the first part of `own` for this machine.

    >>> names(["me@GPU02", "localhost"], "gpu01.cluster")
    ('gpu01', 'gpu02')
    """
    whole = own.casefold().rstrip(".")
    short = whole.partition(".")[0]
    folded = (host.rpartition("@")[2].casefold().rstrip(".") for host in hosts)
    return tuple(sorted(short if name in {whole, short, *_LOOPBACK} else name for name in folded))


def of_network(network: Network, gpu: str, *, date: str, own: str) -> MeasuredLinks | None:
    """Returns the entry for a measurement; None if hosts differ in their slots, since plans are for equal nodes."""
    if len(set(network.slots)) > 1:
        return None
    return MeasuredLinks(
        hosts=names(network.hosts, own),
        gpu=gpu,
        gpus_per_node=network.slots[0],
        backend=network.backend,
        date=date,
        inter_bus_bytes_per_s=network.bus_bytes_per_s if len(network.hosts) > 1 else None,
        intra_bus_bytes_per_s=network.bus_bytes_per_s if len(network.hosts) == 1 else None,
        latency_s=network.latency_s,
    )


def find(
    entries: Sequence[MeasuredLinks], hosts: Sequence[str], *, gpu: str, gpus_per_node: int
) -> MeasuredLinks | None:
    """Returns the newest measurement of these hosts with these GPUs; `hosts` are in canonical form (`names`)."""
    matches = [entry for entry in entries if entry._key == (frozenset(hosts), gpu, gpus_per_node)]
    return matches[-1] if matches else None


def parse(text: str) -> tuple[list[MeasuredLinks], str | None]:
    """Returns the readable entries of a file's text, and the problems of the others, or None.

    >>> parse('{"schema": 2}')
    ([], 'schema is 2; this version reads 1')
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [], f"not JSON: {error}"
    if not isinstance(data, dict) or not isinstance(data.get("measured", []), list):
        return [], "not written by dstrain doctor --network"
    if data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
        return [], f"schema is {json.dumps(data.get('schema'))}; this version reads {SCHEMA}"
    entries, problems = [], []
    for number, entry in enumerate(data.get("measured", [])):
        try:
            entries.append(_entry(entry, number))
        except InvalidConfig as error:
            problems.append(error.problem.replace("\n", "; "))
    return entries, "; ".join(problems) or None


def _entry(data: Any, number: int) -> MeasuredLinks:
    return from_data(MeasuredLinks, data, locate=lambda place: "/".join(("/measured", str(number), *map(str, place))))


def read(path: str = DEFAULT_PATH) -> tuple[list[MeasuredLinks], str | None]:
    """Returns the readable entries of the file, and a line about the problems of the others, or None. Never raises."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the home directory is unknown
        return [], f"{path} is ignored: {error}"
    entries, problem = parse(text)
    return entries, f"{path} is ignored{' in part' if entries else ''}: {problem}" if problem else None


def save(entry: MeasuredLinks, path: str = DEFAULT_PATH) -> Path:
    """Writes an entry to the file, in place of an earlier one of the same hosts and GPUs; returns the file.

    A file with unreadable parts, such as a newer dstrain's, is copied to `.bak` first. Raises EnvironmentProblem
    if the file cannot be written.
    """
    present, problem = read(path)
    kept = [other for other in present if other._key != entry._key]
    entries = [{key: value for key, value in to_data(item).items() if value is not None} for item in (*kept, entry)]
    file = Path(path).expanduser()
    backups = {}
    if problem is not None and file.is_file():
        backups[file.with_name(f"{file.name}.bak")] = file.read_bytes().decode(errors="surrogateescape")
    text = json.dumps({"schema": SCHEMA, "measured": entries}, indent=2, ensure_ascii=False) + "\n"
    write_together({file: text}, backups=backups)
    return file


def with_links(cluster: Cluster, measured: MeasuredLinks) -> Cluster:
    """Returns the cluster with measured links; a given link between nodes stays."""
    if measured.intra_bus_bytes_per_s is not None:
        latency_s = measured.latency_s if measured.inter_bus_bytes_per_s is None else None  # else of all hosts' ranks
        link = _link(cluster.intra_link, measured.intra_bus_bytes_per_s, measured, latency_s)
        cluster = replace(cluster, intra_link=link, intra_link_origin=Origin.MEASURED)
    if measured.inter_bus_bytes_per_s is not None and cluster.inter_link_origin is not Origin.GIVEN:
        rate = measured.inter_bus_bytes_per_s / measured.gpus_per_node
        link = _link(cluster.inter_link, rate, measured, measured.latency_s)
        cluster = replace(cluster, inter_link=link, inter_link_origin=Origin.MEASURED)
    return cluster


def _link(link: Link, bytes_per_s: float, measured: MeasuredLinks, latency_s: float | None) -> Link:
    name = nominal_name(link) + _SUFFIX
    return Link(name=name, bytes_per_s=bytes_per_s, source=measured.source, latency_s=latency_s)


def nominal_name(link: Link) -> str:
    """Returns the name of a measured link in the table of links."""
    return link.name.removesuffix(_SUFFIX)


def with_rates(calibration: Calibration, cluster: Cluster) -> Calibration:
    """Returns the calibration with the bus bandwidths of a cluster whose links were measured.

    Measured rates are rates of collectives; the planner would otherwise take them for the peak of the wire.
    """
    rates: dict[str, Any] = {}
    if cluster.intra_link_origin is Origin.MEASURED:
        rates |= {"intra_bus_bytes_per_s": cluster.intra_link.bytes_per_s, "intra_link": None}
    if cluster.inter_link_origin is Origin.MEASURED:
        rates |= {"inter_bus_bytes_per_s": cluster.inter_link.bytes_per_s * cluster.gpus_per_node, "inter_link": None}
    if not rates:
        return calibration
    measured = replace(calibration.of(cluster.gpu.name), **rates)
    return replace(calibration, gpus={**calibration.gpus, cluster.gpu.name: measured})
