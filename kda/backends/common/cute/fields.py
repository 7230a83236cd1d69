"""Shared memory by name: fields one after the other, each with its dtype and shape, and where each begins.

    TILE = Struct(KG=array("bfloat16", C, K), decay=array("float32", K), align=1024)
    TILE.decay.offset, TILE.bytes

A kernel gets all of a struct with `copies.allocate`, or one field of a struct that begins at `base` with
`copies.field_at(base, TILE.decay)`.  No cutlass: a configuration says how much shared memory a launch needs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SIZES = {"bfloat16": 2, "float32": 4, "int32": 4, "uint32": 4, "int64": 8, "uint8": 1}


class StructField(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    align: int
    offset: int = 0                          # bytes from the struct's first

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def array(dtype: str, *shape: int, align: int = 16) -> StructField:
    return StructField(dtype, shape, align)


class Struct:
    """`bytes` is a multiple of `align`, `end` is where the last field ends."""

    def __init__(self, align: int = 16, **fields: StructField):
        self.align, self.end = align, 0
        for name, field in fields.items():
            assert align % field.align == 0, f"{name} wants a multiple of {field.align} bytes; the struct has {align}"
            offset = -(-self.end // field.align) * field.align
            setattr(self, name, field._replace(offset=offset))
            self.end = offset + field.bytes
        self.bytes = -(-self.end // align) * align

    @property
    def fields(self) -> dict[str, StructField]:
        return {name: field for name, field in vars(self).items() if isinstance(field, StructField)}

    def __getattr__(self, name: str) -> StructField:
        raise AttributeError(f"no field {name}; there are {', '.join(self.fields)}")


def several(struct: Struct, count: int) -> StructField:
    """One struct after the other, as one field of another struct."""
    return StructField("uint8", (count, struct.bytes), struct.align)
