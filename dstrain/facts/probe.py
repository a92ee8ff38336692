"""Reads this machine's GPUs, RAM and files, and a model's config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain import child_process
from dstrain.choices import Hub
from dstrain.errors import InvalidConfig, Place, nearest
from dstrain.facts.cluster.gpus import Chip
from dstrain.facts.model import aliases, families
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traces import Question, Subject
from dstrain.units import MIB

_SLURM_S = 10.0
"""How long SLURM's controller may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpu:
    """One GPU that this process may use."""

    name: str
    """Its NVML name: `NVIDIA A100-SXM4-80GB`."""
    memory_mib: int
    """Total memory in MiB, as nvidia-smi shows it; 0 if NVML does not report it."""
    index: int
    """Its number in nvidia-smi."""
    uuid: str
    """`GPU-…`."""
    chip: Chip | None = None
    """Its cores and clocks; None if NVML does not report them."""


def local_gpus() -> list[LocalGpu]:
    """Returns the NVIDIA GPUs in CUDA_VISIBLE_DEVICES, in its order; none without a driver. Never raises."""
    return _visible(_nvml_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")
"""Device files of the NVIDIA driver: Linux, WSL, Jetson."""


def _nvml_gpus() -> list[LocalGpu]:
    if not any(Path(file).exists() for file in _DRIVERS):
        return []
    try:
        import pynvml  # type: ignore[import-untyped]  # here: reading a plan on a laptop must not need a driver

        pynvml.nvmlInit()
    except Exception:  # a missing or broken driver fails in many ways, and each means that no GPU can be used
        return []
    gpus = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                memory_mib = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB
            except pynvml.NVMLError:  # GPUs that share the RAM have no memory of their own
                memory_mib = 0
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            chip = _chip(pynvml, handle)
            gpus.append(LocalGpu(name=str(name), memory_mib=memory_mib, index=index, uuid=str(uuid), chip=chip))
    except pynvml.NVMLError:  # a GPU fell off the bus: those before it still work
        pass
    finally:
        pynvml.nvmlShutdown()
    return gpus


def _chip(nvml: Any, handle: Any) -> Chip | None:
    """Returns the cores and clocks of a GPU; None if one is not reported, as for virtual GPUs."""
    try:
        return Chip(
            num_cores=nvml.nvmlDeviceGetNumGpuCores(handle),
            sm_clock_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
            memory_bus_bits=nvml.nvmlDeviceGetMemoryBusWidth(handle),
            compute_capability=nvml.nvmlDeviceGetCudaComputeCapability(handle),
        )
    except nvml.NVMLError:
        return None


def _visible(gpus: list[LocalGpu], wanted: str | None) -> list[LocalGpu]:
    """Returns the GPUs that `wanted` lists by number or UUID prefix, up to the first unknown one.

    Source: CUDA C++ programming guide, environment variables: CUDA_VISIBLE_DEVICES
    """
    if wanted is None:
        return gpus
    chosen: list[LocalGpu] = []
    for word in (part.strip() for part in wanted.split(",")):
        by_uuid = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        matches = by_uuid or [gpu for gpu in gpus if word == str(gpu.index)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:  # CUDA shows no GPU at all if one is listed twice
            return []
        chosen += matches
    return chosen


def host_memory_bytes() -> int:
    """Returns the RAM that this process may use: the machine's, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such cgroup version, or `max`
            continue
    return total


def slurm_job(job: str) -> str:
    """Returns SLURM's description of a job, node by node; empty if it does not answer."""
    try:
        return child_process.run(["scontrol", "show", "job", "--details", job], os.environ, _SLURM_S).out
    except OSError:
        return ""


def read_text(path: Path) -> str:
    """Returns the text of a user's file. Raises InvalidConfig if it is missing or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig("no such file", place=Place(file=str(path))) from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        place = Place(file=str(path), line=line, column=column)
        raise InvalidConfig("not UTF-8 text", place=place, hint="Save it as UTF-8.") from None
    except OSError as error:
        raise InvalidConfig(f"cannot be read: {error.strerror or error}", place=Place(file=str(path))) from None


def read_model(name: str, *, hub: Hub = Hub.HF, way: Question | None = None) -> ModelFacts:
    """Returns the facts of the model `name`: a local folder or config.json, else an alias, else an id on the hub.

    With `way`, an unknown family is traced as trained in that way. Raises InvalidConfig for an unknown name,
    EnvironmentProblem if the hub cannot be reached or the tracer cannot run.
    """
    alias = aliases.resolve(name)
    path = _existing(name)
    # an output folder that has the name of a known model is not meant
    if path is not None and (alias is None or path.is_file() or (path / "config.json").is_file()):
        return _read_local(path, way)
    if alias is not None:
        return _known_model(name, hub, *alias, way=way)
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise InvalidConfig(f"{name}: no such folder or file", hint="Give a folder that contains config.json.")
    from dstrain.facts.model import hub_config

    if not hub_config.is_hub_id(name):
        raise InvalidConfig(f'"{name}" is neither a known model nor a folder', hint=_meant(name))
    try:
        config = hub_config.fetch_config(name, hub)
    except InvalidConfig as error:
        raise InvalidConfig(error.problem, hint=error.hint or _meant(name)) from None
    return _facts(config, name=name, source=name, way=way)


def _facts(config: Mapping[str, object], *, name: str, source: str, way: Question | None) -> ModelFacts:
    """Returns facts from the family's row, and what it does not say from a trace of Transformers' own code."""
    model_type, known = config.get("model_type"), None
    if way is None or not isinstance(model_type, str):
        return families.from_config(config, name=name, source=source)
    if (family := families.FAMILIES.get(model_type)) is not None:
        known = families.from_config(config, name=name, source=source)
        if not (family.traces_images and way.image_patches):
            return known
    from dstrain.facts.model import tracer

    subject = Subject(config=dict(config), source=source)
    return tracer.trace_model(subject, way, name=name, source=source, known=known)


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # the name is too long for a path, or the home directory is unknown
        return None


def _known_model(name: str, hub: Hub, alias: str, entry: aliases.Entry, *, way: Question | None) -> ModelFacts:
    """Returns the facts of a shipped model; its source is the id on the hub."""
    model_id = entry.hub_id if hub is Hub.HF else entry.modelscope_id
    if model_id is None and "/" not in name:
        raise InvalidConfig(
            f'"{name}" has no known id on {hub.value}',
            hint=f"Give the id, or `--hub hf` for {entry.hub_id}.",
        )
    own = aliases.resolve(alias)
    label = alias if own is not None and own[1] == entry else entry.hub_id
    return _facts(entry.config, name=label, source=model_id or name, way=way)


def _read_local(path: Path, way: Question | None) -> ModelFacts:
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidConfig(
            f"{folder}: no config.json in this folder",
            hint="Give a folder written by `save_pretrained` or `hf download`.",
        )
    from dstrain.facts.model import hub_config

    config = hub_config.parse_config(read_text(file), str(file))
    return _facts(config, name=folder.resolve().name, source=str(folder), way=way)


def _meant(name: str) -> str:
    """Returns a hint: the closest alias, or the kinds of legal names."""
    near = nearest(name, aliases.known())
    return f'Did you mean "{near}"?' if near else "Give a local folder, a hub id such as Qwen/Qwen3-8B, or an alias."
