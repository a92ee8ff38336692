"""Hostfiles in DeepSpeed's format, and host ranges such as `gpu[01-16]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One line of a hostfile."""

    name: str
    """Host name or address, with `user@` where it has one."""
    slots: int
    """GPUs that may be used on it."""
    line: int | None = None
    """Line of the hostfile, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, in order."""

    hosts: tuple[Host, ...]
    """At least one."""
    name: str
    """The file or option they come from."""

    @property
    def num_slots(self) -> int:
        """GPUs on all hosts together."""
        return sum(host.slots for host in self.hosts)
