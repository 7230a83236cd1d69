"""Ranks agree on what they are about to exchange: through the group's store, on the host, never through the GPU.

gloo does not notice if ranks send different amounts: one continues with wrong data, others crash. So before ranks of a
group exchange anything, they compare a line of text that describes it. They skip this if they agreed on the same
exchange after the same predecessor before, because a model's layers repeat.

Texts do not tell whether ranks are at the same call: one may have skipped a backward. So every exchange has a mark, an
integer on the device of the call, and a sum over all ranks tells each rank whether their marks are equal before any
data is sent (`exchange.agree`). It is a hash of the text, of the number of the exchange and of its context, to which
the bits of a forward's A_log and dt_bias are added, or in a backward the mark of its forward.
"""

from __future__ import annotations

import hashlib
import weakref
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from kda.errors import InputError, KdaError

MOST_KNOWN = 4096                            # agreed pairs; then all are forgotten


class Ask(NamedTuple):
    """Names who agrees, and how the error refers to it."""

    op: str
    argument: str
    check: str
    timeout: float                           # seconds


class Agreement:
    """A process group's rounds of agreement; one for each group and process."""

    def __init__(self, store: dist.Store, rank: int, world: int):
        self.store, self.rank, self.world = store, rank, world
        self.round = 0
        self.exchanges = 0                   # their number so far
        self.last = ""                       # the last exchange
        self.known: set[tuple[str, str]] = set()                               # agreed exchanges, by predecessor

    def agree(self, text: str, ask: Ask) -> None:
        """Raise on all ranks unless all pass the same text; or after the time-out, if some do not call."""
        if self.world == 1:
            return
        key = self._next_round()
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            self.store.add(f"{key}/{digest}", 1)
            self._wait_for_all(f"{key}/here", ask)
            if self.store.add(f"{key}/{digest}", 0) != self.world:
                self._refuse(key, text, ask)
        except KdaError:
            raise
        except (dist.DistError, RuntimeError) as error:                        # the process that keeps the store died
            raise lost(ask.op, f"{type(error).__name__}: {error}") from error
        if self.store.add(f"{key}/read", 1) == self.world:
            for name in (digest, "here", "here/all", "read"):
                self.store.delete_key(f"{key}/{name}")

    def agree_on_exchange(self, text: str, ask: Ask) -> int:
        """Agree on an exchange and return its number."""
        if (self.last, text) not in self.known:
            self.agree(text, ask)
            if len(self.known) >= MOST_KNOWN:                                  # on all ranks at once
                self.known.clear()
            self.known.add((self.last, text))
        self.last, self.exchanges = text, self.exchanges + 1
        return self.exchanges

    def refuse(self, text: str, ask: Ask) -> None:
        """Raise on all ranks, all of which know that their marks differ; name two texts that differ, if any do."""
        self.last = ""                                                         # the same on all ranks again
        try:
            self._refuse(self._next_round(), text, ask)
        except (dist.DistError, RuntimeError) as error:
            raise error if isinstance(error, KdaError) else lost(ask.op, f"{type(error).__name__}: {error}") from error

    def _next_round(self) -> str:
        key, self.round = str(self.round), self.round + 1
        return key

    def object_to(self, text: str) -> None:
        """Join a round without waiting for it, with a text that no other rank has."""
        key = self._next_round()
        self.store.set(f"{key}/text/{self.rank}", text)
        for name in ("here", "texts"):
            self._arrive(f"{key}/{name}")

    def _arrive(self, name: str) -> None:
        if self.store.add(name, 1) == self.world:
            self.store.set(f"{name}/all", "")

    def _wait_for_all(self, name: str, ask: Ask) -> None:
        self._arrive(name)
        try:
            self.store.wait([f"{name}/all"], timedelta(seconds=ask.timeout))
        except dist.DistStoreError:
            arrived = self.store.add(name, 0)
            raise lost(ask.op, f"{arrived} of {self.world} within {ask.timeout:g} seconds") from None

    def _refuse(self, key: str, text: str, ask: Ask) -> None:
        self.store.set(f"{key}/text/{self.rank}", text)
        self._wait_for_all(f"{key}/texts", ask)
        texts = [self.store.get(f"{key}/text/{rank}").decode() for rank in range(self.world)]
        other = next((rank for rank, found in enumerate(texts) if found != texts[0]), None)
        if other is None:
            found = f"another forward, or other values of A_log or dt_bias, on some rank, at {texts[0]}"
        else:
            found = f"rank 0: {texts[0]}; rank {other}: {texts[other]}"
        raise InputError(ask.op, ask.argument, "the same on all ranks of the group",
                         found, "Make the same calls and backwards in the same order on all ranks, with one context, "
                         "one shape and one set of options and parameters.", ask.check)


class RankLost(KdaError, RuntimeError):
    """A rank of the group did not call, or died."""


def lost(op: str, found: str) -> RankLost:
    return RankLost(f"{op}: all ranks of the context's group must make the call together; found {found}. "
                    "Look at the rank that failed first, then start the group again.")


# By name, with weak references: a group that outlives its destruction aborts the process at exit.
_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], Agreement]] = {}


def group_of(group: dist.ProcessGroup) -> Agreement:
    """A group that was destroyed and created again under its old name starts from scratch."""
    known = _groups.get(group.group_name)
    if known is None or known[0]() is not group:
        store = dist.PrefixStore(f"kda/{group.group_name}", distributed_c10d._get_process_group_store(group))
        known = weakref.ref(group), Agreement(store, dist.get_rank(group), dist.get_world_size(group))
        _groups[group.group_name] = known
    return known[1]
