"""The calibration file: measurements on similar machines that replace the planner's priors.

    {"schema": 1, "gpus": {"h100-sxm": {"gemm_ratio": 0.61, "cpu_adam_bytes_per_s": 1.3e11, "source": "8 x H100, …"}}}

Keys of `gpus` are names in dstrain's table of GPUs; priors apply to figures that are missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.gpus import GPUS, gpu
from dstrain.paths import write_together
from dstrain.records import from_data, to_data, type_config

SCHEMA = 1
"""Version of the file format."""

DEFAULT_PATH = "~/.dstrain/calibration.json"
"""The default path of the file."""

Share = Annotated[float, Gt(0), Le(1)]
Rate = Annotated[float, Gt(0)]
Factor = Annotated[float, Ge(1)]
Size = Annotated[int, Ge(0)]


LINK_RATES = MappingProxyType({"intra_link": "intra_bus_bytes_per_s", "inter_link": "inter_bus_bytes_per_s"})
"""Fields of `Measured` that name a link → the rate that belongs to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements with one kind of GPU; each field may be missing."""

    __pydantic_config__ = type_config

    source: str | None = None
    """Machine, versions and date of the measurement, as free text."""

    gemm_ratio: Share | None = None
    """FLOP/s of large matrix products during training, over the dense peak of the data sheet."""
    attention_ratio: Share | None = None
    """FLOP/s of attention, forward and backward together, over the same peak; only the causal half counts."""
    hbm_ratio: Share | None = None
    """Bytes per second of elementwise kernels, over the memory bandwidth of the data sheet."""
    launch_s: Rate | None = None
    """CPU time of one kernel launch in eager PyTorch, in seconds."""

    intra_bus_bytes_per_s: Rate | None = None
    """Bus bandwidth of a large all-gather inside one node, as nccl-tests counts it."""
    inter_bus_bytes_per_s: Rate | None = None
    """Bus bandwidth of a large all-gather over several nodes with all their GPUs."""
    intra_link: str | None = None
    """Name of the link inside a node of which `intra_bus_bytes_per_s` is; None: of any."""
    inter_link: str | None = None
    """Name of the link between nodes of which `inter_bus_bytes_per_s` is; None: of any."""
    overlap_slowdown_ratio: Share | None = None
    """Slowdown of a computation by an overlapping collective, as a share of the collective's time."""

    pcie_bytes_per_s: Rate | None = None
    """Bytes per second between one GPU and pinned host memory, in one direction, all GPUs of the node at once."""
    cpu_adam_bytes_per_s: Rate | None = None
    """Bytes per second of DRAM traffic of DeepSpeed's CPU Adam, all ranks of a node together."""
    nvme_read_bytes_per_s: Rate | None = None
    """Bytes per second read from the NVMe drives of one node."""
    nvme_write_bytes_per_s: Rate | None = None
    """Bytes per second written to the NVMe drives of one node."""

    context_bytes: Size | None = None
    """Memory of one GPU outside torch with one rank alone: context and kernel modules."""
    nccl_bytes: Size | None = None
    """Extra memory that NCCL takes with two or more ranks."""
    reserved_ratio: Factor | None = None
    """Bytes reserved by the caching allocator over predicted live bytes, at the peak."""

    uncertain: tuple[str, ...] = ()
    """Fields that a calibration knows little better than the prior: ranges of times do not narrow by them."""

    def of_others(self, *, intra_link: str, inter_link: str) -> tuple[str, ...]:
        """Returns the fields that name a link outside the cluster."""
        links = {"intra_link": intra_link, "inter_link": inter_link}
        return tuple(link for link, name in links.items() if getattr(self, link) not in (None, name))

    def on(self, *, intra_link: str, inter_link: str) -> Measured:
        """Returns the measurements without rates of links outside the cluster."""
        others = self.of_others(intra_link=intra_link, inter_link=inter_link)
        dropped: dict[str, Any] = {field: None for link in others for field in (link, LINK_RATES[link])}
        return replace(self, **dropped) if dropped else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The calibration file."""

    __pydantic_config__ = type_config

    schema: int = SCHEMA
    """Version of the file format."""
    gpus: Mapping[str, Measured] = field(default_factory=dict)
    """Measurements by the GPU's name in dstrain's table."""

    def of(self, gpu_name: str) -> Measured:
        """Returns the measurements with that GPU, by default none."""
        return self.gpus.get(gpu_name, NOTHING)


NOTHING = Measured()
"""No measurement: all priors apply."""


def parse(text: str, name: str) -> Calibration:
    """Returns the calibration in the text of a file called `name`.

    Raises InvalidConfig with the place of every problem: invalid JSON, a newer schema, an unknown key or GPU, an
    impossible figure.

    >>> parse('{"schema": 1, "gpus": {"a100-80g": {"gemm_ratio": 0.7}}}', "calibration.json").of("a100-80g").gemm_ratio
    0.7
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"{name}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidConfig(f"{name}: nested too deeply") from None
    if not isinstance(data, Mapping):
        raise InvalidConfig(f"{name}: not an object", hint=f'Begin with {{"schema": {SCHEMA}, "gpus": {{…}}}}.')
    schema = data.get("schema")
    # True equals 1
    if schema != SCHEMA or isinstance(schema, bool):
        problem = '"schema" is missing' if schema is None else f"schema is {json.dumps(schema)}"
        raise InvalidConfig(
            f"{name}: /schema: {problem}; this version reads {SCHEMA}", hint="Measure again, or update dstrain."
        )
    outer = from_data(Calibration, {**data, "gpus": {}}, locate=lambda place: f"{name}: /{'/'.join(map(str, place))}")
    return replace(outer, gpus=_entries(data.get("gpus", {}), name))


