"""The recurrent kernel of the Triton backend, run on the CPU from its PTX, against the reference in float64."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from triton_calls import building_here, built_here, compiled, same_bits, with_texts

import kda
from kda.backends.common import triton_launch
from kda.backends.common.triton_types import target_of
from kda.backends.reference import launch as reference
from kda.backends.triton.decode import launch, recurrent_plan
from kda.checks.calls import Call, problem_of
from kda.model.force import Force
from kda.model.host import host_of
from kda.model.problem import Options, Problem
from kda.tools.verify.budget import Budget, shaken, shakes
from kda.tools.verify.cases import make_inputs
from ptxkit import capture

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]
OPTIONS = dict(scale=None, final=True, v_first=False, inplace=False, batch_invariant=False)


@pytest.fixture(autouse=True)
def kernels_built_here(monkeypatch):
    with building_here(monkeypatch):
        yield


# calls


def call(lengths=(3, 0, 5, 1), index=torch.int64, given=None, **words):
    """Return a Problem and its Inputs: the options of this file, tensors by name in `given`, the rest as in
    kda.tools.verify."""
    options = {name: words.pop(name, default) for name, default in OPTIONS.items()}
    shape = dict(H=2, K=32, V=16, padding=2 if lengths else 0) | words
    case = make_inputs(lengths, **shape)
    x = case.inputs
    if options["v_first"] and x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.mT.contiguous())
    if x.cu_seqlens is not None:
        x = x._replace(cu_seqlens=x.cu_seqlens.to(index))
    x = x._replace(**{n: t(getattr(x, n)) if callable(t) else t for n, t in (given or {}).items()})
    return problem(x, case.keywords, **options), x


def problem(x, keywords, scale, final, v_first, inplace, batch_invariant):
    words = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    options = Options(
        scale=x.q.shape[-1] ** -0.5 if scale is None else scale, output_final_state=final, state_v_first=v_first,
        inplace_final_state=inplace, batch_invariant=batch_invariant, lower_bound=keywords.get("lower_bound"),
        **{word: keywords.get(word, False) for word in words},
    )
    return problem_of(Call("fused_recurrent_kda", x, options))


def pooled(p, x, slots, size, dtype=torch.float32, **others):
    """Return the call on a pool of random states."""
    shape = (size, p.HV, *((p.V, p.K) if p.state_v_first else (p.K, p.V)))
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x = x._replace(initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=others.pop("accepted", None))
    words = dict(
        state_dtype=str(dtype).removeprefix("torch."), slots=size, slots_per_token=slots.dim() == 2,
        accepted_tokens=x.num_accepted_tokens is not None, inplace=True,
    )
    return dataclasses.replace(p, **words | others), x


def run(arch, p, x, **options):
    """Return o and the states; inputs stay as they are, a state that is written in place is a copy."""
    if p.inplace:
        x = x._replace(initial_state=x.initial_state.clone())
    with capture(arch=arch, **options) as session:
        o, ht = launch.recurrent(p, x)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert len(session.launches) == 1 and (ht is None) == (p.inplace or not p.final_state)
    return o, x.initial_state if p.inplace else ht


def exactly(p, x, dtype=torch.float64, given=lambda t: t):
    """Return the results of the reference in one dtype."""
    floats = {n: given(t.to(dtype)).clone() for n, t in x._asdict().items() if t is not None and t.is_floating_point()}
    x = x._replace(**floats)
    o, ht = reference.recurrent(p, x)
    return o, x.initial_state if p.inplace else ht


def budgets(p, x):
    """Return the budget of o, and of the states if there are any."""
    exact = exactly(p, x)
    shaking = [functools.partial(shaken, shake=i) for i in shakes(x.g.numel())]
    rounded = [exactly(p, x, torch.float32, given) for given in (lambda t: t, *shaking)]
    stored = x.q.dtype, x.initial_state.dtype if p.inplace else torch.float32
    return [
        Budget.of(e, *(r.to(kept) for r in rs), compute=torch.float32, stored=kept, summed=p.K)
        for e, kept, *rs in zip(exact, stored, *rounded)
        if e is not None
    ]


def check(p, x, found):
    for name, budget, tensor in zip(("o", "states"), budgets(p, x), found):
        measure = budget.measure(tensor)
        assert measure.used <= 1, f"{name} of {p}: {measure}"
    return found


# every option


def cast(dtype):
    return lambda t: t.to(getattr(torch, dtype))


def per_value(t):
    return torch.randn(*t.shape, 16, generator=torch.Generator().manual_seed(2)).to(t.dtype)


CASES = {
    "bfloat16": dict(),
    "float16, softplus gate, GVA": dict(dtype="float16", gate="softplus", HV=6),
    "float32, all given, a scale": dict(dtype="float32", gate="given", beta="given", l2norm=False, scale=-0.3),
    "a strong gate without dt_bias": dict(dtype="float32", gate="softplus", regime="fast", given=dict(dt_bias=None)),
    "bounded gate alone, 2*sigmoid": dict(beta="2*sigmoid", given=dict(A_log=None, dt_bias=None)),
    "g, beta, A_log, dt_bias of other dtypes": dict(
        given=dict(g=cast("float32"), beta=cast("float16"), A_log=cast("bfloat16"), dt_bias=cast("float16"))
    ),
    "a gate per head, GVA": dict(gate="softplus", HV=6, gate_per_head=True),
    "a decay per head, a row of a batch": dict(lengths=None, B=2, T=3, gate="given", gate_per_head=True, v_first=True),
    "a beta for every value": dict(given=dict(beta=per_value)),
    "rows of a batch, states (V, K)": dict(lengths=None, B=3, T=4, v_first=True),
    "no tokens": dict(lengths=None, B=2, T=0, v_first=True),
    "no sequences": dict(lengths=(), padding=5),
    "empty sequences and many tokens of none": dict(lengths=(0, 2, 0), padding=40),
    "one token each, in place": dict(lengths=None, B=3, T=1, K=128, V=128, inplace=True),
    "no initial state, int32 offsets": dict(initial_state=False, index=torch.int32),
    "no states at all": dict(initial_state=False, final=False),
    "states (V, K) in q's dtype, in place": dict(
        inplace=True, v_first=True, dtype="float16", given=dict(initial_state=cast("float16"))
    ),
    "K=60 V=100": dict(K=60, V=100, H=1),
    "K=100 V=60, states (V, K)": dict(K=100, V=60, H=1, v_first=True),
    "K=1 V=1": dict(K=1, V=1),
    "K=256": dict(K=256, V=3, H=1),
    "K=300, two warps": dict(K=300, V=12, H=1, dtype="float32"),
    "K=512, states (V, K) in place": dict(K=512, V=9, H=1, inplace=True, v_first=True),
    "K=1024, four warps": dict(lengths=None, B=1, T=2, K=1024, V=8, H=1, gate="softplus"),
    "bfloat16 states beside float32, in place": dict(
        inplace=True, dtype="float32", given=dict(initial_state=cast("bfloat16"))
    ),
    "float64 states beside bfloat16": dict(given=dict(initial_state=cast("float64"))),
}


@pytest.mark.spread(every=3, first=2)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name):
    p, x = call(**CASES[name])
    if not p.N:
        o, ht = launch.recurrent(p, x)
        assert not o.any() and ht.shape == (0, p.HV, p.K, p.V)
        return
    check(p, x, run("sm90", p, x))


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("arch,wide", [("sm80", 0), ("sm80", 1), ("sm90", 1), ("sm100", 0), ("sm100", 1)])
def test_it_is_the_definition_on_every_arch_and_in_every_tile(arch, wide):
    p, x = call(K=64, V=40, HV=4, gate="softplus", v_first=arch == "sm80")
    p = dataclasses.replace(p, force=Force(configs=(("recurrent", recurrent_plan.configs(p)[wide]),)))
    check(p, x, run(arch, p, x))


@pytest.mark.parametrize("schedule", [1, 2])
@pytest.mark.parametrize("words", [{}, dict(K=512, V=12, H=1)], ids=["one warp", "two warps"])
def test_any_order_of_warps_gives_the_same_bits(words, schedule):
    p, x = call(**words)
    for a, b in zip(run("sm90", p, x), run("sm90", p, x, schedule=schedule, early=True)):
        assert same_bits(a, b)


# gates that saturate


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_a_saturated_gate_gives_no_nan(gate):
    """Rates of e^200 and logits of 0, of both infinities and of all sizes."""
    logits = torch.tensor([0.0, -torch.inf, torch.inf, 1e30, -1e30, 1e-30, -5.0, 3.0])

    def extreme(g):
        return logits.repeat(g.numel() // 8).view(g.shape).to(g.dtype)

    words = dict(dtype="float32", given=dict(dt_bias=None)) if gate == "softplus" else dict(given={})
    words["given"] |= dict(g=extreme, A_log=lambda t: t + 200)
    p, x = call(gate=gate, padding=0, **words)
    o, ht = check(p, x, run("sm90", p, x))
    assert o.isfinite().all() and ht.isfinite().all()


@pytest.mark.parametrize("mask", [-torch.inf, -1e30, -100.0])
def test_a_given_decay_of_minus_infinity_forgets(mask):
    def forgetting(g):
        return g.index_fill(1, torch.tensor([4]), mask)

    p, x = call((9,), dtype="float32", gate="given", beta="given", given=dict(g=forgetting))
    o, ht = check(p, x, run("sm90", p, x))
    changed = x._replace(initial_state=x.initial_state + 1)
    o_changed, ht_changed = run("sm90", p, changed)
    assert same_bits(o[:, 4:], o_changed[:, 4:]) and same_bits(ht, ht_changed)
    assert not same_bits(o[:, :4], o_changed[:, :4])


@pytest.mark.parametrize("size", [0.25, 80.0, 100.0, 1e30])
def test_a_given_decay_above_zero_grows_a_state_until_that_is_not_finite(size):
    """e^80 is a float32, e^100 is not, and does not wrap round to something small."""

    def growing(g):
        return torch.zeros_like(g).index_fill(1, torch.tensor([4]), size)

    p, x = call((9,), dtype="float32", gate="given", beta="given", given=dict(g=growing, k=torch.zeros_like))
    _, ht = run("sm90", p, x)
    expected = x.initial_state.double() * torch.tensor(size, dtype=torch.float64).exp()
    finite = expected.float().isfinite()
    assert torch.equal(ht.isfinite(), finite)
    assert torch.allclose(ht[finite].double(), expected[finite], rtol=2e-5)


# pools


POOLS = {
    "a slot for each sequence": dict(slots=[4, 0, 2, 5]),
    "padding": dict(slots=[4, -1, -1, 0]),
    "int64 slots, states (V, K)": dict(slots=[4, 0, -1, 5], index=torch.int64, v_first=True),
    "states in q's dtype": dict(slots=[4, 0, 2, 5], dtype=torch.bfloat16),
    "states in another dtype than q's": dict(slots=[4, 0, 2, 5], dtype=torch.float16),
    "states in float64": dict(slots=[4, 0, -1, 5], dtype=torch.float64),
    "left alone": dict(slots=[4, -1, 2, 5], inplace=False, final_state=True),
    "slots for each token": dict(slots=[[4, 0, 2, -1, -1], [5] * 5, [6, 7, 8, 9, 10], [11] * 5]),
    "padding between": dict(slots=[[4, -1, 2, 1, 1], [5] * 5, [-1, 7, 8, 9, 10], [11] * 5]),
    "accepted tokens": dict(slots=[[4, 0, 2, 1, 3], [5] * 5, [6, 7, 8, 9, 10], [11] * 5], accepted=[2, 5, 4, 1]),
    "accepted tokens, padding": dict(slots=[[4, 0, -1, 1, 3], [5] * 5, [6, 7, 8, 9, 10], [-1] * 5],
                                     accepted=[3, 5, 4, 1]),
    "accepted tokens, left alone": dict(slots=[[4, 0, 2, 1, 3], [5] * 5, [6, 7, 8, 9, 10], [11] * 5],
                                        accepted=[2, 5, 4, 1], inplace=False, final_state=True),
}


def pool_call(slots, index=torch.int32, accepted=None, v_first=False, size=13, dtype=torch.float32, **words):
    """Return sequences of 3, 0, 5 and 1 tokens on a pool where every slot that they do not read is nan."""
    p, x = call(v_first=v_first)
    accepted = None if accepted is None else torch.tensor(accepted, dtype=index)
    words = dict(final_state=False) | words
    p, x = pooled(p, x, torch.tensor(slots, dtype=index), size, dtype, accepted=accepted, **words)
    return p, with_poison_in_slots(p, x)


def first_slots(x):
    if x.ssm_state_indices.dim() == 1:
        return x.ssm_state_indices.tolist()
    first = [0] * len(x.ssm_state_indices) if x.num_accepted_tokens is None else (x.num_accepted_tokens - 1).tolist()
    return [row[i] for row, i in zip(x.ssm_state_indices.tolist(), first)]


def written_slots(p, x):
    """Return the slots that are written: those of sequences that are not skipped and have tokens."""
    if not p.inplace:
        return set()
    lengths = x.cu_seqlens.diff().tolist()
    real = [n if first >= 0 else 0 for n, first in zip(lengths, first_slots(x))]
    slots = x.ssm_state_indices.view(p.N, -1).tolist()
    return {slot for row, n in zip(slots, real) for slot in row[:n] if slot >= 0}


def with_poison_in_slots(p, x):
    unread = [slot for slot in range(p.slots) if slot not in first_slots(x)]
    x.initial_state[unread] = torch.nan
    skipped = [n for n, slot in enumerate(first_slots(x)) if slot < 0]
    for n in skipped:
        for name in ("q", "k", "v", "g", "beta"):
            getattr(x, name)[:, x.cu_seqlens[n] : x.cu_seqlens[n + 1]] = torch.nan
    return x


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("name", POOLS)
def test_a_pool_is_read_and_written_at_its_slots_alone(name):
    p, x = pool_call(**POOLS[name])
    o, states = check(p, x, run("sm90", p, x))
    for n, slot in enumerate(first_slots(x)):
        if slot < 0:
            assert not o[:, x.cu_seqlens[n] : x.cu_seqlens[n + 1]].any()
            assert p.inplace or not p.final_state or not states[n].any()
    if p.inplace:
        kept = [slot for slot in range(p.slots) if slot not in written_slots(p, x)]
        assert same_bits(states[kept], x.initial_state[kept])


@pytest.mark.parametrize("layout", ["gaps between slots", "gaps between heads", "the other order", "gaps everywhere"])
def test_a_pool_may_have_any_strides(layout):
    p, x = pool_call([4, -1, 2, 0])
    plain = run("sm90", p, x)
    slots, HV, K, V = x.initial_state.shape
    memory, view = {
        "gaps between slots": ((slots, 3, HV, K, V), lambda m: m[:, 1]),
        "gaps between heads": ((slots, HV, 3, K, V), lambda m: m[:, :, 1]),
        "the other order": ((HV, slots, V, K), lambda m: m.permute(1, 0, 3, 2)),
        "gaps everywhere": ((slots, HV, K, 2, V, 3), lambda m: m[:, :, :, 1, :, 1]),
    }[layout]
    memory = torch.full(memory, torch.nan)
    view(memory).copy_(x.initial_state)
    outside = memory.clone()
    view(outside).zero_()
    with capture(arch="sm90") as session:
        o, _ = launch.recurrent(p, x._replace(initial_state=view(memory)))
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    check(p, x, (o, view(memory)))
    assert same_bits(o, plain[0])
    view(memory).zero_()
    assert same_bits(memory, outside)


def test_slots_may_have_any_strides():
    p, x = pool_call(**POOLS["accepted tokens"])
    memory = torch.full((2, 5, 3, 4), 99, dtype=torch.int32)
    slots = memory[1, :, 1].T
    slots.copy_(x.ssm_state_indices)
    spread = x._replace(ssm_state_indices=slots, num_accepted_tokens=x.num_accepted_tokens.repeat_interleave(2)[::2])
    for a, b in zip(run("sm90", p, x), run("sm90", p, spread)):
        assert same_bits(a, b)


# what nobody has looked at


@pytest.mark.parametrize("accepted", [[0, -7, 6, 2**30], [2**31 - 1, -(2**31), 0, 0]])
def test_counts_out_of_range_touch_no_other_memory(accepted):
    p, x = pool_call(**POOLS["accepted tokens"])
    clamped = torch.tensor(accepted).clamp(1, 5).int()
    o, pool = run("sm90", p, x._replace(num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32)))
    o_clamped, pool_clamped = run("sm90", p, x._replace(num_accepted_tokens=clamped))
    assert same_bits(o, o_clamped) and same_bits(pool, pool_clamped)


def test_slots_out_of_range_are_padding():
    p, x = pool_call([4, 0, 2, 5])
    wrong = torch.tensor([4, 13, -2, 2**31 - 1], dtype=torch.int32)
    o, pool = run("sm90", p, x._replace(ssm_state_indices=wrong))
    padding = torch.tensor([4, -1, -1, -1], dtype=torch.int32)
    o_padded, pool_padded = run("sm90", p, x._replace(ssm_state_indices=padding))
    assert same_bits(o, o_padded) and same_bits(pool, pool_padded)


def test_a_sequence_longer_than_its_slots_drops_the_last_states():
    p, x = pool_call([[4, 0, 2, 1, 3], [5] * 5, [6, 7, 8, 9, 10], [11] * 5])
    o, pool = run("sm90", p, x)
    o_short, pool_short = run("sm90", p, x._replace(ssm_state_indices=x.ssm_state_indices[:, :3]))
    assert same_bits(o, o_short) and same_bits(pool[:9], pool_short[:9])
    assert same_bits(pool_short[9:11], x.initial_state[9:11])


@pytest.mark.parametrize("offsets", [[-3, 3, 3, 8, 90], [2**62, 0, -(2**62), 5, 4]])
def test_offsets_out_of_range_touch_no_other_memory(offsets):
    p, x = call(padding=0)
    with capture(arch="sm90") as session:
        launch.recurrent(p, x._replace(cu_seqlens=torch.tensor(offsets)))
    assert {f.kind for f in session.findings} <= {"race-write-write"}    # two sequences may claim one token


# memory


def spread(x, axis):
    """Return the same numbers with nan between them along one axis."""
    memory = torch.full((*x.shape[: axis + 1], 2, *x.shape[axis + 1 :]), torch.nan, dtype=x.dtype)
    memory.select(axis + 1, 1).copy_(x)
    return memory.select(axis + 1, 1)


@pytest.mark.parametrize("axis", [1, 2, 3], ids=["tokens", "heads", "channels"])
def test_inputs_may_have_any_strides(axis):
    p, x = call(given=dict(beta=per_value))
    apart = x._replace(**{name: spread(getattr(x, name), axis) for name in ("q", "k", "v", "g", "beta")})
    for a, b in zip(run("sm90", p, x), run("sm90", p, apart)):
        assert same_bits(a, b)


def test_what_is_expanded_and_what_begins_at_any_element():
    p, x = call(lengths=None, B=2, T=3, v_first=True)
    one = x._replace(beta=x.beta[:1, :1].expand(x.beta.shape), q=x.q[:1].expand(x.q.shape))
    given = {name: t for name, t in one._asdict().items() if t is not None}
    copied = one._replace(**{n: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for n, t in given.items()})
    assert copied.q.data_ptr() % 16
    for a, b in zip(run("sm90", p, one), run("sm90", p, copied)):
        assert same_bits(a, b)


def test_memory_is_read_in_whole_sectors():
    """32 bytes of a state at least are read together, in both orders: nothing is read twice."""
    for v_first in (False, True):
        p, x = call(lengths=None, B=1, T=1, K=128, V=128, inplace=True, v_first=v_first)
        with capture(arch="sm90") as session:
            launch.recurrent(p, x._replace(initial_state=x.initial_state.clone()))
        bytes_of_states = x.initial_state.numel() * 4
        assert 32 * session.runs[0].counters["global_sectors"] < 1.25 * 2 * bytes_of_states


# bits


@pytest.mark.parametrize("v_first", [False, True], ids=["states (K, V)", "states (V, K)"])
def test_batch_invariant_gives_the_same_bits_alone_and_packed(v_first):
    p, x = call((3, 0, 5, 1), HV=4, batch_invariant=True, v_first=v_first)
    o, ht = run("sm90", p, x)
    ends = x.cu_seqlens.tolist()
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        rows = {name: getattr(x, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
        alone = x._replace(**rows, initial_state=x.initial_state[n : n + 1], cu_seqlens=None)
        shape = dataclasses.replace(p, T=end - start, N=1, packed=False)
        o_alone, ht_alone = run("sm90", shape, alone)
        assert same_bits(o[:, start:end], o_alone) and same_bits(ht[n : n + 1], ht_alone)


def test_tokens_one_by_one_give_the_bits_of_all_at_once():
    p, x = call(lengths=None, B=2, T=4, K=128, V=128, inplace=True, batch_invariant=True)
    o, states = run("sm90", p, x)
    state = x.initial_state
    for t in range(4):
        token = {name: getattr(x, name)[:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        o_t, state = run("sm90", dataclasses.replace(p, T=1), x._replace(**token, initial_state=state))
        assert same_bits(o_t, o[:, t : t + 1])
    assert same_bits(state, states)


def test_a_call_in_place_has_no_backward_and_autograd_knows_that_it_wrote():
    p, x = call((3,))
    pool = torch.zeros(2, p.HV, p.K, p.V)
    q, k = x.q.clone().requires_grad_(), torch.ones(1, requires_grad=True)
    kept = (k * pool).sum()
    with capture(arch="sm_90"):
        o, returned = kda.fused_recurrent_kda(
            q, *x[1:5], initial_state=pool, ssm_state_indices=torch.tensor([1]), backend="triton"
        )
    assert returned is pool and pool[1].any() and not pool.requires_grad
    with pytest.raises(kda.KdaError, match="Train with chunk_kda"):
        o.float().sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_no_output_depends_on_later_tokens():
    p, x = call((7,), padding=0)
    o, _ = run("sm90", p, x)
    for t in (1, 4, 6):
        later = {name: getattr(x, name).clone() for name in ("q", "k", "v", "g", "beta")}
        for tensor in later.values():
            tensor[:, t:] = torch.nan
        o_changed, _ = run("sm90", p, x._replace(**later))
        assert same_bits(o[:, :t], o_changed[:, :t])


# faults


FAULTS = {
    "the output does not see its own token": ("tl.fma(tl.sum(qt * kt, 0), x, seen)", "seen", dict()),
    "v is not compared with what is recalled": ("vt.to(tl.float32) - recalled", "vt.to(tl.float32)", dict()),
    "what is recalled has not decayed": (
        "recalled = tl.sum(kt[:, None] * S, 0)", "recalled = tl.sum(kt[:, None] * before, 0)", dict()
    ),
    "q is not normalised": ("qt *= inverse_norm(tl.sum(qt * qt, 0))", "pass", dict()),
    "q of the value head's number": ("q += row * q_b + head // group * q_h", "q += row * q_b + head * q_h", dict(HV=4)),
    "a coefficient of 2^f is off by a hundredth": ("9.61843736e-3", "9.7e-3", dict(dtype="float32", regime="fast")),
    "rows one token late": ("qt, kt, vt, gt, bt = now", "qt, kt, vt, gt, bt = then", dict()),
    "rows past the end are read": ("live & (t + 2 < end)", "live", dict(lengths=None, B=1, T=2)),
    "final states in the other layout": ("state_v, FINAL_ORDER, K, V)", 'state_v, "vk", K, V)', dict()),
    "a head has the biases of its neighbours": (
        "biased = d if GATES == K else d * 0", "biased = d", dict(gate="softplus", gate_per_head=True)
    ),
    "tokens of no sequence are left": ("range(last + n * ZEROED, T, N * ZEROED)", "range(T, T, N * ZEROED)", dict()),
}
POOL_FAULTS = {
    "slot -1 is read": ("live = (slot >= 0) & (slot < pool)", "live = slot < pool", "padding"),
    "a state goes to slot -1": ("stored = real & (to >= 0) & (to < pool)", "stored = real", "padding between"),
    "the slot after the accepted one": ("S_slots) - 1", "S_slots) - 0", "accepted tokens"),
    "states one slot late": ("(t - begin) * slots_s", "(t - begin + 1) * slots_s", "slots for each token"),
    "skipped sequences store states": ("mask=live & (t - begin", "mask=(t - begin", "padding between"),
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Plant a fault in the kernel's source."""

    def plant(old, new):
        before = {"        S *= decay_of": "        before = S\n        S *= decay_of"} if "before" in new else {}
        function = with_texts("decode.kernel", "recurrent", tmp_path, {old: new, **before})
        monkeypatch.setattr(triton_launch, "fetch", functools.partial(compiled, function))

    return plant


