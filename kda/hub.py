"""What Hugging Face's `kernels` finds in kda: layers for models that are loaded with `use_kernels=True`.

`python .ci/hub FOLDER` writes a folder in the form that `kernels` loads.  Its layers have the names and arguments of
the functions of transformers that they replace, and keep no state of their own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .calls.api import chunk_kda, fused_recurrent_kda
from .hf import offsets_of

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor | None]


class chunk_kimi_delta_attention(torch.nn.Module):
    """`kda.chunk_kda`, as transformers calls it for a whole prompt and in training."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Results:
        o, state, *_ = chunk_kda(
            query, key, value, g, beta, chunk_size=chunk_size, initial_state=initial_state,
            output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=offsets_of(kwargs),
        )
        return o, state


class recurrent_kimi_delta_attention(torch.nn.Module):
    """`kda.fused_recurrent_kda`, as transformers calls it for a token."""

    has_backward = False
    can_torch_compile = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
        output_final_state: bool, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> Results:
        return fused_recurrent_kda(
            query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=offsets_of(kwargs),
        )


layers = SimpleNamespace(
    chunk_kimi_delta_attention=chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention=recurrent_kimi_delta_attention,
)
