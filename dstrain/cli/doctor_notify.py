"""`dstrain doctor --notify`: sends a test notice, and says whether the service took it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from dstrain.cli.console import answer, answer_json
from dstrain.errors import EnvironmentProblem
from dstrain.job.monitor import NotifyService
from dstrain.monitor.notices import SERVICES, Notice, reason, send, targets


def test(services: Sequence[NotifyService], *, as_json: bool) -> None:
    """Sends a test notice to each service. Raises EnvironmentProblem if one does not take it."""
    problems: dict[NotifyService, str | None] = {}
    notice = Notice(event="test", title=f"dstrain: a test notice from {socket.gethostname()}", text="Notices arrive.")
    for target in targets(services, os.environ):
        problems[target.service] = None
        try:
            send(target, notice)
        except Exception as error:  # a service may answer anything
            problems[target.service] = reason(error, target)
    if as_json:
        rows = [{"service": name, "is_sent": not problem, "problem": problem} for name, problem in problems.items()]
        answer_json(rows)
    else:
        for name, problem in problems.items():
            answer(f"✗ {name}: {problem}" if problem else f"✓ {name}: sent")
    if failed := [name for name, problem in problems.items() if problem]:
        names = ", ".join(SERVICES[name].variable for name in failed)
        raise EnvironmentProblem(f"no notice to {', '.join(failed)}", hint=f"Correct {names}, then type it again.")
