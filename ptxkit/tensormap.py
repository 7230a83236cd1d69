"""The 128 bytes of a tensor map (CUtensorMap, tile and im2col mode), in both directions.

The format is not published. The bits below come from three sources that agree: maps that driver 580 encoded on an
H200, the machine code that ptxas makes of `tensormap.replace` for sm_90a, sm_100a and sm_103a, and what the CuTe
DSL's host code writes. The first 64 bytes are all that a copy engine reads: an H200 takes maps whose other 64 are
garbage. Two bits of word 1 stay unexplained and are ignored: the DSL sets bit 1, and bit 21 for tensors of 128 KiB
and more; driver 580 sets neither.

Also seen on an H200, and used by whoever executes copies: a box counts all its bytes at the mbarrier, inside the
tensor or not; a dimension takes ceil(box / element stride) steps, and dimension 0 ignores its element stride; the
fill "nan" is 0x7ff7 in every 16 bits; under a swizzle the rows of a box lie a whole swizzle span apart, however short
they are; a start in dimension 0 that is not a multiple of 16 bytes, or a negative start of a store, is an illegal
instruction. In im2col mode: a start outside of the bounding box is an illegal instruction; corners and offsets come in
the order of the coordinates, the contiguous dimension's neighbour first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ptxkit.errors import PtxkitError

SIZE = 128
SHARED = 232448                              # bytes of shared memory that a CTA can have


class TensorMapError(PtxkitError, ValueError):
    """A tensor map that cannot be, or bytes that are none."""


class BitField(NamedTuple):
    """Some bits of the map, counted from the first byte's lowest."""

    shift: int
    bits: int


WORD1 = 64
ADDRESS = BitField(0, 64)
RANK = BitField(WORD1 + 4, 3)                   # less one, as box, dims and element strides are
DTYPE = BitField(WORD1 + 7, 4)
INTERLEAVE = BitField(WORD1 + 11, 2)            # 1: 16 bytes, 2: 32
SWIZZLE = BitField(WORD1 + 13, 2)               # 1, 2, 3: 32, 64, 128 bytes
NAN = BitField(WORD1 + 15, 1)
TF32 = BitField(WORD1 + 16, 1)
L2 = BitField(WORD1 + 17, 2)                    # promotion: a hint
ATOM = BitField(WORD1 + 19, 2)                  # sm_100: what a 128-byte swizzle moves as one
UNEXPLAINED = (BitField(WORD1 + 1, 1), BitField(WORD1 + 21, 1))
SWIZZLE96 = BitField(WORD1 + 22, 1)             # sm_103
STRIDES = tuple(BitField(96 + 32 * i, 32) for i in range(4))        # dimensions 1 to 4, in 16 bytes: low bits
STRIDES_HIGH = tuple(BitField(224 + 4 * i, 4) for i in range(4))    # and the four above them
DIMS = tuple(BitField(256 + 32 * i, 32) for i in range(5))
ELEMENT_STRIDES = tuple(BitField(416 + 3 * i, 3) for i in range(5))
BOX = tuple(BitField(440 + 8 * i, 8) for i in range(5))
FIELDS = (
    ADDRESS, RANK, DTYPE, INTERLEAVE, SWIZZLE, NAN, TF32, L2, ATOM, SWIZZLE96, *UNEXPLAINED,
    *STRIDES, *STRIDES_HIGH, *DIMS, *ELEMENT_STRIDES, *BOX,
)
# im2col maps: BOX[0] is the channels of a pixel, the rest lies where other boxes and nothing are
IM2COL = BitField(WORD1, 1)
LOWER, UPPER = BitField(448, 16), BitField(464, 16)     # corners, shared out among the dimensions in between
PIXELS = BitField(480, 10)                      # less one
KNOWN = sum((1 << f.bits) - 1 << f.shift for f in (*FIELDS, IM2COL, PIXELS))


