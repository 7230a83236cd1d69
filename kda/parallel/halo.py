"""The tokens before a rank's own that a short convolution reads: torch.ops.kda.halo, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kda.calls.autograd import no_second
from kda.errors import InputError, InputTypeError, in_words
from kda.model.transforms import Links, register

from . import exchange
from .context import CPContext, adopt, capturing, context_of, on
from .layout import edges_of, holder

Tensor = torch.Tensor

OP = "conv_halo"


class Places(NamedTuple):
    """Row indices into the gathered tensor, (parts of all ranks * rows, D) followed by a row of zeros."""

    forward: Tensor                          # (N * rows) of the parts' last rows
    backward: Tensor                         # (most, parts * rows) of the gradients of what came before each part
    sent: Tensor                             # (parts * rows) of (N * rows, D) gradients, and a row of zeros


def conv_halo(x: Tensor, cp_context: Any, rows: int | None = None) -> Tensor:
    """The last `rows` tokens before each of this rank's sequences, zeros before a sequence's own beginning.

    A causal convolution over `rows` + 1 tokens starts from them: put them before each sequence. They are zero unless
    the sequence began on an earlier rank. Costs one all-gather of each part's last rows, and one of their gradients in
    the backward, whatever the number of sequences; all ranks call it together.

    Args:
        x: (1, T, D), this rank's tokens; for several convolutions at once, concatenated along D.
        cp_context: from `build_cp_context`, or FLA's.
        rows: None means the context's conv1d_kernel_size - 1.

    Returns:
        (N, rows, D) for the N sequences of this rank, in x's dtype.

    Raises:
        InputError: x is no tensor (1, T, D) with the context's tokens, or the number of rows is unknown.
        RankLost: not all ranks called within the time-out.
    """
    context = adopt(cp_context, OP)
    if rows is None and context.conv1d_kernel_size:
        rows = context.conv1d_kernel_size - 1
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
        raise InputError(OP, "rows", "at least 0, or left out for a context with a conv1d_kernel_size", repr(rows),
                         "Pass rows, or conv1d_kernel_size to build_cp_context.", "halo.rows")
    if not isinstance(x, Tensor):
        found = in_words(x)
        if context.crosses:
            exchange.object_to(context, f"error: x of {found}")
        raise InputTypeError(OP, "x", "a tensor", found, "Pass this rank's tokens, (1, T, D).", "halo.type")
    return torch.ops.kda.halo(x, rows, context.cu_seqlens, context.handle)[0]


def _check(context: CPContext, x: Tensor) -> None:
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != context.tokens:
        found = f"shape {list(x.shape)}"
        if context.crosses:
            exchange.object_to(context, f"error: x of {found}")
        raise InputError(OP, "x", f"[1, T={context.tokens}, D]", found, "Pass this rank's tokens.", "halo.shape")
    exchange.check_world(context, OP)


def _halo(x: Tensor, rows: int, cu_seqlens: Tensor, handle: Tensor) -> tuple[Tensor, Tensor]:
    context = context_of(handle)
    _check(context, x)
    if not context.crosses or not rows:
        return x.new_zeros(context.num_seqs, rows, x.shape[2]), exchange.no_mark(x.device)
    mark = exchange.agree(context, OP, f"halo of {rows} rows of D={x.shape[2]} {x.dtype}, forward", x.device)
    tails = x.new_zeros(context.num_parts, rows, x.shape[2])
    for part, tail in zip(context.parts, tails):
        n = min(rows, part.end - part.begin)
        tail[rows - n:] = x[0, part.end - n:part.end]
    places = _places(context, rows, x.device)
    rows_before = _select(exchange.gather(context, tails, OP), places.forward)
    return rows_before.view(context.num_seqs, rows, x.shape[2]), mark


def _halo_backward(d: Tensor, tokens: int, mark: Tensor, cu_seqlens: Tensor, handle: Tensor) -> Tensor:
    context, rows, D = context_of(handle), d.shape[1], d.shape[2]
    dx = d.new_zeros(1, tokens, D)
    if not context.crosses or not rows:
        return dx
    places = _places(context, rows, d.device)
    mine = _select(d, places.sent).view(context.num_parts, rows, D)
    exchange.agree(context, OP, f"halo of {rows} rows of D={D} {d.dtype}, backward", d.device, mark)
    gathered = exchange.gather(context, mine, OP)
    tails = sum(_select(gathered, row) for row in places.backward).view(context.num_parts, rows, D)  # type: ignore[union-attr]
    for part, tail in zip(context.parts, tails):
        n = min(rows, part.end - part.begin)
        dx[0, part.end - n:part.end] += tail[rows - n:]
    return dx


def _select(x: Tensor, places: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, places)


def _places(context: CPContext, rows: int, device: torch.device) -> Places:
    """A copy for each stream, which that stream's kernels come after.  A graph takes any: its capture waits for all."""
    copies, stream = context.places.setdefault((rows, device), {}), _stream(device)
    if stream not in copies and not (copies and capturing(device)):
        lists = places_of(context, rows)
        copies[stream] = Places(*(on(device, torch.tensor(x, dtype=torch.long, device="cpu")) for x in lists))
    return copies.get(stream) or next(iter(copies.values()))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def places_of(context: CPContext, rows: int) -> tuple[list[int], list[list[int]], list[int]]:
    edges, world = edges_of(context.lengths), context.world_size
    nowhere = (len(edges) - 1) * rows
    forward = [nowhere] * (context.num_seqs * rows)
    sent = [context.num_seqs * rows] * (context.num_parts * rows)
    backward: list[list[int]] = []
    for i, part in enumerate(context.parts):
        a, b = edges[part.number], edges[part.number + 1]
        for j in range(max(0, rows - part.past), rows):                        # token a - rows + j
            forward[part.first * rows + j] = _tail_place(edges, a - rows + j, rows, context.layout, world)
            sent[i * rows + j] = part.first * rows + j
        for token in range(b - rows, b):
            is_valid = token >= a
            backward.append(_readers(edges, part.number, token, rows, context.layout, world) if is_valid else [])
    most = max([1, *map(len, backward)])
    padded = [[*readers, *[nowhere] * (most - len(readers))] for readers in backward]
    return forward, [list(row) for row in zip(*padded)] or [[]], sent


