"""Where libraries keep what they download or build, and whether they ask the Hugging Face hub, by environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


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
