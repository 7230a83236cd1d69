"""torch.ops.kda.parallel_forward and parallel_backward: chunk_kda on a rank, with its exchanges.

They have the arguments of `chunk_forward` and `chunk_backward`, always initial states, and a context's handle. The
forward also returns `carried`, (parts, HV, K, K + V), for the backward: beside the state that entered each part, M of
the part if one sequence spans it, because the backward's map of it is M^T. The backward's exchange gets the `mark` of
the forward's.

  forward   maps of the parts' last sequences -> all-gather -> states entering the first ones -> the ordinary forward
  backward  mirrored maps of the first ones   -> all-gather -> gradients after the last ones -> the ordinary backward

Where a rank has one piece of a sequence, the first halves of both come before the all-gather, and have its map
(`halves`).

With exchange="chain" states go from rank to rank instead, each through its map, and with "tree" maps are composed; with
"hops" there are none: a rank waits for the state that enters it, runs the ordinary forward, and sends its final state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kda.calls import autograd
from kda.calls.autograd import INPUTS, OPTIONS, no_second
from kda.checks.calls import Call, problem_of
from kda.errors import InputError, KdaError
from kda.model.bundles import Save, SegmentSummary
from kda.model.problem import Inputs, Options, Problem
from kda.model.transforms import Links, register
from kda.routing.dispatch import backend_asked

from . import exchange, halves, maps
from .context import CPContext, context_of
from .layout import RankPart, holder

Tensor = torch.Tensor

OP = "chunk_kda"


class Rank(NamedTuple):
    """A call on this rank."""

    context: CPContext
    call: Call
    problem: Problem
    requested: str                           # the backend's name in force

    @property
    def v_first(self) -> bool:
        return self.call.options.state_v_first

    @property
    def only_piece(self) -> RankPart | None:
        """The part of this rank if all its tokens are of one sequence that is on other ranks, too.  Then a call does
        what a map of it would do a second time."""
        (part, *others), p = self.context.parts, self.problem
        return part if not others and p.N == 1 and p.T and (part.before or part.after) else None

    def pieces(self, part: RankPart, first: bool, h0: Tensor | None = None) -> tuple[slice, Inputs]:
        """The tokens of a part's first or last sequence, and a separate call of them."""
        begin, end = (part.begin, part.first_end) if first else (part.last_begin, part.end)
        return slice(begin, end), maps.piece(self.call.inputs, begin, end, h0)

    def row(self, states: Tensor | None, n: int) -> Tensor | None:
        """State n, (1, HV, K, V) in the dtype of states."""
        if states is None:
            return None
        x = states[n:n + 1].to(self.wide)
        return (x.mT if self.v_first else x).contiguous()

    @property
    def wide(self) -> torch.dtype:
        return maps.wide_of(self.problem)

    def with_rows(self, states: Tensor, rows: dict[int, Tensor]) -> Tensor:
        """A copy of states with some replaced by (1, HV, K, V)."""
        states = states.to(self.wide, copy=True)
        for n, x in rows.items():
            states[n] = x[0].mT if self.v_first else x[0]
        return states


def check_tokens(op: str, context: CPContext, q: Tensor) -> None:
    """The rows of a call are those of the context."""
    if q.dim() == 4 and q.shape[1] != context.tokens:
        raise InputError(op, "q", f"a tensor with the T={context.tokens} tokens of rank {context.rank}",
                         f"T={q.shape[1]}", "Cut the row as the context does: context.tokens per rank.",
                         "cp_context.tokens")


def _rank(handle: Tensor, call: Call, direction: str) -> Rank:
    """The checked call; ranks agree on it, and a rank whose call is invalid tells the others."""
    context = context_of(handle)
    q = call.inputs.q
    try:
        exchange.check_world(context, OP)
        check_tokens(OP, context, q)
        problem = problem_of(call, direction)
    except KdaError as error:
        if context.crosses:
            exchange.object_to(context, f"error: {error}")
        raise
    return Rank(context, call, problem, backend_asked(call.options.backend))


