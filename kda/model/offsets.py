"""Offsets of packed sequences as a list, and their check.  Imports neither torch nor a DSL."""

from __future__ import annotations

from kda.errors import InputError

from .problem import Inputs, name_of_dtype

CHECK = "cu_seqlens.values"                  # a row of docs/data/errors.json
ASKED = "offsets that start at 0, never decrease and end at T or before"
FIX = "Offsets are cumulative sums of the lengths."


def bad_offsets(ends: list[int], T: int) -> str | None:
    """The first violation, or None."""
    if ends[0] != 0:
        return f"a first offset of {ends[0]}"
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        if end < start:
            return f"sequence {n} from {start} to {end}"
    return f"a last offset of {ends[-1]}" if ends[-1] > T else None


def offsets_dtype(x: Inputs) -> str | None:
    """The dtype of cu_seqlens, of packed sequences."""
    return None if x.cu_seqlens is None else name_of_dtype(x.cu_seqlens.dtype)


def host_offsets(x: Inputs) -> list[int] | None:
    """cu_seqlens as a list, if it is on a CPU."""
    source = x.cu_seqlens_cpu if x.cu_seqlens_cpu is not None else x.cu_seqlens
    return source.tolist() if source is not None and source.device.type == "cpu" else None


def offsets_after_waiting(x: Inputs) -> list[int] | None:
    """cu_seqlens as a list, copied from the GPU if necessary, and checked; None without cu_seqlens."""
    ends = host_offsets(x)
    if ends is None and x.cu_seqlens is not None:
        ends = x.cu_seqlens.tolist()
        found = bad_offsets(ends, x.q.shape[1])
        if found is not None:
            raise InputError("kda", "cu_seqlens", ASKED, found, FIX, CHECK)
    return ends
