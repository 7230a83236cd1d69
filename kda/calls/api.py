"""The public functions.

KDA keeps one matrix-valued state S (K, V) for each value head and updates it with every token:

    S <- Diag(e^g_t) S                                  each key channel forgets at its own rate, g <= 0
    S <- S + beta_t k_t (v_t - k_t^T S)^T               what k_t recalls moves towards v_t
    o_t = scale S^T q_t

`chunk_kda` computes it in chunks, for training and prefill; `fused_recurrent_kda` token by token, for decoding.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

import torch

from kda.checks.calls import (
    CALLER,
    KIND,
    REQUIRED,
    TRAINING_OUT,
    TRAINING_POOL,
    VALUES,
    WRITTEN_STATE,
    Call,
    check,
    is_training,
    number,
    problem_of,
    problem_of_outlines,
)
from kda.checks.gate import GATE, GateCall
from kda.checks.keywords import names_of, refuse_unknown
from kda.checks.memo import Outline
from kda.errors import InputError
from kda.model.bundles import Grads, Kept, MadeWith, OpaqueSaved, Outputs, Save, Saved
from kda.model.host import stand_in
from kda.model.offsets import host_offsets
from kda.model.problem import Inputs, Options, Problem
from kda.routing.dispatch import backend_asked, capability, choose, route, weigh_route

from . import autograd
from .arguments import (
    NO_EXTRAS,
    Extras,
    by_name,
    is_sharded,
    operate,
    prepare,
    saves_states,
    scale_of,
    without_mesh,
)
from .known import bind, find, is_unseen, key_of, remember

Tensor = torch.Tensor


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool | str = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    ssm_state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, differentiable; a drop-in replacement for `fla.ops.kda.chunk_kda`.

    Args:
        q, k: (B, T, H, K), K <= 256.
        v: (B, T, HV, V), HV a multiple of H: value head i reads q/k head i // (HV // H).
        g: (B, T, HV, K), natural-log decays <= 0 (not checked; a chunk may grow by e^8), or logits with
            `use_gate_in_kernel`. (B, T, HV): one for all channels of a head, as in Gated DeltaNet.
        beta: (B, T, HV), step sizes, or logits with `use_beta_sigmoid_in_kernel`.
        scale: of q; None means `K ** -0.5`.
        initial_state: (N, HV, K, V), float32 or the dtype of q; a pool with `ssm_state_indices`.
        output_final_state: also return the states after the last token, float32 (float64 for float64 inputs).
        use_qk_l2norm_in_kernel: first normalise q and k: x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: with x = g + dt_bias, the decay is `-exp(A_log) softplus(x)`. A `lower_bound`
            makes it `lower_bound * sigmoid(exp(A_log) x)`; A_log may then be left out.
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta), twice that with `allow_neg_eigval`.
        safe_gate: accepted, not needed: every gate is fast and safe.
        lower_bound: of the gate, negative; with a precomputed g, the caller's promise that g >= lower_bound.
        disable_recompute: keep the forward's intermediates for the backward: faster, more memory. They are kept in the
            dtype of q, so in 16 bits all gradients carry that rounding. "states" keeps less than half as much, where
            `explain` says so: what costs a walk over the sequence.
        return_intermediate_states: return h (B, chunks, HV, K, V), the states entering the chunks, as a third value.
        state_v_first: all states are (V, K).
        cu_seqlens: (N + 1,) int32 or int64 offsets of sequences packed in one row (B = 1), on the CPU or the GPU.
            Tokens past the last offset belong to no sequence: outputs and gradients are zero there.
        cu_seqlens_cpu: a copy on the CPU, so that no call waits for the GPU to learn the lengths.
        cp_context: from `kda.parallel.build_cp_context` or FLA: the tensors are this rank's part of a row of packed
            sequences that is distributed over several ranks. Its offsets replace `cu_seqlens`, N counts the rank's own
            sequences, and all ranks make the call together. A sequence that began on an earlier rank gets its state
            from there: its row of `initial_state` is not read and has a gradient of zero.
        use_graph, max_num_seqs: accepted without effect. No launch depends on offsets on the GPU, so a CUDA graph may
            be replayed with other offsets, unless it returns intermediate states. `max_num_seqs` must be at least N.
        A_log: HV elements.
        dt_bias: `HV * K` elements, or HV if g has one gate per head.
        chunk_size: 32 or 64.
        backend: a backend's name; None means that of `use_backend`, else KDA_BACKEND, else the fastest that accepts the
            call.
        batch_invariant: a sequence's results have the same bits alone and packed with others, and however it is cut
            into calls at multiples of `chunk_size`, if its state is kept in float32 in between.
        transpose_state_layout: deprecated name of `state_v_first`.
        ssm_state_indices: (N,), for inference: `initial_state` is a pool (slots, HV, K, V) of any float dtype. Sequence
            n starts from slot [n] and its final state is written back there; -1 starts from zero and drops it.
        initial_state_indices: (N,), with a pool: start from these slots instead; -1 starts from zero.
        checkpoint_offsets: (N, E), with a pool: the state of sequence n after its first [n, e] tokens, a multiple of
            `chunk_size`, is written to slot `checkpoint_indices[n, e]`, which may be -1 for none. The
            entries of a sequence that are stored name different numbers of tokens.
        checkpoint_indices: (N, E), slots that no other state of the call is written to.

    Returns:
        o (B, T, HV, V) in the dtype of q and the final states, which are `initial_state` itself if that is a pool, or
        None; with `return_intermediate_states` also h.

    Raises:
        InputError: an argument is invalid for every backend.
        NoBackendError: no backend accepts the call, or the named one does not.

    Example:
        >>> q, k = torch.randn(2, 1, 100, 2, 16).unbind()                      # B=1, T=100, H=2, K=16
        >>> v, g = torch.randn(1, 100, 4, 16), -torch.rand(1, 100, 4, 16)      # HV=4: two value heads per head
        >>> beta = torch.rand(1, 100, 4)
        >>> o, state = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 16]), torch.Size([1, 4, 16, 16]))
    """
    context = key = None
    if cp_context is ssm_state_indices is transpose_state_layout is None and not unknown:
        tensors = q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu
        key = key_of(
            tensors, (scale, lower_bound, chunk_size, backend, disable_recompute, max_num_seqs, initial_state_indices,
                      checkpoint_offsets, checkpoint_indices),
            (output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
             allow_neg_eigval, safe_gate, return_intermediate_states, state_v_first, use_graph, batch_invariant),
        )
        if key is not None and (known := find(key)) is not None:
            if cu_seqlens is not None:                                         # its numbers may be others
                check(Call("chunk_kda", Inputs(*tensors), known.options), VALUES)
            return known(tensors)  # type: ignore[return-value]
    elif cp_context is not None:
        context = parallel().adopt(cp_context)
        cu_seqlens, cu_seqlens_cpu = context.cu_seqlens, context.cu_seqlens_cpu
    if unknown:
        refuse_keywords("chunk_kda", unknown)
    inputs = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, ssm_state_indices,
        initial_state_indices=initial_state_indices, checkpoint_offsets=checkpoint_offsets,
        checkpoint_indices=checkpoint_indices,
    )
    options = Options(
        scale=scale_of(scale, q), lower_bound=lower_bound, chunk_size=chunk_size, backend=backend,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first,
        inplace_final_state=ssm_state_indices is not None, batch_invariant=batch_invariant,
    )
    extras = Extras(use_graph=use_graph, max_num_seqs=max_num_seqs, transpose_state_layout=transpose_state_layout)
    inputs, options = prepare("chunk_kda", inputs, options, extras)
    if ssm_state_indices is not None:
        return _prefill(inputs, options, context), initial_state  # type: ignore[return-value]
    if key is not None and (bound := bind(inputs, options)) is not None:
        out = operate(bound, Call("chunk_kda", inputs, options), inputs[: len(autograd.INPUTS)])
        remember(key, bound)
        return out
    if is_sharded(inputs):
        each_rank = functools.partial(_chunk, options=options, context=context)
        out = parallel().mesh.run("chunk_kda", inputs, each_rank, context)
    else:
        out = _chunk(inputs, options, context)
    return out if return_intermediate_states else out[:2]