def _forward(*arguments: Any):
    *args, word, _, handle = arguments
    call = autograd.call_of(args)  # type: ignore[arg-type]
    rank = _rank(handle, call, "forward")
    context = rank.context
    mark = _agree(rank, "forward", call.inputs.A_log, call.inputs.dt_bias)
    summaries: list[SegmentSummary | None] = [None] * context.num_parts
    if context.exchange == "hops":
        entering, out = _hop_forward(rank, Save(word))
    elif (part := rank.only_piece) and not part.before:                       # its final state depends on no other rank
        out = autograd.forward(_returning_states(call), Save(word))
        summaries = [SegmentSummary(_no_state(rank, rank.problem.K), rank.row(out.final_state, 0))]  # type: ignore[arg-type]
        entering = _entering(rank, summaries)
    else:
        begun = None
        if part and part.first_end == part.end:                                # no padding behind
            begun = halves.begin_forward(call, Save(word), of_map=bool(part.after))
        if begun:
            summaries = [begun.map]
        elif context.crosses:
            summaries = [_map_of(rank, part) for part in context.parts]
        entering = _entering(rank, summaries)
        call = _with_states(rank, entering)
        out = begun.finish(call) if begun else autograd.forward(call, Save(word))
    q, o = call.inputs.q, call.options
    empty = autograd.or_empty
    ht = out.final_state if o.output_final_state else None
    return out.o, empty(ht, q), empty(out.h, q), _carried(rank, summaries, entering), mark, list(out.saved or ())


def _agree(rank: Rank, direction: str, *values: Tensor | None) -> Tensor:
    """Agree on what determines how much is sent and what it means; returns the mark of the exchange."""
    p, context, device = rank.problem, rank.context, rank.call.inputs.q.device
    if not context.crosses:
        return exchange.no_mark(device)
    text = f"maps of HV={p.HV} K={p.K} V={p.V} in {rank.wide}, {direction}, for {_meaning(p)}"
    return exchange.agree(context, OP, text, device, *values)


def _meaning(p: Problem) -> str:
    """The options that a sequence has once, whatever rank computes it; outputs and layouts are each rank's own."""
    words = [f"H={p.H} {p.dtype}", f"{p.gate} gate", f"beta {p.beta}", f"scale={p.scale:g}"]
    flags = {f"lower_bound={p.lower_bound}": p.lower_bound is not None, "A_log": p.A_log, "dt_bias": p.dt_bias,
             "l2norm": p.qk_l2norm, "one gate per head": p.gate_per_head}
    return ", ".join(words + [word for word, given in flags.items() if given])


def _no_state(rank: Rank, columns: int | None = None) -> Tensor:
    p = rank.problem
    return rank.call.inputs.q.new_zeros(1, p.HV, p.K, columns or p.V, dtype=rank.wide)


def _with_states(rank: Rank, entering: dict[int, Tensor], **others: Any) -> Call:
    """The ordinary call, from the states that enter."""
    h0 = rank.with_rows(rank.call.inputs.initial_state, entering)
    return rank.call._replace(inputs=rank.call.inputs._replace(initial_state=h0), **others)


def _returning_states(call: Call) -> Call:
    return call._replace(options=call.options._replace(output_final_state=True))


def _map_of(rank: Rank, part: RankPart) -> SegmentSummary | None:
    """Return the map of the state that enters a part's last sequence, if that continues on another rank."""
    if not part.after:
        return None
    begun = part.last == part.first and part.before                            # on another rank
    h0 = None if begun else rank.row(rank.call.inputs.initial_state, part.last)
    _, x = rank.pieces(part, first=False, h0=h0)
    return maps.segment_map(rank.problem, x, rank.requested, transition=part.spanned)


