"""Hand-written gradients against finite differences in float64, for every option."""

import pytest
import torch
from naive import DIFFERENTIABLE, OPTIONS, make

import kda


def is_right(call, **how):
    names = [n for n in DIFFERENTIABLE if n in call.tensors]
    rest = {n: x for n, x in call.tensors.items() if n not in names} | call.options

    def outputs(*tensors):
        return kda.chunk_kda(**dict(zip(names, tensors)), **rest, output_final_state=True)

    return torch.autograd.gradcheck(outputs, [call.tensors[n] for n in names], **how)


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options):
    sizes = {"H": 1, "HV": 2, "K": 2, "V": 2} | options
    assert is_right(make([0, 1, 34], **sizes).requiring_grad(), fast_mode=True)


def test_gradcheck_of_every_element():
    call = make([2, 33], H=1, HV=1, K=1, V=1, gate="bounded", beta="2*sigmoid", tail=1)
    assert is_right(call.requiring_grad())
