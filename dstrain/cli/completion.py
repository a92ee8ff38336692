"""`dstrain completion`: prints the completion script of a shell."""

from __future__ import annotations

from enum import StrEnum

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from dstrain.cli.console import answer
from dstrain.cli.types import Choice


class Shell(StrEnum):
    """A shell that Click writes completion for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_WRITERS = {Shell.BASH: BashComplete, Shell.ZSH: ZshComplete, Shell.FISH: FishComplete}


@click.command("completion")
@click.argument("shell", type=Choice(Shell))
@click.pass_context
def command(ctx: click.Context, shell: Shell) -> None:
    """Print the script that completes commands, options, models and GPUs in bash, zsh or fish.

    \b
    Example:
      eval "$(dstrain completion bash)"     # in ~/.bashrc
      eval "$(dstrain completion zsh)"      # in ~/.zshrc, after compinit
      dstrain completion fish | source      # in ~/.config/fish/config.fish
    """
    answer(_WRITERS[shell](ctx.find_root().command, {}, "dstrain", "_DSTRAIN_COMPLETE").source())
