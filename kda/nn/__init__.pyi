"""What type checkers read of `import kda.nn`; `python tests/helpers/stub.py --write` writes it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .cache import Cache, LayerState
from .checkpoints import LAYOUTS, CheckpointError, layout_of, prefixes_of
from .convolution import ShortConvolution, next_state, short_convolution
from .layer import KimiDeltaAttention as _Layer
from .norm import GatedRMSNorm, gated_rms_norm
from .sequences import Sequences

__all__ = [
    "LAYOUTS", "Cache", "CheckpointError", "GatedRMSNorm", "KimiDeltaAttention", "LayerState", "Sequences",
    "ShortConvolution", "gated_rms_norm", "layout_of", "next_state", "prefixes_of", "short_convolution",
]

class KimiDeltaAttention(_Layer):
    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int = 128, num_v_heads: int | None = None,
        head_v_dim: int | None = None, *, lower_bound: float | None = None, forget_rank: int | str | None = "head",
        gate_rank: int | str | None = "head", gate_bias: bool = False, allow_neg_eigval: bool = False,
        conv_size: int = 4, conv_bias: bool = False, norm_eps: float = 1e-05, layer_idx: int | None = None,
        mode: str = "auto", disable_recompute: bool | str = False, backend: str | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...

    def __call__(
        self, x: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None,
    ) -> Tensor: ...

    @classmethod
    def from_checkpoint(
        cls, tensors: Mapping[str, Tensor], prefix: str = "", **options: Any,
    ) -> KimiDeltaAttention: ...

    def explain(  # type: ignore[override]
        self, x: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None,
        cu_seqlens: Tensor | None = None, cp_context: Any = None, *, cu_seqlens_cpu: Tensor | None = None,
    ) -> str: ...
