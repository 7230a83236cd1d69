"""The reference's `forward`, `backward` and `recurrent`, which every backend has: tensors in, tensors out.

The chunked algorithm walks over slabs of chunks, so it needs the memory of one slab, which fits a CPU's cache.
The backward walks forward once for the states at the slabs' edges and then backward, each slab recomputed from its
edge, unless the forward saved it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kda.model.bundles import Grads, Outputs, Products, Save, Saved, SegmentSummary, saved_outlines
from kda.model.gates import wide_dtype
from kda.model.offsets import offsets_after_waiting
from kda.model.problem import Inputs, Problem
from kda.model.stages import BACKWARD, FORWARD, find

from .chunked import Setup, activated, run, run_stage
from .decode import decode_step as decode_step
from .ragged import Ragged, Slab, ragged
from .recurrent import steps

Tensor = torch.Tensor

SAVED_ROWS = Saved._fields[:-2]              # those with a row per token; h and gc_last have one per chunk
SLAB_ELEMENTS = 1 << 18                      # elements of one tensor of a slab: 1 MiB of float32


def rounded_to(p: Problem) -> dict[str, str]:
    return {}                                                                  # never to less than float32


def _table(p: Problem, x: Inputs, C: int) -> Ragged:
    return ragged((p.B, p.T), offsets_after_waiting(x), C, x.q.device)


def _states(p: Problem, x: Tensor | None, like: Tensor) -> Tensor:
    """Return states (N, HV, K, V) in the compute dtype, a copy; zeros for None."""
    if x is None:
        return like.new_zeros(p.N, p.HV, p.K, p.V, dtype=wide_dtype(like.dtype))
    return (x.mT if p.state_v_first else x).to(wide_dtype(like.dtype), copy=True).contiguous()


def _states_out(p: Problem, x: Tensor) -> Tensor:
    """Return states in the caller's layout, not a view."""
    return x.mT.clone(memory_format=torch.contiguous_format) if p.state_v_first else x


