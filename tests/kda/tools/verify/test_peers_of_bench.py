"""Other projects as baselines of `kda bench`: what they are given, and why they are refused.  A stand-in has the
signature that cuDNN's front end 1.32 publishes, and computes with the reference."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch
from bench_calls import run

import kda
from kda.tools.commands import bench
from kda.tools.verify import cases, doors

ONE = ("--tokens", "70", "--heads", "2", "--regime", "slow", "--direction", "forward", "--repeats", "3")


def kimi_delta_attention(
    q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, batch_invariant=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    safe_gate=False, gate_lower_bound=None, gate_domain="log", a_log=None, dt_bias=None, checkpoint_every_n_tokens=0,
    checkpoint_dtype=None, plan_name=None, overwrite_initial_state=False, state_indices=None,
):
    """Take (tokens, heads, channels) and states (N, HV, V, K); a_log and dt_bias only with safe_gate."""
    assert q.dim() == v.dim() == g.dim() == 3 and beta.dim() == 2 and cu_seqlens.dtype in (torch.int32, torch.int64)
    assert safe_gate or a_log is dt_bias is None
    if initial_state is not None:
        assert initial_state.is_contiguous() and initial_state.shape[1:] == (*v.shape[1:], q.shape[2])
    gate = {} if not safe_gate else dict(
        use_gate_in_kernel=True, lower_bound=-5.0 if gate_lower_bound is None else gate_lower_bound, A_log=a_log,
        dt_bias=None if dt_bias is None else dt_bias.flatten(),
    )
    assert dt_bias is None or dt_bias.shape == g.shape[1:]
    o, ht = kda.chunk_kda(
        *(x[None] for x in (q, k, v, g, beta)), cu_seqlens=cu_seqlens, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, **gate,
    )
    return o[0], ht


@pytest.fixture
def cudnn(monkeypatch):
    """Put the stand-in where cuDNN's front end is imported from, and let it run on a CPU."""
    modules = {name: types.ModuleType(name) for name in ("cudnn", "cudnn.linear_attention")}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["cudnn.linear_attention"].kimi_delta_attention = kimi_delta_attention
    modules["cudnn"].__path__ = []
    return modules["cudnn.linear_attention"]


SPECS = {
    "a batch": cases.Spec(lengths=None, B=3, T=70, H=2, K=16, V=8, dtype="float32"),
    "packed, grouped heads": cases.Spec(lengths=(65, 0, 30), H=1, HV=2, K=8, V=8, dtype="float32"),
    "given decays": cases.Spec(lengths=None, B=2, T=33, H=2, K=8, V=8, dtype="float32", gate="given"),
    "no state before": cases.Spec(lengths=(65,), H=2, K=8, V=8, dtype="float32", initial_state=False),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_cudnn_is_given_the_call_in_its_own_layout(spec, cudnn):
    case = cases.make(spec)
    o, ht = doors.Cudnn().chunk_kda(**case.keywords)
    expected, state = kda.chunk_kda(**case.keywords)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ht, state, atol=1e-5, rtol=1e-5)


def test_offsets_of_a_batch_are_made_once():
    door = doors.Cudnn()
    offsets = door._offsets(3, 5, torch.device("cpu"))
    assert offsets.tolist() == [0, 5, 10, 15] and door._offsets(3, 5, torch.device("cpu")) is offsets


@pytest.mark.parametrize("change, direction, says", [
    ({}, "forward", None), ({}, "backward", "cudnn.backward: only its forward is compared -> --direction forward"),
    ({"gate": "softplus"}, "forward", "cudnn.gate: "), ({"gate": "given"}, "forward", None),
    ({"K": 64}, "forward", "cudnn.head_dim: "), ({"dtype": "float32"}, "forward", "cudnn.dtype: "),
])
def test_what_cudnn_does_not_run_is_refused_with_the_reason(change, direction, says, cudnn, monkeypatch):
    door = doors.Cudnn()
    door.device = "cuda:0"
    case = cases.make(cases.Spec(**{"lengths": None, "T": 1, "H": 1, "K": 128, "V": 128, "dtype": "bfloat16"} | change))
    found = door.against(case, direction)
    assert found == () if says is None else found[0].startswith(says)


def test_peers_that_are_not_there_are_refused_with_what_to_install():
    result = run(*ONE, "--against", "cudnn")
    assert result.exit_code == 3 and "nvidia-cudnn-frontend" in " ".join(result.stdout.split())
    assert (*bench.OTHERS,) == (*doors.PEERS,)


def test_a_baseline_is_compared_before_it_is_timed_and_has_a_ratio(cudnn, monkeypatch):
    monkeypatch.setattr(doors.Cudnn, "absent", lambda self: ())                # here is no GPU, and K is 16
    monkeypatch.setattr(doors.Cudnn, "against", lambda self, case, direction="forward": ())
    words = (*ONE, "-K", "16", "-V", "16", "--dtype", "float32", "--against", "cudnn")
    result = run(*words)
    assert result.exit_code == 0 and "vs cudnn" in result.stdout and "parity: 4 of 4 tensors" in result.stdout
    right = kimi_delta_attention
    cudnn.kimi_delta_attention = lambda *args, **given: tuple(x * 1.1 for x in right(*args, **given))
    wrong = run(*words)
    assert wrong.exit_code == 1 and "vs cudnn" not in wrong.stdout and "Wrong results are not timed" in wrong.stdout
