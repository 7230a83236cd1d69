"""What the Hopper forward keeps of A_qk and A_inv, run on the CPU from its PTX, and the Triton backward on that."""

import functools

import pytest
import torch
from cute_calls import RAGGED, kept_nowhere, rows_of

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.sm90 import launch
from kda.backends.sm90.configs import PairsConfig
from kda.model.bundles import Save
from kda.model.host import host_of, standing_in
from kda.model.stages import find
from kda.tools.verify.budget import Budget
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import Oracle, describe, judge, masked
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]

MADE = find("fwd/gate+intra+wy")


def drawn(**words):
    return make_inputs(**dict(H=1, K=128, V=64, gate="bounded") | words)


def forward(case, save=Save.PRODUCTS, **options):
    with capture(arch="sm90", **dict(strict=True) | options) as session:
        out = launch.forward(case.problem(), case.inputs, save)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    return out


def kept(case, **options):
    """Return what was kept, in chunks, by name."""
    return {name: case.layout.chunk(x) for name, x in forward(case, **options).saved._asdict().items()}


def oracle_of(case):
    oracle = Oracle(case, Door("sm90", "cpu").rounding(case))
    oracle.advance(MADE)
    return oracle


def check(case, limits=None, **options):
    limits = limits or oracle_of(case).budgets_chained(MADE)
    rows = [judge("kept", name, limits[name], x, case) for name, x in kept(case, **options).items()]
    assert not any(row.wrong for row in rows), "\n".join(describe(row) for row in rows if row.wrong)


CASES = {
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, many tokens of none": dict(lengths=(30, 130, 0, 33), padding=70, K=64),
    "one token": dict(T=1, H=8),                               # eight draws of a single number are no budget
    "gates that forget": dict(T=130, regime="fast"),
    "softplus gate that forgets, packed": dict(gate="softplus", regime="fast", **RAGGED),
    "given decays and beta, no l2norm": dict(T=70, gate="given", beta="given", l2norm=False),
    "beta up to 2": dict(T=128, beta="2*sigmoid"),
    "chunks of 32": dict(B=2, T=70, C=32),
    "chunks of 32, packed, GVA": dict(C=32, HV=2, **RAGGED),
}


@rows_of(CASES, "packed, many tokens of none", commit=["a batch, GVA"])
def test_what_is_kept_is_the_definition(name):
    check(drawn(**CASES[name]))


@pytest.mark.parametrize("name", ["A_qk", "A_inv"])
def test_what_lies_between_halves_is_the_definition(name):
    """This block is compared alone: beside the ones on A_inv's diagonal it is small."""
    case = drawn(T=100, beta="2*sigmoid")
    oracle = oracle_of(case)
    exact, *rounded = (masked(name, x[name], case)[..., 32:, :32] for x in (oracle.exact, *oracle.rounded))
    limit = Budget.of(exact, *rounded, compute=torch.float32, stored=torch.bfloat16, summed=case.spec.K)
    assert limit.excess(kept(case)[name][..., 32:, :32]) <= 1


@pytest.mark.exhaustive
def test_keeping_changes_no_bit_of_the_results():
    case = drawn(HV=2, **RAGGED)
    out, alone = forward(case), forward(case, Save.NOTHING)
    assert alone.saved is None and torch.equal(out.o, alone.o) and torch.equal(out.final_state, alone.final_state)


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_any_order_of_warps_gives_the_same_bits(gate):
    case = drawn(lengths=(70, 40), K=64, gate=gate)
    expected = kept(case)
    for schedule in (1, 2, 3):
        found = kept(case, schedule=schedule, early=True)
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_tokens_of_other_sequences_and_of_none_are_left_alone():
    case = drawn(lengths=(40, 33), padding=50, K=64)
    for x in forward(case).saved:
        assert x[:73].isfinite().all() and x[73:].isnan().all()


