"""vLLM's layer of Kimi-Linear on kda: convolution, prefill, decode and norm; projections and weights stay vLLM's.

vLLM makes the subclass wherever a model asks for `KimiGatedDeltaNetAttention` (`PluggableLayer.register_oot`).  States
stay where vLLM keeps them: `kv_cache` = (convolution [slots, 3 H D, W - 1] or transposed, recurrent [slots, H, V, K]).
Slot 0 is vLLM's null block: no state is read or written there.

Speculative decoding, and what no backend accepts, is left to vLLM's own kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from kda.calls.api import chunk_kda, fused_recurrent_kda
from kda.model.problem import Problem, name_of_dtype

from ..errors import PackageError
from ..nn.convolution import next_state, short_convolution
from ..nn.norm import gated_rms_norm
from ..nn.sequences import Sequences
from . import leave, refusal

Tensor = torch.Tensor
LAYER = "KimiGatedDeltaNetAttention"
# arguments of vLLM's _forward, which is overridden
ARGUMENTS = ("self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out")
GATE = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True)


def install() -> None:
    """Register the subclass; a second time does nothing, as vLLM may load plug-ins more than once."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    if LAYER in op_registry_oot:
        if op_registry_oot[LAYER].__module__ != __name__:
            leave("vLLM", LAYER, f"{op_registry_oot[LAYER].__module__} has replaced it already")
        return
    PluggableLayer.register_oot(layer(), name=LAYER)


def layer() -> type:
    import inspect

    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
        KimiGatedDeltaNetAttention,
        is_conv_state_dim_first,
    )

    found = tuple(inspect.signature(KimiGatedDeltaNetAttention._forward).parameters)
    if found != ARGUMENTS:
        asked, others = ", ".join(ARGUMENTS), ", ".join(found)
        raise PackageError(f"kda.engines: {LAYER}._forward must have the arguments {asked}; found {others}. Install "
                           "vLLM 0.33, with which kda is tested.", name="vllm")

    class KdaKimiGatedDeltaNetAttention(KimiGatedDeltaNetAttention):
        @eager_break_during_capture
        def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
            metadata = get_forward_context().attn_metadata
            m = None if metadata is None else metadata.get(self.prefix)
            if m is None:                                                      # a dry run
                return
            why = "it is speculative" if self.num_spec else _refused(self, mixed_qkv)
            if why is not None:
                leave("vLLM", LAYER, why)
                super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
                return
            conv, recurrent = self.kv_cache
            attend(self, m, conv.transpose(-1, -2) if is_conv_state_dim_first() else conv, recurrent, mixed_qkv, g1,
                   g2, beta, core_attn_out)

    return KdaKimiGatedDeltaNetAttention


def _refused(layer: Any, x: Tensor) -> str | None:
    """Say why no backend runs the calls of this layer, or return None; one shape stands for all of its calls."""
    H, D, dtype = layer.local_num_heads, layer.head_dim, name_of_dtype(x.dtype)
    call = dict(device=str(x.device), H=H, HV=H, K=D, V=D, dtype=dtype, g_dtype=dtype, beta_dtype=dtype, T=64,
                state_dtype="float32", packed=True, gate="softplus", A_log=True, dt_bias=True, beta="sigmoid",
                qk_l2norm=True, state_v_first=True, slots=2, inplace=True)
    return next((why for op in ("chunk", "recurrent") if (why := refusal(Problem(op=op, **call)))), None)


def attend(layer: Any, m: Any, conv: Tensor, recurrent: Tensor, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor,
           core_attn_out: Tensor) -> None:
    """core_attn_out (1, tokens, H, D), normalised and gated; conv (slots, W - 1, 3 H D).  Nothing waits for the GPU."""
    n, H, D = m.num_actual_tokens, layer.local_num_heads, layer.head_dim
    x, g, b = mixed_qkv[:n], g1[:, :n], beta[:, :n]
    prefill = m.num_prefills > 0
    slots = m.non_spec_state_indices_tensor
    if prefill:
        x, sequences = x.unsqueeze(0), Sequences.of_offsets(m.non_spec_query_start_loc, n, x.device)
    else:                                                                      # a token each
        slots = slots[:n]
        x, g, b = x.unsqueeze(1), g.transpose(0, 1), b.transpose(0, 1)
        sequences = Sequences.of_rows(n)
    real, begun = slots > 0, m.has_initial_state if prefill else None          # slot 0 is null
    home = slots.clamp(min=0).long()
    before = conv[home]
    began = before if begun is None else torch.where(begun[:, None, None], before, 0)      # a slot may hold nan
    y = short_convolution(x, layer.conv1d.weight, None, began, sequences)
    after = next_state(x, layer.conv_size, began, sequences).to(conv.dtype)
    conv.index_copy_(0, home, torch.where(real[:, None, None], after, before))
    q, k, v = (part.unflatten(-1, (H, D)) for part in y.split(H * D, -1))
    gate = dict(GATE, A_log=layer.A_log, dt_bias=layer.dt_bias, lower_bound=layer.gate_lower_bound,
                initial_state=recurrent)
    state_slots = torch.where(real, slots, -1)
    if prefill:
        start = state_slots if begun is None else torch.where(begun, state_slots, -1)
        o = chunk_kda(q, k, v, g, b, **gate, cu_seqlens=sequences.cu_seqlens, ssm_state_indices=state_slots,
                      initial_state_indices=start)[0]
    else:
        o = fused_recurrent_kda(q, k, v, g, b, **gate, ssm_state_indices=state_slots)[0]
    normed = gated_rms_norm(o.reshape(n, H, D), g2[:n], layer.o_norm.weight, layer.o_norm.eps)
    core_attn_out[0, :n] = normed
    core_attn_out[0, n:].zero_()
