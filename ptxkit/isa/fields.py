"""The numbers of an instruction besides its registers (Ins.mod), declared once.

Python makes the list of numbers by name, and C reads it by the enum that `header` generates: `Fields("GRID", "wait")`
gives `GRID(wait=True)` here and `i->mod[GRID_WAIT]` there. `to:place` stands for the fields of PLACE, one after the
other from `..._TO` on. What follows the named numbers, where there is more, begins at `..._FIELDS`.
"""

from __future__ import annotations

import functools
import itertools

ROWS: dict[str, Fields] = {}


class Fields:
    """The fields of an instruction, or of a part that instructions share."""

    def __init__(self, name: str, spec: str) -> None:
        self.name = name
        self.parts: dict[str, Fields | None] = {}
        for word in spec.split():
            field, _, part = word.partition(":")
            self.parts[field] = ROWS[part.upper()] if part else None
        self.names, self.plain = (*self.parts,), not any(self.parts.values())
        ROWS[name] = self

    def __call__(self, **numbers) -> list[int]:
        """Return the numbers in the order of the fields, all of which must be given."""
        if (*numbers,) != self.names:
            numbers = self._in_order(numbers)
        if self.plain:
            return [*numbers.values()]
        result: list[int] = []
        for number, part in zip(numbers.values(), self.parts.values()):
            if not part:
                result.append(number)
            elif len(number) == part.size:
                result += number
            else:
                raise TypeError(f"{self.name}: {part.name} has {part.size} numbers; given: {number}")
        return result

    def _in_order(self, numbers):
        if numbers.keys() != self.parts.keys():
            raise TypeError(f"{self.name} has the fields {', '.join(self.names)}; given: {', '.join(numbers)}")
        return {name: numbers[name] for name in self.names}

    @functools.cached_property
    def size(self) -> int:
        """Return how many numbers there are."""
        return sum(self._sizes())

    def _sizes(self) -> list[int]:
        return [part.size if part else 1 for part in self.parts.values()]

    def offsets(self) -> dict[str, int]:
        """Return where each field begins."""
        return dict(zip(self.parts, itertools.accumulate([0, *self._sizes()])))


# ---- parts that instructions share

ADDRESS = Fields("ADDRESS", "offset wide")  # what is added to the register; is that one of 64 bits?
PLACE = Fields("PLACE", "address:address generic")  # generic: not an address of shared memory as it stands
MEMBERS = Fields("MEMBERS", "mask")  # .sync: the operand with the mask of lanes
REDUCTION = Fields("REDUCTION", "op type bytes")  # AtomicOp or PLAIN, AtomicType, bytes of an element
FRAGMENTS = Fields("FRAGMENTS", "rows depth a b d saturate registers_d registers_a registers_b")  # a, b, d: MatrixType

# ---- control flow and calls

BRA = Fields("BRA", "target")
BRX = Fields("BRX", "count")  # and the targets
PRINTF = Fields("PRINTF", "format values")  # where their addresses lie in local memory
ASSERTFAIL = Fields("ASSERTFAIL", "message file line")  # the same, and where the line itself lies
CALL = Fields("CALL", "arguments results targets stack_end")  # and (bytes, place) of arguments and results; the targets
TARGET = Fields("TARGET", "length address entry recursive frame local_from local_to registers pointers")

# ---- memory

ACCESS = Fields("ACCESS", "space bytes count signed sem scope address:address declared")  # declared: register's bytes
ATOM = Fields("ATOM", "space op type bytes count sem scope address:address")
ST_BULK = Fields("ST_BULK", "to:place")
DISCARD = Fields("DISCARD", "space address:address")
MAPA = Fields("MAPA", "wide generic")
GETCTARANK = Fields("GETCTARANK", "wide")
ISSPACEP = Fields("ISSPACEP", "window own_cta")  # top byte of the window, 0: global; shared memory of this CTA alone

# ---- barriers

BAR = Fields("BAR", "op")  # BarOp
CLUSTER_ARRIVE = Fields("CLUSTER_ARRIVE", "relaxed")
MBARRIER_INIT = Fields("MBARRIER_INIT", "address:address")
MBARRIER_INVAL = Fields("MBARRIER_INVAL", "address:address")
MBARRIER_ARRIVE = Fields("MBARRIER_ARRIVE", "address:address drop relaxed no_complete cluster")
MBARRIER_TX = Fields("MBARRIER_TX", "address:address complete")  # complete_tx, not expect_tx
MBARRIER_WAIT = Fields("MBARRIER_WAIT", "address:address parity relaxed cluster")  # parity: not a state
FENCE = Fields("FENCE", "views order mbarriers")  # views to fence, and RELEASE and ACQUIRE, as bits; TO_ASYNC, TO_CTAS
GRID = Fields("GRID", "wait")  # not launch_dependents
SETMAXNREG = Fields("SETMAXNREG", "inc registers")

