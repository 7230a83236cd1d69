"""Tensors whose memory does not hold their numbers: torch has only noted that they are negated, or all zero."""

import pytest
import torch
from naive import make

import kda
from kda.tools.verify.steps import copied, make_step, run_step
from ptxkit import capture

pytestmark = pytest.mark.simulated


def negated(x):
    """Return the same numbers as a lazily negated tensor, like z.conj().imag."""
    return torch._neg_view(-x)


def zero_of(x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


@pytest.fixture(scope="module")
def call():
    return make(B=1, T=5, H=1, K=64, V=64, dtype=torch.bfloat16, gate="bounded", beta="sigmoid", chunk_size=64,
                initial_state=False)


BACKENDS = {"sm90": ("sm_90a", torch.bfloat16), "sm89": ("sm_89", torch.float32), "triton": ("sm_80", torch.bfloat16)}


@pytest.mark.usefixtures("kernels_built_here")
@pytest.mark.parametrize("backend", ["sm90", "sm89", pytest.param("triton", marks=pytest.mark.exhaustive)])
def test_a_backend_reads_the_numbers_of_negated_and_of_zero_tensors(call, backend):
    arch, dtype = BACKENDS[backend]
    x = {n: t.to(dtype) if n in ("q", "k", "v", "g", "beta") else t for n, t in call.tensors.items()}
    options = call.options | {"backend": backend}
    with capture(arch=arch) as session:
        plain = kda.chunk_kda(**x, **options)[0]
        lazy = kda.chunk_kda(**{n: negated(t) for n, t in x.items()}, **options)[0]
        zeros = kda.chunk_kda(**x | {"v": torch.zeros_like(x["v"])}, **options)[0]
        lazy_zeros = kda.chunk_kda(**x | {"v": zero_of(x["v"])}, **options)[0]
    assert torch.equal(plain, lazy) and torch.equal(zeros, lazy_zeros) and not session.findings


def test_a_step_and_a_recurrent_call_read_them_too():
    x = make_step(N=2, T=1, H=1, K=16, V=16)
    read = [n for n in x if isinstance(x[n], torch.Tensor) and x[n].is_floating_point()
            and n not in ("states", "conv_states")]
    with capture(arch="sm_80"):
        plain = run_step(copied(x) | {"backend": "triton"})
        lazy = run_step(copied(x) | {n: negated(x[n]) for n in read} | {"backend": "triton"})
        rows = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
        rows["g"] = -rows["g"].abs()
        o = [kda.fused_recurrent_kda(**r, initial_state=s, backend="triton")[0] for r, s in (
            (rows, x["states"][:2].float()),
            ({n: negated(t) for n, t in rows.items()}, negated(x["states"][:2].float())),
        )]
    assert all(torch.equal(plain[n], lazy[n]) for n in plain) and torch.equal(*o)
