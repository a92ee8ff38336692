"""Writes a run directory that ranks can start from, for torchrun and for pods, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.launch import environment
from dstrain.launch.prepare import preflight
from dstrain.launch.prepare.prepare import PreparedRun, facts_text
from dstrain.paths import write_atomic
from dstrain.records import to_json


def stand_ins(nodes: int, gpus: int) -> Hosts:
    """Returns hosts for a number of nodes with so many GPUs each, where names do not matter."""
    if nodes == 1:
        return Hosts(hosts=(Host(name="localhost", slots=gpus),), name="--nodes and --gpus")
    hosts = tuple(Host(name=f"node-{number}", slots=gpus) for number in range(nodes))
    return Hosts(hosts=hosts, name="--nodes and --gpus")


def write(prepared: PreparedRun, variables: Mapping[str, str]) -> None:
    """Writes what the ranks read: request, facts, configuration, estimate, hostfile, and secrets with mode 0600.

    Each file is written whole, and a file that holds its text already is not touched: all nodes may do this at once.
    Raises Conflict where checkpoints of another run lie there.
    """
    place, job = prepared.run_dir, prepared.job
    preflight.check(place, resume=job.resume, needed_bytes=0)
    secrets = environment.secrets(variables, job.env)
    open_env = {name: value for name, value in job.env.items() if name not in secrets}
    place.summary.unlink(missing_ok=True)
    write_atomic(place.request, to_json(replace(job, env=open_env)))
    write_atomic(place.facts, facts_text(prepared))
    write_atomic(place.ds_config, json.dumps(prepared.ds_config, indent=2) + "\n")
    write_atomic(place.hostfile, render(prepared.hosts))
    environment.write_secrets(place, secrets)
    if prepared.estimate is None:
        place.plan.unlink(missing_ok=True)
    else:
        write_atomic(place.plan, to_json(prepared.estimate))
