"""What the clock of a B200 predicts of FlashInfer's kernels for a KDA forward of 8 x 1,024 tokens and 64 heads.

    python -m ptxkit.benchmarks.others.short_sequences --sources FOLDER      # as of python -m ptxkit.benchmarks.others
"""

from __future__ import annotations

import argparse
import pathlib

import ptxkit

from .flashinfer import CHUNK, PartOfWalk, ShortSequences, pieces, vtile

TOKENS = 1024


def predicted(folder: pathlib.Path) -> dict[str, tuple[ptxkit.Run, int]]:
    """Return what the CTA with most chunks launches in a call of 8 x 1,024 tokens and 64 heads, and how many these are,
    by the kernel."""
    call, how = ShortSequences(sequences=1, tokens=TOKENS), {"clock": "b200", "checks": False}
    first, *others = (PartOfWalk(walk, 0, TOKENS) for walk in range(3))
    run = pieces(folder, call, [[first, PartOfWalk(3, 0, TOKENS // 2, destination=0), *others]], **how)
    return {"pieces": (run, 7 * TOKENS // 2 // CHUNK),
            "vtile": (vtile(folder, call, 1, 4, 1, "sm_100a", **how), 4 * TOKENS // CHUNK)}


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="What the clock of a B200 predicts.")
    parser.add_argument("--sources", type=pathlib.Path, required=True, help="as of python -m ptxkit.benchmarks.others")
    for kernel, (run, chunks) in predicted(parser.parse_args().sources).items():
        clock, (unit, share) = run.clock, run.clock.binds()[0]
        instructions, wavefronts = (run.counters[name] / chunks for name in ("warp_instructions", "shared_wavefronts"))
        print(f"{kernel}: {clock.milliseconds:.3f} ms; {CHUNK} tokens take {clock.clocks / chunks:,.0f} clocks "
              f"of a CTA, {instructions:,.0f} instructions, {wavefronts:,.0f} wavefronts; {unit} is busy {share:.0%}")


if __name__ == "__main__":
    main()
