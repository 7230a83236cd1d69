"""The instruction set: how each PTX opcode is lowered to a handler of the engine, one file per family."""

from __future__ import annotations

import functools
import importlib

FAMILIES = (
    *("control", "calls", "memory", "barriers", "scalar", "collectives"),
    *("copies", "tma", "matrix", "wmma", "wgmma", "tcgen05"),
)
BARE = frozenset(("bra", "ret", "exit", "trap", "brkpt", "call", "pmevent"))  # opcodes that may have no modifier


@functools.cache
def lowerings():
    """First part of an opcode -> the function that lowers it: (builder, instruction) -> Op."""
    table = {}
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        clash = table.keys() & module.LOWERINGS.keys()
        assert not clash, f"{family} lowers {clash} a second time"
        table.update(module.LOWERINGS)
    return table