class Dtype(NamedTuple):
    code: int
    tf32: int                                # rounds to tf32 on the way
    size: int                                # bytes; of packed elements 0
    floats: bool
    bits: int = 0                            # those of a packed element in global memory
    held: int = 0                            # and in shared memory: 16 of them may have 16 bytes


DTYPES = {
    "uint8": Dtype(0, 0, 1, False), "uint16": Dtype(1, 0, 2, False), "uint32": Dtype(2, 0, 4, False),
    "int32": Dtype(3, 0, 4, False), "uint64": Dtype(4, 0, 8, False), "int64": Dtype(5, 0, 8, False),
    "float16": Dtype(6, 0, 2, True), "float32": Dtype(7, 0, 4, True), "float32_ftz": Dtype(8, 0, 4, True),
    "float64": Dtype(9, 0, 8, True), "bfloat16": Dtype(10, 0, 2, True), "tfloat32": Dtype(7, 1, 4, True),
    "tfloat32_ftz": Dtype(8, 1, 4, True),
    # codes as the CuTe DSL writes the first and the last one
    "16u4_align8b": Dtype(11, 0, 0, False, 4, 4), "16u4_align16b": Dtype(12, 0, 0, False, 4, 8),
    "16u6_align16b": Dtype(13, 0, 0, False, 6, 8),
}
PADDED_BOX = 128                             # elements of a box's row where 16 of them have 16 bytes


class Swizzle(NamedTuple):
    code: int
    atom: int
    wide: int                                # bit 22
    span: int                                # bytes that a row of a box may have


