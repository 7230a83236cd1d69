"""The clock of kernels that ship: the same bits, the same time each time, and all launches of a call."""

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.tools.verify.cases import make_inputs
from ptxkit import capture

pytestmark = pytest.mark.simulated


def forward(backend, arch, **options):
    case = make_inputs(T=128, H=1, K=128, V=128, gate="bounded", initial_state=False)
    with capture(arch=arch, **options) as session:
        o, state = kda.chunk_kda_fwd(**case.keywords, backend=backend)[:2]
    assert not session.findings
    return session, o, state


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend, arch", [("sm90", "sm_90a"), ("sm100", "sm_100a")])
def test_a_forward_has_the_same_bits_with_a_clock_and_the_same_time_each_time(backend, arch):
    _, o, state = forward(backend, arch, strict=True)
    timed = [forward(backend, arch, checks=checks, clock=True) for checks in (True, False)]
    for _, same_o, same_state in timed:
        assert torch.equal(o, same_o) and (state is None or torch.equal(state, same_state))
    first, again = (session for session, _, _ in timed)
    assert 0 < first.milliseconds == again.milliseconds < 1
    one_by_one = sum(run.clock.milliseconds for run in first.runs)
    gaps = sum(run.clock.gap for run in first.runs[1:]) / first.runs[0].clock.chip.gigahertz / 1e6
    assert first.milliseconds <= 1.001 * (one_by_one + gaps)
    assert [run.clock.stalls for run in first.runs] == [run.clock.stalls for run in again.runs]
