"""What a cubin says about its kernels: registers, stack, shared memory, and offsets of parameters.

A cubin is an ELF file. `.nv.info` holds attributes of all kernels by symbol, `.nv.info.<kernel>` those of one,
`.nv.shared.<kernel>` is as large as its static shared memory. The format is not published; the numbers below agree
with what `cuobjdump -res-usage` prints and with the .param lists of the PTX (tests/ptxkit/compile compares both).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Attributes of .nv.info, and the shapes of an attribute record: its first byte says which.
REGISTERS, STACK, PARAMETER = 0x2F, 0x11, 0x17
SIZED = 0x04                                 # kind, id, u16 size, data; the others are four bytes in all


class Resources(NamedTuple):
    """The resources of one kernel."""

    registers: int                           # per thread
    spills: int                              # bytes of a thread's stack: spilled registers, and local arrays as well
    shared: int                              # static bytes of a CTA, on sm_90 and up with the system's own 1024
    params: tuple[tuple[int, int], ...]      # (offset, bytes) by position


class _Section(NamedTuple):
    name: str
    offset: int
    size: int

    def read(self, image: bytes) -> bytes:
        return image[self.offset : self.offset + self.size]


def resources(cubin: bytes) -> dict[str, Resources]:
    """Kernel name -> its resources.  Empty for bytes that are not a cubin."""
    if cubin[:5] != b"\x7fELF\x02":
        return {}
    sections = {s.name: s for s in _sections(cubin)}
    if ".nv.info" not in sections or ".symtab" not in sections:
        return {}
    known: dict[tuple[int, int], int] = {}
    for attribute, data in _attributes(sections[".nv.info"].read(cubin)):
        if attribute in (REGISTERS, STACK):
            symbol, number = struct.unpack_from("<II", data)
            known[attribute, symbol] = number
    by_kernel = {}
    for symbol, name in enumerate(_symbols(cubin, sections)):
        if name and (section := sections.get(f".nv.info.{name}")) is not None:
            registers, stack = (known.get((attribute, symbol), 0) for attribute in (REGISTERS, STACK))
            shared = sections.get(f".nv.shared.{name}")
            params = _params(section.read(cubin))
            by_kernel[name] = Resources(registers, stack, shared.size if shared else 0, params)
    return by_kernel


def _params(info: bytes) -> tuple[tuple[int, int], ...]:
    by_position = {}
    for attribute, data in _attributes(info):
        if attribute == PARAMETER:
            _, position, offset, packed = struct.unpack_from("<IHHI", data)
            by_position[position] = (offset, packed >> 18)
    return tuple(by_position[i] for i in sorted(by_position))


def _attributes(info: bytes):
    offset = 0
    while offset + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if kind == SIZED:
            yield attribute, info[offset : offset + size]
            offset += size


def _sections(image: bytes) -> list[_Section]:
    table, stride, count, names_at = *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HHH", image, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * stride) for i in range(count)]
    names = image[raw[names_at][4] : raw[names_at][4] + raw[names_at][5]]
    return [_Section(_text(names, h[0]), h[4], h[5]) for h in raw]


def _symbols(image: bytes, sections: dict[str, _Section]) -> list[str]:
    table, texts = sections[".symtab"].read(image), sections[".strtab"].read(image)
    return [_text(texts, struct.unpack_from("<I", table, offset)[0]) for offset in range(0, len(table), 24)]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
