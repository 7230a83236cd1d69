"""chunk_kda of the Triton backend on a GPU: every option in both gate regimes against float64, the same bits where they
are promised, CUDA graphs, streams, memory, and what a CPU cannot hold.
"""

import dataclasses
import gc

import pytest
import torch
from memory import needs
from on_a_gpu import DEVICE, ROWS, assert_causal, assert_right, captured, nothing_waits, write_others

pytest.importorskip("triton", reason="needs triton")

import kda
from kda.backends.triton import plan
from kda.model.host import detect
from kda.tools.verify.cases import REGIMES, make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import judge, packed_vs_alone, prove_executed, run_vs_run, whole_call

pytestmark = pytest.mark.gpu


class Calls(Door):
    """Calls with options of their own; states are (K, V) outside of them."""

    def __init__(self, **options):
        super().__init__("triton", DEVICE)
        self.options = options

    def chunk_kda(self, **keywords):
        keywords |= self.options
        if not keywords.get("state_v_first"):
            return super().chunk_kda(**keywords)
        if keywords.get("initial_state") is not None:
            keywords["initial_state"] = keywords["initial_state"].mT.contiguous()
        o, ht = super().chunk_kda(**keywords)
        return o, ht.mT


def changed(case, **given):
    """The case with some inputs replaced: by None, or by what a function makes of them."""
    new = {name: change and change(case.keywords[name]) for name, change in given.items()}
    return dataclasses.replace(case, keywords=case.keywords | new)


def cast(dtype):
    return lambda x: x.to(getattr(torch, dtype))


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert (x is None) == (y is None)
        assert x is None or (x.dtype == y.dtype and torch.equal(x, y))


def trained(x, do, dht):
    """o, the final states and all gradients, without autograd."""
    out = kda.chunk_kda_fwd(**x)
    return [out.o, out.final_state, *kda.chunk_kda_bwd(do=do, dht=dht, saved=out.saved, **x)]


def called(case, **options):
    """The arguments of `trained`, on the GPU."""
    case = case.map(lambda x: x.to(DEVICE))
    return case.keywords | dict(backend="triton", disable_recompute=True) | options, case.do, case.dht


# every option

RAGGED = dict(lengths=(65, 0, 1, 70), padding=9)
OPTIONS = {
    "bfloat16": dict(K=128, V=128),
    "float16": dict(dtype="float16"),
    "float32": dict(dtype="float32"),
    "float32, packed, softplus gate": dict(dtype="float32", gate="softplus", HV=2, **RAGGED),
    "packed, GVA": dict(HV=2, K=128, V=128, **RAGGED),
    "packed, softplus gate, chunks of 32": dict(gate="softplus", C=32, **RAGGED),
    "a batch, beta up to 2": dict(B=2, T=70, beta="2*sigmoid"),
    "all given, a scale": dict(gate="given", beta="given", l2norm=False, options=dict(scale=-0.3)),
    "bounded gate, no l2norm": dict(l2norm=False),
    "bounded gate alone": dict(given=dict(A_log=None, dt_bias=None)),
    "softplus gate without dt_bias": dict(gate="softplus", given=dict(dt_bias=None)),
    "states (V, K)": dict(V=32, options=dict(state_v_first=True)),
    "states in q's dtype": dict(given=dict(initial_state=cast("bfloat16"))),
    "no initial state": dict(initial_state=False),
    "everything kept": dict(options=dict(disable_recompute=True), **RAGGED),
    "int32 offsets": dict(given=dict(cu_seqlens=cast("int32")), **RAGGED),
    "batch invariant": dict(options=dict(batch_invariant=True), **RAGGED),
    "g, beta, A_log, dt_bias of other dtypes": dict(
        given=dict(g=cast("float32"), beta=cast("float16"), A_log=cast("bfloat16"), dt_bias=cast("float16"))
    ),
    "K=60 V=100": dict(K=60, V=100),
    "K=256 V=48": dict(K=256, V=48),
    "K=16 V=300": dict(K=16, V=300),
    "K=1 V=1": dict(K=1, V=1),
}


def option(name, regime):
    """The case, and the options of its call."""
    words = dict(T=130, H=1, K=64, V=64, regime=regime) | OPTIONS[name]
    options, given = words.pop("options", {}), words.pop("given", {})
    case = changed(make_inputs(**words), **given)
    if "scale" in options:
        case = dataclasses.replace(case, keywords=case.keywords | {"scale": options["scale"]})
    return case, options


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_definition(name, regime, fresh_memory_is_poisoned):
    case, options = option(name, regime)
    assert_right(whole_call(Calls(**options), case, backward=True)[0])


@pytest.mark.parametrize("stage", Door("triton", "cpu").stages)
def test_each_run_of_stages_is_its_oracle(stage):
    proof = prove_executed("triton", stage, None)
    assert proof.passed, "\n".join(proof.details)


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_long_sequence_cut_into_segments_is_the_definition(dtype, regime):
    """An error that adds up over many chunks, or an exp2 that errs to one side, would show."""
    case = make_inputs(T=4096, H=1, K=64, V=64, dtype=dtype, regime=regime)
    assert plan.plan(case.problem(), detect(DEVICE)).segment, "the sequence was not cut"
    assert_right(whole_call(Calls(), case, backward=True)[0])


