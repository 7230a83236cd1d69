"""SGLang's dispatcher of KDA on kda: `--linear-attn-prefill-backend kda`, `--linear-attn-decode-backend kda`.

SGLang turns a name that it does not know into a custom backend, which its dispatcher refuses; a hook around the
dispatcher's __init__ puts kda's kernels where that name was asked for.  Verification of speculative tokens stays with
SGLang's Triton kernel.  States are updated in SGLang's pool, (slots, HV, V, K), padding slots are -1.

What no backend accepts is left to SGLang's Triton kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kda.calls.api import chunk_kda, fused_recurrent_kda
from kda.model.problem import Problem, name_of_dtype

from . import leave, refusal

Tensor = torch.Tensor
NAME = "kda"
DISPATCHER = "sglang.srt.layers.attention.linear.kda_backend.KDAKernelDispatcher.__init__"
CHUNK = 64                                   # tokens in one step of SGLang's track_chunk_idx
GATE = dict(use_qk_l2norm_in_kernel=True, state_v_first=True)


def install() -> None:
    """Offer the name and hook the dispatcher; a second time does nothing."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        choices.add_linear_attn_kernel_backend_choices([NAME])
        HookRegistry.register(DISPATCHER, dispatcher, HookType.AROUND)


def dispatcher(original: Any, self: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any) -> None:
    """Replace KDAKernelDispatcher.__init__."""
    Backend = type(decode_backend)
    custom = [backend.is_custom() for backend in (decode_backend, prefill_backend)]
    taken = [Backend.TRITON if ours else backend for ours, backend in zip(custom, (decode_backend, prefill_backend))]
    original(self, *taken, verify_backend)
    if custom[0]:
        self.decode_kernel = kernel()
        self.supports_packed_decode = self.supports_packed_decode_safe_gate = False
    if custom[1]:
        self.extend_kernel = kernel()


@functools.cache
def kernel() -> Any:
    """A subclass of SGLang's Triton kernel: bounded gates go to no other, and it does the rest."""
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    class KdaKernel(TritonKDAKernel):
        supports_packed_decode = False
        supports_track_state_snapshot = True

        def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc,
                   lower_bound=None, **others):
            why = _refused("recurrent", q, v, ssm_states)
            if why is not None:
                leave("SGLang", "decode", why)
                return super().decode(
                    q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                    query_start_loc=query_start_loc, lower_bound=lower_bound, **others,
                )
            gate = _gate(q, v, a, b, A_log, dt_bias, lower_bound, raw_beta=True)
            return fused_recurrent_kda(q, k, v, **gate, initial_state=ssm_states, cu_seqlens=query_start_loc,
                                       ssm_state_indices=cache_indices)[0]

        def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, A_log=None, dt_bias=None,
                   lower_bound=None, beta_is_raw=False, return_intermediate_states=False, track_state=None,
                   track_chunk_idx=None, **others):
            why = _refused("chunk", q, v, ssm_states)
            if why is None and return_intermediate_states and track_state is None:
                why = "it asks for all states between chunks"
            if why is not None:
                leave("SGLang", "extend", why)
                return super().extend(
                    q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                    query_start_loc=query_start_loc, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                    beta_is_raw=beta_is_raw, return_intermediate_states=return_intermediate_states,
                    track_state=track_state, track_chunk_idx=track_chunk_idx, **others,
                )
            gate = _gate(q, v, g, beta, A_log, dt_bias, lower_bound, beta_is_raw)
            call = functools.partial(chunk_kda, q, k, v, **gate, cu_seqlens=query_start_loc)
            if track_state is None:
                o = call(initial_state=ssm_states, ssm_state_indices=cache_indices)[0]
            else:
                o = _tracked(call, ssm_states, cache_indices, track_state, track_chunk_idx)
            return (o, None) if return_intermediate_states else o

    return KdaKernel()


def _tracked(call: Any, pool: Tensor, slots: Tensor, track_state: Tensor, track_chunk_idx: Tensor) -> Tensor:
    """A call that also leaves the state that enters chunk track_chunk_idx[n], -1 for none, in track_state[n], which is
    float32 whatever the pool is: by a pool of both."""
    N, real = slots.shape[0], (slots >= 0)[:, None, None, None]
    home = slots.clamp(min=0).long()
    rows = torch.arange(N, device=slots.device)
    states = torch.cat([torch.where(real, pool[home], 0).float(), track_state])
    chunks = track_chunk_idx.long()
    o = call(
        initial_state=states, ssm_state_indices=rows, checkpoint_offsets=chunks.clamp(min=0)[:, None] * CHUNK,
        checkpoint_indices=torch.where(chunks >= 0, rows + N, -1)[:, None],
    )[0]
    track_state.copy_(states[N:])
    states_at_home = torch.where(real, states[:N].to(pool.dtype), pool[home])
    pool.index_copy_(0, home, states_at_home)
    return o


def _gate(q: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
          lower_bound: float | None, raw_beta: bool) -> dict[str, Any]:
    """Gate and beta in the shapes of kda; g holds logits beside an A_log, decays without."""
    logits = A_log is not None
    return GATE | {
        "g": g.reshape(*v.shape[:3], q.shape[-1]), "beta": beta.reshape(v.shape[:3]),
        "A_log": None if A_log is None else A_log.reshape(-1),
        "dt_bias": None if dt_bias is None or not logits else dt_bias.reshape(-1),
        "lower_bound": lower_bound, "use_gate_in_kernel": logits, "use_beta_sigmoid_in_kernel": raw_beta,
    }


def _refused(op: str, q: Tensor, v: Tensor, pool: Tensor) -> str | None:
    H, K, HV, V = *q.shape[2:], *v.shape[2:]
    dtype, state = (name_of_dtype(x.dtype) for x in (q, pool))
    return refusal(Problem(
        op=op, device=str(q.device), T=64, H=H, HV=HV, K=K, V=V, dtype=dtype, g_dtype=dtype, beta_dtype=dtype,
        state_dtype=state, packed=True, gate="softplus", A_log=True, dt_bias=True, beta="sigmoid", qk_l2norm=True,
        state_v_first=True, slots=2, inplace=True,
    ))
