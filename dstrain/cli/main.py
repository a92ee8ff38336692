"""The `dstrain` command: its subcommands, and the one place where errors become text."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from dstrain import __version__
from dstrain.cli.console import complain
from dstrain.errors import DstrainError, EnvironmentProblem, did_you_mean

VERBS = (
    *("gen-config", "adopt", "diff", "plan", "lint", "doctor", "run", "status", "logs", "stop", "export"),
    *("explain", "schema", "hostfile", "script", "templates", "demo"),
)
"""Verbs in the order of their use; `dstrain <verb>` is the module of that name."""


class Verbs(click.Group):
    """A group that imports the module of a verb when it is asked for, so that none waits for what others need."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the verb of that name."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"dstrain.cli.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the verb and its arguments. Raises UsageError for an unknown verb and suggests the closest."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0]}'. {did_you_mean(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dstrain")
def cli() -> None:
    """Fine-tune large models with DeepSpeed: decide, explain, check, launch, watch.

    \b
    Example:
      dstrain plan --gpus 16 --model qwen3-32b
      dstrain gen-config --gpus 16 --model qwen3-32b --data train.jsonl
      dstrain run

    \b
    The Tab key completes verbs, options, models and GPUs after this (zsh_source, fish_source in those shells):
      eval "$(_DSTRAIN_COMPLETE=bash_source dstrain)"
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. dstrain's errors become a message and an exit code; anything else is a bug and keeps its
    traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows what it can
    try:
        code = cli.main(arguments, prog_name="dstrain", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DstrainError as error:
        complain(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # whoever read our output has left: nothing to say, and no one to say it to
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        complain(EnvironmentProblem(f"the output cannot be written: {error.strerror}"))
        sys.stdout = None  # else Python tries once more at its end
        sys.exit(EnvironmentProblem.exit_code)