def _prefill(inputs: Inputs, options: Options, context: Any = None) -> Tensor:
    """o of a call with a pool of states, which it writes."""
    if context is not None or is_sharded(inputs):
        given = "a cp_context" if context is not None else "a DTensor"
        raise InputError("chunk_kda", "ssm_state_indices", "used on one device", given,
                         "Pass x.to_local() of each tensor, without a cp_context.", "cp_context.pool")
    call, training = Call("chunk_kda", inputs, options), is_training(inputs)
    if training and not torch.compiler.is_compiling():
        operate(check, call, call, (TRAINING_POOL,))
    if is_unseen(inputs) and not training:
        return operate(autograd.prefill, call, call)
    tensors = [getattr(inputs, name) for name in autograd.POOL_INPUTS]
    settings = [getattr(options, name) for name in autograd.POOL_OPTIONS]
    return operate(autograd.call, call, "chunk_forward_", *tensors, *settings)[0]


def _chunk(inputs: Inputs, options: Options, context: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, the final states and the states that enter the chunks."""
    training = is_training(inputs)
    if context is not None:
        return _on_ranks(inputs, options, context, training)
    out = _forward(inputs, options, _saved_by(inputs, options) if training else Save.NOTHING, training)
    return out.o, out.final_state, out.h


_CHUNK_SIGNATURE = inspect.signature(chunk_kda)
_KEYWORDS = names_of(chunk_kda)
OF_OTHERS = {                                # keywords of other packages, and of FLA until 2025
    "return_final_state": "It is called output_final_state.",
    "chunk_indices": "Leave it out: kda finds the chunks of sequences by itself.",
    "head_first": "Leave it out: tensors are (B, T, H, D); use x.transpose(1, 2) if heads come first.",
}
_OPTIONAL = frozenset(_KEYWORDS[len(REQUIRED):])


def chunk_kda_fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *args: Any, **keywords: Any) -> Outputs:
    """The forward of `chunk_kda`, with the same arguments, without autograd: Outputs(o, final_state, h, saved).

    With `disable_recompute=True`, `saved` holds the intermediates for `chunk_kda_bwd`, and the options that they were
    made with; with "states" it does if the backend keeps those alone; otherwise it is None.

    Raises:
        InputError, NoBackendError: as `chunk_kda`.

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 70, 2, 16).unbind()
        >>> out = chunk_kda_fwd(q, k, v, -g.abs(), torch.rand(1, 70, 2), output_final_state=True)
        >>> out.o.shape, out.final_state.shape, out.saved
        (torch.Size([1, 70, 2, 16]), torch.Size([1, 2, 16, 16]), None)
    """
    inputs, options = _bind("chunk_kda_fwd", q, k, v, g, beta, *args, **keywords)
    try:
        if inputs.ssm_state_indices is not None:
            return Outputs(_prefill(inputs, options), inputs.initial_state, None, None)
        with autograd.without_autograd() if is_training(inputs) else autograd.AS_IT_IS:
            save = _saved_by(inputs, options) if options.disable_recompute else Save.NOTHING
            out = _forward(inputs, options, Save.NOTHING if save is Save.PRODUCTS else save)
    except InputError as error:
        raise error.as_of("chunk_kda_fwd") from None
    if not isinstance(out.saved, Saved | OpaqueSaved):
        return out
    return out._replace(saved=Kept(out.saved, _made_with(inputs, options)))


def chunk_kda_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor | None,
    dht: Tensor | None = None,
    saved: Kept | None = None,
    **keywords: Any,
) -> Grads:
    """All gradients of `chunk_kda` without autograd: Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0).

    Args:
        q, k, v, g, beta: as in the forward.
        do: gradient of o; None means zero.
        dht: gradient of the final states, in their layout; None means zero.
        saved: `Outputs.saved` of the same call of `chunk_kda_fwd`; without it the forward is recomputed.
        keywords: those of `chunk_kda`, as in the forward.

    Returns:
        For each input, a gradient of its shape and dtype; None for inputs left out.

    Raises:
        InputError: as `chunk_kda`, and for a `saved` that a call with other options, shapes or dtypes left.
        NoBackendError: as `chunk_kda`.

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 70, 2, 16).unbind()
        >>> inputs = q, k, v, -g.abs(), torch.rand(1, 70, 2)
        >>> out = chunk_kda_fwd(*inputs, disable_recompute=True)
        >>> grads = chunk_kda_bwd(*inputs, do=torch.ones_like(out.o), saved=out.saved)
        >>> grads.dq.shape, grads.dbeta.shape, grads.dA_log
        (torch.Size([1, 70, 2, 16]), torch.Size([1, 70, 2]), None)
    """
    inputs, options = _bind("chunk_kda_bwd", q, k, v, g, beta, **keywords)
    for name, x in (("do", do), ("dht", dht)):
        if is_sharded((x,)):
            raise without_mesh("chunk_kda_bwd", name)
    options = options._replace(disable_recompute=isinstance(saved, Kept) and isinstance(saved.tensors, Saved))
    call = Call("chunk_kda_bwd", inputs, options, do=do, dht=dht)
    if saved is not None:
        _check_saved(call, saved)
    if inputs.ssm_state_indices is not None:                                   # the operator does not see it
        check(call, (*CALLER, *KIND))
    settings = [getattr(options, name) for name in autograd.OPTIONS]
    tensors = inputs[: len(autograd.INPUTS)]
    tensors_saved = saved.tensors if saved else ()
    with autograd.without_autograd():
        grads = operate(autograd.call, call, "chunk_backward", *tensors, *settings, do, dht, *tensors_saved)
    given = (q, k, v, *inputs[3:])                                             # before autocast
    results: list[Any] = [None if x is None else grad.to(x.dtype) for x, grad in zip(given, grads)]
    return Grads(*results)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token, for inference; replaces `fla.ops.kda.fused_recurrent_kda`.

    Args:
        q, k: (B, T, H, K); K up to 1,024 on a GPU. Arguments that are not listed here are those of `chunk_kda`.
        initial_state: of any float dtype.
        beta: also (B, T, HV, V), a step size per value channel.
        ssm_state_indices: `initial_state` is a pool (slots, HV, K, V). (N,): sequence n starts from slot [n] and its
            last state is stored there. (N, S): it starts from slot [n, 0] and the state after its token t is stored in
            slot [n, t].
            A slot of -1 is padding: a sequence that starts there is skipped and its outputs are zero; a state whose
            slot is -1 is dropped.
        num_accepted_tokens: (N,), with (N, S) slots: start from slot [n, num_accepted_tokens[n] - 1] instead.
        inplace_final_state: write the final states into `initial_state`; None means True with a pool, else False.
            False with a pool does not write the pool; with `output_final_state` the last states are returned, zero for
            skipped sequences.
        out: o is written there; only without gradients.

    Returns:
        o (B, T, HV, V) and the final states: `initial_state` itself if written in place, else float32 ones if
        `output_final_state`, else None.

    Raises:
        InputError, NoBackendError: as `chunk_kda`. There is no backward: requesting a gradient raises an error.

    Example:
        >>> q, k, v, g = torch.randn(4, 3, 1, 2, 16).unbind()                  # one token per sequence, three sequences
        >>> pool = torch.zeros(8, 2, 16, 16)                                   # eight states
        >>> slots = torch.tensor([5, 2, -1], dtype=torch.int32)                # the last sequence is padding
        >>> o, _ = fused_recurrent_kda(
        ...     q, k, v, -g.abs(), torch.rand(3, 1, 2), initial_state=pool, ssm_state_indices=slots
        ... )
        >>> o.shape, (o[2] == 0).all().item(), pool[5].any().item(), pool[0].any().item()
        (torch.Size([3, 1, 2, 16]), True, True, False)
    """
    if unknown:
        refuse_keywords("fused_recurrent_kda", unknown)
    if inplace_final_state is None:
        inplace_final_state = ssm_state_indices is not None
    inputs = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, ssm_state_indices,
        num_accepted_tokens,
    )
    options = Options(
        scale=scale_of(scale, q), lower_bound=lower_bound, backend=backend, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, inplace_final_state=inplace_final_state, batch_invariant=batch_invariant,
    )
    extras = NO_EXTRAS if transpose_state_layout is None else Extras(transpose_state_layout=transpose_state_layout)
    inputs, options = prepare("fused_recurrent_kda", inputs, options, extras)
    if is_sharded((*inputs, out)):
        each_rank = functools.partial(_recurrent, options=options)
        o, ht = parallel().mesh.run("fused_recurrent_kda", inputs, each_rank, out=out)
    else:
        o, ht = _recurrent(inputs, options, out)
    return (o if out is None else out), initial_state if options.inplace_final_state else ht


