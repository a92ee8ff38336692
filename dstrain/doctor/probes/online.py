"""Probes whether hubs and SwanLab can be reached, cache folders, and proxies."""

from __future__ import annotations

import http.client
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dstrain.doctor.facts import Endpoint, Folder, Online, Question
from dstrain.doctor.probes.machine import folder
from dstrain.doctor.run_probes import all_at_once
from dstrain.facts.caches import hf_hub_cache, is_hub_offline
from dstrain.monitor.mode import has_login

REACH_S = 3.0
"""How long an address may take to answer."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def look(question: Question, environment: Mapping[str, str]) -> Online:
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