def _carried(rank: Rank, summaries: Sequence[SegmentSummary | None], entering: dict[int, Tensor]) -> Tensor:
    """What the backward needs again, of each part."""
    K, parts = rank.problem.K, rank.context.parts
    carried = torch.cat([torch.cat([_no_state(rank, K), entering.get(part.first, _no_state(rank))], -1)
                         for part in parts])
    for row, part, m in zip(carried, parts, summaries, strict=True):
        if m is not None and part.spanned:
            row[..., :K] = m.M[0]
    return carried


def _entering(rank: Rank, mine: Sequence[SegmentSummary | None]) -> dict[int, Tensor]:
    """The states (1, HV, K, V) that enter this rank's parts, by the sequence that they enter."""
    context = rank.context
    if not context.crosses:
        return {}
    if context.exchange in ONE_BY_ONE:
        (part,), (summary,) = context.parts, mine
        came = ONE_BY_ONE[context.exchange](rank, part.before[::-1], part.after, summary, part.spanned)
        return {} if came is None else {part.first: came}
    gathered = _gathered(rank, mine)
    return {part.first: _folded(rank, gathered, part.before) for part in context.parts if part.before}


def _gathered(rank: Rank, mine: Sequence[SegmentSummary | None]) -> Tensor:
    """The maps of all ranks' parts, (parts, HV, K, K + V): M beside added."""
    p = rank.problem
    message = rank.call.inputs.q.new_zeros(len(mine), p.HV, p.K, p.K + p.V, dtype=rank.wide)
    for row, m in zip(message, mine):
        if m is not None:
            row[..., :p.K], row[..., p.K:] = m.M[0], m.added[0]
    return exchange.gather(rank.context, message, OP)


def _folded(rank: Rank, gathered: Tensor, numbers: tuple[int, ...]) -> Tensor:
    """The state that leaves the last of these parts."""
    K, world = rank.problem.K, rank.context.world_size
    rows = [gathered[holder(rank.context.layout, n, world)].unsqueeze(0) for n in numbers]
    first, *others = [SegmentSummary(row[..., :K], row[..., K:]) for row in rows]
    return maps.fold(others, first.added)


def _backward(*arguments: Any):
    *args, do, dht, carried, mark, saved, _, handle = arguments
    call = autograd.call_of(args, OP, do=do, dht=dht)  # type: ignore[arg-type]
    rank = _rank(handle, call, "backward")
    context = rank.context
    _agree(rank, "backward", mark)
    K = rank.problem.K
    entered = {part.first: row[None, ..., K:] for part, row in zip(context.parts, carried) if part.before}
    if context.exchange == "hops":
        grads = _hop_backward(rank, entered, saved)
    else:
        part, begun = rank.only_piece, None
        if part and (part.before or not saved):                                # others wait, or all is made again
            begun = halves.begin_backward(_with_states(rank, entered), saved)
        behind = _behind(rank, carried[..., :K].mT, begun.dh0 if begun else None)
        if behind:
            dht = rank.with_rows(torch.zeros_like(call.inputs.initial_state) if dht is None else dht, behind)
        call = _with_states(rank, entered, dht=dht)
        grads = begun.finish(call) if begun else autograd.backward(call, saved)
    for n in entered:
        grads.dh0[n] = 0                                                       # its state came from another rank
    return tuple(autograd.or_empty(x, call.inputs.q) for x in grads)


