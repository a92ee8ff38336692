"""`start.sh`: a script that starts a run again by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dstrain.config.templates.templates import render_script
from dstrain.launch.environment import RANK_NAMES
from dstrain.rundir import RunDir


def start_script(
    command: Sequence[str],
    *,
    run_dir: RunDir,
    exported: Mapping[str, str],
    secret_names: Collection[str],
    is_node_by_node: bool = False,
) -> str:
    """Returns the text of `start.sh`; it names the secrets, whose values the ranks read from a file, and holds none.

    `command` starts all ranks, or `is_node_by_node` those of the node that the script is given the number of.
    """
    values = {
        "run_dir": str(run_dir.path),
        "exports": sorted(exported.items()),
        "unset": [*RANK_NAMES, *sorted(secret_names)],
        "command": list(command),
        "is_node_by_node": is_node_by_node,
        "environment_file": str(run_dir.environment),
    }
    return render_script("deepspeed.sh.j2", values)
