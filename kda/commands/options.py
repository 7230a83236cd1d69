"""What the options of several commands share: types, names that exist, the shape of a problem."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import click

from kda import dispatch
from kda.capability import Capability
from kda.compile.target import TARGETS, Target
from kda.problem import DTYPES

from .render import CANNOT_JUDGE


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


class NoKernelsYet(click.ClickException):
    """An arch was asked for, and no backend is built for it: nothing here can be judged."""

    exit_code = CANNOT_JUDGE

    def __init__(self, target: Target):
        super().__init__(no_kernels(target))


def no_kernels(target: Target) -> str:
    return f"{target.name} ({target.examples}): no backend has kernels for it yet"


def built_for(target: Target) -> list[Capability]:
    """The backends with kernels for an arch."""
    return [c for c in dispatch.capabilities() if target.name in c.archs]


def known(kind: str, name: str, names: Sequence[str]) -> None:
    """Usage error for a name that does not exist, such as that of an arch instead of a backend's."""
    if name not in names:
        if kind == "backend" and name in TARGETS:
            builders = ", ".join(c.backend for c in built_for(TARGETS[name]))
            if not builders:
                raise NoKernelsYet(TARGETS[name])
            raise click.UsageError(f"{name} is an arch, and no backend is called so; kernels for it: {builders}.")
        near = difflib.get_close_matches(name, names, n=1, cutoff=0)
        raise click.UsageError(f"there is no {kind} {name!r}. Did you mean {near[0]!r}? There are {', '.join(names)}.")


def shape_options(
    heads: int, lengths: str, batch: int | None = None, dtype: str | None = "bfloat16", dtype_help: str | None = None
) -> Callable[[Callable], Callable]:
    """--lengths or --batch and --tokens, heads, head dims, dtype."""
    options = (
        click.option("--lengths", type=Lengths(), help=lengths),
        click.option("--batch", type=click.IntRange(1), default=batch, show_default=batch is not None,
                     help="Rows of a batch, instead of packed sequences."),
        click.option("--tokens", type=click.IntRange(1), help="Tokens of a row, instead of packed sequences."),
        click.option("--heads", type=click.IntRange(1), default=heads, show_default=True, help="Query/key heads."),
        click.option("--value-heads", type=click.IntRange(1),
                     help="Value heads, a multiple of --heads.  [default: as many]"),
        click.option("-K", "k", type=click.IntRange(1, 256), default=128, show_default=True,
                     help="Head dim of q and k."),
        click.option("-V", "v", type=click.IntRange(1), default=128, show_default=True, help="Head dim of v."),
        click.option("--dtype", type=click.Choice(DTYPES), default=dtype, show_default=dtype is not None,
                     help=dtype_help),
    )  # fmt: skip

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
