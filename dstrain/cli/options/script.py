"""Options of `dstrain script`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dstrain.cli.options.trust import TRUST
from dstrain.cli.types import SIZE

F = TypeVar("F", bound=Callable[..., Any])

JOB = click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a line of the job, in the script too."
)
MACHINES = (
    TRUST,
    click.option("--nodes", type=click.IntRange(1), help="Number of nodes.  [default: as the job's hostfile or plan]"),
    click.option("--gpus", type=click.IntRange(1), help="GPUs altogether.  [default: as the job's hostfile or plan]"),
)
COMMON = (
    JOB,
    *MACHINES,
    click.option("--name", metavar="NAME", help="Name of the job.  [default: from the job's folders]"),
    SET,
    click.option("--python", metavar="PATH", help="Python on the nodes.  [default: this one; in Kubernetes python3]"),
    click.option("-o", "--out", type=click.Path(path_type=Path), help="File to write.  [default: beside the job]"),
    click.option("--force", is_flag=True, help="Replace a script that was edited; yours is kept as .bak."),
    click.option("-n", "--dry-run", is_flag=True, help="Print the script, write nothing."),
    click.option("--json", "as_json", is_flag=True, help="Print the script and what it asks for as JSON to stdout."),
)
BATCH = (
    click.option("--time", default="24h", show_default=True, metavar="TIME", help="Time limit: 90m, 12h, 1d12h."),
    click.option("--cpus", type=click.IntRange(1), help="CPU cores of each node.  [default: 8 for each GPU]"),
    click.option("--memory", type=SIZE, metavar="SIZE", help="RAM of each node, such as 512GiB."),
    click.option("--partition", "--queue", metavar="NAME", help="Partition."),
    click.option("--account", metavar="NAME", help="Account or project."),
    click.option("--qos", metavar="NAME", help="Quality of service."),
    click.option("--reservation", metavar="NAME", help="Reservation."),
)


PORT = click.option("--port", type=click.IntRange(1, 65535), help="Port of the first node.  [default: 29500]")
PODS = (
    click.option("--image", required=True, metavar="IMAGE", help="Image with dstrain installed."),
    click.option("--namespace", metavar="NAME", help="Namespace.  [default: kubectl's]"),
    click.option("--pvc", "claims", multiple=True, metavar="CLAIM:/PATH", help="Volume that all pods share; repeat."),
    click.option("--secret", default="dstrain", show_default=True, metavar="NAME", help="Secret of the job."),
    click.option("--shm", default="16Gi", show_default=True, metavar="SIZE", help="Shared memory of a pod at most."),
    click.option("--cpus", metavar="NUMBER", help="CPU cores of each node."),
    click.option("--memory", metavar="SIZE", help="RAM of each node, such as 512Gi."),
    click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True, metavar="NAME", help="Name of a GPU."),
    click.option("--runtime", default="torch-distributed", show_default=True, metavar="NAME", help="Training runtime."),
)


def options(*listed: Callable[[F], F]) -> Callable[[F], F]:
    """Adds options to a command, in this order."""

    def add(function: F) -> F:
        for option in reversed(listed):
            function = option(function)
        return function

    return add
