"""placeholder"""

import click


@click.command("run")
def command() -> None:
    """x"""