def _behind(rank: Rank, transposed: Tensor, dh0: Tensor | None) -> dict[int, Tensor]:
    """The gradients (1, HV, K, V) of the states that leave this rank's parts, by the sequence that they leave.

    `transposed` is M^T of the parts that one sequence spans, (parts, HV, K, K); dh0 is what the gradient of the state
    that enters would be if none came from other ranks, where the backward has begun.
    """
    context, call = rank.context, rank.call
    if not context.crosses:
        return {}
    mine: list[SegmentSummary | None] = []
    for part, M in zip(context.parts, transposed):
        if not part.before:
            mine.append(None)
            continue
        added = rank.row(dh0, part.first)
        if added is None:
            tokens, x = rank.pieces(part, first=True)
            do = halves.do_of(call)[:, tokens]
            added = maps.segment_map_bwd(rank.problem, x, do, rank.row(call.dht, part.first), rank.requested)
        mine.append(SegmentSummary(M[None], added, transposed=True))
    if context.exchange in ONE_BY_ONE:
        (part,), (summary,) = context.parts, mine
        came = ONE_BY_ONE[context.exchange](rank, part.after, part.before[::-1], summary, part.spanned)
        behind = {} if came is None else {part.last: came}
    else:
        gathered = _gathered(rank, mine)
        behind = {part.last: _folded(rank, gathered, part.after[::-1]) for part in context.parts if part.after}
    if call.dht is not None:
        behind = {n: x + rank.row(call.dht, n) for n, x in behind.items()}  # type: ignore[operator]
    return behind


# from rank to rank: sources and targets are the ranks before and after, or the reverse, nearest first


def _chained(rank: Rank, sources: Sequence[int], targets: Sequence[int], summary: SegmentSummary | None,
             through: bool) -> Tensor | None:
    """Receive from the nearest source, apply this rank's map, and send to the nearest target."""
    came = exchange.receive(rank.context, _no_state(rank), sources[0], OP) if sources else None
    if targets:
        exchange.send(rank.context, maps.fold([summary], came) if through else summary.added, targets[0], OP)  # type: ignore[arg-type, list-item, union-attr]
    return came


def _scanned(rank: Rank, sources: Sequence[int], targets: Sequence[int], summary: SegmentSummary | None,
             through: bool) -> Tensor | None:
    """The same in a tree: at distance d, a rank's map, which covers d ranks by then, is composed with that of the rank
    at distance d, unless its sequence begins nearer.  The last rank of a sequence needs no map, only the `added` of
    its predecessor's."""
    d, K, context = 1, rank.problem.K, rank.context
    while (through and d <= len(sources)) or d < len(targets):
        mine = torch.cat([summary.M, summary.added], -1)  # type: ignore[union-attr]
        target = targets[d - 1] if d < len(targets) else None
        source = sources[d - 1] if through and d <= len(sources) else None
        came = exchange.swap(context, mine, target, source, OP)
        if came is not None:
            summary = maps.compose(summary, SegmentSummary(came[..., :K], came[..., K:]))  # type: ignore[arg-type]
        d *= 2
    mine = _no_state(rank) if summary is None else summary.added
    return exchange.swap(context, mine, targets[0] if targets else None, sources[0] if sources else None, OP)


ONE_BY_ONE = {"chain": _chained, "tree": _scanned}


# hops


def _hop_forward(rank: Rank, save: Save):
    context, (part,) = rank.context, rank.context.parts
    entering = {}
    if part.before:
        entering = {part.first: exchange.receive(context, _no_state(rank), part.before[-1], OP)}
    call = _with_states(rank, entering)
    out = autograd.forward(_returning_states(call) if part.after else call, save)
    if part.after:
        exchange.send(context, rank.row(out.final_state, part.last), part.after[0], OP)  # type: ignore[arg-type]
    return entering, out


def _hop_backward(rank: Rank, entered: dict[int, Tensor], saved: list[Tensor]):
    context, (part,), dht = rank.context, rank.context.parts, rank.call.dht
    if part.after:
        behind = exchange.receive(context, _no_state(rank), part.after[0], OP)
        if dht is None:
            dht = torch.zeros_like(rank.call.inputs.initial_state)
        else:
            behind += rank.row(dht, part.last)  # type: ignore[arg-type]
        dht = rank.with_rows(dht, {part.last: behind})
    grads = autograd.backward(_with_states(rank, entered, dht=dht), saved)
    if part.before:
        exchange.send(context, rank.row(grads.dh0, part.first), part.before[-1], OP)  # type: ignore[arg-type]
    return grads


# registration


