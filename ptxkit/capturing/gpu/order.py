"""Which launches of different streams are ordered: by events, by waits of the host, by the default stream.

Launches run here one after the other, so a missing wait between streams changes no result. Once a program has made a
stream, every launch leaves which bytes it has read and written; one that touches what a launch of another stream has
touched, with no order between the two, is a finding. What torch computes is not looked at. Of memory that was freed in
between, this is said when the stream in which it was allocated may get it again (`Order.freed`).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...findings import FREED, Finding, of_launch
from ...naming import GLOBAL, Names
from ..arena import Arena, Block
from ..turns import Turns, in_turn

READS, WRITES = 1, 2                         # flags of a byte, as the engine sets them
DEFAULT = 0                                  # the legacy default stream
KIND = "race-streams"
ADVICE = (
    "record an event in {other} behind {kernel}, and let {this} wait for it (wait_event, cudaStreamWaitEvent) before "
    "this launch; or launch both in one stream"
)
FREE_AGAIN = (
    "may still use {block}, in stream {stream:#x}: the memory is free for stream {owner:#x}, in which it was allocated "
    "and which does not wait for this launch"
)
ADVICE_OF_FREED = (
    "record the stream (tensor.record_stream); or let the stream that allocated it wait for this one before it is "
    "freed; or allocate it in this one"
)

Mark = dict[int, int]                        # stream -> its launches that are over: an event's, a stream's, the host's


class Accesses(NamedTuple):
    """What a launch has done to one tensor's memory."""

    stream: int
    number: int                              # the launch's, among those of its stream
    kernel: str
    address: int
    flags: torch.Tensor                      # by byte
    storage: StorageWeakRef | Block


class Order(Turns):
    """The order of the launches of one capture."""

    def __init__(self, turns: Turns | None = None) -> None:
        super().__init__(turns)
        self.watching = False                # the program has made a stream
        self._blocking: set[int] = set()     # streams that the default stream waits for, and that wait for it
        self._launched: Mark = defaultdict(int)
        self._known: dict[int, Mark] = defaultdict(dict)
        self._host: Mark = {}
        self._seen: list[Accesses] = []

    @in_turn
    def created(self, stream: int, blocking: bool = False) -> None:
        self.watching = True
        if blocking:
            self._blocking.add(stream)

    @in_turn
    def reached(self, stream: int) -> Mark:
        """Return all that a stream's next launch comes after: also what an event records."""
        known = self._known[stream]
        _join(known, self._host)
        for other in self._blocking if stream == DEFAULT else {DEFAULT} if stream in self._blocking else ():
            _join(known, self._known[other])
            _join(known, {other: self._launched[other]})
        return dict(known)

    @in_turn
    def wait(self, stream: int, mark: Mark | None) -> None:
        """Let a stream wait for an event (None: it was never recorded)."""
        _join(self._known[stream], mark or {})

    @in_turn
    def host_waits(self, mark: Mark | None = None) -> None:
        """Let the host wait for an event or a stream; None: for everything."""
        _join(self._host, self._launched if mark is None else mark)
        self._seen = [a for a in self._seen if a.number > self._host.get(a.stream, 0)]

    @in_turn
    def launched(self, stream: int, run: Any, tensors: Iterable[torch.Tensor], arena: Arena) -> list[Finding]:
        """Enter a launch, and return what it touches without an order behind launches of other streams."""
        known = self.reached(stream)
        self._launched[stream] += 1
        number = self._known[stream][stream] = self._launched[stream]
        self._seen = [a for a in self._seen if not a.storage.expired()]
        findings: dict[tuple[str, int], Finding] = {}
        mine, storages = [], Storages(tensors, arena)
        for address, flags in run.accesses:
            if not flags.any() or (storage := storages.memory_at(address)) is None:
                continue
            for other in self._seen:
                late = other.stream != stream and other.number > known.get(other.stream, 0)
                if late and other.storage == storage and (clash := _clash(address, flags, other)) is not None:
                    findings.setdefault((other.kernel, other.stream), _finding(run, stream, other, *clash))
            mine.append(Accesses(stream, number, run.kernel, address, flags, storage))
            if isinstance(storage, Block) and storage.stream != stream:
                storage.used[stream] = number, run
        self._seen += mine
        return list(findings.values())

    @in_turn
    def freed(self, block: Block) -> list[Finding]:
        """A block is free for its stream: what other streams may still do to it, which their runs have as findings."""
        known, findings = self.reached(block.stream), []
        for stream, (number, run) in block.used.items():
            if stream not in block.recorded and number > known.get(stream, 0):
                says = FREE_AGAIN.format(block=block, stream=stream, owner=block.stream)
                findings.append(of_launch(FREED.id, says, run, address=block.address, advice=ADVICE_OF_FREED))
                run.findings = [*run.findings, findings[-1]]
        return findings


def _join(into: Mark, other: Mapping[int, int]) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


class Storages:
    """The memory of tensors, by address: a process may have as many tensors as a launch has regions."""

    def __init__(self, tensors: Iterable[torch.Tensor], arena: Arena):
        self.arena = arena
        known = {storage.data_ptr(): storage for storage in (x.untyped_storage() for x in tensors) if storage.nbytes()}
        self.begins = sorted(known)
        self.storages = [known[begin] for begin in self.begins]

    def memory_at(self, address: int) -> StorageWeakRef | Block | None:
        if (block := self.arena.block_at(address)) is not None:
            return block
        i = bisect.bisect_right(self.begins, address) - 1
        if i >= 0 and address < self.begins[i] + self.storages[i].nbytes():
            return StorageWeakRef(self.storages[i])
        return None


def _clash(address: int, flags: torch.Tensor, other: Accesses) -> tuple[int, int, int] | None:
    """Return (address of the first byte that both touch and one writes, what this does to it, what the other did)."""
    first, end = max(address, other.address), min(address + len(flags), other.address + len(other.flags))
    if first >= end:
        return None
    now, before = flags[first - address : end - address], other.flags[first - other.address : end - other.address]
    places = ((now != 0) & (before != 0) & (((now | before) & WRITES) != 0)).nonzero()
    return (first + int(places[0]), int(now[places[0]]), int(before[places[0]])) if len(places) else None


def _finding(run: Any, stream: int, other: Accesses, address: int, now: int, before: int) -> Finding:
    memory = Names(run.spans, run._program).memory(GLOBAL, address)
    does, did = "writes" if now & WRITES else "reads", "wrote" if before & WRITES else "read"
    mine, others = (f"stream {number:#x}" for number in (stream, other.stream))
    says = f"{does} {memory} in {mine}, which {other.kernel} {did} in {others}: nothing orders the two launches"
    advice = ADVICE.format(other=others, this=mine, kernel=other.kernel)
    return of_launch(KIND, says, run, address=address, memory=memory, advice=advice)
