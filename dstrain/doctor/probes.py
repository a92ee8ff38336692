"""Probes a machine: software, limits, RAM, disks, network and hubs; runs probes side by side with a time limit."""

from __future__ import annotations

import http.client
import os
import platform
import re
import resource
import shutil
import socket
import sysconfig
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

import psutil

from dstrain import child_process
from dstrain.child_process import Completed
from dstrain.doctor.facts import (
    Endpoint,
    Folder,
    Limits,
    Network,
    Online,
    Question,
    RdmaPort,
    Software,
    Space,
    Toolchain,
)
from dstrain.facts import network
from dstrain.facts.deepspeed_ops import OPS, extension_folder, missing_ops, torch_build, unheld_locks
from dstrain.facts.model.traits import DISTRIBUTIONS
from dstrain.facts.network import is_free
from dstrain.facts.probe import host_memory_bytes
from dstrain.facts.releases import installed
from dstrain.facts.this_machine import hf_hub_cache, is_hub_offline, versions
from dstrain.monitor.sinks.sink import has_login
from dstrain.paths import existing

_SHM = Path("/dev/shm")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")


def look_limits(question: Question, environment: Mapping[str, str]) -> Limits:
    """Returns shared memory, locked memory and open files."""
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        memlock_bytes=_limited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        open_files=_limited(soft),
        open_files_hard=_limited(hard),
        is_container=any(Path(mark).exists() for mark in _CONTAINER_MARKS),
    )


def _limited(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def look_space(question: Question, environment: Mapping[str, str]) -> Space:
    """Returns RAM, and the free space of the folders that the run writes."""
    ram = host_memory_bytes()
    return Space(
        ram_bytes=ram,
        available_bytes=min(ram, psutil.virtual_memory().available),
        folders={purpose: folder(Path(name)) for purpose, name in question.folders.items()},
        unreadable=tuple(path for path in question.paths if not os.access(path, os.R_OK)),
    )


def folder(path: Path) -> Folder:
    """Returns a folder, or its nearest parent that is there, with what is free."""
    there = existing(path.expanduser())
    free = shutil.disk_usage(there).free
    return Folder(path=str(path.expanduser()), free_bytes=free, is_writable=os.access(there, os.W_OK))


_NVCC_S = 2.0
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def look_software(question: Question, environment: Mapping[str, str]) -> Software:
    """Returns the versions; nothing heavy is imported for them."""
    ranges = _ranges()
    nvcc = nvcc_path(environment)
    return Software(
        python=platform.python_version(),
        tested_pythons=_tested_pythons(),
        packages={name: installed(name) for name in ranges},
        ranges=ranges,
        kernels={name: installed(name) for name in DISTRIBUTIONS},
        compilers={name: installed(name) for name in ("triton", "tilelang")},
        same=versions() | {name: installed(name) for name in _NCCL},
        torch_cuda=torch_build("cuda"),
        nvcc=None if nvcc is None else _release(nvcc, environment),
        nvcc_path=nvcc,
    )


def _ranges() -> dict[str, str]:
    """Returns the packages that dstrain needs, with the versions it is tested with. Source: setup.cfg, as installed."""
    try:
        required = metadata.requires("dstrain") or []
    except metadata.PackageNotFoundError:
        return {}
    ranges = {}
    for line in required:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?([^;)]*)", line)
        if match is not None and "extra ==" not in line:
            ranges[match[1]] = match[2].replace(" ", "")
    return ranges


def _tested_pythons() -> tuple[str, ...]:
    try:
        classifiers = metadata.metadata("dstrain").get_all("Classifier") or []
    except metadata.PackageNotFoundError:
        return ()
    versions = [line.rpartition(" :: ")[2] for line in classifiers if "Programming Language :: Python :: 3." in line]
    return tuple(versions)


