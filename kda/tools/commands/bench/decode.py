"""`kda bench --direction decode`: a token of every sequence by `kda.decode_step`.  Imports torch when it runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kda.errors import NoBackendError
from kda.model.problem import Problem
from kda.routing.dispatch import backend_asked, choose
from kda.tools.measure.peers import published_of_decoding
from kda.tools.measure.shapes import GATES
from ptxkit.commands.render import FINDING, OK, CannotJudge, Screen, heading

from ..options import check_value_heads, given, refuse
from .report import machine_line

if TYPE_CHECKING:
    from kda.tools.measure.decoding import Decoded, DecodeSizes
    from kda.tools.measure.timing import Machine

OTHERS = ("against", "names", "lengths", "tokens", "regime", "graph", "disable_recompute", "stages", "save",
          "compare", "fail_above", "plot", "predicted", "host", "arch", "force")
HEADS, SEQUENCES = {"gpu": (8, 12, 16, 32, 64, 96), "cpu": (2,)}, {"gpu": (1, 64, 256), "cpu": (1, 4)}
DIM = {"gpu": 128, "cpu": 32}
DTYPE = {"gpu": "bfloat16", "cpu": "float32"}
REPEATS = {"gpu": 20, "cpu": 10}
HEAD = ("states", "sequences", "heads", "backend", "budget", "median", "p20-p80", "GB/s", "x floor")


def check_usage(options: dict[str, Any]) -> None:
    if len(options["directions"]) > 1:
        raise click.UsageError("--direction decode times one function; leave out the other directions")
    refuse("--direction decode times one token of each sequence", *OTHERS)
    check_value_heads(options)


def sizes_for(options: dict[str, Any], kind: str) -> list[DecodeSizes]:
    """--heads, --batch (sequences), -K, -V and --dtype; what is not given goes by the device."""
    from kda.tools.measure.decoding import DecodeSizes

    heads = (options["heads"],) if given("heads") else HEADS[kind]
    sequences = (options["batch"],) if given("batch") else SEQUENCES[kind]
    K, V = (options[name] if given(name) else DIM[kind] for name in ("k", "v"))
    dtype = options["dtype"] if given("dtype") else DTYPE[kind]
    return [
        DecodeSizes(N, H, options["value_heads"] or H, K, V, dtype, states, options["gate"] or GATES[0])
        for states, H, N in itertools.product(("float32", "bfloat16"), heads, sequences)
    ]


def decode(screen: Screen, options: dict[str, Any]) -> int:
    from kda.tools.measure.clocks import CudaClock, clock_of
    from kda.tools.measure.decoding import measure
    from kda.tools.measure.timing import this_machine
    from kda.tools.verify.doors import default_device

    device = default_device()
    machine = this_machine(device)
    wanted = sizes_for(options, machine.kind)
    backends = [backend_of(each, options["backend"], device) for each in wanted]
    clock, decoded = clock_of(device), []
    repeats = options["repeats"] or REPEATS[machine.kind]
    with screen.progress("measuring the copy bandwidth" if machine.kind == "gpu" else "drawing inputs") as tell:
        if isinstance(clock, CudaClock):
            machine = machine._replace(copy=clock.copy_bandwidth())
        for each, backend in zip(wanted, backends):
            tell(f"sequences: {each.sequences}, heads: {each.heads}, {each.states} states")
            decoded.append(measure(each, backend, clock, repeats, options["seconds"]))
    return report(screen, machine, decoded)


def backend_of(sizes: DecodeSizes, name: str | None, device: str) -> str:
    problem = Problem(
        op="decode", device=device, B=sizes.sequences, T=1, N=sizes.sequences, H=sizes.heads, HV=sizes.value_heads,
        K=sizes.K, V=sizes.V, dtype=sizes.dtype, g_dtype=sizes.dtype, beta_dtype=sizes.dtype, state_dtype=sizes.states,
        gate=sizes.gate, lower_bound=-5.0 if sizes.gate == "bounded" else None, A_log=sizes.gate != "given",
        dt_bias=sizes.gate != "given", beta="sigmoid", qk_l2norm=True, inplace=True,
        scale=sizes.K**-0.5, slots=sizes.sequences + 2, state_v_first=True,
    )
    try:
        return choose(problem, backend_asked(name)).backend or ""
    except NoBackendError as error:
        raise CannotJudge(*str(error).splitlines()) from None


# ---------------------------------------------------------------------------------------------- reporting


def report(screen: Screen, machine: Machine, decoded: Sequence[Decoded]) -> int:
    code = OK if all(each.timing for each in decoded) else FINDING
    first = decoded[0].sizes
    floor = f"; the floor is bytes over {machine.copy / 1e12:.2f} TB/s, a large copy's" if machine.copy else ""
    columns = len(HEAD) - (not machine.copy)                          # without a GPU there is no floor
    rows = [cells(each, machine.copy)[:columns] for each in decoded]
    lines = [
        machine_line(screen, machine),
        f"decode_step, one token, K={first.K} V={first.V} {first.dtype}, {first.gate} gate{floor}", "",
        *screen.table(rows, HEAD[:columns], "lrrlrrrrr"),
    ]
    if machine.copy and (first.K, first.V) == (128, 128):
        lines += ["", "Published by others, not measured here:"]
        lines += screen.table(published(), ("peer", "states", "of", "sequences: us", "source"))
    if code == FINDING:
        lines.append(f"{screen.sign('fail')} wrong results are not timed")
    rows_json = [as_json(each, machine.copy) for each in decoded]
    screen.answer(heading("bench", code, host=machine._asdict(), direction="decode", rows=rows_json), lines)
    return code


def published() -> list[tuple[str, ...]]:
    rows = published_of_decoding()
    times = ["; ".join(f"{n}: {us:.1f}" for n, us in row.us.items()) for row in rows]
    return [(row.peer, row.states, row.what, us, row.source) for row, us in zip(rows, times)]


def cells(each: Decoded, copy: float | None) -> tuple[str, ...]:
    a, t = each.sizes, each.timing
    heads = str(a.heads) if a.heads == a.value_heads else f"{a.heads} of {a.value_heads}"
    first = (a.states, str(a.sequences), heads, each.backend, f"{each.used:.0%}")
    if t is None:
        return (*first, "-", "-", "-", "-")
    us = [f"{1e6 * t.quantile(share):.1f}" for share in (0.5, 0.2, 0.8)]
    floor = f"{t.median * copy / each.bytes:.2f}" if copy else "-"
    return (*first, f"{us[0]} us", f"{us[1]}-{us[2]}", f"{each.bytes / t.median / 1e9:.3g}", floor)


def as_json(each: Decoded, copy: float | None) -> dict[str, Any]:
    t = each.timing
    times = {} if t is None else {"median": t.median, "p20": t.quantile(0.2), "p80": t.quantile(0.8)}
    floor = {"floor": each.bytes / copy} if copy else {}
    return {**each.sizes._asdict(), "backend": each.backend, "used": each.used, "bytes": each.bytes, **times, **floor}
