"""The `kda` command.  Subcommands are imported at their use, so that `kda --help` and `kda doctor` need no torch."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from kda.commands.layout import fold, width_of
from kda.commands.render import ERROR, INTERRUPTED, OutputError, Screen, explain_error, kda_version

# name -> (module that exports `command`, line of --help)
COMMANDS = {
    "doctor": ("kda.commands.doctor", "Say what works on this machine, and how to fix the rest."),
    "selftest": ("kda.commands.selftest", "Check the kernels of an arch, as far as this host can."),
    "verify": ("kda.commands.verify", "Find the first stage of a backend that is wrong."),
    "bench": ("kda.commands.bench", "Time a backend, on inputs on which it was compared."),
    "simulate": ("kda.commands.simulate", "Find races in any script's kernels, without a GPU."),
    "timeline": ("kda.commands.timeline", "Show what a forward's warps and units do, without a GPU."),
    "compile": ("kda.commands.compile", "Build kernels ahead of time, for any arch."),
    "cache": ("kda.commands.cache", "List and clean the kernels that were built."),
}


@contextlib.contextmanager
def folded_errors() -> Iterator[None]:
    """What is said of a wrong command fits the terminal."""
    try:
        yield
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            error = click.NoSuchOption(error.option_name, possibilities=near_options(error), ctx=error.ctx)
        text, width = error.format_message(), width_of(sys.stderr)
        lines = [part for line in f"Error: {text}".splitlines() for part in fold(line, width)]
        error.format_message = lambda: "\n".join(lines).removeprefix("Error: ")     # type: ignore[method-assign]
        raise error from None


def near_options(error: click.NoSuchOption) -> list[str]:
    from kda.errors import nearest

    options = [name for option in error.ctx.command.params for name in option.opts] if error.ctx else []
    near = nearest(error.option_name[2:], [name[2:] for name in options if name.startswith("--")])
    return [f"--{near}"] if near else []


class LazyGroup(click.Group):
    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with folded_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with folded_errors():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("kda: interrupted", err=True)
                ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from kda.errors import nearest

            near = nearest(args[0], COMMANDS)
            hint = f"Did you mean {near!r}?" if near else f"There are {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        try:
            return super().resolve_command(ctx, args)
        except click.ClickException:
            raise
        except Exception as error:
            screen = Screen()
            screen.line(f"kda {args[0]} could not be loaded; `kda doctor` looks for the cause.", err=True)
            screen.line(explain_error(error, "--debug" in args), err=True)
            ctx.exit(ERROR)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


HELP_WIDTH = 100                             # columns of --help: longer lines of prose are hard to read


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH})
@click.version_option(kda_version(), prog_name="kda", message="%(prog)s %(version)s")
def cli() -> None:
    """Kimi Delta Attention: what works on this machine, whether it is correct, and how fast it is.

    Exit codes: 0 nothing wrong, 1 a finding, 2 a wrong command or an internal error, 3 this host cannot judge that or
    lacks a compiler for it.
    """


def main() -> None:
    try:
        cli(prog_name="kda")
    except OSError as error:                 # from --help or --version; commands print their own errors
        click.echo(str(OutputError(error)), err=True)
        sys.exit(ERROR)
