"""Exchanges between ranks, by collectives of torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kda.errors import InputError

from .agreement import Ask, group_of, lost
from .context import CPContext

Tensor = torch.Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def agree(context: CPContext, op: str, text: str) -> None:
    """Agree on the next exchange; see `agreement`."""
    ask = Ask(op, "cp_context", "cp_context.agreed", context.timeout)
    group_of(context.group).agree_on_exchange(text, ask)


def object_to(context: CPContext, text: str) -> None:
    """Tell waiting ranks that this one raises an error, and why."""
    if context.group is not None:
        group_of(context.group).object_to(text)


def check_world(context: CPContext, op: str) -> None:
    found, group = (0, -1), context.group
    if group is not None:                                                      # to torch, None is the default group
        with contextlib.suppress(ValueError):                                  # it was destroyed
            found = dist.get_world_size(group), dist.get_rank(group)
    if found != (context.world_size, context.rank):
        raise InputError(op, "cp_context", f"a context of the group as it is now, rank {found[1]} of {found[0]}",
                         repr(context), "Build a new context for the group that uses it.",
                         "cp_context.world")  # fmt: skip


def gather(context: CPContext, mine: Tensor, op: str) -> Tensor:
    """(parts of all ranks, ..) from this rank's (parts, ..), rank by rank."""
    mine = mine.contiguous()
    found = mine.new_empty(context.world_size * mine.shape[0], *mine.shape[1:])
    _together(op, _all_gather, found, mine, group=context.group)
    return found


def send(context: CPContext, x: Tensor, to: int, op: str) -> None:
    _together(op, dist.send, x.contiguous(), dist.get_global_rank(context.group, to), context.group)


def receive(context: CPContext, like: Tensor, of: int, op: str) -> Tensor:
    found = torch.empty_like(like, memory_format=torch.contiguous_format)
    _together(op, dist.recv, found, dist.get_global_rank(context.group, of), context.group)
    return found


def swap(context: CPContext, x: Tensor, to: int | None, of: int | None, op: str) -> Tensor | None:
    """Send x to one rank and receive as much from another, at the same time; None: no rank."""
    group, x = context.group, x.contiguous()
    found = None if of is None else torch.empty_like(x)
    sent = [] if to is None else [dist.P2POp(dist.isend, x, dist.get_global_rank(group, to), group)]
    received = [] if of is None else [dist.P2POp(dist.irecv, found, dist.get_global_rank(group, of), group)]
    if sent or received:
        _together(op, _finished, [*sent, *received])
    return found


def _finished(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _together(op: str, function: Callable, *args: Any, **keywords: Any) -> None:
    try:
        function(*args, **keywords)
    except (dist.DistError, RuntimeError) as error:
        raise lost(op, f"{type(error).__name__}: {error}") from error
