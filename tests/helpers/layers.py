"""Small layers of every kind, and what goes into them."""

import pytest
import torch

from kda.nn import KimiDeltaAttention

D = 24
KINDS = {
    "Kimi-Linear": {},
    "Kimi-K3": {"lower_bound": -5.0, "gate_rank": None},
    "Ling": {"lower_bound": -5.0, "forget_rank": None, "gate_rank": None},
    "FLA, all options": {"num_v_heads": 4, "head_v_dim": 12, "gate_bias": True, "conv_bias": True,
                         "allow_neg_eigval": True, "conv_size": 3},
}


def of_kinds(*left_out):
    """Return the mark of a test that has the `options` of every kind but those left out."""
    kinds = {name: options for name, options in KINDS.items() if name not in left_out}
    return pytest.mark.parametrize("options", kinds.values(), ids=kinds)


def make(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    layer = KimiDeltaAttention(D, 2, 8, layer_idx=0, **options)
    with torch.no_grad():
        for p in (layer.A_log, layer.dt_bias, layer.o_norm.weight):
            p.normal_()
    return layer.to(dtype)


def hidden(T, B=2, dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(3), dtype=dtype)
