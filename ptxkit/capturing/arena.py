"""The memory of a capture: whose it is, where it was allocated, and where it was freed.

Tensors that a program makes inside a capture lie in chunks of memory that belong to an `Arena`.  Each allocation is a
`Block`.  The storage of its tensors holds a memoryview of the chunk, and the end of that memoryview is the end of the
block: from then on the block is filled with POISON and kept back, so that nothing else lies there for a while and an
address that somebody kept can be told from the address of a tensor that lives.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import random
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from ..naming import Span
from .aligned import ALIGNMENT
from .turns import Turns, in_turn

POISON = 0xFF                                # in every byte: a nan in each floating-point type, -1 in each integer type
CHUNK = 16 << 20                             # bytes that are asked of the system at once
LARGE = 64 << 20                             # bytes of a block that is not poisoned: only what is used costs memory
KEPT_BACK = 256 << 20                        # bytes of freed blocks that nothing else may use
GAP = ALIGNMENT                              # bytes behind each block that are nobody's
FLAGS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}       # by the size of an element
# code of which no line is named: what allocates or frees stands further up
PASSED_OVER = ("torch", "ptxkit", "contextlib", "functools", "weakref", "collections")


class SourceLine:
    """A line of the program."""

    __slots__ = ("file", "line")

    def __init__(self, frame: FrameType | None):
        while frame is not None and _passed_over(frame.f_globals.get("__name__", "")):
            frame = frame.f_back  # type: ignore[assignment]
        self.file, self.line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "the end of the program"


@functools.lru_cache(maxsize=4096)
def _passed_over(module: str) -> bool:
    return module in PASSED_OVER or module.startswith(tuple(f"{name}." for name in PASSED_OVER))


class Chunk:
    """Memory of the system, which costs something where it has been written."""

    __slots__ = ("address", "bytes")

    def __init__(self, size: int):
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.bytes = mmap.mmap(-1, size, **private)                            # a process that is forked has its own
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def view(self, address: int, size: int) -> memoryview:
        begin = address - self.address
        return memoryview(self.bytes)[begin : begin + size]


class Block:
    """One allocation."""

    __slots__ = ("__weakref__", "address", "allocated", "chunk", "ends", "freed", "pool", "recorded", "room", "size",
                 "stream", "used", "written")

    def __init__(self, chunk: Chunk, address: int, size: int, room: int, pool: Any, stream: int):
        self.chunk, self.address, self.size, self.room = chunk, address, size, room
        self.allocated = SourceLine(sys._getframe(2))
        self.freed: SourceLine | None = None
        self.pool = None if pool is None else weakref.ref(pool)
        self.stream = stream                 # that was current when it was allocated
        self.used: dict[int, tuple[int, Any]] = {}  # by other streams: the number of the last launch, and its Run
        self.recorded: set[int] = set()      # streams whose work the allocator waits for: Tensor.record_stream
        self.ends: Any = None                # the weak reference that notices the end
        self.written: bytearray | None = None  # a flag for each byte; None: all of them

    @property
    def gone(self) -> bool:
        """Whether others may have got the block's memory by now: the pool of a CUDA graph keeps what it has."""
        return self.freed is not None and (self.pool is None or self.pool() is None)

    def expired(self) -> bool:
        """Return whether the storage has ended; a StorageWeakRef has a method of this name."""
        return self.gone

    def wrote(self, address: int, size: int) -> None:
        """Note that something has written these bytes."""
        if self.written is not None:
            begin, end = address - self.address, min(address - self.address + size, self.size)
            self.written[begin:end] = b"\1" * (end - begin)

    def wrote_tensor(self, tensor: torch.Tensor) -> None:
        """Note that something has written all of a tensor that lies here."""
        if self.written is None or not tensor.numel():
            return
        address, size = tensor.data_ptr(), tensor.element_size()
        if tensor.is_contiguous() or (dtype := FLAGS.get(size)) is None:
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
            self.wrote(address, (last + 1) * size)
        else:
            flags = torch.frombuffer(self.written, dtype=dtype)
            first = (address - self.address) // size
            flags.as_strided(tensor.shape, tensor.stride(), first).fill_(-1 if size > 1 else 1)

    def unwritten(self) -> bytearray | None:
        """Return the flags, if some byte has not been written."""
        if self.written is not None and self.written.find(0, 0, self.size) < 0:
            self.written = None
        return self.written

    def __str__(self) -> str:
        text = f"{self.size} bytes that were allocated at {self.allocated}"
        return text if self.freed is None else f"{text} and freed at {self.freed}"


