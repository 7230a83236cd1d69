"""What the forwards of sm89, of sm90 in two kernels and of sm100 have in common, on the CPU from their PTX: whole calls
against the definition, the same bits where they are promised, and what is refused."""

import functools

import pytest
import torch
from cute_calls import (
    BLACKWELL,
    COMMIT,
    HOPPER,
    LAYOUTS,
    RAGGED,
    TOKENS,
    call_of,
    called,
    changed,
    check,
    enters_chunks_with_the_final_states_of_what_comes_before,
    hands_states_through_sequences_of_no_tokens,
    has_the_bits_of_the_same_gate_for_each_channel,
    has_the_bits_of_value_heads_with_q_and_k_of_their_own,
    has_the_bits_that_it_has_alone,
    has_the_same_bits_in_any_order_of_warps,
    looks_at_no_later_token,
    refusals,
    rows_of,
    table,
)

from kda.model.bundles import Save
from kda.routing.dispatch import launcher
from ptxkit import capture
from ptxkit.compile.errors import BuildError

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "backend_ready")]

RARELY = ("sm90, 128", "sm100, 64")
OPTIONS = {
    "one token": dict(T=1),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, many tokens of none": dict(HV=2, padding=140, **RAGGED),
    "no initial state, beta up to 2": dict(T=70, initial_state=False, beta="2*sigmoid"),
    "given beta": dict(T=70, beta="given"),
    "gates that forget": dict(T=100, regime="fast"),
    "softplus gate": dict(T=100, gate="softplus"),
    "softplus gate that forgets, packed": dict(gate="softplus", regime="fast", HV=2, **RAGGED),
    "given decays, no l2norm": dict(T=70, gate="given", l2norm=False),
    "bounded gate, no l2norm": dict(T=40, l2norm=False),
    "a part of a chunk": dict(T=33),
}
ON_BLACKWELL = OPTIONS | {
    "stages used several times, GVA": dict(T=390, HV=2), "a batch": dict(B=2, T=70),
    "lengths around a chunk's, GVA": dict(lengths=(65, 0, 1, 300), HV=2),
    "more sequences and heads than 74 clusters": dict(lengths=(5, 33) * 20, HV=2),
}
CALLS = table({
    "sm89": OPTIONS | {
        "one chunk and a part of one": dict(T=70), "chunks of 32": dict(T=70, C=32),
        "a batch, two heads, GVA": dict(B=2, T=70, H=2, HV=4),
        "given decays that forget": dict(T=70, gate="given", regime="fast"),
    },
    "sm89, 128": {
        "one chunk and a part of one": dict(T=70), "chunks of 32, GVA": dict(T=70, C=32, HV=2),
        "packed, chunks of 32": dict(C=32, **RAGGED),
    },
    "sm90": {"three chunks and a part of one": dict(T=100), "bounded gate, no l2norm": dict(T=40, l2norm=False)},
    "sm90, 128": OPTIONS | {"64 channels": dict(T=40, K=64)},
    "sm100": ON_BLACKWELL,
    "sm100, 64": ON_BLACKWELL,
})


@rows_of(
    CALLS, "sm89: one chunk and a part of one", "sm89: packed, GVA", "sm89: softplus gate",
    "sm90: three chunks and a part of one", "sm100: packed, GVA",
    commit=["sm90, 128: a batch, GVA", "sm90, 128: 64 channels", "sm90: bounded gate, no l2norm",
            "sm100: stages used several times, GVA"],
)
def test_a_call_is_the_definition(name):
    case, backend = call_of(CALLS[name])
    check(case, backend=backend)


WIDE, NARROW = torch.Tensor.float, torch.Tensor.bfloat16


@pytest.mark.parametrize("size", ["sm90", pytest.param("sm90, 128", marks=COMMIT), *(
    pytest.param(size, marks=pytest.mark.exhaustive) for size in BLACKWELL
)])
def test_g_and_beta_may_be_float32(size):
    """On Hopper beside states of bfloat16."""
    case, backend = call_of((size, dict(T=40)))
    case = changed(case, initial_state=NARROW) if backend == "sm90" else case
    check(changed(case, g=WIDE, beta=WIDE), backend=backend)


V_FIRST = {
    "sm89": dict(T=70, HV=2), "sm90": dict(T=40), "sm90, 128": dict(T=40, K=64, HV=2),
    **{size: dict(T=70, HV=2) for size in BLACKWELL},
}


