"""What the backwards of Hopper, in two kernels and more, and of Blackwell have in common, on the CPU from their PTX:
gradients against the definition, the same bits where they are promised, and what a forward saves for them."""

import dataclasses

import pytest
import torch
from cute_calls import (
    BLACKWELL,
    HOPPER,
    assert_right,
    call_of,
    changed,
    check_gradients,
    gradients,
    judged_gradients,
    kept_and_made_again,
    rows_of,
    saturated,
    table,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.common import training_plan
from kda.model.host import host_of, standing_in
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]

SIZES = (*HOPPER, *BLACKWELL)
RARELY_WIDE = pytest.mark.parametrize("size", [
    "sm90", "sm100", *(pytest.param(size, marks=pytest.mark.exhaustive) for size in ("sm90, 128", "sm100, 64")),
])
PACKED = dict(lengths=(65, 0, 1, 30), HV=2)
OPTIONS = {
    "two chunks and a part of one": dict(T=140),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "one token": dict(T=1, H=8),                               # eight draws of a single number are no budget
    "less than the half of a chunk": dict(T=20),
    "no initial state, beta up to 2": dict(T=40, initial_state=False, beta="2*sigmoid"),
    "gates that forget": dict(T=100, regime="fast"),
    "packed, GVA, tokens of none": dict(padding=140, **PACKED),
    "a softplus gate": dict(T=140, gate="softplus"),
    "a softplus gate that forgets, packed, GVA": dict(gate="softplus", regime="fast", **PACKED),
    "decays given that forget, GVA": dict(T=70, HV=2, gate="given", regime="fast"),
    "no norms": dict(T=70, l2norm=False),
    "beta given": dict(T=70, beta="given"),
    "decays and beta given, no norms": dict(T=70, gate="given", beta="given", l2norm=False),
}
CALLS = table({size: OPTIONS for size in SIZES})


@rows_of(CALLS, "sm90, 128: a batch, GVA", "sm100: two chunks and a part of one",
         "sm100, 64: packed, GVA, tokens of none", commit=["sm90, 128: two chunks and a part of one"])
def test_gradients_are_the_definition(name):
    check_gradients(*call_of(CALLS[name]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm103", pytest.param("sm110", marks=pytest.mark.commit)])
def test_so_they_are_on_the_other_archs_of_blackwell(arch):
    check_gradients(*call_of(("sm100", dict(padding=20, **PACKED))), arch=arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES)
def test_states_may_be_v_first(size):
    case, backend = call_of((size, dict(T=70)))
    turned = {"initial_state": case.keywords["initial_state"].mT.contiguous(), "state_v_first": True}
    v_first = dataclasses.replace(case, keywords=case.keywords | turned, dht=case.dht.mT.contiguous())
    (found, _), (expected, _) = gradients(v_first, backend), gradients(case, backend)
    expected["dh0"] = expected["dh0"].mT
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@RARELY_WIDE
def test_tokens_past_the_end_decay_nothing_at_a_rate_of_0(size):
    case, backend = call_of((size, dict(T=70)))
    case = changed(case, A_log=lambda x: torch.full_like(x, -90.0))
    found, _ = gradients(case, backend)
    assert all(x.isfinite().all() for x in found.values())
    assert_right(judged_gradients(case, {name: found[name] for name in ("dq", "dk", "dv", "dbeta", "dh0")}, backend))


@RARELY_WIDE
def test_no_tokens_hand_the_gradient_of_their_state_through(size):
    case, backend = call_of((size, dict(B=2, T=0)))
    found, session = gradients(case, backend)
    assert not session.findings and torch.equal(found["dh0"], case.dht)
    assert found["dq"].shape == (2, 0, 1, case.spec.K) and not found["dA_log"].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", SIZES)
def test_any_order_of_warps_gives_the_same_bits(schedule, size):
    case, backend = call_of((size, dict(T=200, HV=2)))
    expected, _ = gradients(case, backend)
    found, session = gradients(case, backend, schedule=schedule, early=schedule % 2 == 0)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


FACTORS = [
    ("bounded", 60, {}), ("bounded", -60, {}), ("softplus", 50, dict(gate="softplus")),
    ("softplus", -50, dict(gate="softplus")), ("given", 50, dict(gate="given")),
    ("all given", 50, OPTIONS["decays and beta given, no norms"]),
]
LARGE = {
    f"{size}: {name}, 2^{exponent}": (size, words | dict(T=70), 2.0**exponent)
    for size, count in {"sm90": 1, "sm90, 128": 6, "sm100": 5, "sm100, 64": 5}.items()
    for name, exponent, words in FACTORS[:count]
}


@rows_of(LARGE, "sm100: bounded, 2^60", commit=["sm90: bounded, 2^60", "sm90, 128: bounded, 2^60"])
def test_gradients_are_as_large_as_those_that_come_in(name):
    """Saturated gates included: what is rounded is never beyond what bfloat16 holds."""
    *row, factor = LARGE[name]
    case, backend = call_of(row)
    case = saturated(case)
    large = dataclasses.replace(case, do=factor * case.do, dht=factor * case.dht)
    (found, _), (expected, _) = gradients(large, backend), gradients(case, backend)
    for name, x in expected.items():
        assert x.isfinite().all() and torch.equal(found[name], factor * x), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("size, gate, bound", [
    (size, gate, bound) for gate, bound in {"softplus": None, "given": None, "bounded": -30.0}.items()
    for size in (HOPPER if bound else SIZES)
])
def test_gates_that_hide_all_that_was_before(size, gate, bound):
    case, backend = call_of((size, dict(T=70, gate=gate)))
    case = saturated(case)
    if bound:
        case = dataclasses.replace(case, keywords=case.keywords | {"lower_bound": bound})
    finite = changed(case, g=lambda g: g.clamp(-1000, 1000))                       # no definition has a gradient at inf
    found = check_gradients(finite, backend)
    (same, _), hidden = gradients(case, backend), case.keywords["g"].abs() >= 1000
    assert all(torch.equal(same[name], x) for name, x in found.items())
    assert not found["dg"][hidden].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size, words", [
    *((size, dict(padding=140, **PACKED)) for size in SIZES),
    *((size, words) for size in SIZES[1:] for words in (dict(T=140, gate="softplus", B=2), dict(T=70, gate="given"))),
    ("sm90, 128", dict(T=70, gate="softplus", B=2)),
], ids=str)
def test_g_may_be_float32(size, words):
    case, backend = call_of((size, words))
    wide = changed(case, g=lambda g: g.float() * 1.001)                            # not what bfloat16 holds
    assert check_gradients(wide, backend)["dg"].dtype == torch.float32