def _setup(p: Problem, table: Ragged) -> Setup:
    return Setup(table, p.scale, p.HV // p.H, p.gate, p.lower_bound, p.beta, p.qk_l2norm)


def _parameters(p: Problem, x: Inputs, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Return A_log and dt_bias, shaped to broadcast against (.., HV, C, p.gate_width)."""
    return {
        "A_log": None if x.A_log is None else x.A_log.to(dtype).reshape(p.HV, 1, 1),
        "dt_bias": None if x.dt_bias is None else x.dt_bias.to(dtype).reshape(p.HV, 1, p.gate_width),
    }


def _with_channels(p: Problem, g: Tensor) -> Tensor:
    """Return g (.., HV, K), or (.., HV, 1) of one gate per head."""
    return g.unsqueeze(-1) if p.gate_per_head else g


class _Walk:
    """One call's tensors, slab by slab."""

    def __init__(self, p: Problem, x: Inputs, saved: Saved | None = None):
        self.p, self.saved, self.dtype = p, saved, wide_dtype(x.q.dtype)
        self.table = _table(p, x, p.C)
        self.rows = {name: getattr(x, name).flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
        self.rows["beta"] = self.rows["beta"].unsqueeze(-1)
        self.rows["g"] = _with_channels(p, self.rows["g"])
        self.parameters = _parameters(p, x, self.dtype)
        chunks = max(1, SLAB_ELEMENTS // (p.C * p.HV * max(p.C, p.K, p.V)))
        if p.batch_invariant:                                                  # one shape, wherever a call ends
            chunks = 1
        self.slabs: list[Slab] = list(self.table.slabs(chunks, apart=p.batch_invariant))

    def chunks(self, slab: Slab, **rows: Tensor) -> dict[str, Tensor]:
        """Return rows of tokens as the slab's chunks."""
        return {name: slab.table.chunk(x[slab.tokens].to(self.dtype)) for name, x in rows.items()}

    def inputs(self, slab: Slab, h0: Tensor) -> dict[str, Tensor | None]:
        env = self.chunks(slab, **self.rows) | self.parameters | {"h0": h0}
        if self.saved is not None:
            env |= self.chunks(slab, **{name: getattr(self.saved, name) for name in SAVED_ROWS})
            env |= {"h": self.saved.h[slab.chunks].to(self.dtype)}
            env |= {"gc_last": self.saved.gc_last[slab.chunks].unsqueeze(-2)}
        return env


def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING) -> Outputs:
    return _forward(p, x, _Walk(p, x), _states(p, x.initial_state, x.q), save)


def _from_slots(p: Problem, pool: Tensor, slots: Tensor, q: Tensor) -> Tensor:
    """Return the states of these slots; zero for a slot of -1, as all are where the pool is empty."""
    states = pool[slots.clamp(min=0)] if pool.shape[0] else pool.new_zeros(slots.shape[0], *pool.shape[1:])
    S = _states(p, states, q)
    S[slots < 0] = 0
    return S


def prefill(p: Problem, x: Inputs) -> Tensor:
    """Run from slots of a pool and back; checkpoints are copies of states that enter chunks, or of final ones."""
    walk, pool = _Walk(p, x), x.initial_state
    start = x.ssm_state_indices if x.initial_state_indices is None else x.initial_state_indices
    S = _from_slots(p, pool, start, x.q)
    chunk_slots = torch.full((walk.table.NC,), -1, device="cpu")
    at_the_end = torch.full((p.N, 0), -1, device="cpu")
    if p.checkpoints:
        chunk_slots, at_the_end = _checkpoints(walk.table, x.checkpoint_offsets, x.checkpoint_indices)
    entering = chunk_slots.to(pool.device)
    out = _forward(p, x, walk, S, Save.NOTHING, lambda chunks, h: _store(p, pool, entering[chunks], h))
    _store(p, pool, x.ssm_state_indices, S)
    for slots in at_the_end.to(pool.device).unbind(1):
        _store(p, pool, slots, S)
    return out.o


def _checkpoints(table: Ragged, offsets: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slot of the state that enters each chunk, and slots of final states (N, E); -1: none."""
    chunk_slots, at_the_end = (torch.full(shape, -1, device="cpu") for shape in ((table.NC,), slots.shape))
    for n, (tokens, to) in enumerate(zip(offsets.tolist(), slots.tolist())):
        for e, (offset, slot) in enumerate(zip(tokens, to)):
            if offset == table.lengths[n]:
                at_the_end[n, e] = slot
            elif slot >= 0 and 0 <= offset < table.lengths[n] and offset % table.C == 0:
                chunk_slots[table.first[n] + offset // table.C] = slot
    return chunk_slots, at_the_end


def _forward(
    p: Problem, x: Inputs, walk: _Walk, S: Tensor, save: Save, entering: Callable[[slice, Tensor], None] | None = None
) -> Outputs:
    """Return the outputs.  S, the states that enter the first chunks, becomes the final states; `entering` gets
    those of all chunks."""
    o, h = torch.zeros(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=x.q.device), None
    rows = o.flatten(0, 1)
    if p.intermediate_states:
        chunks = walk.table.NC if p.packed else -(-p.T // p.C)
        h = S.new_empty(p.B, chunks, p.HV, p.K, p.V, dtype=x.q.dtype)
        states = h.flatten(0, 1)
    kind, saved = save.kind, {}
    if kind is not None:
        outlines = saved_outlines(p, p.C, p.packed, x.q.dtype, walk.dtype)
        saved = {n: S.new_zeros(outlines[n][0], dtype=outlines[n][1]) for n in kind._fields}
    want = ("o", "ht", "h", *saved)
    for slab in walk.slabs:
        env = run(FORWARD, _setup(p, slab.table), walk.inputs(slab, S[slab.sequences]), want)
        S[slab.sequences] = env["ht"]  # type: ignore[assignment]
        if entering is not None:
            entering(slab.chunks, env["h"])  # type: ignore[arg-type]
        rows[slab.tokens] = slab.table.unchunk(env["o"]).to(o.dtype)  # type: ignore[arg-type]
        if h is not None:
            states[slab.chunks] = env["h"].to(h.dtype)  # type: ignore[union-attr]
        for name, tensor in saved.items():
            if name in SAVED_ROWS:
                tensor[slab.tokens] = slab.table.unchunk(env[name]).to(tensor.dtype)  # type: ignore[arg-type]
            else:
                tensor[slab.chunks] = env[name].view(-1, *tensor.shape[1:]).to(tensor.dtype)  # type: ignore[union-attr]
    ht, h = _states_out(p, S) if p.final_state else None, None if h is None else _states_out(p, h)
    return Outputs(o, ht, h, kind(**saved) if kind else None)


def _edges(p: Problem, walk: _Walk, S: Tensor) -> Iterator[Tensor]:
    """Yield the states that enter each slab; S, those that enter the first, becomes the final states."""
    for slab in walk.slabs:
        h0 = S[slab.sequences]
        yield h0
        S[slab.sequences] = run(FORWARD, _setup(p, slab.table), walk.inputs(slab, h0), ("ht",))["ht"]  # type: ignore[assignment]


GRADIENTS = Grads._fields[:5]                # those with a row per token


def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | None = None) -> Grads:
    saved = saved if isinstance(saved, Saved) else None                       # products alone would save nothing
    walk = _Walk(p, x, saved)
    S, dS = _states(p, x.initial_state, x.q), _states(p, dht, x.q)
    edges = [S[slab.sequences] for slab in walk.slabs] if saved is not None else list(_edges(p, walk, S))
    contiguous = torch.contiguous_format
    grads = [torch.zeros_like(t, memory_format=contiguous) for t in (x.q, x.k, x.v, x.g, x.beta)]
    out = {n: t.view(rows.shape) for n, t, rows in zip(GRADIENTS, grads, walk.rows.values())}
    given = {name: t for name, t in (("A_log", x.A_log), ("dt_bias", x.dt_bias)) if t is not None}
    sums = {name: torch.zeros_like(t, dtype=walk.dtype, memory_format=contiguous) for name, t in given.items()}
    do = do.flatten(0, 1)
    for slab, h0 in zip(reversed(walk.slabs), reversed(edges)):
        env = walk.inputs(slab, h0) | walk.chunks(slab, do=do) | {"dht": dS[slab.sequences]}
        env = run(FORWARD + BACKWARD, _setup(p, slab.table), env, (*GRADIENTS, "dA_log", "ddt_bias", "dh0"))
        dS[slab.sequences] = env["dh0"]  # type: ignore[assignment]
        for name in GRADIENTS:
            out[name][slab.tokens] = slab.table.unchunk(env[name]).to(out[name].dtype)
        for name in sums:
            sums[name] += env["d" + name].view(sums[name].shape)  # type: ignore[union-attr]
    dA_log, ddt_bias = (sums[n].to(given[n].dtype) if n in given else None for n in ("A_log", "dt_bias"))
    dh0 = None if x.initial_state is None else _states_out(p, dS).to(x.initial_state.dtype)
    dq, dk, dv, dg, dbeta = grads
    return Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)


def segment_map(p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
    walk, zero = _Walk(p, x), x.q.new_zeros
    added = _states(p, x.initial_state, x.q)
    M = torch.eye(p.K, dtype=walk.dtype, device=added.device).repeat(1, p.HV, 1, 1)
    for slab in walk.slabs:
        setup, env = _setup(p, slab.table), walk.inputs(slab, added)
        env = run(FORWARD, setup, env, ("w", "u", "kg", "gc_last"))
        added = run_stage(find("fwd/state"), setup, env | {"h0": added})["ht"]  # type: ignore[assignment]
        if transition:
            nothing = zero(*env["u"].shape[:-1], p.K, dtype=walk.dtype)  # type: ignore[union-attr]
            M = run_stage(find("fwd/state"), setup, env | {"u": nothing, "h0": M})["ht"]  # type: ignore[assignment]
    return SegmentSummary(M, added)


def segment_map_bwd(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
    return _walked_back(p, x, do, dht, None)


def begin_forward(
    p: Problem, x: Inputs, save: Save, of_map: bool
) -> tuple[SegmentSummary | None, Save] | None:
    """Return the map alone, if it is wanted.  On a CPU, operands that are made earlier save no time."""
    return segment_map(p, x._replace(initial_state=None), True) if of_map else None, save


def finish_forward(p: Problem, x: Inputs, begun: Save) -> Outputs:
    return forward(p, x, begun)


def begin_backward(
    p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | None
) -> tuple[Tensor, Saved | Products | None]:
    dh0 = _walked_back(p, x, do, dht, saved if isinstance(saved, Saved) else None)
    return _states_out(p, dh0), saved


def finish_backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, begun: Saved | Products | None) -> Grads:
    return backward(p, x, do, dht, begun)


def _walked_back(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | None) -> Tensor:
    """Return the gradients of the states that enter, and no others."""
    walk, dS, do = _Walk(p, x, saved), _states(p, dht, x.q), do.flatten(0, 1)
    for slab in reversed(walk.slabs):
        setup, dh = _setup(p, slab.table), dS[slab.sequences]
        env = walk.inputs(slab, dh) | walk.chunks(slab, do=do)
        env = run(FORWARD + BACKWARD, setup, env, ("w", "qg", "kg", "gc_last", "dv_local"))
        dS[slab.sequences] = run_stage(find("bwd/state"), setup, env | {"dht": dh})["dh0"]  # type: ignore[assignment]
    return dS


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Run a stage of kda.model.stages alone, or a run of them, on tensors in chunks (see chunked.py); `offsets` is
    cu_seqlens."""
    stage = find(name)
    table = ragged((p.B, p.T), offsets, p.C, next(x.device for x in tensors.values() if x is not None))
    env = run(stage.members, _setup(p, table), {n: tensors[n] for n in stage.reads}, stage.writes)
    return {n: env[n] for n in stage.writes}


def recurrent(p: Problem, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Return o and the final states; with p.inplace they go into x.initial_state instead, and None is returned for
    them.

    A sequence whose first slot is negative is padding: its o is zero and no state of it is read or written.
    """
    slots, first = x.ssm_state_indices, _first_slots(p, x)
    whole = _table(p, x, 1)
    starts, lengths = whole.starts, whole.lengths
    if first is None:
        S = _states(p, x.initial_state, x.q)
    else:
        S = _from_slots(p, x.initial_state, first, x.q)
        lengths = [0 if slot < 0 else n for n, slot in zip(lengths, first.tolist())]
    o, tokens = torch.zeros(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=x.q.device), _tokens(p, x)
    o_rows = o.flatten(0, 1)
    groups = [slice(n, n + 1) for n in range(p.N)] if p.batch_invariant else [slice(0, p.N)]
    for group in groups:                                                      # sequences that are walked together
        table = Ragged(starts[group], lengths[group], p.B * p.T, 1, x.q.device)
        states = S[group]
        for i, (sequences, rows, o_i, s) in enumerate(steps(*_rows(p, x, tokens, table), states, p.scale, table)):  # type: ignore[arg-type, call-arg]
            o_rows[table.rows[rows]] = o_i.squeeze(-2).to(o.dtype)
            if p.slots_per_token and p.inplace:
                _store(p, x.initial_state, slots[group][sequences, i], s)
            states[sequences] = s
    if not p.inplace:
        return o, _states_out(p, S) if p.final_state else None
    if first is None:
        x.initial_state.copy_(S.mT if p.state_v_first else S)
    elif not p.slots_per_token:
        _store(p, x.initial_state, slots, S)
    return o, None


def _tokens(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """Return q, k, v, g, beta as (tokens, heads, D) in the compute dtype."""
    beta = x.beta if p.beta_per_value else x.beta.unsqueeze(-1)
    rows = x.q, x.k, x.v, _with_channels(p, x.g), beta
    return tuple(t.flatten(0, 1).to(wide_dtype(x.q.dtype)) for t in rows)


def _rows(p: Problem, x: Inputs, tokens: tuple[Tensor, ...], table: Ragged) -> tuple[Tensor, ...]:
    """Return q, k, v, decay, b of the table's tokens, (rows, HV, 1, D), after l2norm, gate and beta's sigmoid."""
    q, k, v, g, beta = map(table.chunk, tokens)
    q, k, decay, b = activated(p, q, k, g, beta, *_parameters(p, x, g.dtype).values())
    groups = p.HV // p.H
    return q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1), v, decay, b


def _first_slots(p: Problem, x: Inputs) -> Tensor | None:
    """Return (N,): the slot that each sequence starts from."""
    slots = x.ssm_state_indices
    if slots is None or not p.slots_per_token:
        return slots
    if x.num_accepted_tokens is None:
        return slots[:, 0]
    return slots.gather(1, x.num_accepted_tokens.long().unsqueeze(1) - 1).squeeze(1)


def _store(p: Problem, pool: Tensor, slots: Tensor, S: Tensor) -> None:
    """Writes states into their slots, without padding."""
    real = slots >= 0
    S = S[real].to(pool.dtype)
    pool[slots[real]] = S.mT if p.state_v_first else S
