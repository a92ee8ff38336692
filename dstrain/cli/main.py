"""The `dstrain` command: its verbs, and the one place where errors become text."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from dstrain import __version__
from dstrain.cli.group import Group, explained
from dstrain.errors import DstrainError, EnvironmentProblem
from dstrain.garbage import collect_seldom

VERBS = {
    "gen-config": "Choose a configuration, explain it, write the files.",
    "import": "Turn another tool's training file into a job.",
    "plan": "Estimate memory and speed, and explain the choice.",
    "data": "Show training data as the model sees them.",
    "lint": "Check a DeepSpeed configuration.",
    "doctor": "Find problems of this machine that block training.",
    "run": "Train as a job file describes.",
    "status": "Show the state of a run.",
    "report": "Say what became of a run, against its plan.",
    "logs": "Print the logs of a run.",
    "stop": "End a run.",
    "tune": "Measure the best configurations, and write the fastest.",
    "export": "Merge an adapter, or gather a ZeRO checkpoint.",
    "explain": "Explain a key, a whole file, or your edits.",
    "hostfile": "Write, check or show a hostfile.",
    "script": "Write a script for SLURM, Kubernetes, accelerate or bash.",
    "show": "Print templates, schemas, or Tab completion.",
    "demo": "Train a tiny model: the smoke test of an installation.",
}
"""Verbs in the order of their use, with their summaries. `dstrain <verb>` is the module of that name, imported only
when the verb is typed."""


class Verbs(Group):
    """A group that imports only the module of the verb that is typed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the verb of that name."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"dstrain.cli.verbs.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the verbs and their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns the verbs that begin with `incomplete`, or the options of `dstrain`."""
        verbs = [CompletionItem(name, help=summary) for name, summary in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dstrain")
def cli() -> None:
    """Fine-tune large models with DeepSpeed: decide, explain, check, launch, watch.

    \b
    Example:
      dstrain plan --gpus 16 --model qwen3-32b
      dstrain gen-config --gpus 16 --model qwen3-32b --data train.jsonl
      dstrain run
    """
    from dstrain.paths import ignore_empty  # help does not need it

    ignore_empty(os.environ)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. dstrain's errors become a message and an exit code; anything else is a bug and keeps its
    traceback."""
    collect_seldom()
    stdout = sys.stdout
    for stream in (stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals that are not UTF-8
    try:
        code = cli.main(arguments, prog_name="dstrain", standalone_mode=False)
        sys.stdout.flush()  # a reader that is gone is noticed here, not at exit
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        explained(error).show()
        sys.exit(error.exit_code)
    except DstrainError as error:
        _complain(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        _die_of_closed_pipe()
    except SystemExit:
        if sys.stdout is not stdout:  # Click has met the closed pipe, and replaced the streams
            _die_of_closed_pipe()
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _complain(EnvironmentProblem(f"the output cannot be written: {error.strerror}"))
        sys.stdout = None  # otherwise Python writes again at exit
        sys.exit(EnvironmentProblem.exit_code)


def _die_of_closed_pipe() -> NoReturn:
    """Ends as other programs do whose reader is gone, as after `dstrain plan | head -1`: by SIGPIPE, silently."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGPIPE)
    sys.exit(128 + signal.SIGPIPE)  # the signal was blocked


def _complain(error: DstrainError) -> None:
    from dstrain.cli.console import complain  # imports Rich, which help does not need

    complain(error)