@pytest.mark.exhaustive
@pytest.mark.parametrize("size, dtype", [
    ("sm90, 128", torch.bfloat16), ("sm90, 128", torch.float32), ("sm100", torch.bfloat16),
    ("sm100, 64", torch.bfloat16),
], ids=str)
def test_beta_may_be_0(size, dtype):
    case, backend = call_of((size, dict(T=70, beta="given")))
    some = changed(case, beta=lambda b: b.to(dtype) * (torch.arange(70) % 3 > 0).view(1, 70, 1))
    assert check_gradients(some, backend)["dbeta"][:, ::3].abs().min() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES[1:])
def test_keys_may_be_all_alike(size):
    case, backend = call_of((size, dict(T=70, gate="softplus")))
    check_gradients(changed(case, k=lambda k: k[:, :1].expand_as(k).contiguous()), backend)


# what a forward saves


KEPT = {
    "one sequence": dict(T=70),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "packed, GVA, tokens of none": OPTIONS["packed, GVA, tokens of none"],
    "cut into segments": dict(T=290, segment_chunks=4),
    "packed, GVA, cut into segments": dict(lengths=(290, 1), padding=20, HV=2, segment_chunks=2),
}
# With 290 such tokens one dg is 70 times as large as the others, and half an ulp of it takes the whole budget.
OF_64 = KEPT | {"cut into segments": dict(T=250, segment_chunks=2)}
KEPT = {
    f"{size}: {name}, {keep}": (size, words, keep) for size in SIZES
    for name, words in (OF_64 if size in ("sm90", "sm100, 64") else KEPT).items() for keep in (True, "states")
}


@rows_of(KEPT, "sm90: one sequence, True", commit=["sm90, 128: a batch, GVA, True", "sm100: a batch, GVA, True"])
def test_what_a_forward_keeps_gives_the_bits_of_what_is_made_again(name, force):
    """It keeps its products, or states alone."""
    size, words, keep = KEPT[name]
    words = dict(words)
    force(form="two kernels", segment_chunks=words.pop("segment_chunks", None))
    case, backend = call_of((size, words))
    cut = training_plan.segment_length(case.problem(), 132 if backend == "sm90" else 148)
    assert ("cut into segments" in name) == bool(cut)
    kept, remade = kept_and_made_again(case, backend, keep)
    assert_right(judged_gradients(case, kept, backend))
    assert all(torch.equal(kept[name], x) for name, x in remade.items())


@pytest.mark.parametrize("kept", [False, True, "states"])
@RARELY_WIDE
def test_autograd_gives_the_same_gradients(size, kept):
    case, backend = call_of((size, dict(T=33)))
    door = SimulatedDoor(backend, parse(backend))
    found, (expected, _) = door.call(case, True, disable_recompute=kept), gradients(case, backend)
    assert not door.findings and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kept, said", {
    False: "nothing is kept but the inputs", True: "{} keeps 1.7 MiB beside the inputs",
    "states": "{} keeps 0.8 MiB beside the inputs",
}.items())
@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_explain_says_that_both_directions_are_here_and_what_is_kept_between_them(backend, kept, said):
    keywords = call_of((backend, dict(T=1024, K=128, V=128)))[0].keywords
    with standing_in(host_of(backend)):
        found = kda.explain(**keywords | {"q": keywords["q"].requires_grad_()}, disable_recompute=kept)
    lines = str(found).splitlines()
    assert [line for line in lines if line.startswith("* ")] == [f"* {backend:10} accepts it"] * 2
    assert f"between forward and backward {said.format(backend)}" in lines