def _recurrent(inputs: Inputs, options: Options, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """o, also in `out`, and the final states unless they are written in place."""
    call, inplace = Call("fused_recurrent_kda", inputs, options, out=out), options.inplace_final_state
    training = is_training(inputs)
    compiling = torch.compiler.is_compiling()
    if (training or getattr(out, "requires_grad", False)) and not compiling:
        operate(check, call, call, (WRITTEN_STATE, TRAINING_OUT))
    if out is not None and not compiling:                                     # the operator does not see it
        operate(problem_of, call, call)
    if is_unseen(inputs) and not training:
        o, ht = operate(autograd.recurrent, call, call)
    else:
        settings = [getattr(options, name) for name in autograd.RECURRENT_OPTIONS]
        tensors = inputs[: len(autograd.RECURRENT_INPUTS)]
        o, *ht = operate(autograd.call, call, "recurrent_" if inplace else "recurrent", *tensors, *settings)
        ht = ht[0] if options.output_final_state and not inplace else None
    if out is not None:
        torch.ops.kda.put(out, o, training) if compiling else out.copy_(o)
    return o, None if inplace else ht


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """`fused_recurrent_kda` with the order and defaults of `fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd`.

    States are written in place unless `inplace_final_state=False`. Other keywords are those of `fused_recurrent_kda`.

    Raises:
        InputError, NoBackendError: as `fused_recurrent_kda`.

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 5, 2, 16).unbind()
        >>> state = torch.zeros(1, 2, 16, 16)
        >>> o, new = fused_recurrent_kda_fwd(q, k, v, -g.abs(), torch.rand(1, 5, 2), initial_state=state)
        >>> new is state, state.any().item()
        (True, True)
    """
    try:
        return fused_recurrent_kda(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
            ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens,
            inplace_final_state=inplace_final_state, out=out, **keywords,
        )
    except InputError as error:
        raise error.as_of("fused_recurrent_kda_fwd") from None


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    **unknown: Any,
) -> Tensor:
    """The gate alone, differentiable: logits (.., HV, K) to natural-log decays of the same shape.

    With x = g + dt_bias: `-exp(A_log) softplus(x)`, or `lower_bound * sigmoid(exp(A_log) x)` given a `lower_bound`.

    Args:
        g: (.., HV, K) logits; (.., HV, 1) for one gate per head.
        A_log: HV elements; may be None with a `lower_bound` (a factor of 1).
        dt_bias: `HV * K` elements or None.
        lower_bound: negative; None means the softplus gate.
        output_dtype: of the result.

    Returns:
        The decays, of the shape of g in `output_dtype`.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> decays = fused_kda_gate(torch.randn(1, 10, 2, 16), A_log=torch.zeros(2), lower_bound=-5.0)
        >>> decays.shape, -5 <= decays.min() and decays.max() <= 0
        (torch.Size([1, 10, 2, 16]), tensor(True))
    """
    if unknown:
        refuse_unknown("fused_kda_gate", unknown, _OWN_KEYWORDS["fused_kda_gate"])
    lower_bound = number(lower_bound)
    if is_sharded((g, A_log, dt_bias)):
        each_rank = functools.partial(fused_kda_gate, lower_bound=lower_bound, output_dtype=output_dtype)
        return parallel().mesh.gate("fused_kda_gate", g, A_log, dt_bias, each_rank)
    check(GateCall("fused_kda_gate", g, A_log, dt_bias, lower_bound, output_dtype), GATE)
    return autograd.call("gate", g, A_log, dt_bias, lower_bound, output_dtype)[0]


