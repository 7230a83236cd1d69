"""The `kda` command.  Subcommands are imported at their use, so that `kda --help` and `kda doctor` need no torch."""

from __future__ import annotations

import click

from ptxkit.commands.groups import SETTINGS, LazyGroup, run
from ptxkit.commands.render import program_version

# name -> (module that exports `command`, line of --help)
COMMANDS = {
    "doctor": ("kda.tools.commands.doctor", "Say what works on this machine, and how to fix the rest."),
    "selftest": ("kda.tools.commands.selftest", "Check the kernels of an arch, as far as this host can."),
    "verify": ("kda.tools.commands.verify", "Find the first stage of a backend that is wrong."),
    "bench": ("kda.tools.commands.bench", "Time a backend, on inputs on which it was compared."),
    "simulate": ("ptxkit.commands.simulate", "Find races in any script's kernels, without a GPU."),
    "timeline": ("kda.tools.commands.timeline", "Show what a forward's warps and units do, without a GPU."),
    "compile": ("kda.tools.commands.compile", "Build kernels ahead of time, for any arch."),
    "cache": ("kda.tools.commands.cache", "List and clean the kernels that were built."),
}


@click.group(cls=LazyGroup, homes=COMMANDS, context_settings=SETTINGS)
@click.version_option(program_version(), prog_name="kda", message="%(prog)s %(version)s")
def cli() -> None:
    """Kimi Delta Attention: what works on this machine, whether it is correct, and how fast it is.

    Exit codes: 0 nothing wrong, 1 a finding, 2 a wrong command or an internal error, 3 this host cannot judge that or
    lacks a compiler for it.
    """


def main() -> None:
    run(cli)