# 128/32: 128 bytes in atoms of 32 instead of 16; +8: the 8-byte halves of odd rows change places as well.
SWIZZLES = {
    0: Swizzle(0, 0, 0, 0), 32: Swizzle(1, 0, 0, 32), 64: Swizzle(2, 0, 0, 64), 96: Swizzle(0, 0, 1, 96),
    128: Swizzle(3, 0, 0, 128), "128/32": Swizzle(3, 1, 0, 128), "128/32+8": Swizzle(3, 2, 0, 128),
    "128/64": Swizzle(3, 3, 0, 128),
}
INTERLEAVES = {0: 0, 16: 1, 32: 2}
FILLS = {"zero": 0, "nan": 1}


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says.  Dimension 0 is the contiguous one.

    The address may be given as a tensor, which then also fills in dims, strides and dtype where they are left out.
    With `pixels` it is a map in im2col mode: the box is (channels of a pixel,), and a copy moves so many pixels. The
    bounding box goes from `lower` to the last place of the dimension plus `upper`, in the dimensions between first and
    last.
    """

    address: Any                             # int, once made
    dims: tuple[int, ...] = None             # type: ignore[assignment]  # elements
    strides: tuple[int, ...] = None          # type: ignore[assignment]  # bytes, of dimensions 1 and up
    box: tuple[int, ...] = ()                # elements a copy moves
    element_strides: tuple[int, ...] = None  # type: ignore[assignment]  # 1: every element of the box
    dtype: str = None                        # type: ignore[assignment]
    swizzle: int | str = 0                   # a key of SWIZZLES
    fill: str = "zero"                       # what elements outside the tensor are
    interleave: int = 0                      # a key of INTERLEAVES
    l2: int = 0                              # promotion, 0 to 3
    pixels: int = 0                          # 0: tile mode
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    tensor: Any = field(default=None, compare=False, repr=False)  # kept alive

    def __post_init__(self):
        given = dict(self.__dict__)
        if hasattr(self.address, "data_ptr"):
            given = _of_tensor(self.address) | {k: v for k, v in given.items() if v is not None and k != "address"}
        for name in ("dims", "strides", "box", "lower", "upper"):
            given[name] = tuple(int(n) for n in given[name] or ())
        given["element_strides"] = tuple(given.get("element_strides") or (1,) * len(given["dims"]))
        for name, value in given.items():
            object.__setattr__(self, name, value)
        for check in CHECKS:
            if not check.holds(self):
                raise TensorMapError(
                    f"tensor map: {check.asked}; found {check.found.format(m=self)}. {check.fix} [{check.id}]"
                )

    def encode(self) -> bytes:
        """Return the map's 128 bytes."""
        return encode(self)

    def spans(self) -> list[tuple[int, int]]:
        """Return (first address, bytes) of the tensor."""
        outer = sum((n - 1) * s for n, s in zip(self.dims[1:], self.strides))
        return [(self.address, outer + self.dims[0] * self.bits // 8)]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].size

    @property
    def bits(self) -> int:
        """Return the bits of an element in global memory."""
        return DTYPES[self.dtype].bits or 8 * self.itemsize

    @property
    def held(self) -> int:
        """Return the bits of an element in shared memory."""
        return DTYPES[self.dtype].held or 8 * self.itemsize

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the elements of a box in shared memory, by dimension; of im2col channels and pixels."""
        if self.pixels:
            return self.box[0], self.pixels
        return tuple(-(-b // s) for b, s in zip(self.box, (1, *self.element_strides[1:])))

    @property
    def box_bytes(self) -> int:
        """Return the bytes that one copy counts at its mbarrier."""
        return self.bits * math.prod(self.steps) // 8

    @property
    def pitch(self) -> int:
        """Return the bytes from one row of a box to the next in shared memory."""
        return max(self.held * self.steps[0] // 8, SWIZZLES[self.swizzle].span)

    @property
    def fill_bytes(self) -> bytes:
        """Return one element outside the tensor."""
        return b"\xf7\x7f" * (self.itemsize // 2) if self.fill == "nan" else bytes(self.itemsize)


class Limit(NamedTuple):
    """A documented limit.  `found` is a format string over m, the map."""

    id: str
    holds: Callable[[TensorMap], bool]
    asked: str
    found: str
    fix: str


def _grain(m: TensorMap) -> int:
    return 32 if m.interleave == 32 else 16


def _corner(m: TensorMap) -> int:
    """Return one more than the largest corner."""
    return 1 << 16 // (m.rank - 2) - 1


CHECKS = (
    Limit("map.rank", lambda m: 1 <= m.rank <= 5, "a tensor has 1 to 5 dimensions", "{m.rank}",
          "Fold dimensions that lie behind one another."),
    Limit("map.dtype", lambda m: m.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}", "{m.dtype!r}",
          "Describe the bytes as uint8."),
    Limit("map.lengths", lambda m: (1 if m.pixels else m.rank) == len(m.box) and len(m.element_strides) == m.rank
          == len(m.strides) + 1,
          "box and element_strides have a number for each dimension, strides for each but the first",
          "dims {m.dims}, strides {m.strides}, box {m.box}, element_strides {m.element_strides}",
          "Give the missing ones."),
    Limit("map.swizzle", lambda m: m.swizzle in SWIZZLES, f"swizzle must be one of {', '.join(map(repr, SWIZZLES))}",
          "{m.swizzle!r}", "128 suits rows of 128 bytes."),
    Limit("map.interleave", lambda m: m.interleave in INTERLEAVES and (not m.interleave or m.rank >= 3),
          "interleave must be 0, or 16 or 32 with at least 3 dimensions", "{m.interleave!r} with {m.rank}", "Use 0."),
    Limit("map.fill", lambda m: m.fill in FILLS and (m.fill == "zero" or DTYPES[m.dtype].floats),
          'fill must be "zero", or "nan" for a float dtype', "{m.fill!r} for {m.dtype}", 'Use "zero".'),
    Limit("map.l2", lambda m: m.l2 in range(4), "l2 promotion is 0 to 3", "{m.l2!r}", "Use 0."),
    Limit("map.address", lambda m: m.address % _grain(m) == 0 and 0 <= m.address < 1 << 57,
          "the address is a multiple of 16 (of 32 with interleave 32)", "{m.address:#x}", "Align the tensor."),
    Limit("map.dims", lambda m: all(1 <= d <= 1 << 32 for d in m.dims), "dims are 1 to 2^32", "{m.dims}",
          "Leave the copy out where a tensor is empty."),
    Limit("map.strides", lambda m: all(0 <= s < 1 << 40 and s % _grain(m) == 0 for s in m.strides),
          "strides are multiples of 16 bytes (of 32 with interleave 32) below 2^40", "{m.strides}", "Pad the rows."),
    Limit("map.box", lambda m: all(1 <= b <= 256 for b in m.box), "box sizes are 1 to 256", "{m.box}",
          "Copy a larger tile in several boxes."),
    Limit("map.inner", lambda m: bool(m.interleave) or m.box[0] * m.held % 128 == 0,
          "a row of a box is a multiple of 16 bytes", "{m.box[0]} elements of {m.held} bits", "Widen the box."),
    Limit("map.span",
          lambda m: bool(m.interleave) or not m.swizzle or m.box[0] * m.held <= 8 * SWIZZLES[m.swizzle].span,
          "a row of a box fits the swizzle", "{m.box[0]} elements of {m.held} bits under swizzle {m.swizzle}",
          "Copy the tile in several boxes."),
    Limit("map.element_strides", lambda m: all(1 <= s <= 8 for s in m.element_strides), "element_strides are 1 to 8",
          "{m.element_strides}", "Put a larger step into strides."),
    Limit("map.packed", lambda m: m.bits == m.held or (m.box[0] == PADDED_BOX and m.dims[0] % PADDED_BOX == 0),
          f"a box of padded elements has {PADDED_BOX} of them, and dimension 0 a multiple",
          "box {m.box}, dims {m.dims}", "Use 16u4_align8b."),
    Limit("map.pixels", lambda m: 0 <= m.pixels <= 1024 and (not m.pixels or m.rank >= 3),
          "im2col copies 1 to 1024 pixels of a tensor of 3 to 5 dimensions", "{m.pixels} of {m.rank} dimensions",
          "Copy more pixels in several copies."),
    Limit("map.corners",
          lambda m: len(m.lower) == len(m.upper) == (m.rank - 2 if m.pixels else 0)
          and all(-_corner(m) <= c < _corner(m) for c in (*m.lower, *m.upper)),
          "a corner has a number for each dimension but the first and the last, of 16 bits in 3, 8 in 4 and 5 in 5 "
          "dimensions", "lower {m.lower}, upper {m.upper} of {m.rank} dimensions", "Move the copy's start instead."),
    Limit("map.bounds",
          lambda m: all(low < size + up for low, up, size in zip(m.lower, m.upper, m.dims[1:])),
          "a bounding box is not empty", "lower {m.lower}, upper {m.upper} of {m.dims}",
          "upper is told from the last place of the dimension."),
    Limit("map.size", lambda m: m.box_bytes <= SHARED, f"a box fits the {SHARED} bytes of shared memory",
          "{m.box_bytes} bytes in {m.box}", "Copy it in several boxes."),
)


def encode(m: TensorMap | None = None, **fields: Any) -> bytes:
    """Return the map's 128 bytes; `fields` are those of TensorMap."""
    m = TensorMap(**fields) if m is None else m
    dtype, swizzle = DTYPES[m.dtype], SWIZZLES[m.swizzle]
    bits = {
        ADDRESS: m.address, RANK: m.rank - 1, DTYPE: dtype.code, TF32: dtype.tf32,
        INTERLEAVE: INTERLEAVES[m.interleave], SWIZZLE: swizzle.code, ATOM: swizzle.atom, SWIZZLE96: swizzle.wide,
        NAN: FILLS[m.fill], L2: m.l2,
    }
    for stride, low, high in zip(m.strides, STRIDES, STRIDES_HIGH):
        bits[low], bits[high] = stride // 16 & 0xFFFFFFFF, stride // 16 >> 32
    if m.pixels:
        bits |= {IM2COL: 1, PIXELS: m.pixels - 1, LOWER: _packed(m, m.lower), UPPER: _packed(m, m.upper)}
    for sizes, places in ((m.dims, DIMS), (m.box, BOX), (m.element_strides, ELEMENT_STRIDES)):
        bits |= {place: size - 1 for size, place in zip(sizes, places)}
    return sum(value << field.shift for field, value in bits.items()).to_bytes(SIZE, "little")


def _packed(m: TensorMap, corner: tuple[int, ...]) -> int:
    width = 16 // (m.rank - 2)
    return sum((c & (1 << width) - 1) << width * i for i, c in enumerate(corner))


def _unpacked(bits: int, rank: int) -> tuple[int, ...]:
    width = 16 // (rank - 2)
    fields = [bits >> width * i & (1 << width) - 1 for i in range(rank - 2)]
    return tuple(f - (1 << width) if f >> width - 1 else f for f in fields)


def decode(raw: bytes) -> TensorMap:
    """Return what the bytes of a map say; other bytes raise an error."""
    if len(raw) < 64:
        raise TensorMapError(f"a tensor map has {SIZE} bytes; found {len(raw)}. Pass all of them.")
    whole = int.from_bytes(raw[:64], "little")

    def read(field: BitField) -> int:
        return whole >> field.shift & (1 << field.bits) - 1

    rank, im2col = read(RANK) + 1, dict[str, Any]()
    if unknown := whole & ~KNOWN:
        raise _no_map(f"bits {', '.join(str(i) for i in range(512) if unknown >> i & 1)} have no meaning", "bits")
    if rank > 5:
        raise _no_map(f"{rank} dimensions", "rank")
    if read(IM2COL) and rank < 3:
        raise _no_map(f"im2col of {rank} dimensions", "pixels")
    if read(IM2COL):
        lower, upper = (_unpacked(read(corner), rank) for corner in (LOWER, UPPER))
        im2col = {"pixels": read(PIXELS) + 1, "lower": lower, "upper": upper}
    elif read(PIXELS):
        raise _no_map("pixels in tile mode", "bits")
    return TensorMap(
        address=read(ADDRESS),
        dims=tuple(read(f) + 1 for f in DIMS[:rank]),
        strides=tuple(16 * (read(low) | read(high) << 32) for low, high in zip(STRIDES[: rank - 1], STRIDES_HIGH)),
        box=tuple(read(f) + 1 for f in BOX[: 1 if im2col else rank]),
        element_strides=tuple(read(f) + 1 for f in ELEMENT_STRIDES[:rank]),
        dtype=_key("dtype", {n: (d.code, d.tf32) for n, d in DTYPES.items()}, (read(DTYPE), read(TF32))),
        swizzle=_key("swizzle", {n: s[:3] for n, s in SWIZZLES.items()}, (read(SWIZZLE), read(ATOM), read(SWIZZLE96))),
        fill=("zero", "nan")[read(NAN)],
        interleave=_key("interleave", INTERLEAVES, read(INTERLEAVE)),
        l2=read(L2),
        **im2col,
    )


def _key(what: str, table: dict, code: Any) -> Any:
    for key, known in table.items():
        if known == code:
            return key
    raise _no_map(f"its {what} is none of {', '.join(map(str, table))}", what)


def _no_map(why: str, check: str) -> TensorMapError:
    return TensorMapError(f"no tensor map: {why}. Was this memory ever written? [map.{check}]")


def _of_tensor(tensor: Any) -> dict[str, Any]:
    """Return the fields of a map over a whole tensor, its last dimension first."""
    *outer, inner = tensor.stride() or (1,)
    if inner != 1:
        raise TensorMapError(f"tensor map: the last dimension is contiguous; found stride {inner}. Transpose it.")
    return {
        "tensor": tensor,
        "address": tensor.data_ptr(),
        "dims": tuple(tensor.shape)[::-1],
        "strides": tuple(s * tensor.element_size() for s in outer)[::-1],
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
