"""`dstrain show`: prints what dstrain carries: templates, schemas of its files, and the completion of a shell."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.group import Group
from dstrain.cli.types import Choice
from dstrain.errors import Conflict, InvalidConfig, did_you_mean
from dstrain.paths import shipped, write_together


class Shell(StrEnum):
    """A shell that Click writes completion for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class File(StrEnum):
    """A file whose keys have a JSON schema."""

    CONFIG = "ds_config"
    JOB = "job"


_WRITERS = {Shell.BASH: BashComplete, Shell.ZSH: ZshComplete, Shell.FISH: FishComplete}


@click.group("show", cls=Group)
def command() -> None:
    """Print what dstrain carries: DeepSpeed templates, JSON schemas of its files, and completion for a shell.

    \b
    Example:
      dstrain show template
      dstrain show schema job
      eval "$(dstrain show completion bash)"
    """


@command.command("template")
@click.argument("names", metavar="[NAME ...]", nargs=-1)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Copy them, with the partials they include, to this folder.",
)
@click.option("-n", "--dry-run", is_flag=True, help="With --dir, print what would be copied; copy nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def template(names: tuple[str, ...], folder: Path | None, dry_run: bool, as_json: bool) -> None:
    """List the DeepSpeed templates, print some of them, or copy them to change them: without names, all of them.

    \b
    Example:
      dstrain show template
      dstrain show template zero3.json.j2 --dir my_templates
      dstrain gen-config --gpus 16 --model qwen3-32b --template-dir my_templates
    """
    from dstrain.config.templates import template_names, template_texts

    legal = template_names()
    for name in names:
        if name not in legal:
            raise InvalidConfig(f'unknown template "{name}"', hint=did_you_mean(name, legal))
    if folder is not None:
        _copy(template_texts(names or legal), folder, dry_run=dry_run)
        return
    # the files as they are, with their comments, which Jinja would drop
    shown = {name: (shipped("ds_templates") / name).read_text(encoding="utf-8") for name in names or legal}
    purposes = {
        name: text.splitlines()[0].removeprefix("{#").removesuffix("#}").strip() for name, text in shown.items()
    }
    if as_json:
        answer_json({"schema": 1, "files": shown} if names else {"schema": 1, "templates": purposes})
    elif names:
        answer("\n".join(text.rstrip() for text in shown.values()))
    else:
        answer("\n".join(f"{name}\n    {purpose}" for name, purpose in purposes.items()))


def _copy(texts: dict[str, str], folder: Path, *, dry_run: bool) -> None:
    """Copies templates. Raises Conflict if another file has one of their names."""
    present = [name for name, text in texts.items() if _differs(folder / name, text)]
    if present:
        raise Conflict(
            f"{folder / present[0]} exists already; nothing was copied", hint="Name another folder with --dir."
        )
    if not dry_run:
        write_together({folder / name: text for name, text in texts.items()})
    for name in texts:
        say(f"{'would copy' if dry_run else 'copied'} {folder / name}")
    if not dry_run:
        say(f"next: edit them, then dstrain gen-config … --template-dir {folder}")


def _differs(path: Path, text: str) -> bool:
    """Returns whether `path` exists with another content than `text`."""
    return path.exists() and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text)


@command.command("schema")
@click.argument("file", type=Choice(File), default=File.CONFIG.value)
def schema_(file: File) -> None:
    """Print the JSON schema of ds_config.json or of job.yaml: keys, types, defaults, meanings.

    gen-config writes both into .dstrain/ and refers to them in its files, where editors find them. In your own files,
    write these first lines:

    \b
      "$schema": "./.dstrain/ds_config.schema.json",
      # yaml-language-server: $schema=./.dstrain/job.schema.json

    \b
    Example:
      mkdir -p .dstrain && dstrain show schema > .dstrain/ds_config.schema.json
      dstrain show schema job > .dstrain/job.schema.json
    """
    from dstrain.config import schema

    answer(schema.text(schema.job_schema() if file is File.JOB else schema.config_schema()))


@command.command("completion")
@click.argument("shell", type=Choice(Shell))
@click.pass_context
def completion(ctx: click.Context, shell: Shell) -> None:
    """Print the script that completes commands, options, models and GPUs in bash, zsh or fish.

    \b
    Example:
      eval "$(dstrain show completion bash)"     # in ~/.bashrc
      eval "$(dstrain show completion zsh)"      # in ~/.zshrc, after compinit
      dstrain show completion fish | source      # in ~/.config/fish/config.fish
    """
    answer(_WRITERS[shell](ctx.find_root().command, {}, "dstrain", "_DSTRAIN_COMPLETE").source())
