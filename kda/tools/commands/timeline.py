"""`kda timeline`: what the warps and units of a forward do over time, without a GPU.  Imports torch when it runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kda.routing.dispatch import capability
from kda.tools.measure.shapes import GATES
from ptxkit.commands.options import ARCH, Count, OutputFile, archs_with_clock, chip_for, needs_a_clock
from ptxkit.commands.render import OK, Screen, common_options, heading, write_file
from ptxkit.compile.target import Target, code_for

from .hosts import own_host
from .options import NoKernelsYet, built_for

if TYPE_CHECKING:
    from ptxkit.capturing.capture import Capture
    from ptxkit.timing.chips import ChipClock
    from ptxkit.timing.timeline import Timeline

TOKENS, HEADS = 512, 64


@click.command()
@click.option("--arch", type=ARCH, required=True, help="The arch or card whose kernels run, such as sm90 or h100.")
@click.option("--tokens", "-T", type=Count(1), default=TOKENS, show_default=True, help="Tokens of a sequence.")
@click.option("--heads", type=Count(1), default=HEADS, show_default=True,
              help="Heads: how many there are decides which kernels run.")
@click.option("--gate", type=click.Choice(GATES), default=GATES[0], show_default=True,
              help="The gate of the call: bounded, as in Kimi-K3; softplus, as in Kimi-Linear; or given decays.")
@click.option("--out", type=OutputFile(path_type=Path), default="timeline.json", show_default=True,
              help="The trace: open it at ui.perfetto.dev or in chrome://tracing.")
@click.option("--html", type=OutputFile(path_type=Path), help="A page with a picture, too.")
@common_options
def command(screen: Screen, arch: Target, tokens: int, heads: int, gate: str, out: Path,
            html: Path | None) -> int:
    """Write a timeline of a forward: what each warp, engine and mbarrier does, predicted without a GPU.

    The file has the SMs of the first CTA, or of the first cluster of CTAs, of each kernel.
    """
    from ptxkit.timing.pages import page
    from ptxkit.timing.traces import trace

    needs_a_clock(arch, "--arch")
    backends = built_for(arch)
    if not backends:
        raise NoKernelsYet(arch)
    chip, which = chip_for(arch)
    with screen.progress(f"running a forward for {arch.name} in the simulator"):
        session = forward(arch, chip, backends[0].backend, tokens, heads, gate)
    with screen.progress("writing what its warps and units do"):
        timelines = timelines_of(session)
        write_file(out, json.dumps(trace(timelines)))
        if html:
            write_file(html, page(timelines))
    lines = [f"{x.kernel}: {1e3 * x.clock.milliseconds:,.1f} us on {chip}, predicted" for x in timelines]
    shape = f"B=1 T={tokens} H={heads} K=128 V=128 {backends[0].usual_dtype}, {gate} gate"
    lines += [f"a forward of {shape}, by {backends[0].backend}", f"predicted for {which}"]
    lines.append(f"{out}: open it at https://ui.perfetto.dev or in chrome://tracing")
    lines += [f"{html}: open it in a browser"] * bool(html)
    files = {"trace": str(out), **({"html": str(html)} if html else {})}
    fields = heading("timeline", OK, chip=chip.name, gate=gate, milliseconds=session.milliseconds, files=files)
    screen.answer(fields, lines)
    return OK


def of_machine(screen: Screen, backend: str, target: Target | None = None, gate: str = GATES[0]) -> list[Timeline]:
    """Return those of a short forward, on this machine's GPU or another; none where the simulator has no clock for
    it."""
    archs, host = capability(backend).archs, own_host()
    card = host.name if target is None else None
    if target is None and host.cc:
        target = code_for(host.cc, archs)
    if target is None or target.name not in archs or target.name not in archs_with_clock():
        return []
    with screen.progress(f"running a forward for {target.name} in the simulator"):
        return timelines_of(forward(target, chip_for(target, card)[0], backend, TOKENS, HEADS, gate))


def timelines_of(session: Capture) -> list[Timeline]:
    return [run.timeline(sms=math.prod(run.cluster)) for run in session.runs if run.recorded]


def forward(target: Target, chip: ChipClock, backend: str, tokens: int, heads: int, gate: str) -> Capture:
    """Return the capture of a call, timed and recorded."""
    import kda
    from kda.tools.verify.cases import make_inputs
    from ptxkit import capture

    dtype = capability(backend).usual_dtype
    case = make_inputs(T=tokens, H=heads, K=128, V=128, gate=gate, initial_state=False, dtype=dtype)
    with capture(arch=target.spelling, checks=False, clock=chip.name, timeline=True) as session:
        kda.chunk_kda_fwd(**case.keywords, backend=backend)
    return session