def noticed(p, x):
    try:
        check(p, x, run("sm90", p, x))
    except AssertionError:
        return True
    return False


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name, broken):
    old, new, words = FAULTS[name]
    p, x = call(**words)
    broken(old, new)
    assert noticed(p, x)


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("name", POOL_FAULTS)
def test_a_planted_fault_with_a_pool_is_noticed(name, broken):
    old, new, case = POOL_FAULTS[name]
    p, x = pool_call(**POOLS[case])
    broken(old, new)
    assert noticed(p, x)


# the plan


def decode(N, HV=32, **words):
    words = dict(state_dtype="float32", inplace=True) | words
    return Problem(op="recurrent", B=N, T=1, N=N, H=HV, HV=HV, **words)


def test_wide_tiles_are_for_calls_that_fill_the_chip():
    narrow, wide = recurrent_plan.configs(decode(1))
    assert narrow.BV == 8 and wide.BV == 16
    assert [recurrent_plan.config(decode(N), 132) for N in (1, 2, 3, 256)] == [narrow, narrow, wide, wide]
    assert recurrent_plan.grid(decode(2), narrow) == 2 * 32 * 16 and recurrent_plan.grid(decode(3), wide) == 3 * 32 * 8


def test_under_batch_invariant_the_other_sequences_choose_nothing():
    assert {recurrent_plan.config(decode(N, batch_invariant=True), 132) for N in (1, 2, 3, 256)} == {
        recurrent_plan.config(decode(1), 132)
    }