@pytest.mark.exhaustive
def test_pairs_takes_the_shared_memory_that_its_configuration_says(monkeypatch):
    """With 16 bytes less it reaches beyond it."""
    enough = PairsConfig.shared.fget
    monkeypatch.setattr(PairsConfig, "shared", property(lambda config: enough(config) - 16))
    kept_nowhere(monkeypatch)
    with pytest.raises(AssertionError, match="out-of-bounds"):
        forward(drawn(T=64, K=64))


def test_a_recorded_call_by_name_explains_both_its_backends():
    keywords = drawn(T=33).keywords
    with standing_in(host_of("sm90")):
        found = kda.explain(**keywords | {"q": keywords["q"].requires_grad_()}, backend="sm90")
    assert [line for line in str(found).splitlines() if line.startswith("* ")] == [
        "* sm90       accepts it", "* triton     accepts it"]


# gradients, made by Triton of what is kept

RECORDED = {
    "T=70": dict(T=70),
    "gates that forget": dict(T=70, regime="fast", seed=2),
    "packed, chunks of 32": dict(lengths=(40, 0, 25), C=32),
}


@pytest.fixture
def recorded(monkeypatch, kernels_built_here):
    """Return a function that makes a recorded call, which saves A_qk and A_inv: the case, its results and budgets."""
    pytest.importorskip("triton")
    monkeypatch.setattr("kda.routing.dispatch.what_is_saved", lambda *asked: Save.PRODUCTS)

    def call(name):
        case, door = drawn(**RECORDED[name]), SimulatedDoor("sm90", parse("sm90"))
        found = door.call(case, True)
        assert not door.findings, "\n".join(map(str, door.findings[:5]))
        return case, found, limits_of_recorded(name)

    return call


@functools.cache
def limits_of_recorded(name):
    case = drawn(**RECORDED[name])
    return budgets(case, SimulatedDoor("sm90", parse("sm90")).rounding(case))


def wrong(found, limits):
    return {name for name, limit in limits.items() if not limit.excess(found[name]) <= 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECORDED)
def test_gradients_are_the_definition(name, recorded):
    case, found, limits = recorded(name)
    assert found.keys() == limits.keys()
    rows = [judge("call", name, limit, found[name], case, whole=True) for name, limit in limits.items()]
    assert not any(row.wrong for row in rows), "\n".join(describe(row) for row in rows if row.wrong)


@pytest.mark.exhaustive
def test_what_the_forward_rounds_is_too_little_room_for_gradients_and_all_that_o_and_ht_have(recorded):
    case, found, limits = recorded("gates that forget")
    rounding = Door("sm90", "cpu").rounding(case)
    narrow = budgets(case, rounding._replace(gradients=None))
    assert {"o", "ht"}.isdisjoint(wrong(found, narrow)) and wrong(found, narrow)
    assert all(narrow[name][1:] == limits[name][1:] for name in ("o", "ht"))
    theirs = budgets(case, Door("triton", "cpu").rounding(case))
    assert all(theirs[name][1:] == limits[name][1:] for name in limits if name not in ("o", "ht"))


SPOILT = {
    "a half of A_qk is missing": lambda A_qk, A_inv: A_qk[32:64, :, :32].zero_(),
    "a half of A_inv is missing": lambda A_qk, A_inv: A_inv[32:64, :, :32].zero_(),
    "a half of A_inv has the wrong sign": lambda A_qk, A_inv: A_inv[32:64, :, :32].neg_(),
    "a row of A_inv is late": lambda A_qk, A_inv: A_inv[40:41].copy_(A_inv[39:40]),
    "a row of A_qk is late": lambda A_qk, A_inv: A_qk[40:41].copy_(A_qk[39:40]),
    "a tail's A_qk is missing": lambda A_qk, A_inv: A_qk[64:].zero_(),
    "A_inv is 2% too small": lambda A_qk, A_inv: A_inv.mul_(0.98),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_gradients_tell_of_what_was_kept_wrong(fault, recorded, calls_in_python, monkeypatch):
    whole = launch.forward

    def spoilt(*args, **options):
        out = whole(*args, **options)
        SPOILT[fault](*out.saved)
        return out

    monkeypatch.setattr(launch, "forward", spoilt)
    _, found, limits = recorded("T=70")
    assert wrong(found, limits)