def _tail_place(edges: Sequence[int], token: int, rows: int, layout: str, world: int) -> int:
    """The index of a token among the last rows of all parts."""
    number = next(i for i in range(len(edges) - 1) if edges[i] <= token < edges[i + 1])
    return holder(layout, number, world) * rows + token - edges[number + 1] + rows


def _readers(edges: Sequence[int], number: int, token: int, rows: int, layout: str, world: int) -> list[int]:
    """Its index among the tokens before all parts."""
    readers = []
    for i in range(number + 1, len(edges) - 1):
        if edges[i] - rows > token:
            break
        readers.append(holder(layout, i, world) * rows + token - edges[i] + rows)
    return readers


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, _, cu_seqlens, handle = inputs
    ctx.tokens = x.shape[1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], cu_seqlens, handle)


def _link(ctx: Any, d: Tensor, _: Any):
    return torch.ops.kda.halo_backward(d, ctx.tokens, *ctx.saved_tensors), None, None, None


def _register() -> None:
    of_context = "Tensor cu_seqlens, Tensor handle"
    operators = {
        f"halo(Tensor x, int rows, {of_context}) -> (Tensor, Tensor)": (
            _halo, lambda x, rows, cu, handle: (x.new_empty(cu.shape[0] - 1, rows, x.shape[2]),
                                                x.new_empty(1, dtype=torch.int64)),
            Links(_setup, _link, None),
        ),
        f"halo_backward(Tensor d, SymInt tokens, Tensor mark, {of_context}) -> Tensor": (
            _halo_backward, lambda d, tokens, mark, cu, handle: d.new_empty(1, tokens, d.shape[2]),
            Links.none(no_second("conv_halo", "torch.ops.kda.halo_backward")),
        ),
    }
    for schema, (real, fake, links) in operators.items():
        register(schema, "parallel.conv_halo", real, fake, links)  # type: ignore[arg-type]  # the union of two kinds


_register()
