"""The float32 kernels on a GPU: every option in both gate regimes against float64, how large errors are, the same bits
where they are promised, CUDA graphs, and what a CPU cannot hold.
"""

import dataclasses

import pytest
import torch
from memory import needs
from on_a_gpu import DEVICE, ROWS, assert_causal, assert_right, captured, nothing_waits, write_others

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

import kda
from kda.model.host import detect
from kda.tools.verify.cases import REGIMES, make_inputs
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import packed_vs_alone, prove_executed, run_vs_run, whole_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_memory_is_poisoned"),
    pytest.mark.skipif(not torch.cuda.is_available() or detect(DEVICE).cc < (8, 9), reason="needs a GPU from sm_89 up"),
]

RAGGED = dict(lengths=(65, 0, 1, 130), padding=9)
OPTIONS = {
    "one token": dict(T=1),
    "a batch, GVA, beta up to 2": dict(B=2, T=70, HV=2, beta="2*sigmoid"),
    "packed, GVA, softplus gate": dict(HV=2, gate="softplus", **RAGGED),
    "packed, chunks of 32": dict(C=32, gate="softplus", **RAGGED),
    "K = V = 128": dict(T=150, K=128, V=128),
    "K = V = 128, packed, GVA, chunks of 32": dict(K=128, V=128, HV=3, C=32, **RAGGED),
    "all given": dict(T=150, gate="given", beta="given", l2norm=False),
    "no initial state": dict(T=150, initial_state=False),
    "a long sequence": dict(T=2100),
    "40 heads": dict(T=130, H=40),
    "140 heads of 128": dict(T=70, H=140, K=128, V=128),
}
LIMITS = {
    "logits of minus infinity": dict(gate="softplus", g=lambda x: x.index_fill(1, torch.arange(3, 130, 9), -torch.inf)),
    "rates of e^50": dict(gate="softplus", regime="fast", A_log=lambda x: x + 50),
    "every token at the lower bound": dict(g=lambda x: torch.full_like(x, 1e9)),
    "nothing forgotten": dict(g=lambda x: torch.full_like(x, -1e9)),
    "a mask of -1e6 between small decays": dict(
        gate="given", beta="given", g=lambda x: (0.01 * x).index_fill(1, torch.arange(3, 130, 9), -1e6)
    ),
    "inputs of 2^12": dict.fromkeys(("q", "k", "v"), lambda x: 4096 * x),
}
SERVED = dict(lengths=(1300, 547, 0, 1, 963), padding=3, H=2, HV=4)


def case_of(**options):
    return make_inputs(**dict(H=1, K=64, V=64, dtype="float32", gate="bounded") | options)


def changed(words):
    """A case of T = 130 with some inputs replaced by what a function makes of them."""
    given = {name: change for name, change in words.items() if callable(change)}
    case = case_of(T=130, **{name: word for name, word in words.items() if name not in given})
    new = {name: change(case.keywords[name]) for name, change in given.items()}
    return dataclasses.replace(case, keywords=case.keywords | new)


def trained(case, **options):
    """o, the final states and all gradients by name."""
    out = kda.chunk_kda_fwd(**case.keywords | options)
    grads = kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords | options)
    found = {"o": out.o, "ht": out.final_state, **grads._asdict()}
    return {name: x for name, x in found.items() if x is not None}


def errors(case):
    """Relative errors, in norms, of what the GPU finds; a walk over chunks in float64 is held to be exact."""
    found = trained(case.map(lambda x: x.to(DEVICE)), backend="sm89")
    exact = trained(case.map(lambda x: x.double() if x.is_floating_point() else x), backend="reference")
    return {name: float((found[name].cpu().double() - x).norm() / x.norm()) for name, x in exact.items()}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_definition(name, regime):
    assert_right(whole_call(Door("sm89", DEVICE), case_of(**dict(regime=regime) | OPTIONS[name]), backward=True)[0])


