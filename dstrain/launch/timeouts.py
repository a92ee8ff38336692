"""All time limits of a launch, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from dstrain.errors import EnvironmentProblem

VARIABLE = "DSTRAIN_TIMEOUTS"
"""For tests: the environment variable by which `dstrain run` takes other limits, as in `silence_s=5,sweep_s=2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The time limits of one start; nodes get them with their orders. All are seconds."""

    connect_s: float = 8.0
    """For ssh to reach a host."""
    close_s: float = 3.0
    """For a connection to end once its input is closed, until its process is killed."""
    hello_s: float = 20.0
    """For every node to answer the first question."""
    beat_s: float = 2.0
    """Between two heartbeats, in both directions."""
    silence_s: float = 30.0
    """Without a sign of life, until the other side is taken for lost."""
    flush_s: float = 5.0
    """For an agent that ends to send what it still has to say."""
    resolve_s: float = 10.0
    """For a node's name servers to know the host of rank 0."""
    reach_s: float = 8.0
    """For a node to connect to the port of rank 0, over all its addresses."""
    reached_s: float = 20.0
    """For the word that a node has connected to it, or could not."""
    others_s: float = 1.0
    """For other nodes to say why they cannot start, after one has."""
    start_s: float = 3600.0
    """Without progress, until a start hangs, or the first steps, a first evaluation or a first checkpoint; 0 for
    never."""
    start_word_s: float = 15.0
    """Between two reports of a start."""
    hang_s: float = 60.0
    """Without a step, until a run hangs at the earliest; 0 for never."""
    stacks_s: float = 3.0
    """For ranks of a run that hangs to write their stacks."""
    grace_s: float = 10.0
    """For ranks to end after SIGTERM, or after another rank's death, until they are killed."""
    kill_s: float = 10.0
    """For killed processes to be gone."""
    ending_s: float = 20.0
    """For a node to say that nothing is left there, after `grace_s`."""
    sweep_s: float = 12.0
    """For one node to end what a lost agent left, over a new connection."""
    pause_s: float = 5.0
    """Between a start that failed and the next one, in which ports and memory of killed ranks become free."""

    record_s: float = 10.0
    """Between two writings of the state file of an active run."""
    stale_s: float = 60.0
    """Age of that file from which a run on another machine is taken for dead."""
    detach_s: float = 60.0
    """For a run in the background to start before the command returns; a slower one continues to start."""
    stop_s: float = 90.0
    """For a run that was asked to stop to end."""
    save_s: float = 3600.0
    """For a run that was asked to save and leave to do so."""

    def changed(self, environment: Mapping[str, str]) -> Timeouts:
        """Returns these limits with those that `DSTRAIN_TIMEOUTS` names. Raises EnvironmentProblem for invalid ones.

        >>> Timeouts().changed({"DSTRAIN_TIMEOUTS": "silence_s=5,sweep_s=2.5"}).sweep_s
        2.5
        """
        names = {field.name for field in fields(self)}
        changes: dict[str, float] = {}
        for pair in filter(None, environment.get(VARIABLE, "").split(",")):
            name, _, seconds = pair.partition("=")
            if name not in names or not seconds.replace(".", "", 1).isdecimal():
                hint = f"The names are {', '.join(sorted(names))}."
                raise EnvironmentProblem(f'{VARIABLE}: "{pair}" is not NAME=SECONDS', hint=hint)
            changes[name] = float(seconds)
        return replace(self, **changes)

    def unusual(self) -> dict[str, float]:
        """Returns the limits that differ from the defaults, by name."""
        return {name: value for name, value in asdict(self).items() if value != getattr(TIMEOUTS, name)}


TIMEOUTS = Timeouts()
"""The default limits."""