# ---- what the lanes of a warp do together

SHFL = Fields("SHFL", "members:members mode")
VOTE = Fields("VOTE", "members:members mode negated")
MATCH = Fields("MATCH", "members:members all wide")
REDUX = Fields("REDUX", "members:members op type abs nan")

# ---- scalar

ROW = Fields("ROW", "rounding flags")
MASKED_ROW = Fields("MASKED_ROW", "row:row mask")  # mask: what the register has of a word
THROUGH_WIDE = Fields("THROUGH_WIDE", "handler signed")  # its index in scalar_handlers; and the instruction's own
COMPARE = Fields("COMPARE", "flags negate combine negate_c packed")
SET = Fields("SET", "compare:compare true")  # true: what it looks like
PREDICATES = Fields("PREDICATES", "combine negate_a negate_b negate")
LOP3 = Fields("LOP3", "combine negated")
PACK = Fields("PACK", "bytes count")
CLOCK = Fields("CLOCK", "wide shift nanoseconds")

# ---- copies

CP_ASYNC = Fields("CP_ASYNC", "to:place source:place bytes negated")
CP_ASYNC_WAIT = Fields("CP_ASYNC_WAIT", "stay all")  # groups that may stay pending; wait_all, which commits first
CP_ASYNC_ARRIVE = Fields("CP_ASYNC_ARRIVE", "mbarrier:place noinc")
BULK_LOAD = Fields("BULK_LOAD", "to:place source:place mbarrier:place own_cta")  # own_cta: .shared::cta
BULK_SEND = Fields("BULK_SEND", "to:place source:place mbarrier:place reduction:reduction")
BULK_STORE = Fields("BULK_STORE", "to:place source:place reduction:reduction")
BULK_PREFETCH = Fields("BULK_PREFETCH", "source:place")
BULK_WAIT = Fields("BULK_WAIT", "stay read")  # read: the sources have been read, and no more
ST_ASYNC = Fields("ST_ASYNC", "to:place mbarrier:place bytes count op type scope")
TRY_CANCEL = Fields("TRY_CANCEL", "to:place mbarrier:place all_ctas")
TMA_LOAD = Fields("TMA_LOAD", "to:place map:place mbarrier:place rank mode pair own_cta")  # pair: .cta_group::2
TMA_STORE = Fields("TMA_STORE", "source:place map:place rank mode op")
TMA_PREFETCH = Fields("TMA_PREFETCH", "map:place rank mode")
TENSORMAP_REPLACE = Fields("TENSORMAP_REPLACE", "map:place space field dimension least most wide multiple")
TENSORMAP_COPY = Fields("TENSORMAP_COPY", "to:place source:place")

# ---- matrices: Form; first: the first lane of a group of four that has metadata

MATRIX_MOVE = Fields("MATRIX_MOVE", "count form rows row:place bits")  # bits: of packed elements
MMA = Fields("MMA", "fragments:fragments bits shift_a shift_b exclusive scales scale_type sparse first")
WMMA_MOVE = Fields("WMMA_MOVE", "registers rows columns bits is_b by_columns space address:address")
WMMA = Fields("WMMA", "m n k ab d c bits saturate exclusive registers_d registers_a registers_b registers_c")
WGMMA = Fields(
    "WGMMA",
    "n depth a b d registers_d registers_a negate_a negate_b rows_a rows_b saturate negate_scale sparse first",
)
WGMMA_WAIT = Fields("WGMMA_WAIT", "stay")

# ---- tcgen05

TMEM_ALLOC = Fields("TMEM_ALLOC", "to:place group")
TMEM_DEALLOC = Fields("TMEM_DEALLOC", "group")
TMEM_MOVE = Fields("TMEM_MOVE", "offset shape registers half packed reduce type abs nan")
TMEM_WAIT = Fields("TMEM_WAIT", "stores")  # wait::st
TMEM_FENCE = Fields("TMEM_FENCE", "after")  # after_thread_sync
TCGEN05_MMA = Fields(
    "TCGEN05_MMA",
    "kind group ws a_in_tmem d_offset a_offset negated scale mask_words factors factors_a_offset factors_b_offset",
)
TCGEN05_CP = Fields("TCGEN05_CP", "offset group shape format")
TCGEN05_SHIFT = Fields("TCGEN05_SHIFT", "offset group")
TCGEN05_COMMIT = Fields("TCGEN05_COMMIT", "mbarrier:place group")


def header() -> str:
    """Return the C header that names all fields."""
    lines = ["/* Generated by ptxkit/isa/fields.py: where an instruction's numbers lie in Ins.mod. */", "#pragma once"]
    for name, row in ROWS.items():
        places = [f"{name}_{field.upper()} = {offset}" for field, offset in row.offsets().items()]
        lines.append(f"enum {{ {', '.join([*places, f'{name}_FIELDS = {row.size}'])} }};")
    return "\n".join([*lines, ""])
