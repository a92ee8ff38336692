"""The connection to an agent."""

from __future__ import annotations

import os
import sys
import time

from dstrain.launch.nodes.connection import Channel


def test_ctrl_c_does_not_reach_the_process_of_a_connection() -> None:
    program = "import os; print('leads its session:', os.getsid(0) == os.getpid())"
    channel = Channel([sys.executable, "-P", "-c", program], os.environ, [0])
    while not channel.is_closed:
        channel.receive()
        time.sleep(0.01)
    said = channel.last_words()
    channel.close()
    assert said == "leads its session: True"
