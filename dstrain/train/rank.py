"""This process among the ranks: its index, what it prints, its secrets, and slow builds that it announces."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.facts.deepspeed_ops import OPS, missing_ops, needed_ops, unheld_locks
from dstrain.heartbeat import SAVE_ON_TERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the launcher said through the environment."""

    index: int
    """The rank, 0 to world_size - 1."""
    world_size: int
    """Number of ranks."""
    local_index: int
    """The rank on this node."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and talks."""
        return self.index == 0

    def say(self, text: str) -> None:
        """Prints a line to stderr, on rank 0 only."""
        if self.is_first:
            print(text, file=sys.stderr, flush=True)


def from_environment(environment: Mapping[str, str]) -> Rank:
    """Returns the place that RANK, WORLD_SIZE and LOCAL_RANK give; one process alone without them."""
    return Rank(
        index=int(environment.get("RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        local_index=int(environment.get("LOCAL_RANK", "0")),
    )


class Leaving:
    """Whether somebody wants this rank to save a checkpoint and leave."""

    def __init__(self) -> None:
        """Listens to SIGUSR1, and to SIGTERM where the run says so; SIGUSR2 writes every thread's stack to stderr."""
        self.is_wanted = False
        signal.signal(signal.SIGUSR1, self._note)
        if SAVE_ON_TERM in os.environ:
            signal.signal(signal.SIGTERM, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which is blocked in the launchers
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)

    def _note(self, number: int, frame: Any) -> None:
        self.is_wanted = True


MPI_NAMES = MappingProxyType(
    {
        "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    }
)
"""What OpenMPI and MPICH's hydra call what DeepSpeed's own launcher sets."""


def adopt_mpi(environment: MutableMapping[str, str]) -> bool:
    """Sets what DeepSpeed's launcher would have set where MPI started this rank, and returns whether it did.

    >>> started = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    >>> adopt_mpi(started), started["RANK"], started["WORLD_SIZE"], started["LOCAL_RANK"]
    (True, '1', '2', '0')
    """
    if not any(name in environment for name in MPI_NAMES["RANK"]):
        return False
    for name, others in MPI_NAMES.items():
        value = next((environment[other] for other in others if other in environment), None)
        if value is not None:
            environment[name] = value
    return True


def write_to_log(folder: Path, index: int) -> None:
    """Lets this process write into a log of its own, as DeepSpeed's launcher does for each rank and MPI does not."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{index}.log"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number in (1, 2):
        os.dup2(handle, number)
    os.close(handle)


def read_secrets(path: Path) -> dict[str, str]:
    """Returns the `NAME=value` lines of a file; empty where there is none."""
    try:
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, equals, value in pairs if equals}


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What PyTorch's caching allocator reads, by its present and its older name. Source: torch 2.13 cuda/memory.py."""


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Lets the caching allocator grow its segments, unless the user has settings of his own.

    Without it a training step leaves holes that later tensors do not fit: published runs reserve up to 1.7 times what
    they use. PyTorch reads the variable when it is imported.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Imports made within it take a tenth less time, and later collections skip the objects that they made."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def announce_builds(rank: Rank, ds_config: Mapping[str, Any], environment: Mapping[str, str], *, on_gpu: bool) -> None:
    """Says which extensions DeepSpeed is about to build, and names a lock that nobody is seen to hold.

    `dstrain run` has seen to both; this is for ranks that something else starts.
    """
    needed = needed_ops(ds_config, on_gpu=on_gpu)
    for op in missing_ops(needed, environment):
        rank.say(f"building {OPS[op]}, about a minute, once")
    for lock in unheld_locks(needed, environment):  # loading takes the lock too, so a built extension can be stuck
        rank.say(f"{lock.path} is held by no process seen here; if nobody builds or loads, {lock.cure}")


def is_port_taken(environment: Mapping[str, str]) -> bool:
    """Returns whether somebody else listens on the port on which rank 0 shall."""
    try:
        socket.create_server(("", int(environment["MASTER_PORT"]))).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def environment_with(secrets: Mapping[str, str]) -> None:
    """Puts the secrets into this process's environment; what is there already stays."""
    for name, value in secrets.items():
        os.environ.setdefault(name, value)


def quieten(*, on_terminal: bool) -> None:
    """Leaves progress bars to terminals, and out of log files what no user of dstrain can mend."""
    from transformers.utils.logging import disable_progress_bar

    if not on_terminal:
        disable_progress_bar()  # type: ignore[no-untyped-call]
    # of DeepSpeed and PEFT, which call PyTorch and Transformers by names that will change
    warnings.filterwarnings("ignore", category=FutureWarning)