class Arena(Turns):
    """The memory of one capture.  `seed` varies which address an allocation gets; `stream` says which one is current;
    `reused` is called before an allocation that may get memory which other streams have used."""

    def __init__(
        self, seed: int, stream: Callable[[], int], reused: Callable[[], None], turns: Turns | None = None
    ):
        super().__init__(turns)
        self.stream, self.reused = stream, reused
        self.pool: Any = None                # memory of the CUDA graph that is captured now
        self.left: list[Block] = []          # freed blocks that other streams have used
        self._random = random.Random(seed) if seed else None
        self._blocks: dict[int, Block] = {}  # by address
        self._begins: list[int] = []         # the addresses, sorted
        self._chunk: Chunk | None = None     # that new blocks are cut from
        self._next = 0
        self._ended: deque[Block] = deque()  # freed since somebody looked
        self._held_back: deque[Block] = deque()  # freed, and not yet used again
        self._bytes_held_back = 0
        self._free: dict[int, list[tuple[Chunk, int]]] = defaultdict(list)  # by room: what may be used again

    @in_turn
    def memory(self, size: int, written: bool = False) -> torch.Tensor:
        """Allocate bytes, aligned as CUDA aligns memory; they are poisoned unless the caller writes all of them."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        self.settle()
        if self.left:
            self.reused()
        room = -(-size // ALIGNMENT) * ALIGNMENT + GAP
        chunk, address = self._place(room)
        block = Block(chunk, address, size, room, self.pool, self.stream())
        view = chunk.view(address, size)
        block.ends = weakref.ref(view, functools.partial(self._end, block))
        self._blocks[address] = block
        bisect.insort(self._begins, address)
        if not written and size < LARGE:
            ctypes.memset(address, POISON, size)
            block.written = bytearray(room)
        return torch.frombuffer(view, dtype=torch.uint8)

    @in_turn
    def block_at(self, address: int) -> Block | None:
        """Return the block, alive or kept back, that an address lies in."""
        if not (i := bisect.bisect_right(self._begins, address)):
            return None
        block = self._blocks[self._begins[i - 1]]
        return block if address < block.address + block.size else None

    def wrote(self, address: int, size: int) -> None:
        """Note that the host has written these bytes."""
        if (block := self.block_at(address)) is not None:
            block.wrote(address, size)

    def among(self, numbers: Iterable[int]) -> Iterator[Block]:
        """Yield the blocks that numbers point into, each once."""
        if not self._begins:
            return
        first, last = self._begins[0], self._blocks[self._begins[-1]]
        end, seen = last.address + last.size, set[int]()
        for number in numbers:
            if first <= number < end and (block := self.block_at(number)) is not None and block.address not in seen:
                seen.add(block.address)
                yield block

    def without_owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same tensor, which does not keep its memory: a launch in a CUDA graph knows addresses alone."""
        storage = tensor.untyped_storage()
        if (block := self.block_at(storage.data_ptr())) is None:
            return tensor
        whole = torch.frombuffer(block.chunk.view(block.address, block.size), dtype=torch.uint8).untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(whole, *place)  # type: ignore[call-overload]

    # the life of blocks

    def _place(self, room: int) -> tuple[Chunk, int]:
        if ready := self._free[room]:
            return ready.pop(self._random.randrange(len(ready)) if self._random else 0)
        if room > CHUNK // 2:
            chunk = Chunk(room)
            return chunk, chunk.address
        skipped = ALIGNMENT * self._random.randrange(64) if self._random else 0
        if self._chunk is None or self._next + skipped + room > CHUNK:
            self._chunk, self._next, skipped = Chunk(CHUNK), 0, 0
        offset = self._next + skipped
        self._next = offset + room
        return self._chunk, self._chunk.address + offset

    def _end(self, block: Block, _: Any) -> None:
        """The last tensor in a block has ended.  This may interrupt any code, so it only notes that; at the end of the
        program there is no code to interrupt."""
        block.freed, block.ends = SourceLine(sys._getframe().f_back), None
        self._ended.append(block)

    @in_turn
    def settle(self) -> None:
        """Poison what has been freed, and let go of what has been kept back for long enough."""
        while self._ended:
            block = self._ended.popleft()
            if block.pool is not None and not block.gone:
                continue                     # replays of its graph still use it
            if block.used.keys() - block.recorded:
                self.left.append(block)
            if block.size < LARGE:
                ctypes.memset(block.address, POISON, block.size)
            self._held_back.append(block)
            self._bytes_held_back += block.room
        while self._bytes_held_back > KEPT_BACK:
            block = self._held_back.popleft()
            self._bytes_held_back -= block.room
            del self._blocks[block.address]
            del self._begins[bisect.bisect_left(self._begins, block.address)]
            if block.room <= CHUNK // 2:     # a larger chunk ends with its block
                self._free[block.room].append((block.chunk, block.address))


class Heap(NamedTuple):
    """What one launch may know of an arena."""

    arena: Arena
    given: tuple[Block, ...]                 # what its arguments point into
    lost: frozenset[int]                     # addresses of blocks that were freed before it, in the same CUDA graph

    @classmethod
    def from_args(cls, arena: Arena, args: bytes, lost: frozenset[int] = frozenset()) -> Heap:
        """Return the Heap of a launch with these parameters: each word that points into a block is an address."""
        return cls(arena, tuple(arena.among(memoryview(args[: len(args) // 8 * 8]).cast("Q"))), lost)

    def is_gone(self, block: Block) -> bool:
        return block.gone or block.address in self.lost

    def gone(self, address: int) -> Block | None:
        """Return the block of an address, if that was freed."""
        return block if (block := self.arena.block_at(address)) is not None and self.is_gone(block) else None

    def regions(self, others: Iterable[Span]) -> list[Span]:
        """Return what the launch may touch: what is known without the arena, and whatever an argument points into."""
        named = [each for each in others if self.gone(each.address) is None]
        covered = {block.address for block in self.arena.among(each.address for each in named)}
        more = [block for block in self.given if not self.is_gone(block) and block.address not in covered]
        return named + [Span(each.address, each.size, f"memory allocated at {each.allocated}") for each in more]

    def mark_unwritten(self, regions: Iterable[Any]) -> list[Any]:
        """Tell the engine's regions what has not been written yet, and return what must live as long as they do."""
        marked = []
        for region in regions:
            block = self.arena.block_at(region.address)
            if block is not None and (flags := block.unwritten()) is not None:
                marked.append((ctypes.c_char * len(flags)).from_buffer(flags))
                region.written = ctypes.addressof(marked[-1]) + region.address - block.address
        return marked