def _saved_by(inputs: Inputs, options: Options) -> Save:
    """Return what a training forward saves.  A compiled one saves what all backends save alike, because the shapes of
    its results must be known; or nothing, if one backend runs both directions and saves only its own layout."""
    on_gpu = _on_gpu(inputs.q)
    if not torch.compiler.is_compiling():
        if on_gpu or stand_in() is not None:
            problem = problem_of(Call("chunk_kda", inputs, options))
            return route(problem, backend_asked(options.backend), True, saves_states(options)).save
        return Save.ALL if options.disable_recompute is True else Save.NOTHING
    if options.disable_recompute is True:
        return Save.ALL
    tensors = inputs[: len(autograd.INPUTS)]
    whole = all(isinstance(x, Tensor) and x.dim() == 4 for x in (inputs.q, inputs.v))
    if not (on_gpu and whole and isinstance(inputs.g, Tensor)):
        return Save.NOTHING                                                    # the operator reports the error
    K, V = (_constant(x.shape[3]) for x in (inputs.q, inputs.v))
    bound = None if options.lower_bound is None else 0.0  # any number will do: no rule depends on its value
    settings = options._replace(scale=1.0, lower_bound=bound, chunk_size=32 if options.chunk_size == 32 else 64)
    dtypes = [None if x is None else x.dtype for x in tensors]
    nothing = _saves_nothing(str(inputs.q.device), tuple(settings), K, V, inputs.g.dim(), *dtypes)
    return Save.NOTHING if nothing else Save.PRODUCTS


