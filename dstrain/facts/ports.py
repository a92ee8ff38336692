"""TCP ports for rank 0."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from dstrain.errors import EnvironmentProblem, InvalidConfig

DEFAULT_PORT = 29500
"""The default port. Source: deepspeed constants.py"""
_BACKLOG = 4096


def wanted_port(named: int | None, environment: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the port for rank 0 and its source: the option, else MASTER_PORT, else (29500, None).

    Raises InvalidConfig if MASTER_PORT is not a port.
    """
    if named is not None:
        return named, "--master-port"
    text = environment.get("MASTER_PORT")
    if not text:
        return DEFAULT_PORT, None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise InvalidConfig(f'MASTER_PORT is "{text}", not a port', hint="Ports are 1 to 65535.")
    return int(text), "MASTER_PORT"


def local_port(named: int | None, environment: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the port of rank 0 on this machine and its source: as requested, else any free port, so that runs that
    start at the same time get different ones.

    Raises EnvironmentProblem if the requested port is in use.
    """
    number, where = wanted_port(named, environment)
    if where is None:
        with socket.create_server(("", 0)) as free:
            return int(free.getsockname()[1]), None
    if not is_free(number):
        raise EnvironmentProblem(f"{where}: port {number} is in use on this machine", hint=in_use_hint(number))
    return number, where


def in_use_hint(number: int) -> str:
    """Returns the hint for a port that is in use."""
    return f"`ss -ltnp | grep :{number}` shows the process; choose another port, or none."


def is_free(number: int) -> bool:
    """Returns whether rank 0 could listen on a port of this machine; closing connections do not count."""
    server = listener(number)
    if server is not None:
        server.close()
    return server is not None


def listener(number: int) -> socket.socket | None:
    """Returns a socket that listens on a port (0: any) as rank 0 will, or None if the port is in use."""
    for family in (socket.AF_INET6, socket.AF_INET):
        with suppress(OSError, ValueError):  # there may be no IPv6
            is_dual = family == socket.AF_INET6
            return socket.create_server(("", number), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    return None