def _entries(data: object, name: str) -> dict[str, Measured]:
    """Returns the measurements by GPU. Raises InvalidConfig with the problems of all of them together."""
    if not isinstance(data, Mapping):
        raise InvalidConfig(f"{name}: /gpus: not an object", hint='Write {"h100-sxm": {…}}.')
    entries: dict[str, Measured] = {}
    problems = []
    for key, value in data.items():
        try:
            entries[key] = _entry(key, value, f"{name}: /gpus/{key}")
        except InvalidConfig as error:
            problems.append(error.problem)
    if problems:
        raise InvalidConfig("\n".join(problems))
    return entries


def _entry(key: str, data: object, where: str) -> Measured:
    """Returns the measurements of one GPU. Raises InvalidConfig unless the key is its name in the table."""
    if key not in GPUS:
        try:
            meant = f'write "{gpu(key).name}"'
        except InvalidConfig as error:
            meant = (error.hint or "").rstrip(".")
            meant = meant[:1].lower() + meant[1:]
        raise InvalidConfig(f'{where}: "{key}" is not the name of a GPU; {meant}')
    if GPUS[key].is_cpu:
        raise InvalidConfig(f"{where}: no time is predicted for a CPU; remove it")
    if not isinstance(data, Mapping):
        raise InvalidConfig(f"{where}: not an object")
    return from_data(Measured, data, locate=lambda place: "/".join((where, *map(str, place))))


def read(path: str | None = None) -> Calibration:
    """Returns the calibration in a file; by default the user's own, which may be missing.

    Raises InvalidConfig if the given file is missing, or if a file is damaged.
    """
    file = Path(path or DEFAULT_PATH).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            return Calibration()
        raise InvalidConfig(f"{path}: no such file", hint="Leave it out to plan with priors.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{file}: cannot be read: {error}") from None
    return parse(text, str(file))


def save(gpu_name: str, measured: Measured, path: str | None = None) -> Path:
    """Writes the measurements with one kind of GPU into a file, in place of its present ones; returns the file.

    By default it is the user's own. A missing file is made. Raises InvalidConfig if the present file is damaged, which
    stays as it is, and EnvironmentProblem if it cannot be written.
    """
    file = Path(path or DEFAULT_PATH).expanduser()
    present = read(str(file)) if file.exists() else Calibration()
    entries = {
        name: {key: value for key, value in to_data(entry).items() if value not in (None, [])}
        for name, entry in {**present.gpus, gpu_name: measured}.items()
    }
    write_together({file: json.dumps({"schema": SCHEMA, "gpus": entries}, indent=2, ensure_ascii=False) + "\n"})
    return file
