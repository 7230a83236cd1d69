"""chunk_kda of the Triton backend, run on the CPU from its PTX: every run of stages against its oracle, whole calls
against the definition, the same bits where they are promised, and faults that the budgets must notice.
"""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cute_calls import COMMIT, LAYOUTS, seen_trained
from kernel_faults import Fault, copy_backend
from triton_calls import Unbuilt, built_here, forget_plans, same_bits

import kda
from kda.backends.triton import call, plan
from kda.model.bundles import Save
from kda.model.host import host_of
from kda.model.problem import Problem
from kda.model.stages import find
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import Oracle, alone, describe, judge, packed_vs_alone
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.target import parse

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_built_here")]


# calls


class KeepsAll(SimulatedDoor):
    """A door whose calls save all that the backward wants: then nothing has to be built twice."""

    def chunk_kda(self, **keywords):
        return super().chunk_kda(**{"disable_recompute": True} | keywords)


def door(arch, **options):
    return KeepsAll("triton", parse(arch), **options)


def assert_clean(findings):
    assert not findings, "\n".join(map(str, findings[:5]))


def changed(case, **given):
    """Return the case with some inputs replaced: by None, or by what a function makes of them."""
    new = {name: change and change(case.keywords[name]) for name, change in given.items()}
    return dataclasses.replace(case, keywords=case.keywords | new)


def trained(arch, case, **options):
    """Return o, the final states and the gradients of one call by name, states as (K, V)."""
    found, findings = seen_trained(case, "triton", dict(arch=arch), **{"disable_recompute": True} | options)
    assert_clean(findings)
    return found


def check(case, found, limits=None):
    """Check that every result is within its budget."""
    limits = limits or budgets(case, Door("triton", "cpu").rounding(case))
    assert found.keys() == limits.keys()
    rows = [judge("call", name, limit, found[name], case, whole=True) for name, limit in limits.items()]
    assert not any(row.wrong for row in rows), "\n".join(describe(row) for row in rows if row.wrong)


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    assert not [name for name in a if not same_bits(a[name], b[name])]


# every option


def cast(dtype):
    return lambda x: x.to(getattr(torch, dtype))


