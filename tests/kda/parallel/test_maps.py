"""Maps of pieces of sequences, for several GPUs: every backend's, on the CPU from its PTX, against the definition's."""

import dataclasses

import pytest
import torch

import kda
from kda.model.force import forced
from kda.model.problem import Inputs
from kda.parallel import operators
from kda.routing.dispatch import backend_of_backward, capability
from kda.tools.verify.cases import make_inputs
from ptxkit import capture

maps = operators.maps
pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]

SHAPES = dict(HV=2, H=1, K=32, V=16)
CASES = {
    "triton, cut": ("triton", "sm90", dict(T=150, **SHAPES)),
    "triton, a chunk alone": ("triton", "sm80", dict(T=40, **SHAPES)),
    "sm90": ("sm90", "sm90", dict(T=70, H=1, K=64, V=64, gate="bounded")),
    "sm90, K and V differ, two heads of one": ("sm90", "sm90", dict(T=40, H=1, HV=2, K=64, V=128, gate="softplus")),
    "sm90, of any gate": ("sm90", "sm90", dict(T=70, H=1, K=128, V=128, gate="softplus")),
    "sm90, cut": ("sm90", "sm90", dict(T=200, H=1, K=128, V=128, gate="bounded")),
    "sm100": ("sm100", "sm100", dict(T=40, H=1, K=128, V=128, gate="bounded")),
    "sm100, 64 channels": ("sm100", "sm100", dict(T=70, H=1, K=64, V=64, gate="softplus")),
    "sm89": ("sm89", "sm89", dict(T=70, H=1, K=64, V=64, dtype="float32")),
    "triton, one gate per head": ("triton", "sm90", dict(T=150, gate_per_head=True, **SHAPES)),
    "sm89, one gate per head": ("sm89", "sm89", dict(T=70, H=1, K=64, V=64, dtype="float32", gate_per_head=True)),
}
NEEDS = {"sm90": "cutlass", "sm100": "cutlass"}


def drawn(name):
    backend, arch, words = CASES[name]
    if backend in NEEDS:
        pytest.importorskip(NEEDS[backend])
    case = make_inputs(**{"gate": "softplus"} | words)
    problem = case.problem()
    x = Inputs(**{n: case.keywords.get(n) for n in Inputs._fields})
    generator = torch.Generator().manual_seed(3)
    h0, dht = torch.randn(2, 1, problem.HV, problem.K, problem.V, generator=generator).unbind()
    return backend, arch, problem, x, case.do, h0, dht


def exact(function, p, x, *others):
    """Return what the reference computes in float64."""
    wide = Inputs(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in x))
    p = dataclasses.replace(p, device="cpu", dtype="float64", g_dtype="float64", beta_dtype="float64")
    return function(p, wide, *(t.double() if isinstance(t, torch.Tensor) else t for t in others))


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_maps_are_those_of_the_definition_and_nothing_is_wrong_on_the_way(name, request, force):
    backend, arch, p, x, do, h0, dht = drawn(name)
    if backend == "sm89":
        request.getfixturevalue("libnvrtc")
    if backend == "triton":
        request.getfixturevalue("kernels_built_here")
    if "cut" in name:
        force(segment_chunks=2)
        p = dataclasses.replace(p, force=forced())
    forward, limit = x._replace(initial_state=h0), 4 * torch.finfo(x.q.dtype).eps
    with capture(arch=arch) as session:
        found = maps.segment_map(p, forward, backend, True)
        alone = maps.segment_map(p, forward, backend, False).added
        back = maps.segment_map_bwd(p, x, do, dht, backend_of_backward(backend)) if p.K == p.V else None
    assert not session.findings, session.findings[:3]
    wanted = exact(maps.segment_map, p, forward, "reference", True)
    assert error(found.added, wanted.added) < limit and error(found.M, wanted.M) < limit
    assert error(alone, wanted.added) < limit
    if back is not None:
        assert error(back, exact(maps.segment_map_bwd, p, x, do, dht, "reference")) < limit


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize("backend", ["triton", "sm90"])
def test_states_that_are_handed_on_give_the_bits_of_one_call(backend, kept, request):
    """exchange="hops" hands states on so.  Hopper's backward that recomputes states begins with another rounding."""
    if backend == "triton":
        request.getfixturevalue("kernels_built_here")
    else:
        pytest.importorskip("cutlass")
    T, K, half = 256, 64, 128
    case = make_inputs(T=T, H=1, K=K, V=K, gate="bounded", regime="slow")
    options = dict(backend=backend, batch_invariant=True, disable_recompute=kept)
    zero = torch.zeros_like(case.dht)

    def forward(begin, end, h0):
        rows = {n: x[:, begin:end] if n in ("q", "k", "v", "g", "beta") else x for n, x in case.keywords.items()}
        keywords = rows | options | {"initial_state": h0}
        return keywords, kda.chunk_kda_fwd(**keywords)

    def backward(keywords, out, do, dht):
        return kda.chunk_kda_bwd(**keywords, do=do, dht=dht, saved=out.saved)

    with capture(arch="sm90", checks=False):
        whole, first = (forward(0, end, case.keywords["initial_state"]) for end in (T, half))
        second = forward(half, T, first[1].final_state)
        expected = backward(*whole, case.do, zero)
        late = backward(*second, case.do[:, half:], zero)
        early = backward(*first, case.do[:, :half], late.dh0)
    assert torch.equal(whole[1].o, torch.cat([first[1].o, second[1].o], 1))
    assert torch.equal(whole[1].final_state, second[1].final_state)
    same = {n for n in ("dq", "dk", "dv", "dg", "dbeta")
            if torch.equal(getattr(expected, n), torch.cat([getattr(early, n), getattr(late, n)], 1))}
    assert same == ({"dv"} if backend == "sm90" and not kept else {"dq", "dk", "dv", "dg", "dbeta"})


def test_who_has_maps_of_its_own_declares_it():
    declared = {name: capability(name).maps for name in ("reference", "triton", "sm89", "sm90", "sm100")}
    both, halves = ("forward", "backward"), ("forward in halves", "backward in halves")
    assert declared == {
        "reference": both + halves, "triton": both, "sm89": both, "sm90": both + halves,
        "sm100": ("backward", "backward in halves"),
    }
