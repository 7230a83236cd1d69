"""Exchanges between ranks, by collectives of torch.distributed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kda.errors import InputError, KdaError

from .agreement import Agreement, Ask, group_of, lost
from .context import CPContext

Tensor = torch.Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # by the size of an element in bytes
STOPPED = "kda: the ranks of a cp_context's group made different calls, or the same ones in another order"


def agree(context: CPContext, op: str, text: str, device: torch.device, *values: Tensor | None) -> Tensor:
    """Agree on the next exchange (see `agreement`), and return its mark, an int64 of shape (1,).

    `values` are the tensors that the ranks have in common: the parameters of a forward, or the mark of a backward's
    forward. If marks differ, all ranks raise an InputError on CPUs. On GPUs, where no call waits, an assertion on the
    device ends the work of the process: nothing that comes later on the GPU runs, so no result can be read.
    """
    ask = Ask(op, "cp_context", "cp_context.agreed", context.timeout)
    group = group_of(context.group)  # type: ignore[arg-type]
    text = f"{text}, exchange {group.agree_on_exchange(text, ask)} of context {context.agreed}"
    common = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return _together(op, _compared, context, common, device, values, group, text, ask)


def _compared(context: CPContext, common: int, device: torch.device, values: tuple[Tensor | None, ...],
              group: Agreement, text: str, ask: Ask) -> Tensor:
    mark = torch.full((1,), common, dtype=torch.int64, device=device)
    for x in values:
        if x is not None:
            mark += x.detach().contiguous().view(INTEGERS[x.element_size()]).sum(dtype=torch.int64)
    total = mark.clone()
    dist.all_reduce(total, group=context.group)
    same = total == mark * context.world_size
    if device.type == "cuda":
        torch._assert_async(same, STOPPED)
    elif not torch.equal(same, torch.ones_like(same)):
        group.refuse(text, ask)
    return mark


def no_mark(device: torch.device) -> Tensor:
    """The mark of a call that exchanges nothing."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def object_to(context: CPContext, text: str) -> None:
    """Tell waiting ranks that this one raises an error, and why."""
    if context.group is not None:
        group_of(context.group).object_to(text)


def check_world(context: CPContext, op: str) -> None:
    world, group = (0, -1), context.group
    if group is not None:                                                      # to torch, None is the default group
        with contextlib.suppress(ValueError):                                  # it was destroyed
            world = dist.get_world_size(group), dist.get_rank(group)
    if world != (context.world_size, context.rank):
        raise InputError(op, "cp_context", f"a context of the group as it is now, rank {world[1]} of {world[0]}",
                         repr(context), "Build a new context for the group that uses it.",
                         "cp_context.world")


def gather(context: CPContext, mine: Tensor, op: str) -> Tensor:
    """(parts of all ranks, ..) from this rank's (parts, ..), rank by rank."""
    mine = mine.contiguous()
    gathered = mine.new_empty(context.world_size * mine.shape[0], *mine.shape[1:])
    _together(op, _all_gather, gathered, mine, group=context.group)
    return gathered


def send(context: CPContext, x: Tensor, to: int, op: str) -> None:
    _together(op, dist.send, x.contiguous(), dist.get_global_rank(context.group, to), context.group)  # type: ignore[arg-type]


def receive(context: CPContext, like: Tensor, source: int, op: str) -> Tensor:
    received = torch.empty_like(like, memory_format=torch.contiguous_format)
    _together(op, dist.recv, received, dist.get_global_rank(context.group, source), context.group)  # type: ignore[arg-type]
    return received


def swap(context: CPContext, x: Tensor, target: int | None, source: int | None, op: str) -> Tensor | None:
    """Send x to one rank and receive as much from another, at the same time; None: no rank."""
    group, x = context.group, x.contiguous()
    came = None if source is None else torch.empty_like(x)
    sent = [] if target is None else [dist.P2POp(dist.isend, x, dist.get_global_rank(group, target), group)]  # type: ignore[arg-type]
    received = [] if source is None else [dist.P2POp(dist.irecv, came, dist.get_global_rank(group, source), group)]  # type: ignore[arg-type]
    if sent or received:
        _together(op, _finished, [*sent, *received])
    return came


def _finished(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _together(op: str, function: Callable, *args: Any, **keywords: Any) -> Any:
    try:
        return function(*args, **keywords)
    except KdaError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise lost(op, f"{type(error).__name__}: {error}") from error
