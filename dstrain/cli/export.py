"""placeholder"""

import click


@click.command("export")
def command() -> None:
    """x"""
