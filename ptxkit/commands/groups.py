"""A command with subcommands that are imported at their use, so that --help imports next to nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from ptxkit import application
from ptxkit.errors import nearest

from .layout import fold, width_of
from .render import ERROR, INTERRUPTED, OutputError, Screen, explain_error, program_version

HELP_WIDTH = 100                             # columns of --help: longer lines of prose are hard to read
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH}
EXIT_CODES = (
    "Exit codes: 0 nothing wrong, 1 a finding, 2 a wrong command or an internal error, 3 this host cannot judge that "
    "or lacks a compiler for it."
)
Homes = Mapping[str, tuple[str, str]]        # name -> (module that exports `command`, line of --help)


@contextlib.contextmanager
def folded_errors() -> Iterator[None]:
    """Fold what is said of a wrong command, so that it fits the terminal."""
    try:
        yield
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            options = [name for option in error.ctx.command.params for name in option.opts] if error.ctx else []
            near = nearest(error.option_name[2:], [name[2:] for name in options if name.startswith("--")])
            error = click.NoSuchOption(error.option_name, possibilities=[f"--{near}"] if near else [], ctx=error.ctx)
        text, width = error.format_message(), width_of(sys.stderr)
        lines = [part for line in f"Error: {text}".splitlines() for part in fold(line, width)]
        error.format_message = lambda: "\n".join(lines).removeprefix("Error: ")     # type: ignore[method-assign]
        raise error from None


class LazyGroup(click.Group):
    def __init__(self, *args: Any, homes: Homes, **options: Any):
        super().__init__(*args, **options)
        self.homes = homes

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with folded_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with folded_errors():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo(f"{application.current().name}: interrupted", err=True)
                ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.homes)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.homes:
            return None
        command: click.Command = importlib.import_module(self.homes[name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.homes and not args[0].startswith("-"):
            option = f"--{args[0]}"
            is_option = any(option in each.opts for each in self.get_params(ctx))
            near = f"{ctx.info_name} {option}" if is_option else nearest(args[0], self.homes)
            hint = f"Did you mean {near!r}?" if near else f"There are {', '.join(self.homes)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        try:
            return super().resolve_command(ctx, args)
        except click.ClickException:
            raise
        except Exception as error:
            screen, program = Screen(), application.current()
            screen.line(f"{program.name} {args[0]} could not be loaded{program.broken or '.'}", err=True)
            screen.line(explain_error(error, "--debug" in args), err=True)
            ctx.exit(ERROR)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.homes.items()])


def command_of(name: str, says: str, homes: Homes) -> click.Command:
    """Return the command of a program, with its subcommands."""
    group = LazyGroup(name, homes=homes, context_settings=SETTINGS, help=f"{says}\n\n{EXIT_CODES}")
    return click.version_option(program_version(), prog_name=name, message="%(prog)s %(version)s")(group)


def run(cli: click.Command) -> None:
    """Run a program's command."""
    try:
        cli(prog_name=application.current().name)
    except OSError as error:                 # from --help or --version; commands print their own errors
        click.echo(str(OutputError(error)), err=True)
        sys.exit(ERROR)
