"""The `ptxkit` command."""

from __future__ import annotations

from .groups import command_of, run

COMMANDS = {"simulate": ("ptxkit.commands.simulate", "Find races in any script's kernels, without a GPU.")}
cli = command_of("ptxkit", "Run GPU kernels on a CPU, from their PTX.", COMMANDS)


def main() -> None:
    run(cli)
