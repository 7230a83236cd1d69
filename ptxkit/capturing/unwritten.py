"""Whether a result of a launch depends on memory that nothing had written before.

A kernel may read what it does not use: a row behind the last one, a part of a vector.  So a launch that has read
unwritten memory is repeated with other bytes there; what it leaves behind is the same if it used none of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ..findings import KINDS, UNWRITTEN, Finding
from ..naming import Span
from .arena import Block, Heap

OTHER = 0x3C                                 # no nan, as POISON is, and no number of the same sign
MOST = 256 << 20                             # bytes of a launch's memory that are copied
UNUSED = "; no result of this launch depends on it"


class Contents:
    """The bytes of a launch's memory at one time."""

    def __init__(self, regions: Iterable[Span]):
        self.pieces: list[tuple[int, bytes]] = []
        end = 0
        for region in sorted(regions):
            first, end = max(region.address, end), max(region.address + region.size, end)
            if first < end:
                self.pieces.append((first, ctypes.string_at(first, end - first)))

    def restore(self) -> None:
        for address, contents in self.pieces:
            ctypes.memmove(address, contents, len(contents))

    def equal(self, later: Contents, ignored: dict[int, torch.Tensor]) -> bool:
        """Return whether nothing has changed since, but for what is ignored: a flag for each byte, by address."""
        for (address, x), (_, y) in zip(self.pieces, later.pieces):
            if x != y:
                differ = _bytes(x) != _bytes(y)
                for first, flags in ignored.items():
                    begin, end = max(first, address), min(first + len(flags), address + len(x))
                    if begin < end:
                        differ[begin - address : end - address] &= ~flags[begin - first : end - first]
                if differ.any():
                    return False
        return True


class Trial:
    """One launch that may read unwritten memory.  Made before it runs."""

    def __init__(self, heap: Heap, regions: list[Span]):
        self.heap, self.regions = heap, regions
        blocks = {block.address: block for block in heap.arena.among(region.address for region in regions)}
        self.unwritten = {block.address: _flags(block) for block in blocks.values() if block.unwritten() is not None}
        small = sum(region.size for region in regions) <= MOST
        self.before = Contents(regions) if self.unwritten and small else None

    def judge(self, run: Any, again: Callable[[], Any]) -> None:
        """Make those reads of the run notes on which nothing depends."""
        if self.before is None:
            return
        reads = [finding for finding in run.findings if finding.kind == KINDS[UNWRITTEN].id and self._blocks(finding)]
        if not reads:
            return
        after = Contents(self.regions)
        if self._depends(again, after, set(self.unwritten)):
            read = set().union(*map(self._blocks, reads))
            used = {address for address in read if self._depends(again, after, {address})} if len(read) > 1 else read
            reads = [finding for finding in reads if used and not self._blocks(finding) & used]
        run.findings = [finding for finding in run.findings if finding not in reads]
        run.notes = [*run.notes, *(replace(finding, grade="note", says=finding.says + UNUSED) for finding in reads)]

    def _blocks(self, finding: Finding) -> set[int]:
        every = self.heap.arena.among(each.address for each in (finding, *finding.alike))
        return {block.address for block in every if block.address in self.unwritten}

    def _depends(self, again: Callable[[], Any], after: Contents, changed: set[int]) -> bool:
        """Return whether other bytes in these blocks lead to other results."""
        assert self.before is not None
        still = {address: _flags(self.heap.arena.block_at(address)) for address in changed}
        self.before.restore()
        for address in changed:
            flags = self.unwritten[address]
            whole = torch.frombuffer((ctypes.c_char * len(flags)).from_address(address), dtype=torch.uint8)
            whole[flags] = OTHER
        again()
        equal = after.equal(Contents(self.regions), still)
        after.restore()
        return not equal


def _flags(block: Block | None) -> torch.Tensor:
    """Return for each byte whether it is unwritten."""
    if block is None or block.written is None:
        return torch.zeros(0, dtype=torch.bool)
    return _bytes(bytes(block.written[: block.size])) == 0


def _bytes(contents: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)