@pytest.mark.parametrize("name", LIMITS)
def test_gates_and_inputs_at_their_limits_are_the_definition(name):
    assert_right(whole_call(Door("sm89", DEVICE), changed(LIMITS[name]), backward=True)[0])


@pytest.mark.parametrize("stage", Door("sm89", "cpu").stages)
def test_each_run_of_stages_is_its_oracle(stage):
    proof = prove_executed("sm89", stage, None)
    assert proof.passed, "\n".join(proof.details)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("shape", [dict(T=1024, H=2), dict(T=512, H=2, K=128, V=128), SERVED], ids=str)
def test_ordinary_inputs_have_errors_below_3e_6(shape, gate, regime):
    found = errors(case_of(**dict(gate=gate, regime=regime) | shape))
    assert max(found.values()) < 3e-6, found


HARD = {
    "identical keys": dict(k=lambda x: x[:, :1].expand(x.shape), g=lambda x: torch.full_like(x, -30.0)),
    "identical keys, beta up to 2": dict(
        beta="2*sigmoid", k=lambda x: x[:, :1].expand(x.shape), g=lambda x: torch.full_like(x, -30.0)
    ),
    "a memory of all tokens": dict(g=lambda x: torch.full_like(x, -30.0)),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_have_errors_below_1e_5(name):
    found = errors(changed(HARD[name]))
    assert max(found.values()) < 1e-5, found


def test_32768_tokens_have_errors_below_1e_5():
    found = errors(case_of(T=32768))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("shape", [SERVED, dict(T=2048, H=16), dict(T=300, H=70, K=128, V=128)], ids=str)
def test_two_runs_give_the_same_bits(shape):
    assert_right(run_vs_run(Door("sm89", DEVICE), case_of(**shape), backward=True))


def test_alone_and_packed_have_the_same_bits():
    assert_right(packed_vs_alone(Door("sm89", DEVICE), case_of(**SERVED), backward=True))


def test_no_output_depends_on_later_tokens():
    x = case_of(T=300, H=2, gate="softplus").map(lambda x: x.to(DEVICE)).keywords | {"backend": "sm89"}
    assert_causal(x, (1, 8, 31, 33, 64, 255, 299))


def test_float32_goes_to_these_kernels_by_itself():
    case = case_of(T=300, H=2).map(lambda x: x.to(DEVICE))
    assert kda.explain(**case.keywords).backend == "sm89"
    assert all(torch.equal(x, y) for x, y in zip(trained(case).values(), trained(case, backend="sm89").values()))


def test_a_graph_replays_with_other_numbers_and_lengths():
    case = case_of(**SERVED, gate="softplus").map(lambda x: x.to(DEVICE))
    trained(case, backend="sm89")
    with nothing_waits():
        graph, found = captured(lambda: trained(case, backend="sm89"))
    x, random = case.keywords, torch.Generator(DEVICE).manual_seed(1)
    for step in range(3):
        write_others(x, random, step)
        graph.replay()
        kept = {name: y.clone() for name, y in found.items()}
        for name, y in trained(case, backend="sm89").items():
            assert torch.equal(kept[name], y), name


@pytest.mark.slow
def test_tensors_of_more_than_2_31_elements_have_the_bits_of_their_rows_alone():
    needs(100)
    B, T, H, D = 3, 1 << 19, 22, 64
    random = torch.Generator(DEVICE).manual_seed(1)
    q, k, v, g = (torch.randn(B, T, H, D, generator=random, device=DEVICE) for _ in range(4))
    assert q.numel() > 2**31
    x = dict(q=q, k=k, v=v, g=g.sub_(4), beta=torch.rand(B, T, H, generator=random, device=DEVICE))
    x |= dict(lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, backend="sm89")
    o = kda.chunk_kda_fwd(**x).o
    alone = kda.chunk_kda_fwd(**x | {name: x[name][-1:] for name in ROWS}).o
    assert torch.equal(o[-1:], alone) and alone[0, -1].isfinite().all() and alone[0, -1].any()
