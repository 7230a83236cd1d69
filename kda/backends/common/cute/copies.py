"""Neighbours in memory to registers and back; pointers to fields."""

import math
from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32
from cutlass.memory import SmemAllocator

TYPES = {
    "bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32, "int32": cutlass.Int32,
    "uint32": cutlass.Uint32, "int64": cutlass.Int64, "uint8": cutlass.Uint8,
}


def field_at(base, field):
    """A field (fields.py) of the struct whose bytes begin at `base`."""
    return cute.make_ptr(
        TYPES[field.dtype], (base + field.offset).toint(), base.memspace, assumed_align=field.align
    )


def fields_at(base, struct):
    """All fields of a struct whose bytes begin at `base`, by name: pointers."""
    found = {name: field_at(base, field) for name, field in struct.fields.items()}
    return namedtuple("Fields", found)(**found)


def allocate(struct):
    """A struct's fields in shared memory, by name: pointers."""
    memory, found = SmemAllocator(), {}
    for name, field in struct.fields.items():
        dtype, count = TYPES[field.dtype], math.prod(field.shape)
        found[name] = memory.allocate_array(dtype, count, byte_alignment=field.align)
    return namedtuple("Shared", found)(**found)


def in_global(address, dtype):
    """A pointer from an address in global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem)


def neighbours(pointer, count: int):
    """`count` elements in memory, where so many together are aligned."""
    align = count * pointer.dtype.width // 8                                   # Pointer.align would round it up
    known = cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=align)
    return cute.make_tensor(known, cute.make_layout(count))


def load(pointer, count: int = 1):
    """Load `count` neighbouring elements."""
    kept = cute.make_rmem_tensor(count, pointer.dtype)
    cute.autovec_copy(neighbours(pointer, count), kept)
    return kept


def load_one(pointer):
    return load(pointer)[0]


def store(pointer, values):
    """Neighbours, rounded to what lies there."""
    kept = cute.make_rmem_tensor(len(values), pointer.dtype)
    for i in range(len(values)):
        kept[i] = values[i].to(pointer.dtype)
    cute.autovec_copy(kept, neighbours(pointer, len(values)))


def floats(kept):
    """float32 of what `load` has brought."""
    if kept.element_type is BFloat16:
        words, wide = cute.recast_tensor(kept, Uint32), cute.make_rmem_tensor(cute.size(kept), Uint32)
        for w in range(cute.size(words)):
            wide[2 * w], wide[2 * w + 1] = both_halves(words[w])
        kept = cute.recast_tensor(wide, Float32)
    return [kept[i].to(Float32) for i in range(cute.size(kept))]


def floats_of(words):
    """float32 of words of two bfloat16."""
    return [half.bitcast(Float32) for word in words for half in both_halves(word)]


def both_halves(word):
    """Two bfloat16 of a word as float32."""
    return word << Uint32(16), word & Uint32(0xFFFF0000)


def words_of(values):
    """Words of two bfloat16."""
    kept = cute.make_rmem_tensor(len(values), BFloat16)
    for i in range(len(values)):
        kept[i] = values[i].to(BFloat16)
    words = cute.recast_tensor(kept, Uint32)
    return [words[w] for w in range(len(values) // 2)]


def compute_words_now(words):
    """An empty statement that reads them: NVVM would round values where words of them are used."""
    cute.arch.inline_ptx("{ }", read_only_args=words)


def copy_16_bytes(source, to):
    cute.autovec_copy(load(source, 128 // source.dtype.width), neighbours(to, 128 // to.dtype.width))


def copy_16_bytes_out(source, to):
    """Copy 16 bytes to global memory that nobody reads soon: they are the first to leave L2."""
    words = load(cute.recast_ptr(source, dtype=Uint32), 4)
    cute.arch.inline_ptx(
        "st.global.cs.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[to.toint(), *(words[w] for w in range(4))],
    )
