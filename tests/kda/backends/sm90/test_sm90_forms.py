"""Forms of the Hopper forward, on the CPU from PTX: calls against the definition, the bits of two kernels, the order of
warps, states and what is kept, registers and shared memory, and which form the plan chooses."""

import dataclasses
import itertools
import sys

import pytest
import torch
from cute_calls import (
    RAGGED,
    TOKENS,
    called,
    check,
    drawn,
    gradients,
    has_products_that_wait_for_no_other,
    kept_and_made_again,
    kept_nowhere,
    looks_at_no_later_token,
    reads_nothing_before_the_kernel_ahead_is_done,
    rows_of,
)
from sm90_forms import (
    ALONE,
    CALLS,
    CHOSEN,
    CHOSEN_TO_KEEP,
    CUT,
    CUT_STREAM,
    DEFINED,
    FOUR,
    KEPT,
    NO_TOKENS,
    ORDERS,
    PAIR,
    SEGMENTS,
    SMALL,
    STATES,
    STREAM,
    TWO,
    TWO_KERNELS,
    Call,
    Form,
    assert_as_planned,
    assert_nothing_found,
    assert_the_same,
    results,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from benchmarks import sanitized
from kda.backends.common import training, training_plan
from kda.backends.common.pool.launch import Checkpoints
from kda.backends.common.training_plan import NO_CLUSTERS
from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import GROUPS, TILES, FusedConfig, StreamConfig, tile
from kda.model.bundles import Save
from kda.model.problem import Problem
from ptxkit import capture
from ptxkit.compile.recipes import imported

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]


@rows_of(
    CALLS, "shares: a walk is longer than a share", "four: every tile is made twice",
    commit=["pair: one chunk and a part of one", "any_gate: stages used several times, GVA", "alone: packed, GVA"],
)
def test_a_call_is_the_definition_and_has_the_bits_of_two_kernels(name, takes):
    call = CALLS[name]
    case = call.case()
    takes(call.form)
    assert_as_planned(call, case)
    found = check(case, state_v_first=call.v_first)
    takes(TWO_KERNELS)
    assert_the_same(found, called(case)[0])


@rows_of(
    DEFINED, "stream: a group makes several steps",
    commit=["segments: softplus gate that forgets", "segments: five, the last of one token"],
)
def test_a_call_is_the_definition(name, takes):
    call = DEFINED[name]
    case = call.case()
    takes(call.form)
    assert_as_planned(call, case)
    check(case, state_v_first=call.v_first)


@pytest.mark.parametrize("call", [
    Call(PAIR, dict(T=33)), Call(Form(2, 4), CUT), pytest.param(Call(PAIR, RAGGED), marks=pytest.mark.exhaustive),
], ids=["rows", "packed, shares", "packed"])
def test_it_is_one_kernel_which_reads_nothing_before_the_tables_are_there(call, takes):
    takes(call.form)
    launches = results(call)[1].launches
    assert [launched.pdl for launched in launches] == ([False, True] if call.packed else [False])
    if call.packed:
        reads_nothing_before_the_kernel_ahead_is_done(launches[1].kernel)


@rows_of(NO_TOKENS, "pair: a batch", "shares: packed", commit=["pair: packed", "alone: packed, GVA"])
def test_sequences_of_no_tokens_hand_their_states_through(name, takes):
    call = NO_TOKENS[name]
    takes(call.form)
    case, (found, session) = call.case(), results(call)
    spec, given = case.spec, case.keywords["initial_state"]
    empty = [n for n, length in enumerate(spec.lengths or (spec.T,) * spec.B) if not length]
    assert not session.findings and not found["o"][:, sum(spec.lengths or ()) :].any()
    assert empty and torch.equal(found["ht"][empty], given[empty])


@rows_of(ORDERS, "pair, rows, 1", "shares, packed, 3", "four, rows, 1", "K = V = 64, packed, GVA, 2",
         commit=["alone, packed, GVA, 1", "alone, packed, GVA, 2"])
def test_any_order_of_warps_gives_the_same_bits(name, takes):
    call, save, order = ORDERS[name]
    takes(call.form)
    if save is Save.NOTHING:
        assert_as_planned(call, call.case())
    (expected, _), (found, session) = results(call, save), results(call, save, **order)
    assert_nothing_found(session)
    assert_the_same(found, expected)


def test_sequences_of_no_tokens_may_leave_fewer_chunks_than_the_plan_has_clusters(force, takes):
    case = drawn(lengths=(70,) + (0,) * 70)
    force()
    assert plan.plan(case.problem(), 132).clusters == (2, 66)
    found = check(case)
    takes(TWO_KERNELS)
    assert_the_same(found, called(case)[0])


