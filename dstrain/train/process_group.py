"""Connects the ranks of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from dstrain.choices import Precision
from dstrain.errors import EnvironmentProblem
from dstrain.heartbeat import MARK, Phase, Sender, run_of
from dstrain.job.schema import Job
from dstrain.monitor.collectives import Collectives
from dstrain.train import out_of_memory
from dstrain.train import rank as ranks
from dstrain.train.rank import Rank

_SCHEME = "dstrain"
"""Of the address under which ranks meet: as `env://`, among ranks of one run."""


class PortTaken(EnvironmentProblem):
    """The port of rank 0 belongs to another run."""


def meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Yields the store of the run, the rank and the number of ranks, as torch's `env://` does.

    Two runs that start at the same time may have chosen one port. A rank that met the other run's rank 0 would wait
    for its own forever.

    Raises:
        PortTaken: the store is that of another run.
    """
    mark = run_of(os.environ.get(MARK, ""))
    for store, rank, world_size in rendezvous(url.replace(_SCHEME, "env", 1), **options):
        if rank == 0:
            store.set(_RUN, mark)
        elif store.get(_RUN).decode() != mark:
            where = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
            raise PortTaken(f"another run uses {where}", hint="Start again, with another --master-port.")
        yield store, rank, world_size


_RUN = "dstrain/run"
register_rendezvous_handler(_SCHEME, meet)  # type: ignore[no-untyped-call]


def observed(rank: Rank, job: Job, *, on_gpu: bool) -> Collectives:
    """Observes the collectives of this rank from now on, unless the job says no.

    Call it before DeepSpeed keeps their functions.
    """
    collectives = Collectives(on_gpu=on_gpu)
    if rank.world_size > 1 and job.monitor.collectives:
        collectives.install()
    return collectives


def connect(rank: Rank, job: Job, ds_config: Mapping[str, Any], heartbeat: Sender, *, on_gpu: bool) -> Any:
    """Starts DeepSpeed's process group; returns a gloo group of all ranks, or None for a single one.

    Raises EnvironmentProblem if this node has fewer GPUs than ranks, or if they do not support the job's precision.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    computes = {Precision.BF16: accelerator.is_bf16_supported, Precision.FP16: accelerator.is_fp16_supported}
    if job.precision in computes and not computes[job.precision]():
        other = "fp32" if not on_gpu else "fp16" if job.precision is Precision.BF16 else "bf16"
        raise EnvironmentProblem(
            f"precision is {job.precision}, which this {'GPU' if on_gpu else 'CPU'} does not support",
            hint=f"precision: {other}",
        )
    if on_gpu:
        visible = torch.cuda.device_count()
        if rank.local_index >= visible:
            raise EnvironmentProblem(
                f"local rank {rank.local_index} has no GPU: {visible} are visible on this node",
                hint=f"Write slots={visible} for this node in the hostfile.",
            )
        torch.cuda.set_device(rank.local_index)
        out_of_memory.observe()
    ranks.announce_builds(rank, ds_config, os.environ, on_gpu=on_gpu)
    heartbeat.send(0, Phase.CONNECTING)
    try:
        if not dist.is_initialized():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, init_method=f"{_SCHEME}://")
    except (dist.DistNetworkError, PortTaken) as error:
        if isinstance(error, PortTaken) or (rank.is_first and ranks.is_port_taken(os.environ)):
            heartbeat.send(0, Phase.PORT_TAKEN)
        raise
    group = None if rank.world_size == 1 else dist.new_group(backend="gloo")
    heartbeat.send(0, Phase.LOADING)
    return group
