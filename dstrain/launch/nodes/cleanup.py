"""Kills leftover processes on nodes whose agent was lost, over a new connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from dstrain.errors import EnvironmentProblem
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Begin, End, Ended, Go
from dstrain.launch.nodes.spec import LaunchSpec

_POLL_S = 0.1


def sweep(spec: LaunchSpec, nodes: Sequence[Node]) -> None:
    """Kills whatever has a node's mark on each of the nodes; skips those that cannot be reached."""
    if nodes:
        with ThreadPoolExecutor(max_workers=min(64, len(nodes))) as pool:
            list(pool.map(lambda node: _sweep(spec, node), nodes))


def _sweep(spec: LaunchSpec, node: Node) -> None:
    with suppress(EnvironmentProblem):
        (channel,) = spec.open([node])
        begin = Begin(
            host=node.host,
            run_dir=str(spec.run_dir.path),
            mark=spec.mark_of(node),
            first_rank=node.first_rank,
            num_ranks=0,
            master_port=spec.master_port,
        )
        for order in (begin, Go(), End(grace_s=0)):
            channel.send(order, node.number)
        until = time.monotonic() + spec.timeouts.sweep_s
        while time.monotonic() < until and not channel.is_closed:
            if any(isinstance(event, Ended) for _, event in channel.receive()):
                break
            time.sleep(_POLL_S)
        channel.close()
