"""Checks hubs, caches, proxies and SwanLab."""

from __future__ import annotations

from dstrain.choices import SwanLabMode
from dstrain.doctor.facts import Endpoint, Facts, Online
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.errors import InvalidConfig
from dstrain.monitor.mode import decide_mode
from dstrain.units import GIB, format_bytes

_SMALL = 20 * GIB
"""Free space of a cache below which an ordinary model does not fit."""
_MIRRORS = {
    "Hugging Face": "export HF_ENDPOINT=https://hf-mirror.com; or if the cache has everything: export HF_HUB_OFFLINE=1",
    "ModelScope": "needed with hub: modelscope only; elsewhere name local folders",
}
_CERTIFICATE = "export SSL_CERT_FILE=/path/to/ca.pem REQUESTS_CA_BUNDLE=/path/to/ca.pem  (your proxy's certificate)"


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about hubs, SwanLab and proxies."""
    online, notes = facts.online, Notes("online")
    if online is None:
        return []
    if needs.has_job and not needs.hubs:
        notes.ok("model and data are local; no hub is needed")
    for name in needs.hubs:
        _hub(name, online, notes)
    if needs.wants_swanlab and needs.is_first:
        _swanlab(online, needs, notes)
    if online.proxies:
        _proxies(online, needs, notes)
    return notes.findings


def _hub(name: str, online: Online, notes: Notes) -> None:
    cache, endpoint = online.caches.get(name), online.endpoints.get(name)
    kept = f"; {cache.path}: {format_bytes(cache.free_bytes)} free" if cache else ""
    if name == "Hugging Face" and online.is_offline:
        notes.ok(f"{name} is offline (HF_HUB_OFFLINE); only its cache is used{kept}")
        return
    if endpoint is not None and endpoint.took_s is not None:
        notes.ok(f"{endpoint.url} answers in {endpoint.took_s:.1f} s{kept}")
    elif endpoint is not None:
        notes.warn(f"{_silent(endpoint, online)}{kept}", _fix(endpoint, _MIRRORS[name]))
    if cache is not None and not cache.is_writable:
        notes.warn(f"{cache.path}, {name}'s cache, cannot be written", _move(name))
    elif cache is not None and endpoint is not None and endpoint.took_s is not None and cache.free_bytes < _SMALL:
        notes.warn(f"{cache.path}, {name}'s cache, has only {format_bytes(cache.free_bytes)} free", _move(name))


def _silent(endpoint: Endpoint, online: Online) -> str:
    through = f" through {online.proxies['https_proxy']}" if "https_proxy" in online.proxies else ""
    return f"{endpoint.url} cannot be reached{through}: {endpoint.problem}"


def _fix(endpoint: Endpoint, otherwise: str) -> str:
    return _CERTIFICATE if "CERTIFICATE_VERIFY" in (endpoint.problem or "") else otherwise


def _move(name: str) -> str:
    return f"export {'HF_HOME' if name == 'Hugging Face' else 'MODELSCOPE_CACHE'}=/a/large/disk"


def _swanlab(online: Online, needs: Needs, notes: Notes) -> None:
    has_key = bool(needs.environment.get("SWANLAB_API_KEY")) or online.has_swanlab_login
    try:
        mode = decide_mode(needs.swanlab_mode, needs.environment, logged_in=online.has_swanlab_login)
    except InvalidConfig as error:
        notes.bad(f"SwanLab: {error.problem}", error.hint)
        return
    if mode is SwanLabMode.ONLINE and not has_key:
        notes.bad("SwanLab is set to online, but has no key", "swanlab login; or: export SWANLAB_MODE=offline")
        return
    endpoint = online.endpoints.get("SwanLab")
    if mode is not SwanLabMode.ONLINE:
        why = "" if has_key else ", without a key: `swanlab login`, or SWANLAB_API_KEY, would upload the curves"
        notes.ok(f"SwanLab runs {mode}{why}")
    elif endpoint is not None and endpoint.took_s is not None:
        notes.ok(f"SwanLab has a key, and {endpoint.url} answers in {endpoint.took_s:.1f} s")
    elif endpoint is not None:
        fix = "export SWANLAB_MODE=offline, and later: swanlab sync"
        notes.warn(f"SwanLab: {_silent(endpoint, online)}", _fix(endpoint, fix))


def _proxies(online: Online, needs: Needs, notes: Notes) -> None:
    proxies = ", ".join(f"{name}={value}" for name, value in online.proxies.items())
    if needs.num_hosts > 1 and needs.is_first and "no_proxy" not in online.proxies:
        notes.warn(f"{proxies}: also between the hosts", "export no_proxy=localhost,127.0.0.1,10.0.0.0/8  (your hosts)")
    else:
        notes.ok(proxies)
