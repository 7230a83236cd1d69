"""The layer: `KimiDeltaAttention`, its parts, its cache, and the checkpoints that it reads (docs/layer.md)."""

from .cache import Cache, LayerState
from .checkpoints import LAYOUTS, CheckpointError, layout_of, prefixes_of
from .convolution import ShortConvolution, next_state, short_convolution
from .layer import KimiDeltaAttention
from .norm import GatedRMSNorm, gated_rms_norm
from .sequences import Sequences

__all__ = [
    "LAYOUTS", "Cache", "CheckpointError", "GatedRMSNorm", "KimiDeltaAttention", "LayerState", "Sequences",
    "ShortConvolution", "gated_rms_norm", "layout_of", "next_state", "prefixes_of", "short_convolution",
]
