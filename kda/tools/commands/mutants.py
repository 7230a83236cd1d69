"""`kda verify --mutants`: which losses of synchronisation the simulator notices in an arch's kernels."""

from __future__ import annotations

from typing import Any

import click

from ptxkit.commands.mutants import lines, reporter
from ptxkit.commands.render import FINDING, OK, Screen, heading
from ptxkit.compile.target import Target


def report(screen: Screen, target: Target, options: dict[str, Any]) -> int:
    """Weaken the kernels of a target, print what became of each mutant; return 1 if one survives without a reason."""
    from kda import simulator
    from kda.tools.verify.mutants import CALLS, calls

    if target.name not in CALLS:
        raise click.UsageError(f"--mutants: --arch {target.name} has no kernels of its own; {', '.join(CALLS)} have")
    with screen.progress(f"looking for the mutants of {target.name}") as shown:
        result = simulator.mutants(
            *calls(target.name), arch=target.spelling, strict=True, sample=options["sample"],
            workers=options["workers"], tell=reporter(shown, f"mutants of {target.name}"),
        )
    code = FINDING if result.survivors else OK
    part = f" (every {options['sample']}th was looked at)" if options["sample"] > 1 else ""
    noticed = f"{len(result.outcomes)} mutants{part}: {result.share:.1%} of those that matter were noticed"
    end = f"{noticed}, {len(result.survivors)} survived."
    screen.answer(heading("verify", code, mutants=result.as_json()), [*lines(screen, result), "", end])
    return code
