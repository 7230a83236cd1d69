"""What the options of several commands share: archs and cards, numbers, files that are written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ptxkit.compile.store import accepts_files
from ptxkit.compile.target import NAMES, TARGETS, Target, parse

if TYPE_CHECKING:
    from ptxkit.timing.chips import ChipClock


class Count(click.IntRange):
    name = "integer"


CARD = "card"                                # in the meta of a context: what --arch was given


class Arch(click.ParamType):
    """A Target, by the name of an arch or of a card."""

    name = "ARCH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        if isinstance(value, Target):
            return value
        if ctx is not None:
            ctx.meta[CARD] = value
        try:
            return parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "Name a GPU, such as --arch h100."

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        archs = [CompletionItem(t.name, help=t.examples) for t in TARGETS.values()]
        cards = [CompletionItem(name) for name in NAMES if name not in TARGETS and " " not in name]
        return [each for each in archs + cards if each.value.startswith(incomplete)]


class OutputFile(click.Path):
    """A file that is written in the end: whether it can be, and by no other option, is asked before the work."""

    def __init__(self, *endings: str, path_type: type | None = None):
        super().__init__(dir_okay=False, writable=True, path_type=path_type)
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        file = str(path)
        folder = os.path.dirname(file) or "."
        if not os.path.isdir(folder):
            self.fail(f"there is no folder {folder!r} for {file!r}. Create it, or name another file.", param, ctx)
        if not (os.access(file, os.W_OK) if os.path.exists(file) else accepts_files(folder)):
            self.fail(f"{file!r} cannot be written. Name another file.", param, ctx)
        if self.endings and not file.lower().endswith(self.endings):
            self.fail(f"{file!r} must end in {', '.join(self.endings[:-1])} or {self.endings[-1]}", param, ctx)
        if ctx and param and (os.path.isfile(file) or not os.path.exists(file)):
            other = ctx.meta.setdefault("files of outputs", {}).setdefault(os.path.realpath(file), param)
            if other is not param:
                self.fail(f"{file!r} is the file of {other.opts[-1]}, too. Name another file.", param, ctx)
        return path


ARCH = Arch()


def archs_with_clock() -> list[str]:
    from ptxkit.timing.chips import OF_ARCH

    return [f"sm{number}" for number in OF_ARCH]


def chip_for(target: Target, card: str | None = None) -> tuple[ChipClock, str]:
    """Return the chip whose clock times an arch, and what it is in words: the card that --arch named, or `card`, as its
    driver calls it; where that one has no clock, the chip that stands for the arch."""
    from ptxkit.timing.chips import chip_of, of_card

    if card is None:
        context = click.get_current_context(silent=True)
        card = context.meta.get(CARD, "") if context else ""
    if named := of_card(card, target.number):
        return named, f"{named} ({target.name})"
    chip = chip_of(True, target.number)
    return chip, f"{chip}, which stands for {target.name} ({target.examples})"


def needs_a_clock(target: Target, option: str) -> None:
    if target.name not in archs_with_clock():
        known = ", ".join(archs_with_clock())
        raise click.UsageError(f"{option}: the simulator has no clock for {target.name}; it has one for {known}")