NUMBERS = {
    **{f"shares, {n} clusters": (Form(2, n), TWO_KERNELS) for n in range(1, 7)},
    **{f"four, {n} clusters": (Form(4, n), TWO_KERNELS) for n in range(1, 6)},
    **{f"{form.segments} segments of a stream, {n} makers": (form._replace(makers=n), form._replace(makers=3))
       for form in (STREAM, CUT_STREAM) for n in (1, 2, 5, 50)},
}


@rows_of(NUMBERS)
def test_no_bit_depends_on_the_number_of_clusters_or_makers(name, takes):
    form, other = NUMBERS[name]
    call = Call(form, dict(lengths=(130, 0, 1, 200, 64, 31), HV=2))
    takes(other)
    expected, _ = results(call)
    takes(form)
    found, session = results(call)
    assert_nothing_found(session)
    assert_the_same(found, expected)


@pytest.mark.exhaustive
def test_sequences_of_a_batch_do_not_see_each_other(takes):
    """In a stream, a sequence alone has the bits that it has beside others."""
    case, start = drawn(lengths=(130, 33), HV=2), 130
    takes(STREAM._replace(makers=2))
    found, _ = called(case)
    x = case.keywords
    alone = {name: x[name][:, start:] for name in TOKENS} | {"cu_seqlens": None}
    alone["initial_state"] = x["initial_state"][1:]
    expected, session = called(dataclasses.replace(case, keywords=x | alone))
    assert not session.findings
    assert torch.equal(found["o"][:, start:], expected["o"]) and torch.equal(found["ht"][1:], expected["ht"])


@pytest.mark.exhaustive
def test_nothing_depends_on_later_tokens(takes):
    takes(CUT_STREAM._replace(makers=2))
    looks_at_no_later_token(drawn(T=200), "sm90", 100)


def test_states_of_heads_that_remember_are_whole_or_cut_the_same_but_for_roundings(takes):
    call = Call(SEGMENTS, dict(T=256, regime="slow", states=True, **SMALL))
    takes(call.form)
    cut = results(call)[0]
    takes(TWO_KERNELS)
    whole = results(call)[0]
    assert whole["h"].shape == (1, 4, 1, 64, 64)
    for name in ("ht", "h"):
        assert not torch.equal(cut[name], whole[name])
        assert (cut[name] - whole[name]).norm() < 5e-3 * whole[name].norm()


