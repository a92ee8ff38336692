"""Gathers the facts of this machine: all probes at once, each with a time limit.

`python -m dstrain.doctor.gather` does it for another machine: the question on stdin, the facts on stdout.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from dstrain.doctor import gpu_probes, probes
from dstrain.doctor.facts import Facts, Question
from dstrain.doctor.probes import all_at_once
from dstrain.facts import attention_kernels
from dstrain.records import from_data, to_data

LIMIT_S = 3.6
"""Time limit of all probes together in seconds; most give up sooner."""

Look = Callable[[Question, Mapping[str, str]], Any]
LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "software": probes.look_software,
        "attention": lambda question, environment: attention_kernels.of_this_machine(environment),
        "toolchain": probes.look_toolchain,
        "gpus": gpu_probes.look,
        "kernel_log": gpu_probes.look_kernel_log,
        "topology": gpu_probes.look_topology,
        "network": probes.look_network,
        "limits": probes.look_limits,
        "space": probes.look_space,
        "online": probes.look_online,
    }
)
"""Subject → its probe, which fills the field of `Facts` of that name."""
SLOW = frozenset({"topology", "online", "attention"})
"""Probes that a quick query skips: they take long, or `dstrain run` has made them."""


def gather(question: Question, base: Mapping[str, str] = os.environ, limit_s: float = LIMIT_S) -> Facts:
    """Returns the facts of this machine; `base` is its environment, which the query's variables extend."""
    environment = {**base, **question.environment}
    looks = {
        name: partial(look, question, environment)
        for name, look in LOOKS.items()
        if not (question.is_quick and name in SLOW)
    }
    results = all_at_once(looks, limit_s)
    return Facts(
        host=socket.gethostname(),
        time_s=time.time(),
        failed={name: result.problem for name, result in results.items() if result.problem is not None},
        **{name: result.value for name, result in results.items()},
    )


def main() -> int:
    """Answers one query."""
    question = from_data(Question, json.load(sys.stdin), locate=lambda place: f"question: {'.'.join(map(str, place))}")
    sys.stdout.write(json.dumps(to_data(gather(question))) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
