"""The `ptxkit` command."""

from __future__ import annotations

import click

from .groups import SETTINGS, LazyGroup, run
from .render import program_version

COMMANDS = {
    "simulate": ("ptxkit.commands.simulate", "Find races in any script's kernels, without a GPU."),
}


@click.group(cls=LazyGroup, homes=COMMANDS, context_settings=SETTINGS)
@click.version_option(program_version(), prog_name="ptxkit", message="%(prog)s %(version)s")
def cli() -> None:
    """Run GPU kernels on a CPU, from their PTX.

    Exit codes: 0 nothing wrong, 1 a finding, 2 a wrong command or an internal error, 3 this host cannot judge that or
    lacks a compiler for it.
    """


def main() -> None:
    run(cli)