@pytest.mark.parametrize(
    "walks, clusters, waits", [((248,) * 66, 66, False), ((256,) * 96, 66, False), ((4,) * 4096, 66, False),
                               ((300, 1, 1, 1), 4, True)]
)
def test_nobody_waits_where_no_walk_is_longer_than_a_share(walks, clusters, waits):
    """If a walk has two pieces, the first ends before the second begins, counted in chunks."""
    ends, begins = {}, {}
    starts = [0, *itertools.accumulate(walks)]
    for cluster in range(clusters):
        begin, end = (n * starts[-1] // clusters for n in (cluster, cluster + 1))
        within = [(w, a, b) for w, (a, b) in enumerate(itertools.pairwise(starts)) if a < end and b > begin]
        leaves = [piece for piece in within if piece[1] >= begin and piece[2] > end]
        enters = [piece for piece in within if piece[1] < begin]
        now = 0
        for w, a, b in leaves + [piece for piece in within if piece not in leaves + enters] + enters:
            a, b = max(a, begin), min(b, end)
            begins[w, a], ends[w, b], now = now, now + b - a, now + b - a
    assert waits == any(ends.get((w, a), 0) > t for (w, a), t in begins.items())


# states that enter chunks, and what is kept for a backward or in a pool


@rows_of(STATES, "states: chunks of 32, V first", commit=["states: a batch, GVA, V first"])
def test_states_outputs_and_final_states_have_the_bits_of_two_kernels(name, takes):
    call = STATES[name]
    takes(call.form)
    found, session = results(call)
    assert_nothing_found(session)
    assert len(session.launches) == 1 + call.packed and found.keys() == {"o", "ht", "h"}
    takes(TWO_KERNELS)
    assert_the_same(found, results(call)[0])


@rows_of(KEPT, "pair: stages used several times")
def test_what_is_kept_has_the_bits_of_two_kernels(name, takes):
    call = KEPT[name]
    takes(call.form)
    found, session = results(call, Save.OWN)
    assert_nothing_found(session)
    assert clusters_of(call) == (call.form.ctas, call.form.sharing or 0)
    assert len(session.launches) == 1 + call.packed
    takes(TWO_KERNELS)
    assert_the_same(found, results(call, Save.OWN)[0])


def clusters_of(call):
    return clusters_that_keep(call.case().problem())


def clusters_that_keep(p):
    """Return CTAs and clusters of the one kernel that keeps; (0, 0) if kernels apart do."""
    return getattr(plan.training_plan(p, 132).making, "clusters", NO_CLUSTERS)


GRADIENTS = {
    f"{name}, {shape}, {keep}": (Call(form, words | rows), keep)
    for name, form, words in (
        ("pair", PAIR, {}), ("four", FOUR, {}), ("alone, 64 channels", ALONE, SMALL),
        ("one walks, 64 channels", PAIR, SMALL),
    )
    for shape, rows in (("rows", dict(T=140)), ("packed", dict(padding=9, **RAGGED))) for keep in (True, "states")
}


@rows_of(GRADIENTS)
def test_gradients_have_the_bits_of_two_kernels(name, takes):
    """Gradients come from what was kept, and from what a backward recomputes in one kernel without o."""
    call, keep = GRADIENTS[name]
    case = call.case()
    takes(call.form)
    assert clusters_of(call).ctas == call.form.ctas
    kept, recomputed = kept_and_made_again(case, "sm90", keep)
    takes(TWO_KERNELS)
    expected, _ = gradients(case, "sm90")
    for found in (kept, recomputed):
        assert_the_same({name: found[name] for name in expected}, expected)


def test_gradients_of_fewer_chunks_than_the_plan_has_clusters_have_the_bits_of_two_kernels(force, takes):
    case = drawn(lengths=(64,) + (0,) * 15, HV=8, **SMALL)
    force()
    assert clusters_that_keep(case.problem()) == (1, 128)
    kept, recomputed = kept_and_made_again(case, "sm90")
    takes(TWO_KERNELS)
    expected, _ = gradients(case, "sm90")
    for found in (kept, recomputed):
        assert_the_same({name: found[name] for name in expected}, expected)


def stored(call, dtype):
    """Return o, ht, a pool with every third state that enters a chunk, and how many CTAs the one kernel has."""
    case = call.case()
    p = dataclasses.replace(case.problem(), checkpoints=dtype)
    planned, size = plan.plan(p, 132), p.HV * p.K * p.V
    pool = torch.full((planned.sizes.entries * size,), 7.0, dtype=getattr(torch, dtype))
    place = torch.full((planned.sizes.entries,), -1)
    place[::3] = torch.arange(planned.sizes.entries)[::3] * size
    with capture(arch="sm90", strict=True) as session:
        out = launch.forward(p, case.inputs, Save.NOTHING, Checkpoints(pool, place))
    assert_nothing_found(session)
    ctas = planned.clusters.ctas if planned.name == "one kernel" else 0
    return {"o": out.o, "ht": out.final_state, "pool": pool}, ctas


STORED = {
    "pair": (Call(PAIR, dict(T=200)), "float32"), "four": (Call(FOUR, dict(T=200)), "bfloat16"),
    "shares": (Call(Form(2, 4), CUT), "bfloat16"), "four, shares": (Call(Form(4, 4), CUT), "float32"),
}


@rows_of(STORED, commit=["pair"])
def test_states_that_a_pool_stores_have_the_bits_of_two_kernels(name, takes):
    call, dtype = STORED[name]
    takes(call.form)
    found, used = stored(call, dtype)
    takes(TWO_KERNELS)
    expected, unused = stored(call, dtype)
    assert (used, unused) == (call.form.ctas, 0)
    assert_the_same(found, expected)
    assert (found["pool"] != 7).any() and (found["pool"] == 7).any()


def test_arguments_are_those_of_a_call_that_keeps_nothing_and_three_more(takes):
    takes(PAIR)
    found = plan.training_plan(drawn(T=33).problem(), 132).making.record.arguments
    plain = imported("kda.backends.sm90.configs:FusedArguments")
    assert found.number_names() == plain.number_names()
    assert found.tensor_names() == [*plain.tensor_names(), "tiles", "h", "r"]


# shared memory, registers, and the form that racecheck follows

FOLLOWED = {
    "alone": (Call(ALONE, dict(T=390, V=64)), Save.NOTHING),
    "one_walks": (Call(PAIR, dict(T=390, V=64)), Save.NOTHING),
    "pair": (Call(PAIR, dict(T=390)), Save.NOTHING),
    "four": (Call(FOUR, dict(T=390)), Save.NOTHING),
    "kept": (Call(PAIR, dict(T=390)), Save.OWN),
    "kept by four": (Call(FOUR, dict(T=390)), Save.OWN),
    "stream": (Call(STREAM, dict(T=390)), Save.NOTHING),
    "stream, softplus": (Call(STREAM, dict(T=390, gate="softplus")), Save.NOTHING),
}


def made_ready_for_each_call(monkeypatch):
    for module in (launch, training):
        kept_nowhere(monkeypatch, module)


@rows_of(FOLLOWED)
def test_the_form_that_racecheck_follows_is_this_kernel(name, tmp_path, monkeypatch, takes):
    call, save = FOLLOWED[name]
    for x, attribute in ((launch, "kernel"), (sys, "path")):                    # `follow` changes both
        monkeypatch.setattr(x, attribute, getattr(x, attribute))
    made_ready_for_each_call(monkeypatch)
    takes(call.form)
    expected, _ = results(call, save)
    sanitized.follow(tmp_path)
    found, session = results(call, save)
    assert_nothing_found(session)
    assert_the_same(found, expected)


TAKING = {
    "pair": (Call(PAIR, dict(T=100)), Save.NOTHING),
    "four": (Call(FOUR, dict(T=100)), Save.NOTHING),
    "any_gate": (Call(PAIR, dict(T=100, gate="softplus")), Save.NOTHING),
    "any_gate, in fours": (Call(FOUR, dict(T=100, gate="softplus")), Save.NOTHING),
    "kept": (Call(PAIR, dict(T=100)), Save.OWN),
    "kept by four": (Call(FOUR, dict(T=100)), Save.OWN),
    "stream": (Call(STREAM, dict(T=300)), Save.NOTHING),
}


@rows_of(TAKING, "pair")
def test_it_takes_the_shared_memory_that_its_configuration_says(name, monkeypatch, takes):
    """With 16 bytes less, a kernel reaches beyond them."""
    call, save = TAKING[name]
    config = StreamConfig if call.form.segments else FusedConfig
    enough = config.shared.fget
    takes(call.form)
    monkeypatch.setattr(config, "shared", property(lambda config: enough(config) - 16))
    made_ready_for_each_call(monkeypatch)
    _, session = results(call, save)
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


SPILLED = {                                  # bytes of a thread at most: what waits in local memory while warps meet
    "pair": (Call(PAIR, dict(T=33)), Save.NOTHING, 0),
    "four": (Call(FOUR, dict(T=33)), Save.NOTHING, 32),
    "any_gate": (Call(PAIR, dict(T=33, gate="softplus")), Save.NOTHING, 40),
    "any_gate, GVA": (Call(PAIR, dict(T=33, HV=2, gate="softplus")), Save.NOTHING, 40),
    "any_gate, in fours": (Call(FOUR, dict(T=33, gate="softplus")), Save.NOTHING, 40),
    "alone": (Call(ALONE, dict(T=33, V=64)), Save.NOTHING, 8),
    "alone, K = V = 64": (Call(ALONE, dict(T=33, **SMALL)), Save.NOTHING, 0),
    "kept": (Call(PAIR, dict(T=33)), Save.OWN, 8),
    "kept by four": (Call(FOUR, dict(T=33)), Save.OWN, 16),
    "kept by four, softplus": (Call(FOUR, dict(T=33, gate="softplus")), Save.OWN, 48),
    "stream": (Call(STREAM, dict(T=33)), Save.NOTHING, 16),
    "stream, softplus": (Call(STREAM, dict(T=33, gate="softplus")), Save.NOTHING, 96),
    "stream_of_segments": (Call(CUT_STREAM, dict(T=33)), Save.NOTHING, 16),
    "stream_of_segments, softplus": (Call(CUT_STREAM, dict(T=33, gate="softplus")), Save.NOTHING, 96),
}


@rows_of(SPILLED, "pair", "four", "kept", "stream", commit=["any_gate, GVA"])
def test_roles_share_out_registers_and_shared_memory_and_no_product_waits_for_another(name, tmp_path, takes):
    call, save, spills = SPILLED[name]
    takes(call.form)
    p = call.case().problem()
    if save is Save.OWN:
        config = plan.training_plan(p, 132).making.record
    else:
        config = plan.plan(p, 132).stream if call.form.segments else plan.plan(p, 132).fused
    kernel, (chain, others) = launch.kernel(config), config.registers
    assert kernel.spills <= spills and config.shared <= 227 * 1024
    if call.form.segments:
        assert (GROUPS - 1) * config.group.bytes + config.group.end <= config.shared
    if call.form.ctas == 4:                                                     # tiles lie where others have stages
        groups, tiles = GROUPS * config.group.bytes, GROUPS * (TILES - 1) * tile(128).bytes
        assert groups + tiles <= config.struct.full.offset
    handed_out = 128 * chain + 512 * others
    assert handed_out <= 640 * kernel.registers <= 65536
    if call.any_gate and call.form.ctas:
        assert handed_out == 640 * kernel.registers                             # none is left
    has_products_that_wait_for_no_other(kernel, tmp_path)


# which form the plan chooses


def problem(words):
    return Problem.parse(f"bfloat16 l2norm beta=sigmoid K=128 V=128 {'' if 'softplus' in words else 'bounded'} {words}")


@pytest.mark.parametrize("words", CHOSEN)
def test_the_plan_chooses_the_form_that_was_fastest(words):
    p = problem(words)
    found = plan.plan(p, 132)
    if found.name == "stream":
        assert CHOSEN[words] == ("stream", found.segments, found.makers)
    else:
        assert CHOSEN[words] == ((found.fused.ctas, found.fused.wrapped) if found.name == "one kernel" else TWO)
    assert plan.plan(p, 132, saves=True).name == "two kernels"


@pytest.mark.parametrize("words", CHOSEN_TO_KEEP)
def test_one_kernel_keeps_where_it_was_faster(words):
    p = dataclasses.replace(problem(words), direction="backward")
    assert clusters_that_keep(p) == CHOSEN_TO_KEEP[words]


@pytest.mark.parametrize("options", [dict(batch_invariant=True), dict(intermediate_states=True)], ids=str)
def test_the_plan_chooses_no_stream_for_calls_that_promise_or_request_more(options):
    """Its bits are those of steps of 64 tokens, so a call that promises the same bits for any batch does without."""
    p = problem("T=8192 H=16")
    assert plan.plan(p, 132).name == "stream" != plan.plan(dataclasses.replace(p, **options), 132).name


@pytest.mark.parametrize("words", ["T=8192 H=64", "T=8192 H=32", "T=1024 H=64"])
def test_one_kernel_returns_states_where_it_runs_without_them(words):
    p = problem(words)
    one, with_states = (plan.plan(x, 132).fused for x in (p, dataclasses.replace(p, intermediate_states=True)))
    assert (one.ctas, one.wrapped) == (with_states.ctas, with_states.wrapped)
    assert with_states.chain.h and with_states.chain.every == 2 and not with_states.keeps


@pytest.mark.parametrize("words", [
    dict(T=33, K=64, gate="softplus"), dict(T=33, gate="softplus", **SMALL), dict(T=33, K=64, l2norm=False),
    dict(T=8192),                                                               # cut into segments
], ids=str)
def test_what_one_kernel_cannot_do_stays_with_two(words, takes):
    takes(PAIR)
    p = drawn(**words).problem()
    found = plan.plan(p, 132)
    assert found.name == "two kernels" and bool(found.carry) == (p.T == 8192)


@pytest.mark.parametrize("words", [
    dict(T=33, gate="softplus"), dict(T=33, gate="given", l2norm=False), dict(T=33, gate="softplus", **SMALL),
    dict(T=8192),                                                               # cut into segments
], ids=str)
def test_what_one_kernel_cannot_keep_stays_with_two(words, takes):
    takes(PAIR)
    assert clusters_of(Call(PAIR, words)) == (0, 0)


def test_what_a_portable_backward_reads_is_kept_by_two_kernels(takes):
    takes(PAIR)
    p = drawn(T=33).problem()
    assert [plan.plan(p, 132, saves).name for saves in (False, True)] == ["one kernel", "two kernels"]
    takes(TWO_KERNELS)
    assert plan.plan(drawn(T=33).problem(), 132).name == "two kernels"


@pytest.mark.parametrize("words, length", {
    "T=32768 H=8": 128, "T=8192 H=16": 64, "T=8192 H=64": 0, "T=1024 H=8": 0, "T=8192 H=8 V=64": 32,
    "T=8192 H=8 N=8 packed": 0, "T=65536 H=8 N=2 packed": 256, "T=65536 H=8 batch_invariant=true": 0,
}.items())
def test_shapes_alone_say_where_sequences_are_cut(words, length):
    assert training_plan.segment_length(Problem.parse(f"bounded lower_bound=-5 l2norm {words}"), 132) == length
