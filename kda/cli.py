"""The `kda` command.  Subcommands are imported at their use, so that `kda --help` and `kda doctor` need no torch."""

from __future__ import annotations

from ptxkit.commands.groups import command_of, run

# name -> (module that exports `command`, line of --help)
COMMANDS = {
    "doctor": ("kda.tools.commands.doctor", "Say what works on this machine, and how to fix the rest."),
    "selftest": ("kda.tools.commands.selftest", "Check the kernels of an arch, as far as this host can."),
    "verify": ("kda.tools.commands.verify", "Find the first stage of a backend that is wrong."),
    "explain": ("kda.tools.commands.explain", "Say what a call would run on any GPU, and why."),
    "bench": ("kda.tools.commands.bench", "Time a backend, after comparing its results."),
    "simulate": ("ptxkit.commands.simulate", "Find races in any script's kernels, without a GPU."),
    "timeline": ("kda.tools.commands.timeline", "Show what a forward's warps and units do, without a GPU."),
    "compile": ("kda.tools.commands.compile", "Build kernels ahead of time, for any arch."),
    "cache": ("kda.tools.commands.cache", "List and clean the kernels that were built."),
}
SAYS = "Kimi Delta Attention: what works on this machine, whether it is correct, and how fast it is."
cli = command_of("kda", SAYS, COMMANDS)


def main() -> None:
    run(cli)