def nvcc_path(environment: Mapping[str, str]) -> str | None:
    """Returns the nvcc that PyTorch would build with, or None. Source: torch 2.13 utils/cpp_extension.py:
    _find_cuda_home."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        path = Path(home) / "bin" / "nvcc"
        return str(path) if path.is_file() else None
    on_path = shutil.which("nvcc", path=environment.get("PATH"))
    usual = Path("/usr/local/cuda/bin/nvcc")
    return on_path or (str(usual) if usual.is_file() else None)


def _release(nvcc: str, environment: Mapping[str, str]) -> str | None:
    """Returns the release that nvcc names, such as `12.8`."""
    match = re.search(r"release (\d+\.\d+)", run([nvcc, "--version"], environment, _NVCC_S).out)
    return match[1] if match else None


_INSTALLERS = ("apt-get", "dnf", "yum", "zypper", "pacman", "apk")
_HEADERS = ("/usr/include", "/usr/local/include")
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")


def look_toolchain(question: Question, environment: Mapping[str, str]) -> Toolchain:
    """Returns compilers, headers, and the state of the extensions."""
    path = environment.get("PATH")
    # Source: torch 2.13 utils/cpp_extension.py: get_cxx_compiler
    compiler = shutil.which(environment.get("CXX", "c++").split()[0], path=path) or shutil.which("g++", path=path)
    locked = sorted(lock.parent.name for lock in extension_folder(environment).glob("*/lock"))
    unbuilt = missing_ops(OPS, environment)
    return Toolchain(
        compiler=compiler,
        has_ninja=shutil.which("ninja", path=path) is not None or util.find_spec("ninja") is not None,
        has_python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        has_libaio=_has_libaio(environment),
        has_numactl=shutil.which("numactl", path=path) is not None,
        has_cuda_toolkit=nvcc_path(environment) is not None,
        installer=next((name for name in _INSTALLERS if shutil.which(name, path=path)), None),
        built=tuple(op for op in OPS if op not in unbuilt),
        locks=tuple(unheld_locks(locked, environment)),
        architectures=environment.get("TORCH_CUDA_ARCH_LIST", ""),
    )


def _has_libaio(environment: Mapping[str, str]) -> bool:
    """Returns whether a compiler would find libaio, in the usual folders or where CFLAGS and LDFLAGS point."""
    flags = f"{environment.get('CFLAGS', '')} {environment.get('CXXFLAGS', '')}"
    headers = [*_HEADERS, *re.findall(r"-I\s*(\S+)", flags), *environment.get("CPATH", "").split(":")]
    libraries = [*_LIBRARIES, *re.findall(r"-L\s*(\S+)", environment.get("LDFLAGS", ""))]
    libraries += environment.get("LIBRARY_PATH", "").split(":")
    multiarch = sysconfig.get_config_var("MULTIARCH")
    libraries += [f"{folder}/{multiarch}" for folder in _LIBRARIES] if multiarch else []
    has_header = any((Path(folder) / "libaio.h").is_file() for folder in headers if folder)
    has_library = any((Path(folder) / name).exists() for folder in libraries if folder for name in _NAMES)
    return has_header and has_library


_NAMES = ("libaio.so", "libaio.a")
"""Library that `-laio` looks for."""


_NAMES_S = 3.0
"""How long names of hosts may take to be looked up."""
_RDMA = Path("/sys/class/infiniband")


def look_network(question: Question, environment: Mapping[str, str]) -> Network:
    """Returns the network as this machine sees it; nothing is sent."""
    asked = () if question.is_quick else (*question.others, *([question.master] if question.master else []))
    looks = {host: partial(network.source_address, host) for host in asked}
    sources = all_at_once(looks, _NAMES_S)
    return Network(
        interfaces=network.interfaces(),
        routes={host: sources[host].value for host in asked if host != question.master or host in question.others},
        default_address=network.default_address(),
        master_is_known=question.master is None or question.is_quick or sources[question.master].value is not None,
        rdma=rdma_ports(_RDMA),
        port_user=None if question.port is None else _user(question.port),
    )


def rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Returns the ports of RDMA devices below `/sys/class/infiniband`."""
    ports = []
    for port in sorted(root.glob("*/ports/*"), key=lambda path: (_natural(path.parts[-3]), path.name)):
        device = port.parent.parent
        rate = re.match(r"[\d.]+", _read(port / "rate"))
        ports.append(
            RdmaPort(
                device=device.name,
                state=_read(port / "state").rpartition(":")[2].strip(),
                gbits_per_s=float(rate[0]) if rate else 0.0,
                link_layer=_read(port / "link_layer"),
                interface=next((card.name for card in sorted((device / "device" / "net").glob("*"))), None),
            )
        )
    return tuple(ports)


