"""What can be known to go wrong before anything is launched: folders, disk, ports, earlier checkpoints."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dstrain.errors import Conflict, EnvironmentProblem, InvalidConfig
from dstrain.rundir import RunDir
from dstrain.units import format_bytes

DEFAULT_PORT = 29500
"""The port that is taken where nobody named one and it is free. Source: deepspeed constants.py"""
_BACKLOG = 4096


def check(run_dir: RunDir, *, resume: str, needed_bytes: int) -> None:
    """Raises the right DstrainError when the run directory cannot take this run; creates the folder."""
    check_checkpoints(run_dir, resume=resume)
    check_writable(run_dir.path)
    check_disk(run_dir.path, needed_bytes=needed_bytes)


def check_dry(run_dir: RunDir, *, resume: str, needed_bytes: int) -> None:
    """Raises what `check` would, as far as that can be known without creating the folder."""
    check_checkpoints(run_dir, resume=resume)
    folder = run_dir.path
    while not folder.exists():
        folder = folder.parent
    check_writable(folder, name=run_dir.path)
    check_disk(folder, needed_bytes=needed_bytes)


def check_checkpoints(run_dir: RunDir, *, resume: str) -> None:
    """Raises Conflict when checkpoints of an earlier run lie there and this one would not go on from them."""
    found = run_dir.checkpoints()
    if found and resume == "never":
        raise Conflict(
            f"{run_dir.path} holds checkpoints up to step {found[-1][0]} of an earlier run",
            hint="To go on from there: dstrain run --set resume=auto. To start anew, name another output_dir.",
        )


def check_writable(folder: Path, *, name: Path | None = None) -> None:
    """Creates the folder; raises EnvironmentProblem when that, or writing into it, is not possible.

    `name` is what is to be made in it, where that is not the folder itself.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "Name another output_dir, or change the folder's owner or mode."
        raise EnvironmentProblem(f"output_dir {name or folder} cannot be written: {reason}", hint=hint) from error


def check_disk(folder: Path, *, needed_bytes: int) -> None:
    """Raises EnvironmentProblem when a checkpoint of `needed_bytes` does not fit the disk."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise EnvironmentProblem(
            f"{folder}: {format_bytes(free_bytes)} are free, and one checkpoint takes {format_bytes(needed_bytes)}",
            hint="Free some space, or name an output_dir on a larger disk.",
        )


def wanted_port(named: int | None, environment: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the port that the option or MASTER_PORT names for rank 0, and which of them does; 29500 where none does.

    Raises InvalidConfig where MASTER_PORT is no port.
    """
    if named is not None:
        return named, "--master-port"
    text = environment.get("MASTER_PORT")
    if not text:
        return DEFAULT_PORT, None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise InvalidConfig(f'MASTER_PORT is "{text}", not a port', hint="Ports are 1 to 65535.")
    return int(text), "MASTER_PORT"


def port(named: int | None, environment: Mapping[str, str]) -> int:
    """Returns the port of a rank 0 on this machine: the one that is named, else 29500, else any free one.

    Raises EnvironmentProblem when the named one is in use.
    """
    number, where = wanted_port(named, environment)
    if is_free(number):
        return number
    if where is not None:
        raise EnvironmentProblem(f"{where}: port {number} is in use on this machine", hint=in_use_hint(number))
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def in_use_hint(number: int) -> str:
    """Returns what to do where a port is in use."""
    return f"`ss -ltnp | grep :{number}` shows by whom; name another port, or none."


def is_free(number: int) -> bool:
    """Returns whether rank 0 could listen on a port of this machine; closing connections do not count."""
    found = listener(number)
    if found is not None:
        found.close()
    return found is not None


def listener(number: int) -> socket.socket | None:
    """Returns a socket that listens on a port of this machine, as rank 0 will (0: any); None where it is in use."""
    for family in (socket.AF_INET6, socket.AF_INET):
        with suppress(OSError, ValueError):  # there may be no IPv6
            is_dual = family == socket.AF_INET6
            return socket.create_server(("", number), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    return None
