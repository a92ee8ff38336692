"""`dstrain schema`: prints the JSON schemas by which editors complete, explain and check the files."""

from __future__ import annotations

import click

from dstrain.cli.console import answer
from dstrain.config import schema


@click.command("schema")
@click.option("--job", "of_job", is_flag=True, help="Print the schema of job.yaml instead.")
def command(of_job: bool) -> None:
    """Print the JSON schema of ds_config.json, or with --job that of job.yaml: keys, types, defaults, meanings.

    gen-config writes both into .dstrain/ and refers to them in its files, where editors find them. In your own files,
    write these first lines:

    \b
      "$schema": "./.dstrain/ds_config.schema.json",
      # yaml-language-server: $schema=./.dstrain/job.schema.json

    \b
    Example:
      mkdir -p .dstrain && dstrain schema > .dstrain/ds_config.schema.json
      dstrain schema --job > .dstrain/job.schema.json
    """
    answer(schema.text(schema.job_schema() if of_job else schema.config_schema()))
