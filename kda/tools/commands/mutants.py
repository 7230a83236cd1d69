"""`kda verify --mutants`: which losses of synchronisation the simulator notices in an arch's kernels."""

from __future__ import annotations

from typing import Any

import click

from ptxkit.commands.mutants import write
from ptxkit.commands.render import FINDING, OK, Screen, program_version
from ptxkit.compile.target import Target


def report(screen: Screen, target: Target, options: dict[str, Any]) -> int:
    """Weaken the kernels of a target, print what became of each mutant; return 1 if one survives without a reason."""
    from kda import simulator
    from kda.tools.verify.mutants import CALLS, calls

    if target.name not in CALLS:
        raise click.UsageError(f"--mutants: --arch {target.name} has no kernels of its own; {', '.join(CALLS)} have")
    with screen.progress(f"looking for the mutants of {target.name}") as shown:
        def tell(done: int, total: int, survived: int) -> None:
            if not shown.total:
                shown.expect(total)
            shown(f"mutants of {target.name}, {survived} survived")
            shown.count()

        found = simulator.mutants(
            *calls(target.name), arch=target.spelling, strict=True, sample=options["sample"],
            workers=options["workers"], tell=tell,
        )
    code = FINDING if found.survivors else OK
    if screen.json:
        heading = {"schema": 1, "kda": program_version(), "command": "verify", "exit": code}
        screen.emit_json({**heading, "mutants": found.as_json()})
        return code
    write(screen, found)
    part = f" (every {options['sample']}th was looked at)" if options["sample"] > 1 else ""
    screen.line()
    screen.line(
        f"{len(found.outcomes)} mutants{part}: {found.share:.1%} of those that matter were noticed, "
        f"{len(found.survivors)} survived."
    )
    return code
