"""`simulated` in kda selftest and kda verify: a made-up backend whose results pass through a simulated kernel."""

import json

import backends_made_up as made_up
import pytest
import torch
from assembly import kernel
from click.testing import CliRunner

from kda.backends.reference import launch
from kda.model.host import Host, detect, host_of, standing_in
from kda.routing.capability import Capability, Rule
from kda.tools.commands import selftest, verify
from kda.tools.verify.evidence import Evidence
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.target import parse

pytestmark = pytest.mark.simulated

# Each CTA of 64 threads takes 64 words through shared memory: thread t loads word t and stores that of thread t ^ 32
# where it belongs.
BODY = """
    mov.u32 %r2, %ctaid.x;
    shl.b32 %r3, %r2, 6;
    add.u32 %r3, %r3, %r0;
    mul.wide.u32 %rd3, %r3, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u32 %r4, [%rd4];
    mov.u32 %r5, smem;
    shl.b32 %r6, %r0, 2;
    add.u32 %r7, %r5, %r6;
    st.shared.u32 [%r7], %r4;
    {barrier}
    xor.b32 %r8, %r6, 128;
    add.u32 %r8, %r8, %r5;
    ld.shared.u32 %r9, [%r8];
    xor.b32 %r3, %r3, 32;
    mul.wide.u32 %rd5, %r3, 4;
    add.s64 %rd6, %rd2, %rd5;
    st.global.u32 [%rd6], %r9;
"""


def passed_through(x, target, barrier):
    """Return x, copied word for word by a kernel."""
    words = torch.zeros(-(-x.numel() * x.element_size() // 256) * 64, dtype=torch.int32)
    words.view(torch.uint8)[: x.numel() * x.element_size()] = x.contiguous().flatten().view(torch.uint8)
    out = torch.zeros_like(words)
    ptx = kernel(BODY.format(barrier=barrier), pointers=2, target=target.spelling, shared=256)
    Kernel.of("k", ptx, None, target).launch(words.numel() // 64, words, out, block=64)
    return out.view(torch.uint8)[: x.numel() * x.element_size()].view(x.dtype).reshape(x.shape).clone()


def mine(monkeypatch, barrier="bar.sync 0;", wrong=1.0, launches=True, stages=("fwd/gate", "fwd/output")):
    """Make a backend called `mine`: the reference, whose stages' results pass through that kernel."""

    def through(x):
        target = parse("".join(map(str, detect("cpu").cc)))
        return passed_through(wrong * x, target, barrier) if launches else wrong * x

    def stage(which, problem, offsets, tensors):
        found = launch.stage(which, problem, offsets, tensors)
        return {n: through(x) if x is not None and x.is_floating_point() else x for n, x in found.items()}

    def forward(problem, inputs, save):
        assert detect("cpu").simulated
        outputs = launch.forward(problem, inputs, save)
        return outputs._replace(o=through(outputs.o))

    rule = Rule("mine.arch", lambda p, h: h.cc is not None and h.cc >= (9, 0), "needs 9.0, found {h.cc}", "none")
    capability = Capability("mine", 10, "made up", archs=("sm90", "sm100"), stages=stages, rules=(rule,))
    made_up.declare(monkeypatch, capability, stage=stage, forward=forward)


def run(command, *args):
    result = CliRunner().invoke(command, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_selftest_goes_as_far_as_simulated_without_the_gpu(monkeypatch, arch):
    mine(monkeypatch)
    result = run(selftest.command, "--arch", arch)
    assert result.exit_code == 0, result.output
    assert (
        "simulated (of budget)" in result.output
        and "within budget in the simulator; nothing was executed" in result.output
    )


def test_json_calls_it_simulated(monkeypatch):
    mine(monkeypatch)
    (backend,) = json.loads(run(selftest.command, "--arch", "sm100", "--json").stdout)["backends"]
    assert {stage["evidence"] for stage in backend["stages"]} == {Evidence.SIMULATED.word}
    assert backend["device"] is None


def test_a_missing_barrier_fails_though_the_numbers_may_agree(monkeypatch):
    mine(monkeypatch, barrier="")
    result = run(selftest.command, "--arch", "sm100")
    assert result.exit_code == 1
    assert "FAIL" in result.output and "race" in result.output and "ld.shared.u32 %r9, [%r8];" in result.output


def test_wrong_numbers_fail(monkeypatch):
    mine(monkeypatch, wrong=1.01)
    assert run(selftest.command, "--arch", "sm100", "--stage", "fwd/output").exit_code == 1


def test_a_stage_that_launches_nothing_proves_nothing(monkeypatch):
    mine(monkeypatch, launches=False)
    result = run(selftest.command, "--arch", "sm100")
    assert result.exit_code == 1 and "no kernel was launched" in result.output


def test_verify_runs_a_backend_on_a_simulated_arch_and_says_so(monkeypatch):
    mine(monkeypatch)
    result = run(verify.command, "--backend", "mine", "--arch", "sm100", "--stage", "fwd/output", "--lengths", "65,3")
    assert result.exit_code == 0, result.output
    assert "backend  mine on a simulated sm_100a" in result.output
    data = json.loads(
        run(verify.command, "--arch", "sm100", "--stage", "fwd/output", "--lengths", "65,3", "--json").stdout
    )
    assert data["evidence"] == "simulated" and data["arch"] == "sm100" and data["objections"] == []


@pytest.mark.parametrize(("barrier", "code"), [("bar.sync 0;", 0), ("", 1)])
def test_a_run_of_fused_stages_is_simulated_as_one(monkeypatch, barrier, code):
    mine(monkeypatch, barrier, stages=("fwd/gate+intra+wy", "fwd/state+output"))
    (backend,) = json.loads(run(selftest.command, "--arch", "sm100", "--json").stdout)["backends"]
    assert [stage["stage"] for stage in backend["stages"]] == ["fwd/gate+intra+wy", "fwd/state+output"]
    assert [stage["passed"] for stage in backend["stages"]] == [not code] * 2
    args = ("--backend", "mine", "--arch", "sm100", "--stage", "fwd/state+output", "--lengths", "65,3", "--heads", "1")
    result = run(verify.command, *args)
    assert result.exit_code == code and ("race" in result.output) == bool(code)


def test_a_planted_fault_is_noticed_on_the_simulated_arch(monkeypatch):
    mine(monkeypatch)
    args = ("--backend", "mine", "--arch", "sm100", "--lengths", "65,3", "--heads", "1", "-K", "32", "-V", "32")
    result = run(verify.command, *args, "--fault", "heads-swapped", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["first_wrong"]["stage"] == "fwd/gate" and not found["no_backward"]


def test_verify_reports_what_the_simulator_objects_to(monkeypatch):
    mine(monkeypatch, barrier="")
    result = run(verify.command, "--backend", "mine", "--arch", "sm100", "--stage", "fwd/output", "--lengths", "65,3")
    assert result.exit_code == 1 and "The simulator objects:" in result.output and "race" in result.output


def test_verify_cannot_simulate_a_backend_without_kernels():
    result = run(verify.command, "--backend", "reference", "--arch", "sm100")
    assert result.exit_code == 2 and "reference has no kernels. Leave out --backend" in result.output


def test_a_stand_in_is_seen_inside_its_block_alone():
    assert not detect("cpu").simulated
    with standing_in(host_of("sm_100a")):
        assert detect("cpu").cc == (10, 0) and detect("cpu").is_gpu
    assert isinstance(detect("cpu"), Host) and detect("cpu").cc is None