LIMITS = {
    "logits of minus infinity": dict(gate="softplus", g=lambda x: x.index_fill(1, torch.arange(3, 130, 9), -torch.inf)),
    "rates of e^50": dict(gate="softplus", regime="fast", A_log=lambda x: x + 50),
    "logits of 1000": dict(gate="softplus", g=lambda x: x.index_fill(1, torch.arange(3, 130, 9), 1000.0)),
    "every token at the lower bound": dict(g=lambda x: torch.full_like(x, 1e9)),
    "every other token at the lower bound": dict(
        g=lambda x: torch.full_like(x, -20.0).index_fill(1, torch.arange(0, 130, 2), 20.0)
    ),
    "nothing forgotten": dict(g=lambda x: torch.full_like(x, -1e9)),
    "a mask of -1e6 between small decays": dict(
        gate="given", beta="given", g=lambda x: (0.01 * x).index_fill(1, torch.arange(3, 130, 9), -1e6)
    ),
    "identical keys": dict(
        beta="2*sigmoid", k=lambda x: x[:, :1].expand(x.shape), g=lambda x: torch.full_like(x, -30.0)
    ),
    "inputs of 2^12": dict.fromkeys(("q", "k", "v"), lambda x: 4096 * x),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", LIMITS)
def test_gates_and_keys_at_their_limits_are_the_definition(name, dtype):
    words = dict(T=130, H=1, K=64, V=64, dtype=dtype) | LIMITS[name]
    given = {n: words.pop(n) for n in (*ROWS, "A_log") if callable(words.get(n))}
    assert_right(whole_call(Calls(), changed(make_inputs(**words), **given), backward=True)[0])


def test_decoding_goes_on_where_prefill_ends():
    case, prompt = make_inputs(T=130, H=2, HV=4), 100
    limits = budgets(case, Door("triton", DEVICE).rounding(case), backward=False)
    x = case.map(lambda x: x.to(DEVICE)).keywords | {"backend": "triton"}
    o, state = kda.chunk_kda(**x | {name: x[name][:, :prompt] for name in ROWS})
    x = {name: value for name, value in x.items() if name not in ("chunk_size", "output_final_state")}
    outputs = [o]
    for t in range(prompt, case.spec.T):
        token = {name: x[name][:, t : t + 1] for name in ROWS}
        o, state = kda.fused_recurrent_kda(**x | token | {"initial_state": state}, inplace_final_state=True)
        outputs.append(o)
    found = {"o": torch.cat(outputs, 1).cpu(), "ht": state.cpu()}
    assert_right([judge("call", name, limits[name], found[name], case, whole=True) for name in found])


# the same bits

SERVED = dict(lengths=(1300, 547, 0, 1, 963), padding=3, H=2, HV=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [SERVED, dict(T=2048, H=16), dict(T=8192, H=1)], ids=str)
def test_two_runs_give_the_same_bits(shape, dtype):
    assert_right(run_vs_run(Calls(), make_inputs(**shape, dtype=dtype), backward=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [dict(), dict(H=16, HV=16), dict(K=64, V=96)], ids=str)
def test_alone_and_packed_have_the_same_bits(heads, dtype):
    case = make_inputs(**SERVED | heads, dtype=dtype)
    assert_right(packed_vs_alone(Calls(), case, backward=True))


def test_a_long_sequence_has_the_same_bits_among_others():
    """Long enough to be cut into segments alone and packed."""
    case = make_inputs((9000, 5, 4200), H=1)
    assert_right(packed_vs_alone(Calls(), case, backward=True))


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_output_depends_on_later_tokens(dtype, gate):
    x, *_ = called(make_inputs(T=300, H=2, dtype=dtype, gate=gate))
    assert_causal(x, (1, 16, 33, 64, 100, 255, 299))


@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
def test_calls_on_two_streams_do_not_meet(kept):
    cases = [make_inputs(T=2048, H=4, seed=seed) for seed in (1, 2)]
    door = Calls(disable_recompute=kept)
    expected = [door.call(case, True) for case in cases]
    cases, streams = [case.map(lambda x: x.to(DEVICE)) for case in cases], [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        for case, stream in zip(cases, streams):
            with torch.cuda.stream(stream):
                found.append(on_the_gpu(case, disable_recompute=kept))
    torch.cuda.synchronize()
    for i, results in enumerate(found):
        assert_same_bits([x.cpu() for x in results], list(expected[i % 2].values()))


def on_the_gpu(case, **options):
    """o, the final states and the gradients by way of autograd; nothing is waited for."""
    leaves = {n: x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
              for n, x in case.keywords.items()}
    o, ht = kda.chunk_kda(**leaves, **options, backend="triton")
    wanted = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    grads = torch.autograd.grad((o, ht), [leaves[n] for n in wanted if n in leaves], (case.do, case.dht))
    return [o.detach(), ht.detach(), *grads]


# the host


@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("offsets_on", ["cpu", DEVICE])
def test_nothing_waits_for_the_gpu(offsets_on, kept):
    case = make_inputs(**SERVED).map(lambda x: x.to(DEVICE))
    case = changed(case, cu_seqlens=lambda x: x.to(offsets_on))
    expected = on_the_gpu(case, disable_recompute=kept)
    with nothing_waits():
        found = on_the_gpu(case, disable_recompute=kept)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("shape", [dict(SERVED, padding=0), dict(T=1024, H=4), dict(T=8192, H=1)], ids=str)
def test_a_graph_replays_with_other_numbers_and_lengths(shape, kept):
    x, do, dht = called(make_inputs(**shape), disable_recompute=kept)
    random = torch.Generator(DEVICE).manual_seed(1)
    trained(x, do, dht)
    graph, found = captured(lambda: trained(x, do, dht))
    for step in range(3):
        write_others(x, random, step, do, dht, x["initial_state"])
        graph.replay()
        assert_same_bits(found, trained(x, do, dht))


# memory


def tokens(T, B=1, H=64, HV=64, K=128, V=128, dtype=torch.bfloat16):
    """Keywords of a call with random rows, with nothing else that takes memory."""
    random = torch.Generator(DEVICE).manual_seed(0)
    shapes = dict(q=(H, K), k=(H, K), v=(HV, V), g=(HV, K), beta=(HV,))
    rows = {n: torch.randn(B, T, *s, generator=random, device=DEVICE, dtype=dtype) for n, s in shapes.items()}
    parameters = {n: torch.randn(size, generator=random, device=DEVICE) for n, size in
                  (("A_log", HV), ("dt_bias", HV * K))}
    switches = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    return rows | parameters | switches | dict(lower_bound=-5.0, backend="triton")


def test_training_holds_no_more_than_three_gibibytes():
    """B1 T8192 H64 K=V=128: inputs, outputs, gradients and all between."""
    needs(6)
    gc.collect()
    before = torch.cuda.memory_allocated()
    x = tokens(8192)
    leaves = [t.requires_grad_() for t in x.values() if isinstance(t, torch.Tensor)]
    do = torch.randn_like(x["v"])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        o, _ = kda.chunk_kda(**x)
        torch.autograd.grad(o, leaves, do)
    assert torch.cuda.max_memory_allocated() - before <= 3.0 * 2**30


def parts(x, offsets):
    """The same call on each sequence by itself."""
    for n, (start, end) in enumerate(zip(offsets, offsets[1:])):
        yield n, start, end, x | {name: x[name][:, start:end] for name in ROWS}


BEYOND = [4096] * 32 + [130]                 # with 128 heads of 128: 2^31 elements, and a sequence past them


@pytest.mark.slow
def test_outputs_and_states_of_more_elements_than_an_int32_counts():
    needs(70)
    offsets = torch.tensor([0, *BEYOND]).cumsum(0)
    x = tokens(sum(BEYOND), H=16, HV=128) | dict(output_final_state=True, batch_invariant=True)
    with torch.inference_mode():
        o, ht, h = kda.chunk_kda(**x, cu_seqlens=offsets.to(DEVICE), cu_seqlens_cpu=offsets,
                                 return_intermediate_states=True)
        assert o[:, : offsets[-2]].numel() == 2**31 and h[:, :-3].numel() > 2**31
        for n, start, end, part in parts(x, offsets.tolist()):
            o_n, ht_n, h_n = kda.chunk_kda(**part, return_intermediate_states=True)
            assert torch.equal(o[:, start:end], o_n) and torch.equal(ht[n : n + 1], ht_n)
            assert torch.equal(h[:, start // 64 : start // 64 + h_n.shape[1]], h_n)


@pytest.mark.slow
def test_gradients_of_more_elements_than_an_int32_counts():
    needs(100)
    offsets = torch.tensor([0, *BEYOND]).cumsum(0)
    x = tokens(sum(BEYOND), H=16, HV=128, V=16) | dict(batch_invariant=True)
    do = torch.randn_like(x["v"])
    grads = kda.chunk_kda_bwd(do=do, **x, cu_seqlens=offsets.to(DEVICE))
    assert grads.dg[:, : offsets[-2]].numel() == 2**31
    for _, start, end, part in parts(x, offsets.tolist()):
        alone = kda.chunk_kda_bwd(do=do[:, start:end], **part)
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(getattr(grads, name)[:, start:end], getattr(alone, name)), (name, start)


@pytest.mark.slow
def test_rows_of_a_batch_beyond_an_int32():
    needs(90)
    x = tokens(2**17, B=2, H=16, HV=128, V=16) | dict(output_final_state=True, batch_invariant=True)
    with torch.inference_mode():
        o, ht = kda.chunk_kda(**x)
        assert x["g"][:1].numel() == 2**31
        o_1, ht_1 = kda.chunk_kda(**x | {name: x[name][1:] for name in ROWS})
    assert torch.equal(o[1:], o_1) and torch.equal(ht[1:], ht_1)
