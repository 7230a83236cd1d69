"""`kda bench`: how fast a backend is, on inputs on which it was compared in the same process.

This file declares the command and checks its options.  `asked` has shapes and problems of the options, `timed`,
`decode`, `predicted` and `host` measure or predict and print, `report` and `drawn` are what they print and draw.
Imports torch when it runs.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import click

from kda.routing.dispatch import backend_names
from kda.tools.measure.shapes import DIRECTIONS, GATES, SHAPES, with_gate
from ptxkit.commands.options import ARCH, Count, OutputFile
from ptxkit.commands.render import CANNOT_JUDGE, OK, CannotJudge, Screen, common_options, heading

from ..options import Name, NumberOption, check_value_heads, given, option_of, refuse, shape_options
from . import decode
from .asked import REGIMES
from .timed import compare_and_time, read_results

OTHERS = ("fla", "cudnn")                    # those of kda.tools.verify.doors.PEERS, which import torch
EXPLICIT = ("lengths", "batch", "tokens", "heads", "value_heads", "k", "v", "dtype")
OUTPUT = OutputFile()


class Percent(click.ParamType):
    name = "N%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%?", str(value))
        if not match:
            self.fail(f"{value!r} is not a percentage such as 3%", param, ctx)
        return float(match[1]) / 100


@click.command()
@click.option("--backend", type=Name("backend", lambda: ["auto", *backend_names()]),
              help="The backend to time; left out, the one that auto picks.")
@click.option("--against", type=Name("backend", lambda: [*OTHERS, *backend_names()]),
              help="A baseline: another backend; fla; or cudnn, whose forwards alone are compared.")
@click.option("--shape", "names", type=Name("shape", lambda: list(SHAPES)), multiple=True,
              help="A named shape, see --list; may be repeated.  [default: those for this device]")
@shape_options(heads=8, lengths="Packed sequences.", batch=1)
@click.option("--regime", type=click.Choice([*REGIMES, "both"]), default="both", show_default=True,
              help="Gates that forget within 16 tokens, or remember for hundreds.")
@click.option("--gate", type=click.Choice(GATES),
              help="The gate of the calls: bounded, as in Kimi-K3; softplus, as in Kimi-Linear; or given decays.  "
              "[default: that of the shape: a model's, or else bounded]")
@click.option("--direction", "directions", multiple=True, default=["both"], show_default=True,
              type=click.Choice([*DIRECTIONS, "both", "step", "layer", "decode"]),
              help="A step is a recorded forward and its backward in one; may be repeated. layer, with --host: a step "
              "of one layer of 16. decode: a token of each of --batch sequences by kda.decode_step.")
@click.option("--graph", is_flag=True, help="Replay calls from a CUDA graph.")
@click.option("--disable-recompute", is_flag=False, flag_value="all", type=click.Choice(["all", "states"]),
              help="Keep the forward's intermediates for the backward, or the states alone.")
@click.option("--stages", is_flag=True, help="Time each stage that the backend can run alone, too.")
@click.option("--repeats", type=Count(1), help="Launches per timing.  [default: 20 on a CPU, 200 on a GPU]")
@click.option("--seconds", type=NumberOption(0), default=10.0, show_default=True,
              help="Stop a timing after this long, but make at least three launches.")
@click.option("--save", metavar="FILE", type=OUTPUT, help="Write the results as JSON.")
@click.option("--compare", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="Compare medians with a saved run.")
@click.option("--fail-above", type=Percent(), default="3%", show_default=True,
              help="With --compare: exit with 1 if a median is slower by more, and the spreads are apart.")
@click.option("--plot", metavar="FILE", type=OutputFile(".png", ".svg", ".pdf"),
              help="Draw the times (.png, .svg, .pdf).")
@click.option("--html", metavar="FILE", type=OUTPUT,
              help="Write a page: times as bars, and what the roles of the kernels do over time.")
@click.option("--predicted", is_flag=True,
              help="Time nothing: what the simulator's clock says, and its error.  Needs no GPU.")
@click.option("--host", is_flag=True,
              help="Time the host's part alone: a forward and a step, with the GPU idle and busy.")
@click.option("--arch", type=ARCH,
              help="With --predicted: the GPUs of this arch or card, such as b200.  [default: that of --backend, or "
              "sm90]  With --host: launches go to a stand-in of one.")
@click.option("--verbose", "-v", is_flag=True, help="Print rates, memory with inputs, and each comparison, too.")
@click.option("--list", "only_list", is_flag=True, help="List the named shapes and end.")
@click.option("--force", is_flag=True, help="Run shapes that look too large for this machine.")
@common_options
def command(screen: Screen, **options: Any) -> int:
    """Time a backend, after comparing its results.

    Exits with 1 if a result is wrong or --compare finds a regression, with 3 if this machine cannot judge.
    """
    if options["only_list"]:
        return print_list(screen)
    decoding = "decode" in options["directions"]
    if decoding:
        decode.check_usage(options)
    else:
        check_usage(options)
    old = read_results(options["compare"]) if options["compare"] else None
    try:
        if decoding:
            return decode.decode(screen, options)
        if options["predicted"]:
            from .predicted import predicted

            return predicted(screen, options)
        if options["host"]:
            from .host import host

            return host(screen, options)
        return compare_and_time(screen, options, old)
    except CannotJudge as refusal:
        screen.answer(heading("bench", CANNOT_JUDGE, refused=refusal.reasons, rows=[]), refusal.reasons)
        return CANNOT_JUDGE


# ---------------------------------------------------------------------------------------------- what is asked


def check_usage(options: dict[str, Any]) -> None:
    explicit = given(*EXPLICIT)
    if options["names"]:
        refuse("--shape names a shape", *EXPLICIT)
    if explicit and not options["tokens"] and options["lengths"] is None:
        raise click.UsageError(f"{option_of(explicit[0])} needs --tokens or --lengths beside it")
    if options["lengths"] is not None and (options["tokens"] or given("batch")):
        raise click.UsageError("--lengths packs sequences in one row; leave out --batch and --tokens")
    if options["lengths"] is not None and not sum(options["lengths"]):
        raise click.UsageError("--lengths must have a token to time")
    check_value_heads(options)
    if given("fail_above") and not options["compare"]:
        raise click.UsageError("--fail-above needs --compare FILE, the results to compare with")
    if options["graph"] and options["stages"]:
        raise click.UsageError("--graph replays whole calls; leave out --stages")
    if options["arch"] and not options["predicted"] and not options["host"]:
        raise click.UsageError("--arch needs --predicted or --host: timings are made on the GPU of this machine")
    if options["host"]:
        others = ("predicted", "graph", "stages", "save", "compare", "plot", "html", "regime", "seconds", "force")
        refuse("--host times calls of the host", *others)
        if {"backward", "both"} & set(options["directions"]) and given("directions"):
            raise click.UsageError("--host times a forward, a step and a layer; --direction names one of them")
    elif "layer" in options["directions"]:
        raise click.UsageError("--direction layer needs --host: it times the host's part of one layer of 16")
    if options["predicted"]:
        refuse("--predicted times nothing", "graph", "against", "stages", "repeats", "save", "compare", "regime",
               "seconds", "force")
    if options["plot"] and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot draws with matplotlib: pip install matplotlib")


def print_list(screen: Screen) -> int:
    shapes = {name: {**shape._asdict(), "label": shape.label} for name, shape in SHAPES.items()}
    lines = screen.table([(name, with_gate(shape.label), shape.origin) for name, shape in SHAPES.items()])
    screen.answer({"schema": 1, "command": "bench", "shapes": shapes}, lines)
    return OK
