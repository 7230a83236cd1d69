"""Steps of Hopper and Blackwell with one gate per head, on the CPU from their PTX: they are the definition, and have
the bits of the same gate for each channel wherever nothing is summed over channels."""

import pytest
import torch
from cute_calls import (
    COMMIT,
    RARE,
    assert_right,
    call_of,
    changed,
    drawn,
    for_each_channel,
    judged_gradients,
    kept_and_made_again,
    rows_of,
    table,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common import training
from kda.backends.common.tensors import INPUTS
from kda.backends.sm90 import launch as sm90
from kda.backends.sm100 import launch as sm100
from kda.model.bundles import Save
from kda.model.host import detect
from kda.model.problem import Problem
from kda.tools.verify.parity import examine
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]

WIDE, NO_BIAS = dict(g=torch.Tensor.float), dict(dt_bias=lambda _: None)
NO_PARAMETERS = NO_BIAS | dict(A_log=lambda _: None)
PACKED = dict(lengths=(65, 0, 1, 30), HV=2, padding=140)
FORGETS = dict(gate="softplus", regime="fast")
# the inputs, what becomes of them, what the forward saves, and fields of Force
STEPS = {
    "bounded, packed, GVA": (PACKED, {}, True, {}),
    "bounded, a batch, GVA": (dict(B=2, T=70, HV=2), {}, "states", {}),
    "bounded, g of float32": (dict(T=140), WIDE, True, {}),
    "bounded, without A_log and dt_bias": (dict(T=70), NO_PARAMETERS, True, {}),
    "softplus that forgets, packed, GVA": (FORGETS | PACKED, {}, True, {}),
    "softplus that forgets, packed, g of float32": (FORGETS | PACKED, WIDE, "states", {}),
    "softplus, without dt_bias": (dict(T=70, gate="softplus"), NO_BIAS, True, {}),
    "given, GVA": (dict(T=70, HV=2, gate="given"), {}, True, {}),
    "one token": (dict(T=1, H=8), {}, True, {}),
    "cut into segments": (dict(T=250), {}, True, dict(segment_chunks=2)),
    "packed, cut into segments": (dict(lengths=(130, 0, 65), padding=20, HV=2), {}, "states", dict(segment_chunks=2)),
}
ONE_KERNEL = {
    f"{name}, clusters of {ctas}": (*STEPS[name][:3], dict(form="one kernel", ctas=ctas)) for name, ctas in (
        ("bounded, packed, GVA", 2), ("softplus that forgets, packed, GVA", 4),
    )
}
STEPS = table({"sm90": STEPS, "sm90, 128": STEPS | ONE_KERNEL, "sm100": STEPS, "sm100, 64": STEPS})


@rows_of(
    STEPS, "sm100: bounded, a batch, GVA",
    commit=["sm90: softplus that forgets, packed, GVA", "sm90: bounded, g of float32",
            "sm100: bounded, without A_log and dt_bias"],
)
def test_a_step_is_the_definition_and_that_of_the_same_gate_for_each_channel(name, force):
    size, (words, change, keep, forced) = STEPS[name]
    case, backend = call_of((size, dict(gate_per_head=True) | words))
    case = changed(case, **change)
    force(**dict(form="two kernels") | forced)
    (found, again), (expected, _) = (kept_and_made_again(x, backend, keep) for x in (case, for_each_channel(case)))
    assert_right(judged_gradients(case, found, backend))
    assert all(torch.equal(found[name], x) for name, x in again.items())
    terms = {name: expected.pop(name) for name in ("dg", "ddt_bias") if name in expected}
    for name, x in expected.items():                                           # the compiler joins other multiply-adds
        few = {"dA_log": 1e-4, "dq": 2.0**-13, "dk": 2.0**-13}.get(name, 0.0)  # one bfloat16 in a thousand
        assert (found[name].double() - x.double()).norm() <= few * x.double().norm(), name
    for name, x in terms.items():
        sums = x.view(*found[name].shape, case.spec.K).double().sum(-1)
        wide = name == "ddt_bias" or change is WIDE                            # in bfloat16, terms were rounded before
        assert (found[name] - sums).norm() <= (1e-5 if wide else 2.0**-8) * (sums.norm() + x.norm()), name
        assert found[name].dtype == x.dtype


@pytest.mark.parametrize("backend, words", [
    pytest.param("sm90", dict(K=64, V=64, **FORGETS, **PACKED), marks=RARE),
    pytest.param("sm100", dict(T=70), marks=COMMIT),
], ids=str)
def test_its_second_kernel_is_a_stage_of_its_own(backend, words):
    case, door = drawn(gate_per_head=True, **words), SimulatedDoor(backend, parse(backend))
    rows = examine(door, case, only_stage="bwd/grads").rows
    assert not door.findings and {row.tensor for row in rows} >= {"dq", "dk", "dg", "dbeta", "ddt_bias_parts"}
    assert_right(rows)


@pytest.mark.parametrize("backend", ["sm90", pytest.param("sm100", marks=RARE)])
def test_a_bias_of_one_gate_per_head_gets_the_sum_over_channels(backend):
    """The sum of more chunks than threads that share a channel."""
    p = Problem.parse("backward softplus l2norm gate_per_head=true beta=sigmoid dt_bias=true T=4200 H=1 HV=3")
    makes = {"sm90": sm90.TRAINING, "sm100": sm100.TRAINING}[backend]
    door = SimulatedDoor(backend, parse(backend))
    with door.simulated():
        host = detect("cpu")
        d = makes.description(p, host.cc, host.sms, None, (*INPUTS, "of_A_log", "of_dt_bias"))
        scratch = training.Scratch(None, None, None, *(d.draft[name] for name in ("of_A_log", "of_dt_bias")))
        run = d.draft.done(*training.sums(d, scratch, Save.OWN))
        of_A_log, of_dt_bias = torch.randn(2, d.plan.all_states, p.HV, p.K)
        q = torch.zeros(1, dtype=torch.bfloat16)
        dA_log, ddt_bias = run(q, [q, *[None] * (len(INPUTS) - 1), of_A_log, of_dt_bias])
    assert not door.findings and d.plan.all_states > 64
    torch.testing.assert_close(dA_log, of_A_log.sum((0, 2)), rtol=0, atol=1e-3)
    torch.testing.assert_close(ddt_bias, of_dt_bias.sum((0, 2)), rtol=0, atol=1e-3)
