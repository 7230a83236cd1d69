"""What the options of several commands share: types, names that exist, the shape of a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from kda.errors import nearest
from kda.model.problem import DTYPES, SHORT_DTYPES, Problem
from kda.routing import dispatch
from kda.routing.capability import Capability
from ptxkit.commands.options import Count, archs_with_clock
from ptxkit.commands.render import CANNOT_JUDGE
from ptxkit.compile.target import Target, code_for, parse


class NumberOption(click.FloatRange):
    name = "number"


class Lengths(click.ParamType):
    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            lengths = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            lengths = (-1,)
        if min(lengths) < 0:
            self.fail(f"{value!r} is not a list of lengths such as 65,0,63", param, ctx)
        return lengths


class DtypeOption(click.Choice):
    """A dtype by torch's name, or by a short one such as bf16."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(SHORT_DTYPES.get(value, value), param, ctx)


class Name(click.ParamType):
    """One of the names of a kind, such as those of the backends, which are asked for when they are needed."""

    def __init__(self, kind: str, names: Callable[[], Sequence[str]]):
        self.kind, self.names = kind, names
        self.name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known(self.kind, value, self.names())
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]


BACKEND = Name("backend", dispatch.backend_names)


def problem_of(words: str) -> Problem:
    try:
        return Problem.parse(words)
    except ValueError as error:
        raise click.UsageError(f"--problem: {error}") from None


class NoKernelsYet(click.ClickException):
    """An arch was asked for, and no backend is built for it: nothing here can be judged."""

    exit_code = CANNOT_JUDGE

    def __init__(self, target: Target):
        super().__init__(no_kernels(target))


def no_kernels(target: Target) -> str:
    return f"{target.name} ({target.examples}): no backend has kernels for it yet"


def built_for(target: Target) -> list[Capability]:
    """Return the backends with kernels for an arch."""
    return [c for c in dispatch.capabilities() if target.name in c.archs]


def must_have_kernels(backend: str | None, target: Target) -> None:
    """Raise a usage error for a backend that was named beside an arch for which it has no kernels."""
    if backend is None or target.name in (archs := dispatch.capability(backend).archs):
        return
    if not (others := [c.backend for c in built_for(target)]):
        raise NoKernelsYet(target)
    if archs and (older := code_for(target.cc, archs)):
        raise click.UsageError(f"--arch {target.name}: {backend} has kernels for {older.name}, which these GPUs run, "
                               f"too. Name --arch {older.name}.")
    has = f"kernels for {', '.join(archs)}" if archs else "no kernels"
    raise click.UsageError(f"--arch {target.name}: {backend} has {has}. Leave out --backend, or name "
                           f"{', '.join(others)}.")


def timed_arch(requested: str | None) -> str | None:
    """Return the arch on which the clock times a backend if none is named: sm90, or else the first that it has kernels
    for."""
    backend = dispatch.backend_asked(requested)
    archs = dispatch.capability(backend).archs if backend in dispatch.backend_names() else ("sm90",)
    timed = [arch for arch in archs if arch in archs_with_clock()]
    return "sm90" if "sm90" in timed else next(iter(timed), None)


def given(*names: str) -> list[str]:
    """Return those of the running command's options that stand on its command line."""
    source = click.get_current_context().get_parameter_source
    return [name for name in names if source(name) is click.core.ParameterSource.COMMANDLINE]


def option_of(name: str) -> str:
    """Return an option of the running command as it is typed."""
    command = click.get_current_context().command
    return next(max(option.opts, key=len) for option in command.params if option.name == name)


def refuse(why: str, *names: str) -> None:
    """Raise a usage error that names the first of these options that was given."""
    if wrong := given(*names):
        raise click.UsageError(f"{why}; leave out {option_of(wrong[0])}")


def check_value_heads(options: dict[str, Any]) -> None:
    heads, values = options["heads"], options["value_heads"]
    if values and values % heads:
        raise click.UsageError(f"--value-heads must be a multiple of --heads {heads}; found {values}")


def backend_in_force() -> str:
    """Return the name that a call without one gets: "auto", or that of KDA_BACKEND, if there is such a backend."""
    name, names = dispatch.backend_asked(), dispatch.backend_names()
    if name not in ("auto", *names):
        raise click.UsageError(f"KDA_BACKEND={name} names no backend. Unset it, or name one of {', '.join(names)}.")
    return name


LISTED = {"check": "`kda doctor --list`", "shape": "`kda bench --list`", "fault": "`kda verify --fault list`"}


def known(kind: str, name: str, names: Sequence[str]) -> None:
    """Raise a usage error for a name that does not exist, such as that of an arch instead of a backend's."""
    if name in names:
        return
    if kind == "backend" and (target := _target(name)):
        builders = ", ".join(c.backend for c in built_for(target))
        if not builders:
            raise NoKernelsYet(target)
        is_what = "an arch" if name == target.name else f"of the arch {target.name}"
        raise click.UsageError(f"{name} is {is_what}, and no backend is called so; kernels for it: {builders}.")
    near = nearest(name, names)
    hint = f" Did you mean {near!r}?" if near else ""
    runs = ", and runs of them, such as fwd/gate+intra+wy" if kind == "stage" else ""
    all_of_them = f"{LISTED[kind]} lists them." if kind in LISTED else f"There are {', '.join(names)}{runs}."
    raise click.UsageError(f"there is no {kind} {name!r}.{hint} {all_of_them}")


def _target(name: str) -> Target | None:
    try:
        return parse(name)
    except ValueError:
        return None


def shape_options(
    heads: int, lengths: str, batch: int | None = None, dtype: str | None = "bfloat16", dtype_help: str | None = None
) -> Callable[[Callable], Callable]:
    """Add --lengths or --batch and --tokens, heads, head dims, dtype."""
    options = (
        click.option("--lengths", type=Lengths(), help=lengths),
        click.option("--batch", type=Count(1), default=batch, show_default=batch is not None,
                     help="Rows of a batch, instead of packed sequences."),
        click.option("--tokens", type=Count(1), help="Tokens of a row, instead of packed sequences."),
        click.option("--heads", type=Count(1), default=heads, show_default=True, help="Query/key heads."),
        click.option("--value-heads", type=Count(1),
                     help="Value heads, a multiple of --heads.  [default: as many]"),
        click.option("-K", "k", type=Count(1, 256), default=128, show_default=True,
                     help="Head dim of q and k."),
        click.option("-V", "v", type=Count(1), default=128, show_default=True, help="Head dim of v."),
        click.option("--dtype", type=DtypeOption(DTYPES), default=dtype, show_default=dtype is not None,
                     help=dtype_help),
    )

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
