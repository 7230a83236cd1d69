"""What a sequence over many ranks costs by way of exchange: a simulation of messages, and the page of it.

    python -m benchmarks.ranks [--heads 64] [--dim 128] [--latency 10e-6] [--bandwidth 50e9] [--pass 0.33e-3]
                               [--map 0.66e-3] [--fold 20e-6]

Each rank has a clock. A message leaves when its sender has what it holds, takes latency + bytes / bandwidth, and the
receiver goes on once it is there; compute adds to a rank's clock. The numbers given are assumptions, the results
follow from them: nothing is timed here. `pass` is the local forward and `map` what makes M and added of a rank's
tokens, both of one rank; `fold` one product of a map with a state.  docs/written.py writes the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from . import common

RANKS = (2, 8, 32, 128, 1024)
TITLE = "# What an exchange costs on up to 1,024 ranks"
ABOUT = """`benchmarks/ranks.py` simulates every message of [an exchange](parallel.md#how-the-state-travels); nothing
was timed. `python -m benchmarks.ranks` takes your own numbers. The time is that until the last rank has its outputs,
and MB are those of the rank that receives most."""


class Costs(NamedTuple):
    heads: int = 64                          # value heads; K = V = dim, states and maps in float32
    dim: int = 128
    latency: float = 10e-6                   # seconds of a message
    bandwidth: float = 50e9                  # bytes a second, of a rank
    local: float = 0.33e-3                   # seconds of the forward of a rank's tokens
    map: float = 0.66e-3
    fold: float = 20e-6

    @property
    def state(self) -> int:
        """Bytes of a state: 4 HV K V."""
        return 4 * self.heads * self.dim * self.dim

    @property
    def both(self) -> int:
        """Bytes of a map: 4 HV K (V + K)."""
        return 2 * self.state

    def message(self, size: int) -> float:
        return self.latency + size / self.bandwidth


def maps_made(ranks: int, c: Costs) -> list[float]:
    """When each rank has its map: the first sends the state alone, which one forward gives; the last sends nothing."""
    return [c.local, *[c.map] * (ranks - 2), 0.0]


class Way(NamedTuple):
    seconds: float                           # until the last rank has its outputs
    received: float                          # bytes, by the rank that gets most


def gather(ranks: int, c: Costs) -> Way:
    """A ring: in each of W - 1 steps every rank passes on the map that it got last; then each folds what is before."""
    clocks, message = maps_made(ranks, c), c.message(c.both)
    for _ in range(ranks - 1):
        clocks = [max(clock, before + message) for before, clock in zip([clocks[-1], *clocks], clocks)]
    done = [clock + max(r - 1, 0) * c.fold + c.local for r, clock in enumerate(clocks)]
    return Way(max(done), (ranks - 1) * c.both)


def chain(ranks: int, c: Costs) -> Way:
    """A state comes, goes through the map that was made meanwhile, and goes on."""
    (leaves, *others), done = maps_made(ranks, c), [2 * c.local]
    for ready in others:
        arrives = leaves + c.message(c.state)
        done.append(max(arrives, ready) + c.local)
        leaves = max(arrives, ready) + c.fold
    return Way(max(done), c.state)


def tree(ranks: int, c: Costs) -> Way:
    """A scan: in step i rank r composes its map with that of rank r - 2^i, in two products."""
    clocks, distance, steps = maps_made(ranks, c), 1, 0
    while distance < ranks:
        clocks = [
            clock if r < distance else max(clock, clocks[r - distance] + c.message(c.both)) + 2 * c.fold
            for r, clock in enumerate(clocks)
        ]
        distance, steps = 2 * distance, steps + 1
    return Way(max(clocks) + c.message(c.state) + c.local, steps * c.both + c.state)


def hops(ranks: int, c: Costs) -> Way:
    """No maps: each rank waits for the state, makes its forward, and sends the state that leaves."""
    leaves = c.local
    for _ in range(1, ranks):
        leaves += c.message(c.state) + c.local
    return Way(leaves, c.state)


WAYS: dict[str, Callable[[int, Costs], Way]] = {"gather": gather, "chain": chain, "hops": hops, "tree": tree}


def table(c: Costs) -> str:
    """Milliseconds, and MB that a rank receives, by number of ranks and way."""
    head = "| ranks | " + " | ".join(f"{name}: ms, MB in" for name in WAYS) + " |"
    rows = [head, "|---" * (len(WAYS) + 1) + "|"]
    for ranks in RANKS:
        ways = [way(ranks, c) for way in WAYS.values()]
        cells = [f"{way.seconds * 1e3:,.2f}, {way.received / 1e6:,.1f}" for way in ways]
        rows.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def sentence(c: Costs) -> str:
    return (
        f"HV={c.heads}, K = V = {c.dim}: a state has {c.state / 1e6:.2f} MB, a map {c.both / 1e6:.2f} MB. Assumed: a "
        f"message takes {c.latency * 1e6:g} us and {c.bandwidth / 1e9:g} GB/s, a rank's forward {c.local * 1e3:g} ms, "
        f"its map {c.map * 1e3:g} ms, a fold {c.fold * 1e6:g} us."
    )


def page(c: Costs) -> str:
    return "\n\n".join([TITLE, ABOUT, textwrap.fill(sentence(c), 120), table(c)]) + "\n"


def main() -> None:
    parser = common.parser(__spec__, __doc__, json=False)
    for name, default in Costs._field_defaults.items():
        word = {"local": "pass"}.get(name, name)
        parser.add_argument(f"--{word}", dest=name, type=type(default), default=default)
    costs = Costs(**vars(parser.parse_args()))
    print(f"{sentence(costs)}\n\n{table(costs)}")


if __name__ == "__main__":
    main()
