"""The `dstrain` command: its subcommands, and the one place where errors become text."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from dstrain import __version__
from dstrain.errors import DstrainError, EnvironmentProblem, did_you_mean

VERBS = {
    "gen-config": "Decide how to train, say why, write the files.",
    "adopt": "Let files that dstrain did not write count as generated.",
    "diff": "List your edits, and what each does to memory and speed.",
    "plan": "Say what training needs, how fast it is, and why.",
    "lint": "Check a DeepSpeed configuration.",
    "doctor": "Find what stands in the way of training.",
    "run": "Train as a job file says.",
    "status": "Say how a run stands.",
    "logs": "Print what a run wrote.",
    "stop": "End a run.",
    "export": "Merge an adapter, or gather a ZeRO checkpoint.",
    "explain": "Explain a key of ds_config.json, or a whole file.",
    "schema": "Print the JSON schema of ds_config.json or job.yaml.",
    "hostfile": "Write, check or show a hostfile.",
    "script": "Write a script for SLURM, Kubernetes and others.",
    "templates": "List the DeepSpeed templates, or copy them out.",
    "demo": "Train a tiny model: the smoke test of an installation.",
    "completion": "Print the Tab completion of bash, zsh or fish.",
}
"""Verbs in the order of their use, with their summaries; `dstrain <verb>` is the module of that name, which is imported
only when the verb is typed."""


class Verbs(click.Group):
    """A group that imports the module of the verb that is typed, and of no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the verb of that name."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"dstrain.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the verbs and their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns the verbs that begin with `incomplete`, or the options of `dstrain`."""
        verbs = [CompletionItem(name, help=summary) for name, summary in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the verb and its arguments. Raises UsageError for an unknown verb and suggests the closest."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0]}'. {did_you_mean(args[0], list(VERBS))}", ctx)
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
        _complain(error)
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
        _complain(EnvironmentProblem(f"the output cannot be written: {error.strerror}"))
        sys.stdout = None  # else Python tries once more at its end
        sys.exit(EnvironmentProblem.exit_code)


def _complain(error: DstrainError) -> None:
    from dstrain.cli.console import complain  # imports Rich, which help does not need

    complain(error)
