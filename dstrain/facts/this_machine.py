"""This machine's names, software versions, visible devices, and the caches of libraries on it."""

from __future__ import annotations

import platform
import re
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

import dstrain
from dstrain.errors import EnvironmentProblem
from dstrain.facts.releases import installed

LOCAL = "localhost"
"""The host in the hostfile of a local run."""
ACCELERATOR = "DS_ACCELERATOR"
"""DeepSpeed's own switch: `cpu` trains without GPUs."""
SAME_PACKAGES = ("torch", "deepspeed", "transformers", "dstrain")
"""Packages whose versions must agree on all nodes of a run."""


def versions(also: Collection[str] = ()) -> dict[str, str | None]:
    """Returns the versions of Python, of `SAME_PACKAGES` and of others; None for packages that are not installed."""
    packages = {name: installed(name) for name in (*SAME_PACKAGES, *also)}
    # a checkout has no metadata
    return {"Python": platform.python_version(), **packages, "dstrain": dstrain.__version__}


def usual_versions(machines: Sequence[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Returns the most common version of each package; in a tie, the first machine's."""
    things = dict.fromkeys(name for versions in machines for name in versions)
    return {name: Counter(versions.get(name) for versions in machines).most_common(1)[0][0] for name in things}


def version_problems(versions: Mapping[str, str | None], usual: Mapping[str, str | None]) -> list[str]:
    """Returns how the versions of one machine differ from the majority.

    >>> version_problems({"torch": "2.12.0"}, {"torch": "2.13.0"})
    ['torch is 2.12.0; most hosts have 2.13.0']
    """
    return [
        f"{name} is {versions.get(name) or 'missing'}; most hosts have {version or 'none'}"
        for name, version in usual.items()
        if versions.get(name) != version
    ]


@cache
def names() -> frozenset[str]:
    """Returns the names and addresses under which a hostfile may mean this machine; a name server is asked once."""
    host = socket.gethostname()
    known = {host, host.partition(".")[0], socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in {socket.AF_INET, socket.AF_INET6}:
                known.add(address.address.partition("%")[0])
    return frozenset(known)


def trains_on_cpu(environment: Mapping[str, str], job_env: Mapping[str, str] | None = None) -> bool:
    """Returns whether ranks train on the CPU, given this environment and the `env` of a job, which wins."""
    return {**environment, **(job_env or {})}.get(ACCELERATOR) == "cpu"


def busy_share() -> float:
    """Returns the share of this machine's cores, 0…1, that all processes use while it waits for half a second."""
    return psutil.cpu_percent(interval=0.5) / 100


def is_this_machine(host: str, names: Collection[str]) -> bool:
    """Returns whether a host of a hostfile is this machine, given this machine's names and addresses.

    >>> is_this_machine("me@GPU01", {"gpu01", "10.0.0.1"}), is_this_machine("b", {"a"})
    (True, False)
    """
    name = host.rpartition("@")[2].casefold().rstrip(".")
    if name in {LOCAL, "localhost.localdomain", "::1"} or re.fullmatch(r"127(\.\d+){3}", name):
        return True
    return name in {known.casefold().rstrip(".") for known in names}


def visible_devices(visible: str | None) -> tuple[int, ...] | None:
    """Returns the GPU numbers in a value of CUDA_VISIBLE_DEVICES, or None if the variable is not set.

    Raises EnvironmentProblem for values that DeepSpeed's `--include` cannot express: UUIDs, MIG slices, no GPU at all.

    >>> visible_devices("2,3"), visible_devices(None)
    ((2, 3), None)
    """
    if visible is None:
        return None
    words = [word.strip() for word in visible.split(",")]
    quoted = f'CUDA_VISIBLE_DEVICES is "{visible}"'
    # isdigit alone is true of ², which int does not read, and of digits of other scripts
    if all(word.isascii() and word.isdigit() for word in words):
        ids = tuple(int(word) for word in words)
        if len(set(ids)) < len(ids):
            raise EnvironmentProblem(f"{quoted}, which lists a GPU twice", hint="List every GPU once.")
        return ids
    if any(word.startswith("MIG-") for word in words):
        hint = "`unset CUDA_VISIBLE_DEVICES`, or list whole GPUs by number: `export CUDA_VISIBLE_DEVICES=0`."
        raise EnvironmentProblem(f"{quoted}; DeepSpeed's launcher cannot start ranks on MIG slices", hint=hint)
    if any(word.startswith("GPU-") for word in words):
        hint = "`nvidia-smi -L` shows the number of each UUID; then `export CUDA_VISIBLE_DEVICES=0,1`, for example."
        raise EnvironmentProblem(f"{quoted}; DeepSpeed's launcher takes numbers, not UUIDs", hint=hint)
    hint = "`unset CUDA_VISIBLE_DEVICES`, or list GPUs by number: `export CUDA_VISIBLE_DEVICES=0,1`."
    raise EnvironmentProblem(f"{quoted}, which hides every GPU", hint=hint)


def user_cache(environment: Mapping[str, str]) -> Path:
    """Returns the folder of a user's caches: $XDG_CACHE_HOME, or else ~/.cache."""
    home = Path(environment.get("HOME") or Path.home())
    return Path(environment.get("XDG_CACHE_HOME") or home / ".cache")


def hf_home(environment: Mapping[str, str]) -> Path:
    """Returns the folder of Hugging Face's libraries. Source: huggingface_hub 2.4 constants.py."""
    return Path(environment.get("HF_HOME") or user_cache(environment) / "huggingface").expanduser()


def hf_hub_cache(environment: Mapping[str, str]) -> Path:
    """Returns the folder of what huggingface_hub has downloaded. Source: its constants.py."""
    return Path(environment.get("HF_HUB_CACHE") or hf_home(environment) / "hub").expanduser()


_OF_HUBS = ("HF_", "HUGGING_FACE_", "MODELSCOPE_")
_OF_NETWORKS = frozenset(
    {"TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}
)


def hub_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which libraries find hubs and their caches.

    >>> hub_variables({"HF_ENDPOINT": "https://hf-mirror.com", "https_proxy": "http://proxy", "NCCL_DEBUG": "INFO"})
    {'HF_ENDPOINT': 'https://hf-mirror.com', 'https_proxy': 'http://proxy'}
    """
    return {
        name: value for name, value in environment.items() if name.startswith(_OF_HUBS) or name.upper() in _OF_NETWORKS
    }


def is_hub_offline(environment: Mapping[str, str]) -> bool:
    """Returns whether the Hugging Face hub is not to be asked; the second variable counts only without the first.

    Source: huggingface_hub 2.4 constants.py: HF_HUB_OFFLINE.

    >>> [is_hub_offline({"TRANSFORMERS_OFFLINE": "1"} | first) for first in ({}, {"HF_HUB_OFFLINE": "0"})]
    [True, False]
    """
    value = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}
