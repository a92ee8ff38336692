"""`dstrain templates`: lists the DeepSpeed templates and copies them out for changes."""

from __future__ import annotations

from pathlib import Path

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.group import Group
from dstrain.config.templates.templates import template_names, template_texts
from dstrain.errors import Conflict, InvalidConfig, did_you_mean
from dstrain.paths import shipped, write_together


@click.group("templates", cls=Group)
def command() -> None:
    """List the DeepSpeed templates, or copy them out to change them.

    \b
    Example:
      dstrain templates eject zero3.json.j2 --dir my_templates
      dstrain gen-config --gpus 16 --model qwen3-32b --template-dir my_templates
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the templates with their purpose.

    \b
    Example:
      dstrain templates list
    """
    purposes = {name: _purpose(name) for name in template_names()}
    if as_json:
        answer_json({"schema": 1, "templates": purposes})
        return
    for name, purpose in purposes.items():
        answer(f"{name}\n    {purpose}")


def _purpose(name: str) -> str:
    first = (shipped("ds_templates") / name).read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("{#").removesuffix("#}").strip()


@command.command("eject")
@click.argument("names", nargs=-1)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default="ds_templates",
    show_default=True,
    help="Folder to copy into.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be copied; copy nothing.")
def eject(names: tuple[str, ...], folder: Path, dry_run: bool) -> None:
    """Copy templates, with the partials they include, to a folder; without names, all of them.

    \b
    Example:
      dstrain templates eject --dir my_templates
    """
    legal = template_names()
    for name in names:
        if name not in legal:
            raise InvalidConfig(f'unknown template "{name}"', hint=did_you_mean(name, legal))
    texts = template_texts(names or legal)
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
