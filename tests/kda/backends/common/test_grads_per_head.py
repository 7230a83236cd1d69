"""bwd/grads and bwd/shares of Hopper and Blackwell with one gate per head, as stages, simulated.

No forward kernel of these backends reads such a gate yet: capability rules refuse the whole call.
"""

import pytest
import torch
from cute_calls import COMMIT, RARE, assert_right, changed, drawn

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common import training
from kda.backends.common.tensors import INPUTS
from kda.backends.sm90 import launch as sm90
from kda.backends.sm100 import launch as sm100
from kda.model.host import detect
from kda.model.problem import Problem
from kda.tools.verify.parity import examine
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]
PER_HEAD = Problem.parse("backward softplus l2norm gate_per_head=true beta=sigmoid dt_bias=true T=600 H=1 HV=3")
BACKENDS = {"sm90": sm90.TRAINING, "sm100": sm100.TRAINING}
PACKED = dict(lengths=(65, 0, 1, 30), HV=2, padding=5, gate="softplus", regime="fast", K=64, V=64)


def door_of(backend):
    return SimulatedDoor(backend, parse(backend))


@pytest.mark.parametrize(("backend", "words", "dtype"), [
    pytest.param("sm90", PACKED, torch.float32, marks=RARE),
    pytest.param("sm100", dict(T=70), torch.bfloat16, marks=COMMIT),
], ids=str)
def test_grads_read_and_write_one_gate_per_head(backend, words, dtype, monkeypatch):
    case, door, results = drawn(gate_per_head=True, **words), door_of(backend), []
    case = changed(case, g=lambda g: g.to(dtype))
    rounding, as_given = door.rounding(drawn(**words)), training.as_given      # rules refuse this call itself
    monkeypatch.setattr(door, "rounding", lambda case: rounding)
    monkeypatch.setattr(training, "as_given", lambda y, given: results.append(y) or as_given(y, given))
    rows = examine(door, case, only_stage="bwd/grads").rows
    assert not door.findings and {row.tensor for row in rows} >= {"dq", "dk", "dg", "dbeta"}
    assert_right(rows)
    _, _, dg, _ = results
    assert dg.shape == case.inputs.g.shape and dg.dtype == dtype
    last = case.spec.padding
    assert not last or not dg[:, -last:].any()


@pytest.mark.parametrize("backend", ["sm90", pytest.param("sm100", marks=RARE)])
def test_a_bias_of_one_gate_per_head_gets_the_sum_over_channels(backend):
    door = door_of(backend)
    with door.simulated():
        host = detect("cpu")
        d = BACKENDS[backend].description(PER_HEAD, host.cc, host.sms, None, (*INPUTS, "of_A_log", "of_dt_bias"))
        scratch = training.Scratch(None, None, None, *(d.draft[name] for name in ("of_A_log", "of_dt_bias")))
        run = d.draft.done(*training.sums(d, scratch))
        of_A_log, of_dt_bias = torch.randn(2, d.plan.all_states, PER_HEAD.HV, PER_HEAD.K)
        q = torch.zeros(1, dtype=torch.bfloat16)
        dA_log, ddt_bias = run(q, [q, *[None] * (len(INPUTS) - 1), of_A_log, of_dt_bias])
    assert not door.findings and d.plan.all_states > 8
    torch.testing.assert_close(dA_log, of_A_log.sum((0, 2)), rtol=0, atol=1e-3)
    torch.testing.assert_close(ddt_bias, of_dt_bias.sum((0, 2)), rtol=0, atol=1e-3)
