"""The Hopper forward in one kernel where it keeps more than results, for its backward or in a pool: the bits of kernels
apart, in what is kept as in results and gradients."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from cute_calls import (
    RAGGED,
    Fault,
    drawn,
    gradients,
    has_products_that_wait_for_no_other,
    kept_and_made_again,
    kept_nowhere,
    plant,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common import training
from kda.backends.common.pool.launch import Checkpoints
from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import FusedConfig
from kda.bundles import Save
from ptxkit import capture
from ptxkit.compile.recipes import imported

pytestmark = pytest.mark.usefixtures("one_thread")


def keeping(case, save=Save.OWN, **options):
    """o, ht and all that is kept, and what the simulator objects to."""
    with capture(arch="sm90", **dict(strict=True) | options) as session:
        out = launch.forward(case.problem(), case.inputs, save)
    return [x for x in (out.o, out.final_state, out.saved.memory) if x is not None], session


SMALL = dict(K=64, V=64)


def clusters_of(case):
    return plan.training_plan(case.problem(), 132).clusters


CASES = {
    "stages used several times": (2, None, dict(T=390)),
    "the same, GVA": (2, None, dict(T=390, HV=2)),
    "one token": (2, None, dict(T=1)),
    "a batch, an odd number of chunks": (2, None, dict(B=2, T=70)),
    "packed, GVA": (2, None, dict(HV=2, **RAGGED)),
    "packed, many tokens of none": (2, None, dict(padding=140, **RAGGED)),
    "a walk is cut behind an odd chunk": (2, 4, dict(lengths=(300, 1, 0, 5, 40))),
    "each cut goes through a walk": (2, 3, dict(B=2, T=130, HV=2)),
    "of four, packed, GVA": (4, None, dict(HV=2, **RAGGED)),
    "of four, every tile made twice": (4, None, dict(T=650)),
    "of four, a walk is cut behind an odd chunk": (4, 4, dict(lengths=(300, 1, 0, 5, 40))),
    "of four, a softplus gate": (4, None, dict(T=390, gate="softplus")),
    "of four, given decays, shares": (4, 2, dict(T=130, HV=3, gate="given", beta="given", l2norm=False)),
    "of four, no initial state": (4, 2, dict(T=130, HV=3, initial_state=False)),
}


@pytest.mark.spread(every=16)
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_has_the_bits_of_two_kernels(name, at_once):
    ctas, sharing, words = CASES[name]
    case = drawn(**words)
    at_once(ctas, sharing)
    found, session = keeping(case)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert clusters_of(case) == (ctas, sharing or 0) and len(session.launches) == 1 + 2 * ("lengths" in words)
    at_once(0)
    expected, _ = keeping(case)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


@pytest.mark.spread(every=8)
@pytest.mark.parametrize("keep", [True, "states"], ids=str)
@pytest.mark.parametrize("shape", [dict(T=140), dict(lengths=(65, 0, 1, 30), padding=9)], ids=["rows", "packed"])
@pytest.mark.parametrize("ctas, dims", [(2, {}), (4, {}), (1, SMALL), (2, SMALL)], ids=str)
def test_gradients_have_the_bits_of_two_kernels(shape, ctas, dims, keep, at_once):
    """Gradients come from what was kept, and from what a backward recomputes in one kernel without o."""
    case = drawn(**shape, **dims)
    at_once(ctas)
    assert clusters_of(case).ctas == ctas
    kept, made = kept_and_made_again(case, "sm90", keep)
    at_once(0)
    expected, _ = gradients(case, "sm90")
    for found in (kept, made):
        assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [2, 4])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_any_order_of_warps_gives_the_same_bits(schedule, ctas, at_once):
    case = drawn(lengths=(290, 0, 1, 90), padding=9)
    at_once(ctas, 3)
    (expected, _), (found, session) = keeping(case), keeping(case, schedule=schedule, early=schedule % 2 == 0)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def storing(case, dtype):
    """o, ht and a pool in which every third state that enters a chunk was stored, and the CTAs of the one kernel."""
    p = dataclasses.replace(case.problem(), checkpoints=dtype)
    planned, size = plan.plan(p, 132), p.HV * p.K * p.V
    stored = torch.full((planned.entries * size,), 7.0, dtype=getattr(torch, dtype))
    place = torch.full((planned.entries,), -1)
    place[::3] = torch.arange(planned.entries)[::3] * size
    with capture(arch="sm90", strict=True) as session:
        out = launch._forward(p, case.inputs, Save.NOTHING, Checkpoints(stored, place))
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    return [out.o, out.final_state, stored], planned.fused.ctas if planned.fused else 0


@pytest.mark.spread(every=4)
@pytest.mark.parametrize(("ctas", "sharing", "dtype", "words"), [
    (2, None, "float32", dict(T=200)), (4, None, "bfloat16", dict(T=200)),
    (2, 4, "bfloat16", dict(lengths=(300, 1, 0, 5, 40))), (4, 4, "float32", dict(lengths=(300, 1, 0, 5, 40))),
], ids=str)
def test_states_that_a_pool_stores_have_the_bits_of_two_kernels(ctas, sharing, dtype, words, at_once):
    case = drawn(**words)
    at_once(ctas, sharing)
    found, used = storing(case, dtype)
    at_once(0)
    expected, unused = storing(case, dtype)
    assert (used, unused) == (ctas, 0)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    assert (found[-1] != 7).any() and (found[-1] == 7).any()


@pytest.mark.parametrize(
    "T, H, lengths, gate, expected",
    [
        (8192, 64, (), "bounded", (2, 0)), (8192, 96, (), "bounded", (2, 66)), (8192, 32, (), "bounded", (4, 30)),
        (8192, 24, (), "bounded", (4, 0)), (8192, 64, (1024,) * 8, "bounded", (2, 66)),
        (1024, 64, (), "bounded", (2, 0)), (8192, 32, (), "softplus", (4, 30)), (1024, 32, (), "bounded", (0, 0)),
        (8192, 64, (128,) * 64, "bounded", (0, 0)), (8192, 16, (), "bounded", (0, 0)),
        (8192, 64, (), "softplus", (0, 0)), (8192, 44, (), "bounded", (0, 0)),
    ],
)
def test_one_kernel_keeps_where_it_is_faster_on_an_h200(T, H, lengths, gate, expected):
    """These are measured, except for 44 heads."""
    p = drawn(**(dict(lengths=(1,) * len(lengths)) if lengths else dict(T=1)), gate=gate).problem()
    p = dataclasses.replace(p, T=T, H=H, HV=H, direction="backward")
    assert plan.training_plan(p, 132).clusters == expected


def test_what_it_cannot_do_stays_with_two_kernels(at_once):
    at_once(2)
    for words in (dict(gate="softplus"), dict(gate="given", l2norm=False), dict(K=64, V=64, gate="softplus")):
        assert clusters_of(drawn(T=33, **words)) == (0, 0)
    assert clusters_of(drawn(T=8192)) == (0, 0)                                 # cut into segments


FUSED, HANDOVER, VALUES, STATE = "sm90/fwd/fused", "sm90/parts/handover", "sm90/parts/values", "sm90/parts/state"
FAULTS = {
    "a tile is overwritten before memory has it": Fault(
        HANDOVER, "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n", "", "race-read-write"
    ),
    "nobody waits for the copy of the last tile": Fault(
        FUSED, "cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass", "copy-at-exit"
    ),
    "b of a chunk comes where b of the last one is read": Fault(
        FUSED, "work.b + (turn & 1) * C", "work.b", "race-read-write", schedule=2
    ),
    "v comes where r still is": Fault(
        VALUES, "            if i > 0:\n                self.store(x, s, thread_place, i - 1, walked)\n            "
        "self.request(x, s, thread_place, i + RING - 1, tokens, walked)\n        else",
        "            self.request(x, s, thread_place, i + RING - 1, tokens, walked)\n            if i > 0:\n"
        "                self.store(x, s, thread_place, i - 1, walked)\n        else", "race-read-write"
    ),
    "columns of a state are read before all lanes have put theirs": Fault(
        STATE, f"cute.arch.sync_warp(){46 * ' '}# 16 columns are there", "pass", "race-lanes"
    ),
    "columns of a state are put before all lanes have read the last": Fault(
        STATE, f"cute.arch.sync_warp(){42 * ' '}# those before were read", "pass", "race-lanes"
    ),
    "a state that a share begins with counts from there": Fault(
        FUSED, "if piece_place.skipped + i & self.c.every - 1 == 0:", "if i & self.c.every - 1 == 0:", "wrong answer",
        case="cut"
    ),
    "tiles of a share lie where those of the walk begin": Fault(
        FUSED, "tokens, head, piece.number, before)", "tokens, head, piece.number - piece.skipped, before)",
        "wrong answer", case="cut"
    ),
    "of four: LOAD looks at who has read v, not r": Fault(
        VALUES, "ring.stored if cutlass.const_expr(self.c.has_r) else ring.read", "ring.read", "race-read-write",
        case="of four", schedule=2
    ),
    "of four: a tile is overwritten before memory has it": Fault(
        HANDOVER, "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n", "", "race-read-write", case="of four"
    ),
}
OF_FAULTS = {
    "long": (2, None, dict(T=390)), "cut": (2, 4, dict(lengths=(300, 1, 0, 5, 40))), "of four": (4, None, dict(T=650)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, monkeypatch, at_once):
    ctas, sharing, words = OF_FAULTS[fault.case]
    case = drawn(**words)
    at_once(0)
    expected, _ = keeping(case)
    plant(fault, tmp_path, monkeypatch)
    at_once(ctas, sharing)
    found, session = keeping(case, schedule=fault.schedule, early=bool(fault.schedule))
    if fault.noticed == "wrong answer":
        assert not torch.equal(found[-1], expected[-1])
    else:
        kinds = {finding.kind for finding in session.findings}
        assert fault.noticed in kinds, f"found {kinds or 'nothing'} instead of {fault.noticed}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [2, 4])
def test_it_takes_the_shared_memory_that_its_configuration_says(ctas, monkeypatch, at_once):
    at_once(ctas)
    enough = FusedConfig.shared.fget
    monkeypatch.setattr(FusedConfig, "shared", property(lambda config: enough(config) - 16))
    kept_nowhere(monkeypatch, training)
    _, session = keeping(drawn(T=100))
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


@pytest.mark.spread(every=3)
@pytest.mark.parametrize(("ctas", "gate", "spills"), [(2, "bounded", 24), (4, "bounded", 32), (4, "softplus", 48)])
def test_it_spills_little_and_its_products_wait_for_no_other(ctas, gate, spills, tmp_path, at_once):
    at_once(ctas)
    config = plan.training_plan(drawn(T=33, gate=gate).problem(), 132).fused
    kernel = launch.kernel(config)
    assert kernel.spills <= spills and config.shared <= 227 * 1024
    has_products_that_wait_for_no_other(kernel, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ctas", [2, 4])
def test_the_form_that_racecheck_follows_keeps_the_same(ctas, tmp_path, monkeypatch, at_once):
    for x, name in ((launch, "kernel"), (sys, "path")):                         # `follow` changes both
        monkeypatch.setattr(x, name, getattr(x, name))
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    kept_nowhere(monkeypatch, training)
    at_once(ctas)
    case = drawn(T=390)
    expected, _ = keeping(case)
    importlib.import_module("sanitized").follow(tmp_path)
    found, session = keeping(case)
    assert not session.findings and all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_arguments_are_those_of_a_call_that_keeps_nothing_and_three_more(at_once):
    at_once(2)
    asked = plan.training_plan(drawn(T=33).problem(), 132).fused.arguments
    plain = imported("kda.backends.sm90.configs:FusedArguments")
    assert asked.numbers() == plain.numbers() and asked.tensors() == [*plain.tensors(), "tiles", "h", "r"]