@rows_of(V_FIRST, "sm89", "sm90", commit=["sm90, 128"])
def test_states_may_be_v_first(name):
    """On Blackwell those of bfloat16."""
    case, backend = call_of((name, V_FIRST[name]))
    case = changed(case, initial_state=NARROW) if name in BLACKWELL else case
    found, expected = (check(case, backend=backend, state_v_first=v_first) for v_first in (True, False))
    assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", ["sm89", "sm100"])
def test_offsets_may_be_int32_or_int64(size):
    case, backend = call_of((size, RAGGED))
    one, other = (changed(case, cu_seqlens=dtype) for dtype in (torch.Tensor.int, torch.Tensor.long))
    assert torch.equal(called(one, backend=backend)[0]["o"], called(other, backend=backend)[0]["o"])


ANY_ORDER = {**{f"sm89, {layout}": LAYOUTS[layout] for layout in LAYOUTS}, **dict.fromkeys(
    ("sm90", "sm100"), lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
)}


@rows_of(ANY_ORDER, *(name for name in ANY_ORDER if name != "sm100"), commit=["sm100"])
def test_memory_may_lie_in_any_order(name):
    """Nothing is read at an address that is not a multiple of its size, either."""
    case, backend = call_of((name.partition(",")[0], dict(T=40, H=2)))
    every = [name for name, x in case.keywords.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    apart = changed(case, **dict.fromkeys(every if backend == "sm89" else TOKENS, ANY_ORDER[name]))
    (found, session), (expected, _) = called(apart, backend=backend), called(case, backend=backend)
    assert not session.findings and all(torch.equal(found[x], expected[x]) for x in expected)


STATES = {
    f"{size}, {C}{', V first' * v_first}": (size, lengths, C, v_first)
    for size, lengths in {"sm89": (70, 0, 1, 64), **dict.fromkeys(("sm90", *BLACKWELL), (130, 0, 1, 64))}.items()
    for C in (32, 64) for v_first in (False, True)
}


@rows_of(STATES, "sm89, 64", "sm90, 32, V first", "sm100, 64, 32")
def test_states_that_enter_chunks_are_final_states_of_what_comes_before(name):
    size, lengths, C, v_first = STATES[name]
    case, backend = call_of((size, dict(lengths=lengths, padding=9, HV=2, initial_state=False)))
    found = enters_chunks_with_the_final_states_of_what_comes_before(case, backend, chunk_size=C, state_v_first=v_first)
    assert found.shape == (1, sum(-(-n // C) for n in lengths), 2, case.spec.K, case.spec.V)
    assert found.dtype == case.keywords["q"].dtype


NOTHING = {"a batch": dict(B=2, T=0), "packed": dict(lengths=(0, 0), padding=40)}
NO_TOKENS = table({
    "sm89": {name: dict(HV=2, **shape) for name, shape in NOTHING.items()} | {
        "no sequences": dict(lengths=(), padding=9, HV=2)
    },
    "sm90": {name: dict(HV=2, **shape) for name, shape in NOTHING.items()},
    **dict.fromkeys(BLACKWELL, NOTHING | {f"{name}, GVA": dict(HV=2, **shape) for name, shape in NOTHING.items()}),
})


@rows_of(
    NO_TOKENS, *(name for name in NO_TOKENS if name.startswith(("sm89", "sm90"))), "sm100: a batch",
    "sm100: packed, GVA", commit=["sm100: packed"],
)
def test_sequences_of_no_tokens_hand_their_states_through(name):
    hands_states_through_sequences_of_no_tokens(*call_of(NO_TOKENS[name]))


# the same bits


@pytest.mark.parametrize("size", ["sm89", pytest.param("sm100", marks=COMMIT)])
def test_a_value_head_of_its_own_has_the_bits_of_one_that_shares_q_and_k(size):
    has_the_bits_of_value_heads_with_q_and_k_of_their_own(*call_of((size, dict(T=70, HV=2))))


NO_BIAS = dict(dt_bias=lambda _: None)
PER_HEAD = table({
    "sm90": {"bounded, packed, GVA": dict(HV=2, **RAGGED), "softplus, chunks of 32": dict(T=40, C=32, gate="softplus")},
    "sm90, 128": {
        "softplus that forgets, packed, GVA": dict(HV=2, gate="softplus", regime="fast", **RAGGED),
        "given": dict(T=70, gate="given"), "bounded, a batch": dict(B=2, T=70),
    },
    "sm100": {
        "bounded": dict(T=70), "given that forgets": dict(T=70, gate="given", regime="fast"),
        "softplus, packed, GVA": dict(HV=2, gate="softplus", **RAGGED),
    },
    "sm100, 64": {"bounded, packed, GVA": dict(HV=2, **RAGGED), "softplus": dict(T=70, gate="softplus")},
})
CHANGES = {                                  # and the gates that have what is left out
    "": ({}, "bounded softplus given"), ", g of float32": (dict(g=WIDE), "bounded softplus given"),
    ", without A_log and dt_bias": (NO_BIAS | dict(A_log=lambda _: None), "bounded"),
    ", without dt_bias": (NO_BIAS, "softplus"),
}
PER_HEAD = {f"{name}{change}": (*row, new) for name, row in PER_HEAD.items() for change, (new, gates) in CHANGES.items()
            if row[1].get("gate", "bounded") in gates}


@rows_of(
    PER_HEAD, "sm90: bounded, packed, GVA", "sm100: bounded, without A_log and dt_bias",
    commit=["sm90, 128: softplus that forgets, packed, GVA", "sm100: softplus, packed, GVA, g of float32"],
)
def test_one_gate_per_head_has_the_bits_of_the_same_gate_for_each_channel(name):
    size, words, change = PER_HEAD[name]
    case, backend = call_of((size, dict(gate_per_head=True) | words))
    has_the_bits_of_the_same_gate_for_each_channel(changed(case, **change), backend)


SHAPES = table({
    "sm89": {"rows": dict(T=140), "packed": dict(padding=9, **RAGGED)}, "sm89, 128": {"chunks of 32": dict(T=70, C=32)},
    **{size: {f"packed, {gate}, GVA": dict(HV=2, gate=gate, **RAGGED) for gate in ("bounded", "softplus")}
       for size in HOPPER},
    **{size: {
        "rows": dict(T=390), "rows, GVA": dict(T=390, HV=2), "packed": dict(padding=9, **RAGGED),
        "softplus": dict(T=130, gate="softplus"),
        "more sequences and heads than 74 clusters": dict(lengths=(5, 33) * 20, HV=2),
    } for size in BLACKWELL},
})
ORDERS = {
    f"{name}, {schedule}": (shape, schedule) for name, shape in SHAPES.items()
    for schedule in range(1, 6 if shape[0] in BLACKWELL else 4)
}


@rows_of(ORDERS, "sm89: packed, 1", "sm90: packed, bounded, GVA, 1", commit=["sm100: packed, 1"])
def test_any_order_of_warps_gives_the_same_bits(name):
    shape, schedule = ORDERS[name]
    case, backend = call_of(shape)
    early = schedule % 2 == 1 or backend == "sm90"
    has_the_same_bits_in_any_order_of_warps(case, backend, schedule=schedule, early=early)


LATER = {
    f"{size}, {gate}": (size, words | dict(gate=gate), tokens) for size, words, tokens in (
        ("sm89", dict(T=100), (1, 9, 33, 75)), *((size, dict(T=70), (1, 9, 31, 32, 50)) for size in HOPPER),
        *((size, dict(T=150), (75,)) for size in BLACKWELL),
    ) for gate in ("bounded", "softplus")
}


@rows_of(LATER, *(name for name in LATER if not name.startswith(("sm90, 128", "sm100"))))
def test_no_output_depends_on_later_tokens(name):
    *row, tokens = LATER[name]
    looks_at_no_later_token(*call_of(row), *tokens)


@pytest.mark.parametrize("size, lengths", [
    ("sm89", (33, 70, 21)), *(pytest.param(size, (33, 40, 21), marks=pytest.mark.exhaustive) for size in BLACKWELL)
])
def test_a_sequence_has_the_bits_that_it_has_alone_whatever_its_neighbours_hold(size, lengths):
    case, backend = call_of((size, dict(lengths=lengths, initial_state=False)))
    o = has_the_bits_that_it_has_alone(case, 33, 33 + lengths[1], backend)
    assert backend != "sm89" or o[:, :33].isnan().all()


# hard inputs

SAME_KEYS = dict(k=lambda x: x[:, :1].expand_as(x).contiguous())


def filled(value):
    return functools.partial(torch.full_like, fill_value=value)


HARD = {
    "identical keys": SAME_KEYS,
    "identical keys, gates open": dict(g=filled(-30.0), **SAME_KEYS),
    "identical keys, beta near 1, gates open": dict(beta=filled(8), g=filled(-30), **SAME_KEYS),
    "saturated gates": dict(g=lambda x: torch.where(x > 0, 1e4, -1e4).to(x.dtype)),
    "gates saturated on and off in turn": dict(
        g=lambda x: torch.full_like(x, -20.0).index_fill(1, torch.arange(0, x.shape[1], 2), 20.0)
    ),
    "every token at the lower bound": dict(g=filled(1e9)),
    "nothing forgotten": dict(g=filled(-1e9)),
    "all of it forgotten at once": dict(g=lambda x: x.index_fill(1, torch.arange(3, 96, 9), 1e9)),
    "keys of zero": dict(k=torch.zeros_like),
    "keys and values of 2^12": dict.fromkeys(("k", "v"), lambda x: 4096 * x),
    "q, k and v of 2^12": dict.fromkeys(("q", "k", "v"), lambda x: 4096 * x),
}
OF_HOPPER = ("every token at the lower bound", "gates saturated on and off in turn", "nothing forgotten",
             "identical keys, gates open", "keys and values of 2^12")
OF_BLACKWELL = ("identical keys", "identical keys, beta near 1, gates open", "saturated gates", "keys of zero")
HARD_CALLS = {
    f"{size}{f', {gate}' if gate else ''}: {name}": (size, words | (dict(gate=gate) if gate else {}), HARD[name])
    for size, words, gates, names in (
        ("sm89", dict(T=100), ("",), ("identical keys", "saturated gates", "keys of zero", "q, k and v of 2^12",
                                      "nothing forgotten", "all of it forgotten at once")),
        *((size, dict(T=70), ("bounded", "softplus"), OF_HOPPER) for size in HOPPER),
        *((size, dict(T=100), ("",), OF_BLACKWELL) for size in BLACKWELL),
    ) for gate in gates for name in names
}


@rows_of(HARD_CALLS, *(name for name in HARD_CALLS if not name.startswith(RARELY)))
def test_hard_inputs_are_within_budget(name):
    *row, given = HARD_CALLS[name]
    case, backend = call_of(row)
    assert all(x.isfinite().all() for x in check(changed(case, **given), backend=backend).values())


@pytest.mark.parametrize("size, decay", [
    *(("sm89", decay) for decay in (-1000.0, -1e6, -torch.inf)),
    *(pytest.param(size, -1000.0, marks=pytest.mark.exhaustive) for size in BLACKWELL),
])
def test_decays_whose_products_vanish_are_finite_and_correct(size, decay):
    """A ratio of prefix products is 0 / 0 here, and a difference of float32 sums forgets what follows."""
    case, backend = call_of((size, dict(T=70 if size == "sm89" else 100, gate="given")))
    given = (lambda x: (0.01 * x).index_fill(1, torch.arange(3, 70, 9), decay)) if backend == "sm89" else (
        lambda x: torch.where(x < x.median(), decay, x).to(x.dtype))
    assert check(changed(case, g=given), backend=backend)["o"].isfinite().all()


# what is refused

REFUSED = {
    "sm89": ("float32 K=64 V=64", {
        "bfloat16": "dtype", "g_dtype=bfloat16": "dtype", "state_dtype=bfloat16": "dtype", "K=128": "head_dim",
        "V=32": "head_dim", "backward T=1000000000 HV=80": "size", "T=1000000000 HV=200": "size",
        "N=70000 HV=40000 packed": "size",
    }),
    "sm90": ("", {
        "dtype=float16": "dtype", "K=96": "head_dim", "V=256": "head_dim", "backward K=64": "backward_shape",
        "N=70000 packed": "size",
    }),
    "sm100": ("", {
        "dtype=float16": "dtype", "K=64": "head_dim", "K=96 V=96": "head_dim", "V=256": "head_dim",
        "H=70000 backward": "backward_size", "N=70000 HV=40000 packed": "size",
    }),
}
BY_ALL = {"recurrent": "chunks", "disable_recompute=true": "keeps", "beta_per_value=true": "beta"}


@pytest.mark.parametrize("backend, words", [(b, words) for b, (_, rows) in REFUSED.items() for words in rows | BY_ALL])
def test_what_it_cannot_do_is_refused_with_a_way_out(backend, words):
    usual, rows = REFUSED[backend]
    found = refusals(f"{usual} bounded lower_bound=-5 l2norm {words}", backend)
    assert found == [f"{backend}.{(rows | BY_ALL)[words]}"]


@pytest.mark.parametrize("backend, said", {
    "sm89": "Leave out disable_recompute", "sm100": "Leave out disable_recompute",
    "sm90": "keeps what its own backward reads, or A_qk and A_inv, not all",
}.items())
def test_no_kernel_keeps_all_that_a_backward_reads(backend, said):
    case, _ = call_of((backend, dict(T=33)))
    with capture(arch=backend), pytest.raises(BuildError, match=said):
        launcher(backend).forward(case.problem(), case.inputs, Save.ALL)