@pytest.mark.parametrize("K,V", [(1, 1), (16, 7), (60, 100), (128, 128), (256, 8), (256, 512), (300, 8), (1024, 64)])
def test_a_program_holds_no_more_than_its_registers(K, V):
    for c in recurrent_plan.configs(decode(4, K=K, V=V)):
        assert c.BV * recurrent_plan.width(K) <= 64 * 32 * c.num_warps and c.BV < 2 * V


def test_a_kernel_is_built_for_a_class_of_calls():
    """Never for B, T, N, H, HV, the size of a pool, or numbers."""
    x = recurrent_plan.RecurrentLayout(slots="int32", order="kv")
    c, target = recurrent_plan.configs(decode(1))[0], target_of(host_of("sm90"))
    one = recurrent_plan.recipe(decode(1, slots=3, scale=0.5), x, c, target)
    assert one == recurrent_plan.recipe(decode(7, HV=96, slots=900, scale=0.1), x, c, target)
    assert one != recurrent_plan.recipe(decode(1, slots=3, V=64), x, c, target)


def test_kernels_built_ahead_of_time_are_those_that_calls_ask_for(monkeypatch):
    wanted = []
    monkeypatch.setattr(triton_launch, "fetch", lambda recipe: wanted.append(recipe) or built_here(recipe))
    for name in ("a slot for each sequence", "accepted tokens", "int64 slots, states (V, K)", "left alone"):
        for p, x in (pool_call(**POOLS[name]), pool_call(**POOLS[name], gate_per_head=True)):
            run("sm90", p, x)
            assert wanted[-1] in recurrent_plan.recipes(p, host_of("sm90"))
