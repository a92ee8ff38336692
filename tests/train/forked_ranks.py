"""Runs programs as ranks for tests, each in a process of its own, forked after the imports that are most of its cost.

Reads a line of JSON for each request: a module with its arguments, the number of ranks and where each rank writes its
log. Answers with two lines: the process ids of the ranks, and their exit codes, negative for a signal.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from dstrain.launch.nodes.node_runner import remove_buffers
from tests.forked import run_and_exit
from tests.train.launching import free_port

PR_SET_PDEATHSIG = 1


def import_everything() -> None:
    """Imports what programs need, and loads DeepSpeed's extensions for a CPU."""
    from dstrain.train.rank import import_muon

    import_muon({})
    assert "torch._inductor.compile_fx" not in sys.modules, "a rank compiles Muon again"
    import peft  # noqa: F401  # loads bitsandbytes, and that the compiler
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import dstrain.monitor.end_report
    import dstrain.train.setup  # noqa: F401

    get_checkpoint_conversion_mapping("qwen3")
    for builder in (CPUAdamBuilder, ShareMemCommBuilder):
        builder().load(verbose=False)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become(rank: int, program: Sequence[str], *, ranks: int, port: int, log: str) -> NoReturn:
    """Makes this process a rank as DeepSpeed's launcher starts it, and ends it with its program."""
    die_with_parent()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(f"{log}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv[1:] = program[1:]
    run_and_exit(program[0])


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # DeepSpeed prints
    import_everything()
    gc.collect()
    gc.freeze()
    for line in sys.stdin.buffer:
        request, port, children = json.loads(line), free_port(), []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                become(rank, port=port, **request)
            children.append(child)
        print(json.dumps(children), file=answers)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        remove_buffers(port)
        print(json.dumps(codes), file=answers)


if __name__ == "__main__":
    main()
