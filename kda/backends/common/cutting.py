"""How sequences are cut into segments of chunks, which are walked at the same time: what all plans share.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kda.model.problem import Problem

if TYPE_CHECKING:
    from ptxkit.compile.launch_list import Location

    from .arguments import KernelConfig
    from .routine import Draft


@dataclass(frozen=True)
class Cut:
    """Sizes that follow from the length of a segment.  Packed, there may be fewer chunks and segments."""

    chunks: int                              # chunks of a row of T tokens
    segments: int                            # segments of a row
    segment: int                             # chunks of a segment
    all_segments: int                        # every sequence has at least one


def cut_into(p: Problem, rows: int, length: int) -> tuple[int, int, int, int]:
    """Return the fields of Cut for chunks of `rows` tokens and segments of `length` chunks; 0: whole sequences."""
    chunks = -(-p.T // rows)
    segment = length or max(chunks, 1)
    segments = max(1, -(-chunks // segment))
    packed = p.N + (p.T // (length * rows) if length else 0)
    return chunks, segments, segment, packed if p.packed else p.B * segments


def chunks_of_a_sequence(p: Problem, rows: int) -> int:
    """Return the chunks of `rows` tokens that a sequence has, on average if sequences are packed."""
    return -(-p.T // rows) // (max(p.N, 1) if p.packed else 1)


def length_for(chunks: int, segments: int, shortest: int, multiple: int = 1) -> int:
    """Return the length of a segment that gives a sequence as many segments, or fewer that are not too short."""
    needed = -(-chunks // segments)
    return max(shortest, -(-needed // multiple) * multiple)


def prescribed_length(p: Problem, multiple: int = 1) -> int | None:
    """Return the chunks of a segment that are prescribed; None if the plan chooses."""
    chunks = None if p.batch_invariant else p.force.segment_chunks
    return None if chunks is None else -(-chunks // multiple) * multiple


def segment_length(p: Problem, rows: int, parts: int, at_once: int, shortest: int, multiple: int = 1) -> int:
    """Return the chunks of a segment, 0 for whole sequences: cut where heads and sequences leave the chip idle.

    A chunk has `rows` tokens; `parts` programs walk a state, of which `at_once` run at the same time.  Never with
    batch_invariant: roundings would depend on neighbours, and on where a call ends.
    """
    prescribed = prescribed_length(p, multiple)
    if prescribed is not None:
        return prescribed
    segments = at_once // (parts * p.HV * max(p.N, 1))
    if segments < 3 or p.batch_invariant:
        return 0
    chunks = chunks_of_a_sequence(p, rows)
    length = length_for(chunks, segments, shortest, multiple)
    return length if chunks > 2 * length else 0


def launch_segments(
    draft: Draft, p: Problem, first: tuple[KernelConfig, tuple[int, int, int]], compose: Any,
    join: tuple[KernelConfig | None, int], segments: int, o: Location, ht: Location | None, **arguments: Any,
) -> None:
    """Launch `first`, which walks over the segments of all sequences at once, and what adds up its results.  Beside
    `first` stands its grid, beside `join` its CTAs for a segment."""
    scratch, (config, grid), (joining, ctas) = draft.memory(), first, join
    M, added, edge = (scratch.part(4 * p.N * segments * p.HV * p.K * n) for n in (p.K, p.V, p.V))
    response = scratch.part(2 * p.B * p.T * p.HV * p.K)
    draft.launch(config, grid, **arguments, segments=segments, o=o, response=response, ht=added, M=M)
    draft.launch(compose, (compose.strips, p.HV, p.N), segments=segments, HV=p.HV, M=M, added=added, edge=edge, ht=ht)
    draft.launch(joining, (ctas, p.HV, p.N * (segments - 1)), T=p.T, HV=p.HV, segments=segments, response=response,
                 edge=edge, o=o, cu_seqlens=draft["cu_seqlens"])
