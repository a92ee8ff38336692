"""Names that earlier versions knew and this one refuses, each with the way that remains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COMMANDS: Mapping[str, str] = MappingProxyType({})
"""Words of a command line → what to type instead: `watch`, `run --sync`, `plan --task=kto`."""
JOB: Mapping[str, str] = MappingProxyType({})
"""Keys of job.yaml, or one of their values → what to write instead: `kto`, `monitor.notify`, `task=kto`."""
