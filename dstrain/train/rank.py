"""The rank of this process: its index, messages, secrets, signals, environment, and the files that it reads first."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.deepspeed_ops import OPS, missing_ops, needed_ops, unheld_locks
from dstrain.facts.ds_config import section
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.heartbeat import SAVE_ON_TERM
from dstrain.job.schema import Job
from dstrain.records import from_data, load_json
from dstrain.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The numbers that the launcher sets in the environment."""

    index: int
    """0 to world_size - 1."""
    world_size: int
    """Number of ranks."""
    local_index: int
    """Index among the ranks of this node, from 0."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.index == 0

    def say(self, text: str) -> None:
        """Prints a line to stderr, on rank 0 only."""
        if self.is_first:
            print(text, file=sys.stderr, flush=True)

    def log_data(self, text: str) -> None:
        """Prints a line of training data to the log, on rank 0 only.

        It passes by `sys.stderr`, whose lines SwanLab and W&B copy to their servers.
        """
        if self.is_first:
            sys.stderr.flush()
            with suppress(OSError):  # a full disk
                os.write(2, f"{text}\n".encode())


def from_environment(environment: Mapping[str, str]) -> Rank:
    """Returns the rank from RANK, WORLD_SIZE and LOCAL_RANK; by default a single one."""
    return Rank(
        index=int(environment.get("RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        local_index=int(environment.get("LOCAL_RANK", "0")),
    )


def of_all_ranks(own: Any, group: Any) -> list[Any]:
    """Returns the value of each rank; collective over `group`, a gloo group of all ranks, None with one rank."""
    if group is None:
        return [own]
    import torch.distributed as dist  # here: a rank reports that it starts before it loads PyTorch

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


class Leaving:
    """Whether this rank was asked to save a checkpoint and leave."""

    def __init__(self) -> None:
        """Handles SIGUSR1, and SIGTERM with `SAVE_ON_TERM`; SIGUSR2 writes every thread's stack to stderr."""
        self.is_wanted = False
        signal.signal(signal.SIGUSR1, self._note)
        if SAVE_ON_TERM in os.environ:
            signal.signal(signal.SIGTERM, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the launchers block it
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)

    def settle(self) -> None:
        """Ignores the signals from now on: one that arrives while Python ends would kill a rank that has left well."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_IGN)  # Python resets handlers at its end, but not this

    def _note(self, number: int, frame: Any) -> None:
        self.is_wanted = True


def read_secrets(path: Path) -> dict[str, str]:
    """Returns the `NAME=value` lines of a file; none if it is missing."""
    try:
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, equals, value in pairs if equals}


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable of PyTorch's caching allocator, and its older name. Source: torch 2.13 cuda/memory.py."""


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Enables expandable segments in the caching allocator, unless the user has configured it.

    Otherwise freed blocks fragment the memory: published runs reserve up to 1.7 times the allocated bytes. Must be
    called before PyTorch is imported.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


DYNAMO_OFF = "TORCHDYNAMO_DISABLE"
"""The variable with which torch.compile returns its argument unchanged. Source: torch 2.13 _dynamo/eval_frame.py."""


def import_muon(ds_config: Mapping[str, Any]) -> None:
    """Imports DeepSpeed's Muon without compiling it, unless the run trains with it or compiles nothing anyway.

    Every engine compares its optimizer with Muon, whose decorators load TorchInductor: 4 CPU seconds of each rank.
    Source: deepspeed 0.19.8 runtime/zero/utils.py is_zero_supported_optimizer, original_muon.py.
    """
    if str(section(ds_config, "optimizer").get("type")).lower() == "muon" or DYNAMO_OFF in os.environ:
        return
    os.environ[DYNAMO_OFF] = "1"
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # type: ignore[import-untyped]  # noqa: F401
    finally:
        del os.environ[DYNAMO_OFF]


def announce_builds(rank: Rank, ds_config: Mapping[str, Any], environment: Mapping[str, str], *, on_gpu: bool) -> None:
    """Prints which extensions DeepSpeed is about to build, and locks that no visible process holds.

    `dstrain run` handles both; this is for ranks that were started otherwise.
    """
    needed = needed_ops(ds_config, on_gpu=on_gpu)
    for op in missing_ops(needed, environment):
        rank.say(f"building {OPS[op]}: about a minute, once")
    for lock in unheld_locks(needed, environment):  # loading takes the lock too, so a built extension can hang
        rank.say(f"{lock.held}; if no other host is building: {lock.cure}")


def is_port_taken(environment: Mapping[str, str]) -> bool:
    """Returns whether another process listens on the port of rank 0."""
    try:
        socket.create_server(("", int(environment["MASTER_PORT"]))).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def environment_with(secrets: Mapping[str, str]) -> None:
    """Adds the secrets to this process's environment; existing variables stay."""
    for name, value in secrets.items():
        os.environ.setdefault(name, value)


def quieten(*, on_terminal: bool) -> None:
    """Keeps progress bars, and warnings that no user can fix, out of log files."""
    from transformers.utils.logging import disable_progress_bar

    if not on_terminal:
        disable_progress_bar()  # type: ignore[no-untyped-call]
    # DeepSpeed and PEFT use deprecated names of PyTorch and Transformers
    warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files of a run directory that a rank reads."""

    run_dir: RunDir
    job: Job
    ds_config: dict[str, Any]
    model: ModelFacts | None
    """None: no MFU is computed."""
    cluster: Cluster | None


def read(run_dir: RunDir) -> Inputs:
    """Returns the inputs of a run. Raises InvalidConfig if a file is missing or damaged."""
    job = dataclasses.replace(load_json(Job, run_dir.request), output_dir=str(run_dir.path))
    if not job.train_sources:
        raise InvalidConfig(f'{run_dir.request}: "data" is missing')
    facts = _json(run_dir.facts) if run_dir.facts.exists() else {}

    def fact(kind: Any, name: str) -> Any:
        if facts.get(name) is None:
            return None
        return from_data(
            kind, facts[name], locate=lambda place: f"{run_dir.facts}: /{name}/{'/'.join(map(str, place))}"
        )

    return Inputs(
        run_dir=run_dir,
        job=job,
        ds_config=_json(run_dir.ds_config),
        model=fact(ModelFacts, "model"),
        cluster=fact(Cluster, "cluster"),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig(f"{path}: no such file", hint="Create the run directory with `dstrain run`.") from None
    except ValueError as error:
        raise InvalidConfig(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise InvalidConfig(f"{path}: not a JSON object")
    return data


SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
FINISH_S = 4.0
"""Time limit of `finish` before the process exits anyway."""


def leave_on_sigterm(finish: Callable[[], None]) -> None:
    """Makes SIGTERM call `finish` from another thread and then exit with code 143, even while a collective blocks.

    Python runs signal handlers between bytecodes of the main thread, so not while a rank waits in NCCL or gloo. The
    C-level handler does run, and writes the signal's number to the wake-up descriptor, on which a thread waits.
    Must be called from the main thread. Processes forked later (data loaders) are killed by SIGTERM as usual.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=(read_end, finish), name="sigterm", daemon=True).start()


def _forget() -> None:
    """Restores SIGTERM in a forked child, which would otherwise end its parent through the shared pipe."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(read_end: int, finish: Callable[[], None]) -> None:
    while True:
        received = os.read(read_end, 64)
        if signal.SIGTERM in received:
            break
    worker = threading.Thread(target=_quietly, args=(finish,), daemon=True)
    worker.start()
    worker.join(FINISH_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(SIGTERM_EXIT_CODE)


def _quietly(finish: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        finish()
