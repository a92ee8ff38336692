"""Binds the ranks of a machine to cores of their own, if the CPU steps the optimizer.

`python -m dstrain.launch.cores RUN_DIR RANKS OPTION …` becomes DeepSpeed's launcher with these options, on
one of several nodes, with that many ranks: cores and numactl are its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dstrain.child_process import run
from dstrain.facts.ds_config import ZERO, section
from dstrain.paths import python
from dstrain.rundir import RunDir
from dstrain.units import counted

LAUNCHER = "deepspeed.launcher.runner"
"""The module of DeepSpeed's launcher."""
_PROBE_S = 5.0
_SLOWER = "ranks share all cores, which made steps with CPU Adam 1.16 × as long in DeepSpeed's measurement"
"""Source: DeepSpeed blogs/zenflow-corebinding: Qwen2.5-3B on 2 × A100, ZeRO-2, 2,887 ms without and 2,497 ms with."""
_OWN = ("OMP_NUM_THREADS", "KMP_AFFINITY")
"""Variables of a user who places threads; DeepSpeed overwrites the first and refuses the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The cores that ranks share out, or why they do not."""

    cores: str | None = None
    """Cores in numactl's notation; None: ranks are not bound."""
    note: str | None = None
    """What to say about it."""


def binding(ds_config: Mapping[str, Any], environment: Mapping[str, str], num_ranks: int) -> Binding:
    """Returns the cores of `num_ranks` ranks on this machine, which DeepSpeed's launcher shares out by numactl.

    Ranks are bound if optimizer or parameters are on the CPU, and if the user has not placed threads already.
    Source: deepspeed 0.19.8 utils/numa.py: get_numactl_cmd, which takes the first cores of the machine otherwise, those
    that a container may not use included.
    """
    if not is_on_cpu(ds_config):
        return Binding()
    if placed := [name for name in _OWN if name in environment]:
        return Binding(note=f"{' and '.join(placed)} set: ranks are not bound to cores of their own")
    program = shutil.which("numactl", path=environment.get("PATH"))
    if program is None:
        return Binding(note=f"numactl is not installed (apt-get install numactl): {_SLOWER}")
    cores = usable_cores(os.sched_getaffinity(0), psutil.cpu_count(logical=False) or 0)
    if len(cores) < num_ranks:
        few = f"{counted(len(cores), 'core')} for {counted(num_ranks, 'rank')}"
        return Binding(note=f"{few}, which are not bound to any")
    tried = run([program, "--localalloc", "-C", str(cores[0]), "true"], environment, _PROBE_S)
    if tried.code != 0:
        return Binding(note=f"numactl may not bind here ({tried.last_line or 'no answer'}): {_SLOWER}")
    return Binding(cores=ranges(cores))


def options(cores: str | None) -> list[str]:
    """Returns the launcher's options that share out cores. Source: deepspeed 0.19.8 launcher/runner.py: parse_args."""
    return [] if cores is None else ["--bind_cores_to_rank", f"--bind_core_list={cores}"]


def is_on_cpu(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration keeps optimizer states or parameters on the CPU."""
    zero = section(ds_config, ZERO)
    return any(section(zero, name).get("device") == "cpu" for name in ("offload_optimizer", "offload_param"))


def usable_cores(allowed: set[int], num_physical: int) -> list[int]:
    """Returns the cores that processes may use, without the second threads of a core where they come last.

    >>> usable_cores({0, 1, 2, 3}, 2), usable_cores({6, 7}, 2)
    ([0, 1], [6, 7])
    """
    return sorted(core for core in allowed if core < num_physical) or sorted(allowed)


def ranges(cores: list[int]) -> str:
    """Returns sorted cores in numactl's notation.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def main(words: Sequence[str]) -> None:
    """Becomes the launcher; its log has what keeps ranks from being bound."""
    folder, num_ranks, *rest = words
    config = json.loads(RunDir(Path(folder)).ds_config.read_text(encoding="utf-8"))
    bound = binding(config, os.environ, int(num_ranks))
    if bound.note is not None:
        print(f"dstrain: {bound.note}", file=sys.stderr, flush=True)
    line = python("-m", LAUNCHER, *options(bound.cores), *rest)
    os.execv(line[0], line)


if __name__ == "__main__":
    main(sys.argv[1:])
