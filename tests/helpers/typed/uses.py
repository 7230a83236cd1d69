# ruff: noqa: B018, F841, RUF059
"""Calls that type checkers must accept, and, on lines that end in `# wrong`, calls that they must refuse.

Nothing runs this file: tests/repository/test_typing.py has checkers read it.
"""

from typing import Any

import torch

import kda
from kda.nn import Cache, KimiDeltaAttention

x = torch.randn(1, 8, 2, 16)
beta = torch.rand(1, 8, 2)


def chunks(anything: dict[str, Any], perhaps: bool) -> None:
    o, state = kda.chunk_kda(x, x, x, x, beta)
    o, state, h = kda.chunk_kda(x, x, x, x, beta)                                                       # wrong
    state.shape                                                                                         # wrong
    o, final = kda.chunk_kda(x, x, x, x, beta, output_final_state=True)
    final.shape
    o, final, h = kda.chunk_kda(x, x, x, x, beta, output_final_state=True, return_intermediate_states=True)
    final.shape, h.shape
    o, state = kda.chunk_kda(x, x, x, x, beta, return_intermediate_states=True)                         # wrong
    o, state, h = kda.chunk_kda(x, x, x, x, beta, return_intermediate_states=True)
    o, state = kda.chunk_kda(x, x, x, x, beta, 0.5, None, True)
    o, state = kda.chunk_kda(x, x, x, x, beta, **anything)
    o, state, h = kda.chunk_kda(x, x, x, x, beta, **anything)
    result = kda.chunk_kda(x, x, x, x, beta, return_intermediate_states=perhaps)
    result[0].shape
    result[2].shape                                                                                     # wrong
    kda.chunk_kda(x, x, x, x, beta, output_final_states=True)                                           # wrong
    kda.chunk_kda(x, x, x, x, beta, return_final_state=True)                                            # wrong
    kda.chunk_kda(x, x, x, x)                                                                           # wrong
    kda.chunk_kda(x, x, x, x, beta, lower_bound="-5")                                                   # wrong
    kda.chunk_kda(x, x, x, x, beta, cu_seqlens=[0, 8])                                                  # wrong


def without_autograd() -> None:
    out = kda.chunk_kda_fwd(x, x, x, x, beta, None, None, True, disable_recompute=True)
    out.o.shape
    kda.chunk_kda_fwd(x, x, x, x, beta, cp_context=None)                                                # wrong
    kda.chunk_kda_fwd(x, x, x, x, beta, disable_recompte=True)                                          # wrong
    grads = kda.chunk_kda_bwd(x, x, x, x, beta, do=out.o, lower_bound=-5.0)
    grads.dq.shape
    kda.chunk_kda_bwd(x, x, x, x, beta, do=out.o, saved=out.saved)
    kda.chunk_kda_bwd(x, x, x, x, beta, do=out.o, saved=out.o)                                          # wrong
    kda.chunk_kda_bwd(x, x, x, x, beta, dout=out.o)                                                     # wrong
    kda.chunk_kda_bwd(x, x, x, x, beta, out.o, lowerbound=-5.0)                                         # wrong


def decoding(pool: torch.Tensor) -> None:
    o, state = kda.fused_recurrent_kda(x, x, x, x, beta, initial_state=pool, inplace_final_state=True)
    o, final = kda.fused_recurrent_kda(x, x, x, x, beta, output_final_state=True)
    final.shape
    kda.fused_recurrent_kda(x, x, x, x, beta, chunk_size=64)                                            # wrong
    o, state, h = kda.fused_recurrent_kda(x, x, x, x, beta)                                             # wrong
    o, state = kda.fused_recurrent_kda_fwd(x, x, x, x, beta, initial_state=pool, cu_seqlens_cpu=None)
    kda.fused_recurrent_kda_fwd(x, x, x, x, beta, initial_states=pool)                                  # wrong
    kda.decode_step(x, x, x, x, beta, pool, norm_eps=1e-6).shape
    kda.decode_step(x, x, x, x, beta)                                                                   # wrong
    kda.decode_step(x, x, x, x, beta, pool, norm_epsilon=1e-6)                                          # wrong
    o, state = kda.decode_step(x, x, x, x, beta, pool), None
    kda.fused_kda_gate(x, lower_bound=-5.0, output_dtype=torch.float16).shape
    kda.fused_kda_gate(x, bound=-5.0)                                                                   # wrong


def choosing() -> None:
    found = kda.explain(x, x, x, x, beta, None, None, True, return_intermediate_states=True)
    found.backend
    found.back_end                                                                                      # wrong
    kda.explain(x, x, x, x, beta, use_gate_in_kernels=True)                                             # wrong
    kda.explain(x, x, x, x)                                                                             # wrong
    with kda.use_backend("reference"):
        pass
    kda.use_backend()                                                                                   # wrong
    kda.chunked_kda                                                                                     # wrong


def layers(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    layer: KimiDeltaAttention = KimiDeltaAttention.from_checkpoint(weights, lower_bound=-5.0)
    layer = KimiDeltaAttention(64, 2, layer_idx=0).to("cpu")
    KimiDeltaAttention(64, 2, layer_index=0)                                                            # wrong
    KimiDeltaAttention(hidden_size=64)                                                                  # wrong
    layer(x, attention_masks=None)                                                                      # wrong
    layer.explain(x, mask=None)                                                                         # wrong
    kda.parallel.build_cp_context(torch.tensor([0, 8]), None).tokens
    kda.parallel.build_cp_context()                                                                     # wrong
    return layer(x, cache=Cache()).square()
