"""Probes interfaces, routes and RDMA devices, and which hubs can be reached."""

from __future__ import annotations

import http.client
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from dstrain.doctor.facts import Endpoint, Folder, Network, Online, Question, RdmaPort
from dstrain.doctor.probes.machine import folder
from dstrain.doctor.run_probes import all_at_once
from dstrain.facts import network
from dstrain.facts.caches import hf_hub_cache, is_hub_offline
from dstrain.facts.network import is_free
from dstrain.monitor.mode import has_login

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
