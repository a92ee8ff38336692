"""Writes a script without a scheduler: DeepSpeed's launcher on each node."""

from __future__ import annotations

from typing import Any

from dstrain.config.templates.templates import render_script
from dstrain.errors import InvalidConfig
from dstrain.facts.ports import DEFAULT_PORT
from dstrain.launch.environment import RANK_NAMES
from dstrain.launch.scripts.script_context import ScriptContext


def bash(asked: ScriptContext, port: int | None = None) -> str:
    """Returns a script that starts the nodes of the job's hostfile, one by one or all over ssh."""
    hosts = asked.hosts or (("localhost",) if asked.nodes == 1 else ())
    if not hosts:
        raise InvalidConfig(
            f"the names of the {asked.nodes} nodes are not known", hint="Write them into the job's hostfile."
        )
    return render_script("bash.sh.j2", _values(asked, port) | {"hosts": hosts, "is_several": len(hosts) > 1})


def _values(asked: ScriptContext, port: int | None) -> dict[str, Any]:
    master = asked.hosts[0].rpartition("@")[2] if asked.hosts else ""
    if asked.nodes == 1:
        master = "127.0.0.1"
    return asked.values | {
        "name": asked.name,
        "all_gpus": asked.nodes * asked.gpus,
        "master": master,
        "port": port or DEFAULT_PORT,
        "unset": RANK_NAMES,
        "exports": sorted(asked.exports.items()),
    }
