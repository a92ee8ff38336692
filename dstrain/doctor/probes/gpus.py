"""Probes GPUs through nvidia-smi, their connections, and the driver's errors in the kernel log."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dstrain.doctor import kernel_log, nvidia_smi, topology
from dstrain.doctor.facts import Question
from dstrain.doctor.gpu_facts import Gpus, KernelLog, Topology
from dstrain.doctor.run_probes import all_at_once, run
from dstrain.facts import kernel_messages

SMI_S = 3.0
"""How long nvidia-smi may take; without persistence mode it loads the driver first."""
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")


def look(question: Question, environment: Mapping[str, str]) -> Gpus:
    """Returns the GPUs and their state."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return Gpus(has_driver=any(Path(path).exists() for path in _DRIVERS), has_tool=False)
    said = run([tool, "-q", "-x"], environment, SMI_S)
    if said.is_late:
        return Gpus(has_driver=True, is_late=True, problem=f"no answer from nvidia-smi within {SMI_S:g} s")
    return nvidia_smi.parse(said.out) or Gpus(
        has_driver=True, problem=said.last_line or f"nvidia-smi ended with {said.code}"
    )


def look_topology(question: Question, environment: Mapping[str, str]) -> Topology | None:
    """Returns how GPUs and network adapters are joined; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return None
    said = all_at_once(
        {
            "-m": partial(run, [tool, "topo", "-m"], environment, SMI_S),
            "-p2p": partial(run, [tool, "topo", "-p2p", "r"], environment, SMI_S),
        },
        SMI_S + 0.2,
    )
    matrix, p2p = said["-m"].value, said["-p2p"].value
    return topology.parse(matrix.out, p2p.out if p2p else "") if matrix else None


def look_kernel_log(question: Question, environment: Mapping[str, str]) -> KernelLog:
    """Returns the driver's errors since boot."""
    messages = kernel_messages.read(environment)
    return KernelLog(problem=messages.problem, xids=kernel_log.parse(messages.text, kernel_messages.uptime_s()))