RAGGED = (65, 0, 1, 30)
ROWS = {
    "bfloat16, packed, bounded gate, GVA": ("sm90", dict(lengths=RAGGED, padding=5, HV=2, K=32, V=16)),
    "a batch of that": ("sm90", dict(B=2, T=70, HV=2, K=32, V=16)),
    "softplus gate, states (V, K) in q's dtype": (
        "sm80", dict(lengths=RAGGED, K=16, V=32, gate="softplus", regime="fast", beta="2*sigmoid"),
        dict(state_v_first=True), dict(dt_bias=None, initial_state=cast("bfloat16")),
    ),
    "float16, all given, no initial state, K=72 V=40, chunks of 32": (
        "sm100", dict(T=40, K=72, V=40, C=32, dtype="float16", gate="given", beta="given", l2norm=False,
                      initial_state=False), dict(scale=-0.3), dict(g=cast("float32"), beta=cast("bfloat16")),
    ),
    "float32, bounded gate alone, many tokens of none": (
        "sm80", dict(lengths=RAGGED, padding=40, K=16, V=16, C=32, dtype="float32"), {}, dict(A_log=None)
    ),
    "one softplus gate per head, GVA, slices of K": (
        "sm90", dict(lengths=RAGGED, padding=40, HV=2, K=72, V=16, gate="softplus", gate_per_head=True, seed=1)
    ),
    "float32, one gate per head, a batch": (
        "sm80", dict(B=2, T=40, K=32, V=16, C=32, dtype="float32", gate_per_head=True), {}, dict(dt_bias=None)
    ),
    "float16, one decay per head": (
        "sm100", dict(lengths=RAGGED, K=32, V=16, dtype="float16", gate="given", gate_per_head=True)
    ),
}
PACKED, BATCH, SOFTPLUS, GIVEN, FLOAT32, PER_HEAD, *OTHERS_PER_HEAD = ROWS
RARELY_A_BATCH = pytest.mark.parametrize("name", [PACKED, pytest.param(BATCH, marks=pytest.mark.exhaustive)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm110", "sm121"])
def test_thor_and_gb10_compute_what_the_definition_says(arch):
    case = make_inputs(T=70, H=1, K=32, V=16, gate="bounded")
    check(case, trained(arch, case))


class Row:
    """One of ROWS: the case, and what was found out about it."""

    def __init__(self, name):
        self.arch, words, self.options, given = (*ROWS[name], {}, {})[:4]
        self.case = changed(make_inputs(**dict(H=1) | words), **given)
        if "scale" in self.options:
            keywords = self.case.keywords | {"scale": self.options["scale"]}
            self.case = dataclasses.replace(self.case, keywords=keywords)

    @functools.cached_property
    def rounding(self):
        return Door("triton", "cpu").rounding(self.case)

    @functools.cached_property
    def oracle(self):
        return Oracle(self.case, self.rounding)

    @functools.cached_property
    def limits(self):
        return budgets(self.case, self.rounding)

    @functools.cached_property
    def found(self):
        return self.trained()

    def trained(self, case=None, **options):
        return trained(self.arch, case or self.case, **self.options | options)


row_of = functools.cache(Row)


@pytest.fixture(scope="module", params=[PACKED, *(pytest.param(name, marks=COMMIT) for name in (SOFTPLUS, BATCH)), *(
    pytest.param(name, marks=pytest.mark.exhaustive) for name in (GIVEN, FLOAT32, PER_HEAD, *OTHERS_PER_HEAD)
)])
def row(request):
    return row_of(request.param)


@pytest.mark.spread(every=6)
@pytest.mark.slow
@pytest.mark.parametrize("stage", Door("triton", "cpu").stages)
def test_each_run_of_stages_is_its_oracle(row, stage):
    simulated = door(row.arch)
    wrong = [describe(found) for found in alone(simulated, row.case, find(stage), row.oracle) if found.wrong]
    assert not wrong, "\n".join(wrong)
    assert simulated.launches
    assert_clean(simulated.findings)


def test_a_call_is_the_definition(row):
    check(row.case, row.found, row.limits)


@pytest.mark.exhaustive
@pytest.mark.commit
def test_one_gate_per_head_has_the_bits_of_the_same_gate_for_each_channel_and_the_sums_of_its_gradients():
    case = changed(row_of(PER_HEAD).case, g=lambda g: g.float())
    K = case.spec.K
    per_channel = changed(case, g=lambda g: g[..., None].expand(*g.shape, K), dt_bias=lambda x: x.repeat_interleave(K))
    found, wanted = trained("sm90", case), trained("sm90", per_channel)
    sums = {"dg": wanted["dg"].sum(-1), "dA_log": wanted["dA_log"], "ddt_bias": wanted["ddt_bias"].view(-1, K).sum(-1)}
    for name, exact in sums.items():
        assert (found.pop(name) - exact).abs().max() < 1e-5 * exact.abs().max(), name
        del wanted[name]
    assert_same_bits(found, wanted)


def test_tokens_of_no_sequence_have_zeros(row):
    end = sum(row.case.spec.lengths or row.case.spec.shape[1:])
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not row.found[name][:, end:].any(), name


# ways to the same numbers

# Most cases have the head dims of ROWS, whose kernels are there; a row that is not of a power of two wants its own.
any_dims = pytest.mark.parametrize(
    "K, V", [(32, 16), pytest.param(72, 40, marks=pytest.mark.exhaustive)], ids=["K=32 V=16", "K=72 V=40"]
)


@pytest.mark.parametrize("padding", [0, 140])
@any_dims
def test_what_is_kept_is_zero_where_no_token_and_no_chunk_is(K, V, padding):
    case, lengths = make_inputs((65, 0, 128), padding=padding, H=1, HV=2, K=K, V=V), (65, 0, 128)
    with capture(arch="sm90") as session:
        saved = kda.chunk_kda_fwd(**case.keywords, disable_recompute=True, backend="triton").saved.tensors
    assert_clean(session.findings)
    for name, x in saved._asdict().items():
        end = 4 if name in ("h", "gc_last") else sum(lengths)
        assert x.isfinite().all() and x[:end].any() and not x[end:].any(), name


def recorded(row, **options):
    """Return the results of the call by way of autograd."""
    simulated = SimulatedDoor("triton", parse(row.arch))
    found = simulated.call(row.case, True, **{"disable_recompute": True} | row.options | options)
    assert_clean(simulated.findings)
    return found


@pytest.mark.slow
@RARELY_A_BATCH
@pytest.mark.parametrize("kept", [pytest.param(Save.NOTHING, marks=pytest.mark.exhaustive), Save.PRODUCTS])
def test_what_is_not_kept_is_made_again(kept, name, monkeypatch):
    """`products` is what a recorded forward on a GPU keeps."""
    row = row_of(name)
    monkeypatch.setattr("kda.routing.dispatch.what_is_saved", lambda *asked: kept)
    check(row.case, recorded(row, disable_recompute=False), row.limits)


@RARELY_A_BATCH
def test_autograd_gives_what_the_two_functions_give(name):
    row = row_of(name)
    assert_same_bits(recorded(row), row.found)


@RARELY_A_BATCH
def test_torch_func_gives_the_same_gradients_and_refuses_tangents(name):
    row = row_of(name)
    keywords = row.case.keywords | {"disable_recompute": True, "backend": "triton"}

    def outputs(q):
        return kda.chunk_kda(**keywords | {"q": q})

    with capture(arch=row.arch):
        _, pull = torch.func.vjp(outputs, keywords["q"])
        assert same_bits(pull((row.case.do, row.case.dht))[0], row.found["dq"])
        with pytest.raises(kda.KdaError, match="found backend 'triton', whose kernels have no such derivative"):
            torch.func.jvp(outputs, (keywords["q"],), (keywords["q"],))


def test_results_have_the_shapes_of_inputs_and_are_no_views():
    row = row_of(PACKED)
    case = changed(row.case, A_log=lambda x: x.view(1, 1, -1, 1).bfloat16(), dt_bias=lambda x: x.view(x.numel(), 1))
    leaves = [x for n in DIFFERENTIABLE if (x := case.keywords[n]) is not None]
    with capture(arch=row.arch):
        keywords = case.keywords | dict(backend="triton", disable_recompute=True)
        out = kda.chunk_kda_fwd(**keywords)
        grads = kda.chunk_kda_bwd(do=case.do, saved=out.saved, **keywords)
        *_, h = kda.chunk_kda(**keywords, return_intermediate_states=True)
    for x, grad in zip(leaves, (grad for grad in grads if grad is not None), strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
    assert not [x for x in (out.o, out.final_state, h, *out.saved.tensors, *grads) if x is not None and x._is_view()]


@pytest.mark.parametrize("name", [PACKED, pytest.param(GIVEN, marks=COMMIT)])
def test_a_loss_on_the_outputs_alone_has_gradients(name):
    row = row_of(name)
    silent = dataclasses.replace(row.case, dht=torch.zeros_like(row.case.dht))
    keywords = row.case.keywords | dict(backend="triton", disable_recompute=name == PACKED)
    with capture(arch=row.arch) as session:
        saved = kda.chunk_kda_fwd(**keywords).saved if name == PACKED else None
        grads = kda.chunk_kda_bwd(do=row.case.do, saved=saved, **keywords)
    assert_clean(session.findings)
    found = {name: grad for name, grad in grads._asdict().items() if grad is not None}
    limits = {name: limit for name, limit in budgets(silent, row.rounding).items() if name not in ("o", "ht")}
    check(silent, found, limits)


@pytest.mark.parametrize("v_first", [False, True], ids=["(K, V)", "(V, K)"])
def test_intermediate_states_enter_their_chunks(v_first):
    row = row_of(PACKED)
    turned = (lambda x: x.mT.contiguous()) if v_first else (lambda x: x)
    prefix = changed(row.case, cu_seqlens=lambda x: torch.tensor([0, 64]), initial_state=lambda x: x[:1],
                     **dict.fromkeys(("q", "k", "v", "g", "beta"), lambda x: x[:, :64]))
    with capture(arch=row.arch) as session:
        keywords = changed(row.case, initial_state=turned).keywords | dict(state_v_first=v_first, backend="triton")
        _, _, h = kda.chunk_kda(**keywords, return_intermediate_states=True)
        _, after_64 = kda.chunk_kda(**prefix.keywords, backend="triton")
    assert_clean(session.findings)
    initial = row.case.keywords["initial_state"]
    expected = torch.stack([initial[0], after_64[0], initial[2], initial[3]]).bfloat16()
    assert same_bits(h, turned(expected).unsqueeze(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_may_lie_in_any_order(layout):
    row = row_of(PACKED)
    apart = row.case.map(lambda x: LAYOUTS[layout](x) if x.is_floating_point() else x)
    assert_same_bits(row.trained(apart), row.found)


def test_offsets_may_be_int32():
    row = row_of(PACKED)
    assert_same_bits(row.trained(changed(row.case, cu_seqlens=cast("int32"))), row.found)


def test_inputs_are_left_alone():
    row = row_of(PACKED)
    case = row.case.map(torch.clone)
    row.trained(case)
    for name, x in row.case.keywords.items():
        assert not isinstance(x, torch.Tensor) or same_bits(case.keywords[name], x)


# segments


LONG = dict(lengths=(200, 0, 1, 70), padding=5, HV=2, K=32, V=16)


@pytest.mark.slow
def test_a_sequence_in_segments_is_the_definition(force):
    """Segments of a chunk each, of two, and of all."""
    long = changed(make_inputs(H=1, **LONG))
    limits = budgets(long, row_of(PACKED).rounding)
    for chunks in (1, 2, 9):
        force(segment_chunks=chunks)
        check(long, trained("sm90", long), limits)


# the same bits


@pytest.mark.slow
def test_alone_and_packed_have_the_same_bits(force):
    """Segments have two chunks."""
    force(segment_chunks=2)
    simulated = door("sm90")
    case = make_inputs(H=1, **LONG | dict(lengths=(150, 0, 1, 64)))
    differ = [row for row in packed_vs_alone(simulated, case, backward=True) if row.wrong]
    assert not differ, "\n".join(map(describe, differ))
    assert_clean(simulated.findings)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("schedule", [1, 2])
def test_any_order_of_warps_gives_the_same_bits(schedule):
    row = row_of(PACKED)
    simulated = door(row.arch, schedule=schedule, early=True)
    assert_same_bits(simulated.call(row.case, True), row.found)
    assert_clean(simulated.findings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [BATCH, SOFTPLUS, FLOAT32])
def test_no_output_depends_on_later_tokens(name):
    row = row_of(name)
    for t in (1, 9, 33, 40, 50):
        later = changed(row.case, **dict.fromkeys(("q", "k", "v", "g", "beta"), lambda x, t=t: other_from(x, t)))
        assert same_bits(row.trained(later)["o"][:, :t], row.found["o"][:, :t]), t


def other_from(x, t):
    """Return other numbers from token t on."""
    x = x.clone()
    x[:, t:] = 3 * torch.randn(x[:, t:].shape, generator=torch.Generator().manual_seed(t)).to(x.dtype)
    return x


# gates and keys at their limits


GATES = {
    "logits of minus infinity": (SOFTPLUS, dict(g=lambda x: x.index_fill(1, torch.arange(3, 96, 9), -torch.inf))),
    "rates of e^50": (SOFTPLUS, dict(A_log=lambda x: x + 50)),
    "logits of 1000": (SOFTPLUS, dict(g=lambda x: x.index_fill(1, torch.arange(3, 96, 9), 1000.0))),
    "every token at the lower bound": (PACKED, dict(g=lambda x: torch.full_like(x, 1e9))),
    "every other token at the lower bound": (
        PACKED, dict(g=lambda x: torch.full_like(x, -20.0).index_fill(1, torch.arange(0, 101, 2), 20.0))
    ),
    "all of it forgotten at once": (FLOAT32, dict(g=lambda x: x.index_fill(1, torch.arange(3, 96, 9), 1e9))),
    "nothing forgotten": (FLOAT32, dict(g=lambda x: torch.full_like(x, -1e9))),
    "given decays of 0 and of -1e6": (GIVEN, dict(g=lambda x: x.index_fill(1, torch.arange(3, 40, 9), -1e6) * 0.01)),
}


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("name", GATES)
def test_a_saturated_gate_is_the_definition(name):
    which, given = GATES[name]
    case = changed(row_of(which).case, **given)
    check(case, row_of(which).trained(case))


SATURATED = dict(g=lambda x: torch.full_like(x, 20.0))    # every token at the lower bound, and its slope still normal
LOSSES = {
    "blocks of 32 rows": (PACKED, SATURATED), "blocks of 32 rows, open gates": (PACKED, {}),
    "by halving": (SOFTPLUS, {}), "float32": (FLOAT32, {}),
}


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_any_size_have_the_same_bits(name):
    """A loss times 2^60 or 2^-60, before or after: nothing overflows or vanishes on the way."""
    which, given = LOSSES[name]
    row = row_of(which)
    case = changed(row.case, **given)
    expected = row.trained(case) if given else row.found
    for size in (2.0**60, 2.0**-60):
        found = row.trained(dataclasses.replace(case, do=size * case.do, dht=size * case.dht))
        for gradient, x in found.items():
            factor = size if gradient.startswith("d") else 1.0
            assert torch.equal(x, factor * expected[gradient]), (size, gradient)


@pytest.mark.exhaustive
def test_gradients_without_l2norm_of_any_size_have_the_same_bits():
    """Blocks of 16 rows, all of whose tokens are at the lower bound."""
    case = changed(make_inputs(T=70, H=1, K=32, V=16, gate="bounded", l2norm=False), **SATURATED)
    expected = trained("sm90", case)
    for size in (2.0**60, 2.0**-60):
        found = trained("sm90", dataclasses.replace(case, do=size * case.do, dht=size * case.dht))
        assert all(torch.equal(found[name], size * expected[name]) for name in found if name.startswith("d"))


@pytest.mark.exhaustive
@pytest.mark.commit
def test_a_given_decay_of_minus_infinity_forgets():
    row = row_of(GIVEN)
    forgetting = changed(row.case, g=lambda x: x.index_fill(1, torch.tensor([20]), -torch.inf))
    before = changed(forgetting, v=lambda x: torch.cat([x[:, :20] + 1, x[:, 20:]], 1))
    a, b = row.trained(forgetting), row.trained(before)
    assert all(x.isfinite().all() for x in a.values())
    assert same_bits(a["o"][:, 20:], b["o"][:, 20:]) and same_bits(a["ht"], b["ht"])
    assert not same_bits(a["o"][:, :20], b["o"][:, :20])


def test_identical_keys():
    """The matrix to be inverted is as far from the identity as it gets."""
    row = row_of(SOFTPLUS)
    case = changed(row.case, k=lambda x: x[:, :1].expand(x.shape).contiguous(), g=lambda x: torch.full_like(x, -30.0))
    check(case, row.trained(case))


def test_inputs_far_from_one():
    """q, k and v of 2^12, and a step size of almost 2."""
    row = row_of(SOFTPLUS)
    large = changed(row.case, **dict.fromkeys(("q", "k", "v"), lambda x: 4096 * x), beta=lambda x: x + 8)
    check(large, row.trained(large))


@pytest.mark.parametrize("size", [2.0**-12, 2.0**40])
def test_pairs_without_decay_after_the_longest_one_whatever_the_norms(size):
    """The decay of a block of rows uses up the range of bfloat16: nothing is left for norms."""
    sized = dict.fromkeys(("q", "k"), lambda x: size * x)
    last = (torch.arange(64) % 32 >= 28).view(-1, 1, 1)
    case = make_inputs(T=64, H=1, K=32, V=16, gate="bounded")
    case = changed(case, g=lambda x: torch.where(last, -1e9, 1e9).to(x.dtype).expand_as(x).contiguous(), **sized)
    check(case, trained("sm90", case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("C", [32, 64])
def test_every_token_at_the_lower_bound_without_l2norm(C):
    case = make_inputs(T=70, H=1, K=32, V=16, C=C, gate="bounded", l2norm=False)
    case = changed(case, g=lambda x: torch.full_like(x, 1e9))
    check(case, trained("sm90", case))


@pytest.mark.parametrize(
    "words, rows",
    [
        ("bfloat16 bounded lower_bound=-5 l2norm", 32),
        ("bfloat16 bounded lower_bound=-5", 16),
        ("bfloat16 bounded lower_bound=-8 l2norm", 1),
        ("bfloat16 bounded lower_bound=-5 l2norm C=32", 16),
        ("float16 bounded lower_bound=-5 l2norm", 1),
        ("float32 bounded lower_bound=-5 l2norm", 1),
        ("bfloat16 softplus l2norm", 1),
        ("bfloat16 gate=given lower_bound=-5 l2norm", 1),
    ],
)
def test_blocks_are_as_large_as_a_bound_allows(words, rows):
    assert plan.span(Problem.parse(words)) == rows


TUNED = [
    ("sm90", 128, "bounded", "bfloat16"), ("sm90", 128, "softplus", "bfloat16"), ("sm80", 128, "bounded", "bfloat16"),
    ("sm100", 128, "bounded", "bfloat16"), ("sm90", 64, "bounded", "bfloat16"), ("sm90", 256, "bounded", "bfloat16"),
    ("sm80", 256, "bounded", "bfloat16"), ("sm90", 128, "bounded", "float32"), ("sm80", 128, "softplus", "bfloat16"),
    ("sm80", 64, "bounded", "bfloat16"), ("sm86", 128, "bounded", "bfloat16"),
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("arch, dim, gate, dtype", TUNED)
def test_the_configurations_of_the_table_are_clean(arch, dim, gate, dtype):
    """Head dims as large as rows are made for, and more chunks than a pipeline has stages: loops run round."""
    case = make_inputs(T=200, H=1, K=dim, V=dim, gate=gate, dtype=dtype)
    check(case, trained(arch, case, disable_recompute=False))


# nothing at all


@pytest.mark.spread(every=24)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("lengths", [(0,), (0, 0), ()], ids=str)
@pytest.mark.parametrize("K, V", [(32, 16), (40, 24)], ids=["K=32 V=16", "K=40 V=24"])
def test_sequences_of_no_tokens_hand_their_states_through(K, V, lengths, arch):
    """Ten tokens beside them belong to nobody."""
    case = make_inputs(lengths, H=1, HV=2, K=K, V=V, padding=10)
    found = trained(arch, case)
    assert same_bits(found.pop("ht"), case.keywords["initial_state"]) and same_bits(found.pop("dh0"), case.dht)
    assert not any(x.any() for x in found.values())


@pytest.mark.parametrize("shape", [dict(B=2, T=0), dict(B=0, T=5)], ids=str)
def test_a_batch_of_nothing(shape):
    row = row_of(BATCH)
    case = make_inputs(H=1, HV=2, K=32, V=16, **shape)
    found = row.trained(case)
    assert same_bits(found.pop("ht"), case.keywords["initial_state"]) and same_bits(found.pop("dh0"), case.dht)
    assert not any(x.any() for x in found.values())


# faults

FORWARD_CHUNK, FORWARD_STATE, BACKWARD_STATE, BACKWARD_CHUNK = Door("triton", "cpu").stages
FAULTS = {
    "a token does not read what it wrote": Fault(
        "triton/fwd/prepare", PACKED, FORWARD_CHUNK, "i[None, :], qk[:, None], Aqk)", "i[None, :], 0.0, Aqk)"
    ),
    "a level takes its whole block": Fault(
        "triton/parts/halving", GIVEN, BACKWARD_CHUNK,
        "(half ^ 1)[:, None] == half", "(half | 1)[:, None] == (half | 1)"
    ),
    "the gate's derivative with the wrong sign": Fault(
        "triton/parts/gate", PACKED, BACKWARD_CHUNK, "dy = dg2 *", "dy = -dg2 *"
    ),
    "a state that grows where it should decay": Fault(
        "triton/fwd/state", PACKED, FORWARD_STATE, "S[s] * decay[:, None]", "S[s] / decay[:, None]"
    ),
    "rows of the next sequence": Fault(
        "triton/fwd/state", PACKED, FORWARD_STATE,
        "tl.minimum(left, segment * C)\n    if FINISH", "tl.minimum(segment * C, T - begin)\n    if FINISH"
    ),
    "a gate per head that only its first slice of channels reaches": Fault(
        "triton/bwd/norms", PER_HEAD, BACKWARD_CHUNK, "offset, ROWS, SHARES - 1)", "offset, ROWS, 1)"
    ),
    "a gate per head without its bias": Fault(
        "triton/fwd/prepare", PER_HEAD, FORWARD_CHUNK, "x += tl.load(dt_bias).to", "x += 0 * tl.load(dt_bias).to"
    ),
    "dv_new goes back through w with the wrong sign": Fault(
        "triton/bwd/state", PACKED, BACKWARD_STATE, "(-x).to(DOT)", "x.to(DOT)"
    ),
}


@pytest.mark.spread(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch):
    row = row_of(FAULTS[fault].case)
    package = f'{copy_backend("triton", FAULTS[fault], tmp_path, monkeypatch)}.triton'
    monkeypatch.setattr(call, "fetch_all", lambda recipes: [Unbuilt(recipe, package) for recipe in recipes])
    forget_plans()
    assert any(found.wrong for found in alone(door(row.arch), row.case, find(FAULTS[fault].noticed), row.oracle))


# the plan


def problem(**words):
    words = dict(B=1, T=8192, N=1, H=8, HV=8) | words
    return Problem(gate="bounded", lower_bound=-5.0, A_log=True, dt_bias=True, qk_l2norm=True, **words)


SIZES = [dict(), dict(T=100), dict(T=65536, H=1, HV=1), dict(B=4, N=4, T=1024, H=64, HV=64), dict(T=0)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("words", [dict(), dict(packed=True), dict(disable_recompute=True), dict(dtype="float32")],
                         ids=str)
def test_kernels_built_ahead_of_time_are_those_of_calls_of_any_size(direction, words):
    host = host_of("sm90")
    built = set(plan.recipes(problem(direction=direction, **words), host))
    for size in SIZES:
        p = problem(direction=direction, **words | size)
        for saved in (Save.ALL,) if p.disable_recompute else (Save.NOTHING, Save.PRODUCTS):
            assert set(plan.plan(p, host, saved).kernels.values()) <= built


def test_idle_chips_have_their_sequences_cut_and_busy_ones_do_not():
    sms = 132
    assert plan.split(problem(T=65536, H=1, HV=1), sms, 64) > 0
    assert plan.split(problem(T=65536, H=128, HV=128), sms, 64) == 0
    assert plan.split(problem(T=64), sms, 64) == 0


def test_under_batch_invariant_no_sequence_is_cut():
    cuts = {plan.split(problem(packed=True, batch_invariant=True, T=T, N=N), 132, 64)
            for T, N in ((64, 1), (65536, 1), (65536, 16), (8192, 300))}
    assert cuts == {0}


@pytest.mark.parametrize("T,N", [(0, 1), (1, 1), (64, 1), (65, 3), (8192, 7), (10, 200)])
def test_there_is_room_for_every_chunk_and_segment(T, N):
    """Packed in the worst way: one long sequence, and a token for every other."""
    found = plan.plan(problem(T=T, N=N, packed=True), host_of("sm90"))
    others = min(T, N - 1)
    lengths = [T - others] + [1] * others + [0] * (N - 1 - others)
    chunks = [-(-n // 64) for n in lengths]
    assert sum(chunks) <= found.chunk_bound
    assert sum(max(1, -(-n // found.segment)) for n in chunks) <= found.all_segments


def tables_of(lengths, padding, segment):
    """Compute the tables of chunks and segments of 64 rows, in Python."""
    T, chunks, segments, first, begin = sum(lengths) + padding, [], [], [], 0
    for n, length in enumerate(lengths):
        its_chunks = [(begin + start, min(length - start, 64)) for start in range(0, length, 64)]
        first.append(len(segments))
        for j in range(max(1, -(-len(its_chunks) // segment))):
            skipped = j * segment * 64
            segments.append((n, j, begin + skipped, length - skipped, len(chunks) + j * segment))
        chunks += its_chunks
        begin += length
    idle = [(start, -min(T - start, 64)) for start in range(begin, T, 64)]
    return T, chunks, idle, segments, [*first, len(segments)], begin


MANY = [int(x) for x in torch.randint(0, 150, (300,), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("lengths, padding, segment", [
    ([5000, 0, 64, 1], 0, 1000), ([5000, 0, 64, 1], 200, 16), ([], 130, 1), (MANY, 1, 2),
], ids=["long", "in segments", "nobody", "many"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tables_say_where_chunks_and_segments_lie(lengths, padding, segment, dtype):
    T, chunks, idle, segments, first, taken = tables_of(lengths, padding, segment)
    N, recipe = len(lengths), plan.plan(problem(packed=True), host_of("sm90")).kernels["tables " + dtype]
    bounds = T // 64 + N + 1, len(segments) + 3
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(getattr(torch, dtype))
    out = {"chunk_table": torch.full((bounds[0], 2), 77), "segment_table": torch.full((bounds[1], 5), 77),
           "first_segment": torch.full((N + 1,), 77, dtype=torch.int32), "taken": torch.tensor([77])}
    given = {"cu_seqlens": cu_seqlens, "T": T, "N": N, "C": 64, "segment": segment, "chunk_entries": bounds[0],
             "segment_entries": bounds[1], **out}
    kernel, programs = built_here(recipe), max(1, -(-T // (64 * recipe.constants["RUN"])))
    with capture(arch="sm_90") as session:
        kernel.launch(programs, *(given[name] for name in kernel.names))
    assert_clean(session.findings)
    found = [tuple(x) for x in out["chunk_table"].tolist()]
    assert found[: len(chunks)] == chunks and found[len(chunks) :][: len(idle)] == idle
    assert all(rows == 0 for _, rows in found[len(chunks) + len(idle) :])
    found = [tuple(x) for x in out["segment_table"].tolist()]
    assert found[: len(segments)] == segments and [x[0] for x in found[len(segments) :]] == [-1] * 3
    assert out["first_segment"].tolist() == first and out["taken"].item() == taken
