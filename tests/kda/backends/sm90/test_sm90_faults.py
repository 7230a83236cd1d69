"""A fault planted into a Hopper kernel is noticed: by the simulator, or by a result that is wrong."""

import functools

import pytest
import torch
from cute_calls import gradients, judged_gradients, rows_of
from kernel_faults import assert_noticed, plant
from sm90_faults import CALLS, FAULTS
from sm90_forms import TWO_KERNELS, assert_the_same, results

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.model.bundles import Save
from kda.model.stages import find
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import Oracle, judge

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]


def run(name, **options):
    """Return the results of a call, by name, and the session with the simulator's findings."""
    if name.startswith("gradients"):
        return gradients(CALLS[name].case(), "sm90", strict=False, **options)
    save = Save.PRODUCTS if name == "products" else Save.OWN if name.startswith("kept") else Save.NOTHING
    return results(CALLS[name], save, strict=name != "products", **options)


@functools.cache
def limits_of(name):
    case = CALLS[name].case()
    rounding = Door("sm90", "cpu").rounding(case)
    if name != "products":
        return budgets(case, rounding, backward=False)
    oracle, stage = Oracle(case, rounding), find("fwd/gate+intra+wy")
    oracle.advance(stage)
    return oracle.budgets_chained(stage)


def judged(name, found):
    case = CALLS[name].case()
    if name.startswith("gradients"):
        return judged_gradients(case, found, "sm90")
    if name == "products":
        found = {x: case.layout.chunk(found[x]) for x in ("A_qk", "A_inv")}
    limits = limits_of(name)
    return [judge("call", x, limits[x], found[x], case, whole=name != "products") for x in found if x in limits]


@rows_of(
    FAULTS, "two kernels: a token does not read what it wrote", "products: rows of A_kk without b",
    "pair: a stage is handed back before both CTAs have read it", "products: rows of the next sequence are written",
    commit=["shares: a state is read before it is there"],
)
def test_a_planted_fault_is_noticed(name, tmp_path, monkeypatch, takes, force):
    fault = FAULTS[name]
    expected = None
    if fault.noticed.startswith("wrong") and fault.case.startswith(("states", "kept")):
        takes(TWO_KERNELS)
        expected, _ = run(fault.case)
    form = CALLS[fault.case].form
    sms = 2 if form.reverse and fault.case != "gradients, many items" else 1
    one_item_after_another = dict(sms=sms) if fault.case.startswith("gradients") else {}
    force(**form.forced | one_item_after_another)
    plant(fault, tmp_path, monkeypatch)
    order = dict(schedule=fault.schedule, early=True) if fault.schedule else {}
    found, session = run(fault.case, **order)
    if expected is None:
        assert_noticed(fault, session, lambda: judged(fault.case, found))
    else:
        wrong = "h" if fault.noticed == "wrong states" else "memory"
        assert not torch.equal(found.pop(wrong), expected.pop(wrong))
        if wrong == "h":
            assert_the_same(found, expected)                                    # the states alone are wrong