def _forward_fake(*arguments: Any):
    *args, word, parts, _ = arguments
    o, ht, h, saved = autograd.chunk_forward_fake(*args, word)
    c = autograd.call_of(args)  # type: ignore[arg-type]
    dtype = autograd.wide_dtype(o.dtype)
    carried, mark = o.new_empty(parts, c.HV, c.K, c.K + c.V, dtype=dtype), o.new_empty(1, dtype=torch.int64)
    return o, ht, h, carried, mark, saved


def _backward_fake(*arguments: Any):
    *args, do, dht, _, _, saved, _, _ = arguments
    return autograd.chunk_backward_fake(*args, do, dht, saved)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *args, _, parts, handle = inputs
    *_, carried, mark, saved = output
    tensors, options = args[: len(INPUTS)], Options(**dict(zip(OPTIONS, args[len(INPUTS):])))
    ctx.mark_non_differentiable(carried, mark, *saved)
    ctx.options, ctx.parts = autograd.for_backward(options), parts
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, handle, carried, mark, *saved)


def _link(ctx: Any, do: Tensor | None, dht: Tensor | None, *_: Any):
    held = ctx.saved_tensors                                                   # a checkpoint returns them only once
    tensors, (handle, carried, mark, *saved) = held[: len(INPUTS)], held[len(INPUTS):]
    options = [getattr(ctx.options, name) for name in OPTIONS]
    grads = torch.ops.kda.parallel_backward(
        *tensors, *options, do, autograd.or_none(dht), carried, mark, saved, ctx.parts, handle
    )
    wanted = [x if need else None for x, need in zip(grads, ctx.needs_input_grad)]
    return *wanted, *[None] * (len(ctx.needs_input_grad) - len(wanted))


def _register() -> None:
    chunk = f"{autograd.schema_of_tensors(INPUTS)}, {autograd.schema_of_options(OPTIONS)}"
    of_context = "int parts, Tensor handle"
    operators = {
        f"parallel_forward({chunk}, str save, {of_context}) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])":
            (_forward, _forward_fake, Links(_setup, _link, None)),
        f"parallel_backward({chunk}, Tensor? do, Tensor? dht, Tensor carried, Tensor mark, Tensor[] saved, "
        f"{of_context}) -> ({', '.join(['Tensor'] * 8)})":
            (_backward, _backward_fake, Links.none(no_second("chunk_kda", "torch.ops.kda.parallel_backward"))),
    }
    for schema, (real, fake, links) in operators.items():
        register(schema, OP, real, fake, links)


_register()


def run(inputs: Inputs, options: Options, context: CPContext, save: Save) -> tuple:
    """o, the final states or None, h or None."""
    if not torch.compiler.is_compiling() and autograd.transforms.active():
        raise KdaError(f"{OP}: torch.func and forward-mode AD do not work with a cp_context; found one active. "
                       "Use backward().")
    if save is not Save.ALL:
        options = options._replace(disable_recompute=False)
    settings = [getattr(options, name) for name in OPTIONS]
    o, ht, h, *_ = torch.ops.kda.parallel_forward(
        *inputs[: len(INPUTS)], *settings, save.value, context.num_parts, context.handle
    )
    return o, ht if options.output_final_state else None, h if options.return_intermediate_states else None


def prepared(inputs: Inputs, options: Options) -> Inputs:
    """Initial states, created if absent, in the layout and dtype of maps."""
    q, v, h0 = inputs.q, inputs.v, inputs.initial_state
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, v)):
        return inputs                                                          # the operator reports the error
    dtype = autograd.wide_dtype(q.dtype)
    if h0 is None:
        N, HV, K, V = inputs.cu_seqlens.shape[0] - 1, v.shape[2], q.shape[3], v.shape[3]
        h0 = q.new_zeros((N, HV, V, K) if options.state_v_first else (N, HV, K, V), dtype=dtype)
    elif isinstance(h0, Tensor) and h0.dtype == q.dtype:
        h0 = h0.to(dtype)
    return inputs._replace(initial_state=h0)
