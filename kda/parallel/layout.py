"""How a row of packed sequences is divided among ranks: arithmetic only, without torch.

A part is an interval of the row's tokens. A rank has one part, or with "zigzag" two, part r followed by part
2W - 1 - r, which balances a model's attention over ranks. Only the first sequence of a part can have begun before it,
and only the last can continue after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LAYOUTS = ("contiguous", "zigzag")


class RankPart(NamedTuple):
    """A part, from its rank's view; tokens count from the rank's first one."""

    number: int                              # its number among the parts of all ranks
    begin: int
    end: int
    first: int = -1                          # the number of its first sequence on the rank; -1: none
    last: int = -1
    first_end: int = 0                       # the first one's last token + 1
    last_begin: int = 0
    before: tuple[int, ...] = ()             # the parts that hold earlier tokens of the first sequence, in order
    after: tuple[int, ...] = ()              # the parts that hold later tokens of the last sequence, in order
    past: int = 0                            # tokens of the first sequence in all earlier parts

    @property
    def spanned(self) -> bool:
        """Whether one sequence spans all of the part and continues on both sides."""
        return self.first == self.last and bool(self.before) and bool(self.after)


class Local(NamedTuple):
    """The sequences and parts of a rank."""

    offsets: list[int]                       # offsets of its sequences, from 0
    parts: tuple[RankPart, ...]


def part_numbers(layout: str, rank: int, world: int) -> tuple[int, ...]:
    """The numbers of a rank's parts, in its order."""
    return (rank,) if layout == "contiguous" else (rank, 2 * world - 1 - rank)


def holder(layout: str, number: int, world: int) -> int:
    """The index of a part among those of all ranks, rank by rank."""
    if layout == "contiguous":
        return number
    return 2 * number if number < world else 2 * (2 * world - 1 - number) + 1


def equal_edges(total: int, parts: int) -> list[int]:
    return [i * total // parts for i in range(parts + 1)]


def edges_of(lengths: Sequence[int]) -> list[int]:
    edges = [0]
    for n in lengths:
        edges.append(edges[-1] + n)
    return edges


def local_of(offsets: Sequence[int], edges: Sequence[int], numbers: Sequence[int]) -> Local:
    """What the rank with parts `numbers` has of sequences at `offsets`; part i is tokens edges[i]:edges[i + 1].

    A sequence without tokens belongs to the part that begins at its offset or contains it; at the end of the row, to
    the last part.
    """
    ends, parts, shift = [0], [], 0
    for number in numbers:
        a, b = edges[number], edges[number + 1]
        local = sequences_of(offsets, edges, number)
        part = RankPart(number, shift, shift + b - a)
        if local:
            start, stop = offsets[local[0]], offsets[local[-1] + 1]
            part = part._replace(
                first=len(ends) - 1, last=len(ends) + len(local) - 2,
                first_end=shift + min(offsets[local[0] + 1], b) - a,
                last_begin=shift + max(offsets[local[-1]], a) - a,
                before=tuple(_holding(edges, start, a, 0, number)),
                after=tuple(_holding(edges, b, stop, number + 1, len(edges) - 1)),
                past=max(0, a - start),
            )
            ends += [shift + min(offsets[n + 1], b) - a for n in local]
        parts.append(part)
        shift += b - a
    return Local(ends, tuple(parts))


def sequences_of(offsets: Sequence[int], edges: Sequence[int], number: int) -> list[int]:
    a, b, last = edges[number], edges[number + 1], number == len(edges) - 2

    def belongs(start: int, stop: int) -> bool:
        if start < stop:
            return max(start, a) < min(stop, b)
        return a <= start < b or (last and start == b)

    return [n for n, (start, stop) in enumerate(zip(offsets, offsets[1:])) if belongs(start, stop)]


def _holding(edges: Sequence[int], start: int, stop: int, first: int, last: int) -> list[int]:
    """Parts among first..last - 1 with tokens of start:stop."""
    return [i for i in range(first, last) if max(edges[i], start) < min(edges[i + 1], stop)]


def crosses(offsets: Sequence[int], edges: Sequence[int]) -> bool:
    """Whether a sequence has tokens in two parts."""
    marks = set(offsets)
    total = offsets[-1]
    return any(0 < edge < total and edge not in marks for edge in edges)