def _on_gpu(q: Any) -> bool:
    return isinstance(q, Tensor) and q.is_cuda


def _constant(size: int) -> int:
    """A head dim for which a graph is specialised; 0 for an unusual one."""
    return next((usual for usual in (64, 128, 256) if size == usual), 0)


def _saves_nothing(device: str, settings: tuple, K: int, V: int, axes_of_g: int, *dtypes: torch.dtype | None) -> bool:
    """Return whether a compiled forward saves nothing.

    It ignores the number of tokens and heads, so that no graph is specialised to them. If another backend then runs the
    call, it recomputes what was not saved; if none does, the operator reports the error.
    """
    rows, heads, options = (Problem.B, Problem.T), Problem.HV, Options(*settings)
    state, offsets = (1, heads, K, V), (2,)                                    # for one sequence
    shapes = dict(q=(*rows, heads, K), k=(*rows, heads, K), v=(*rows, heads, V), g=(*rows, heads, K)[:axes_of_g],
                  beta=(*rows, heads), A_log=(heads,), dt_bias=(heads * K,), initial_state=state,
                  cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    outlines = [Outline(shapes[name], dtype, device) if dtype else None
                for name, dtype in zip(autograd.INPUTS, dtypes, strict=True)]
    found = weigh_route(problem_of_outlines(outlines, options), backend_asked(options.backend), training=True)
    return found.save is Save.NOTHING


vars(_saves_nothing)["_dynamo_marked_constant"] = True                          # torch.compile calls it untraced


def _on_ranks(inputs: Inputs, options: Options, context: Any, training: bool) -> tuple:
    operators = parallel().operators
    inputs = operators.prepared(inputs, options)
    save = _saved_by(inputs, options) if training else Save.NOTHING
    call = Call("chunk_kda", inputs, options)
    return operate(operators.run, call, inputs, options, context, save)


def parallel() -> Any:
    from kda import parallel

    return parallel


def _forward(inputs: Inputs, options: Options, save: Save, training: bool = False) -> Outputs:
    """Run the forward. For operators `disable_recompute` requests `Saved`; `save` decides what else is saved."""
    if options.disable_recompute and save is not Save.ALL:
        options = options._replace(disable_recompute=False)
    call = Call("chunk_kda", inputs, options)
    if not training and is_unseen(inputs):                                     # the operator costs 20 microseconds more
        return operate(autograd.forward, call, call, save)
    settings = [getattr(options, name) for name in autograd.OPTIONS]
    arguments = *inputs[: len(autograd.INPUTS)], *settings, save.value
    o, ht, h, *saved = operate(autograd.call, call, "chunk_forward", *arguments)
    kind = save.kind if save in (Save.ALL, Save.OWN, Save.STATES) else None
    return Outputs(o, ht if options.output_final_state else None, h if options.return_intermediate_states else None,
                   None if kind is None else kind(*saved))


def _made_with(inputs: Inputs, options: Options) -> MadeWith:
    """A graph of torch.compile is for any offsets."""
    return MadeWith.of(inputs, options, None if torch.compiler.is_compiling() else host_offsets(inputs))


def _check_saved(call: Call, passed: Any) -> None:
    asked = "what chunk_kda_fwd(..., disable_recompute=True) returned as saved for the same call"
    refuse = functools.partial(InputError, call.op, "saved", asked)
    whole = (
        isinstance(passed, Kept)
        and isinstance(passed.tensors, Saved | OpaqueSaved)
        and isinstance(passed.made_with, MadeWith)
    )
    if not whole or not all(isinstance(x, Tensor) for x in passed.tensors):
        kind = "a Kept with other contents" if isinstance(passed, Kept) else type(passed).__name__
        raise refuse(kind, "Pass Outputs.saved, or None to recompute.", "saved.kind")
    if not torch.compiler.is_compiling():                                      # the operator checks a compiled call
        check(call, (*CALLER, *KIND))
    saved, same = passed.tensors, "Pass both functions the same arguments."
    ours = _made_with(call.inputs, call.options)
    for name, had, given in zip(MadeWith._fields, passed.made_with, ours):
        if name == "offsets" and None in (had, given):
            continue                                                           # a GPU alone knows them
        if had != given:
            had, given = (f"{x[0]} {[*x[1]]}" if isinstance(x, tuple) else x for x in (had, given))
            raise refuse(f"what it returned for {name}={had}, beside {name}={given} here", same, "saved.options")
    if isinstance(saved, OpaqueSaved):
        problem = problem_of(call, "backward")
        backend = choose(problem, backend_asked(call.options.backend)).backend
        if backend is None or not capability(backend).saves_opaque:            # its backward recomputes
            return
        forms = [autograd.outlines_of(call, save, backend) for save in (Save.OWN, Save.STATES)]
        outlines = next((form for form in forms if saved.memory.shape == form[0][0]), forms[0])
    else:
        outlines = autograd.outlines_of(call, Save.ALL)
    for name, x, (shape, dtype) in zip(saved._fields, saved, outlines):
        for what, found, wanted in (("shape", list(x.shape), list(shape)), ("dtype", x.dtype, dtype),
                                    ("device", x.device, call.inputs.q.device)):
            if found != wanted:
                raise refuse(f"{name} of {what} {found}, not {wanted}", same, "saved.shape")


def bind_a_part(op: str, /, *args: Any, cp_context: Any = None, **keywords: Any) -> tuple[Inputs, Options, Any]:
    """Bind like `_bind`; a context becomes one of kda's, and inputs those of this rank's part of the sequences."""
    if cp_context is None:
        return *_bind(op, *args, **keywords), None
    context = parallel().adopt(cp_context, op)
    keywords |= {"cu_seqlens": context.cu_seqlens, "cu_seqlens_cpu": context.cu_seqlens_cpu}
    inputs, options = _bind(op, *args, **keywords)
    return parallel().operators.prepared(inputs, options), options, context


def _bind(op: str, /, *args: Any, **keywords: Any) -> tuple[Inputs, Options]:
    """Return the inputs and options of a function that takes the arguments of `chunk_kda`."""
    if len(args) == 5 and _OPTIONAL.issuperset(keywords):                      # saves 30 microseconds of bind
        return prepare(op, *by_name(dict(zip(REQUIRED, args), **keywords)))
    try:
        given = _CHUNK_SIGNATURE.bind(*args, **keywords).arguments
    except TypeError as error:
        raise TypeError(f"{op}: {error}; its arguments are those of chunk_kda") from None
    if unknown := given.get("unknown"):
        refuse_keywords(op, unknown)
    return prepare(op, *by_name(given))


def refuse_keywords(op: str, unknown: dict[str, Any]) -> NoReturn:
    refuse_unknown(op, unknown, _OWN_KEYWORDS.get(op, _KEYWORDS), OF_OTHERS)


_OWN_KEYWORDS = {                            # keywords, if they are not those of chunk_kda
    "chunk_kda_bwd": [*names_of(chunk_kda_bwd), *_KEYWORDS[5:]],
    "explain": [*_KEYWORDS, "arch"],
    "fused_recurrent_kda": names_of(fused_recurrent_kda),
    "fused_kda_gate": names_of(fused_kda_gate),
}
