"""The `dstrain` command: its verbs, and the one place where errors become text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from dstrain import __version__
from dstrain.cli import demo, export, gen_config, plan, run, templates
from dstrain.cli.console import complain
from dstrain.errors import DstrainError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dstrain")
def cli() -> None:
    """Fine-tune large models with DeepSpeed: decide, explain, check, launch, watch.

    \b
    Example:
      dstrain plan --gpus 16 --model qwen3-32b
      dstrain gen-config --gpus 16 --model qwen3-32b --data train.jsonl
      dstrain run
    """


for _module in (gen_config, plan, run, export, templates, demo):
    cli.add_command(_module.command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. dstrain's errors become a message and an exit code; anything else is a bug and keeps its
    traceback."""
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