def _natural(name: str) -> list[int | str]:
    """Returns a key by which `mlx5_10` comes after `mlx5_9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _user(port: int) -> str | None:
    """Returns the process that listens on a port; None if rank 0 could."""
    if is_free(port):
        return None
    with suppress(psutil.Error, OSError):
        for item in psutil.net_connections("tcp"):
            if item.status == psutil.CONN_LISTEN and item.laddr and item.laddr.port == port and item.pid:
                return f"{psutil.Process(item.pid).name()} ({item.pid})"
    return "another user's program"


REACH_S = 3.0
"""How long an address may take to answer."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def look_online(question: Question, environment: Mapping[str, str]) -> Online:
    """Returns which internet addresses can be reached, and the caches."""
    proxies = _proxies(environment)
    is_offline = is_hub_offline(environment)
    asked = {name: url for name, url in question.endpoints.items() if not (is_offline and name == "Hugging Face")}
    tried = all_at_once({name: partial(reach, url, proxies) for name, url in asked.items()}, REACH_S + 0.2)
    return Online(
        endpoints={
            name: seen.value or Endpoint(url=masked(question.endpoints[name]), took_s=None, problem=seen.problem)
            for name, seen in tried.items()
        },
        is_offline=is_offline,
        caches=_caches(environment),
        has_swanlab_login=has_login(Path.home()),
        proxies={name: masked(value) for name, value in proxies.items()},
    )


def reach(url: str, proxies: Mapping[str, str], limit_s: float = REACH_S) -> Endpoint:
    """Returns whether an address answers through the proxies, with any status."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "dstrain"})
    started, problem = time.monotonic(), None
    try:
        with urllib.request.build_opener(_NoRedirect, _through(url, proxies)).open(request, timeout=limit_s):
            pass
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        problem = None if error.code < 500 and error.code != 407 else f"{error.code} {error.reason}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        timed_out = isinstance(reason, (TimeoutError, socket.timeout))
        problem = f"no answer within {limit_s:g} s" if timed_out else str(getattr(reason, "strerror", None) or reason)
    took = time.monotonic() - started
    return Endpoint(url=masked(url), took_s=took if problem is None else None, problem=problem and masked(problem))


def _through(url: str, proxies: Mapping[str, str]) -> urllib.request.ProxyHandler:
    """Returns the handler that goes through the proxy of an address, or through none where `no_proxy` names it."""
    host = urllib.parse.urlsplit(url).hostname or ""
    excepted = [name.strip().lstrip(".") for name in proxies.get("no_proxy", "").split(",") if name.strip()]
    if any(name == "*" or host == name or host.endswith(f".{name}") for name in excepted):
        return urllib.request.ProxyHandler({})
    return urllib.request.ProxyHandler({name.removesuffix("_proxy"): value for name, value in proxies.items()})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for an answer."""

    def redirect_request(self, *args: object) -> None:
        """Follows nothing."""


def masked(text: str) -> str:
    """Returns a text without the user and password of addresses in it.

    >>> masked("http://me:secret@proxy:3128")
    'http://***@proxy:3128'
    """
    return re.sub(r"(\w://)?[^\s/@,]+@", lambda match: f"{match[1] or ''}***@", text)


def _caches(environment: Mapping[str, str]) -> dict[str, Folder]:
    """Returns the folder in which each hub keeps what it downloads. Source: modelscope utils/file_utils.py."""
    hubs = {
        "Hugging Face": hf_hub_cache(environment),
        "ModelScope": Path(environment.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub"),
    }
    return {name: folder(path) for name, path in hubs.items()}


def _proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the proxies that Python's libraries would use; small letters win, as they do there."""
    values = {name: environment.get(name) or environment.get(name.upper()) for name in _PROXIES}
    return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The result of one probe."""

    value: Any = None
    """None if nothing was found."""
    problem: str | None = None
    """Why nothing was found."""


def all_at_once(
    looks: Mapping[str, Callable[[], Any]], limit_s: float, *, awaited: Collection[str] = ()
) -> dict[str, Seen]:
    """Returns the result of every probe within `limit_s`; slower ones are abandoned, unless they are `awaited` since
    they have time limits of their own.

    Each runs in a daemon thread, since neither name resolution nor a hanging driver can be interrupted.
    """
    results: dict[str, Seen] = {}
    threads = [
        threading.Thread(target=_look, args=(name, look, results), name=f"look {name}", daemon=True)
        for name, look in looks.items()
    ]
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for name, thread in zip(looks, threads, strict=True):
        thread.join(None if name in awaited else max(0.0, end - time.monotonic()))
    late = Seen(problem=f"no answer within {limit_s:g} s")
    return {name: results.get(name, late) for name in looks}


def _look(name: str, look: Callable[[], Any], results: dict[str, Seen]) -> None:
    try:
        results[name] = Seen(value=look())
    except Exception as error:  # a failed probe is a finding and does not stop the others
        results[name] = Seen(problem=f"{type(error).__name__}: {error}".rstrip(": "))


def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Completed:
    """Returns the output of a command in English, within `limit_s` seconds. Raises FileNotFoundError."""
    return child_process.run(command, {**environment, "LC_ALL": "C"}, limit_s)
