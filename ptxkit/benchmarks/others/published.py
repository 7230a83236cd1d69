"""What the clock of a B200 predicts of FlashInfer's KDA forward, for calls whose times are published.

    python -m ptxkit.benchmarks.others.published --sources FOLDER      # as of python -m ptxkit.benchmarks.others
"""

from __future__ import annotations

import argparse
import pathlib

import ptxkit

from .flashinfer import CHUNK, PartOfWalk, PublishedCall, m64, pieces, vtile

TOKENS, LONG = 1024, 8192


def predicted(folder: pathlib.Path) -> dict[str, tuple[ptxkit.Run, int]]:
    """Return what the CTA with most chunks launches, with 64 heads, and how many these are, by kernel and call."""
    how = {"clock": "b200", "checks": False}
    call, long = PublishedCall(sequences=1, tokens=TOKENS), PublishedCall(sequences=1, tokens=LONG)
    first, *others = (PartOfWalk(walk, 0, TOKENS) for walk in range(3))
    run = pieces(folder, call, [[first, PartOfWalk(3, 0, TOKENS // 2, destination=0), *others]], **how)
    return {"m64, 8,192 tokens": (m64(folder, long, 1, **how), LONG // CHUNK),
            "pieces, 8 x 1,024": (run, 7 * TOKENS // 2 // CHUNK),
            "vtile, 8 x 1,024": (vtile(folder, call, 1, 4, 1, "sm_100a", **how), 4 * TOKENS // CHUNK)}


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="What the clock of a B200 predicts.")
    parser.add_argument("--sources", type=pathlib.Path, required=True, help="as of python -m ptxkit.benchmarks.others")
    for kernel, (run, chunks) in predicted(parser.parse_args().sources).items():
        clock, (unit, share) = run.clock, run.clock.binds()[0]
        instructions, wavefronts = (run.counters[name] / chunks for name in ("warp_instructions", "shared_wavefronts"))
        print(f"{kernel}: {clock.milliseconds:.3f} ms; {CHUNK} tokens take {clock.clocks / chunks:,.0f} clocks "
              f"of a CTA, {instructions:,.0f} instructions and {wavefronts:,.0f} wavefronts of all; "
              f"{unit} is busy {share:.0%}")


if __name__ == "__main__":
    main()
