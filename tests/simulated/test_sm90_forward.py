"""The Hopper forward, run on the CPU from its PTX: whole calls against the definition, clean under several schedules.

The backend is not offered to callers yet (it has no capability.py): what is here is called by itself.
"""

import dataclasses
import subprocess
import sys

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.sm90 import launch
from kda.backends.sm90.configs import ChainConfig, PrepareConfig
from kda.simulator import capture
from kda.verify.budget import Rounding
from kda.verify.cases import make_inputs
from kda.verify.definition import budgets
from kda.verify.parity import describe, judge

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDED = dict.fromkeys(("A_qk", "A_inv", "qg", "kb", "kg", "h", "v_new", "o"), "bfloat16")
RAGGED = dict(lengths=(65, 0, 1, 30))


def changed(case, **given):
    new = {name: change(case.keywords[name]) for name, change in given.items()}
    return dataclasses.replace(case, keywords=case.keywords | new)


def called(case, **options):
    """o and ht, (K, V), of one call, and what the simulator objects to."""
    problem = dataclasses.replace(case.problem(), final_state=True)
    with capture(arch="sm90", **options) as session:
        out = launch.forward(problem, case.inputs)
    return {"o": out.o, "ht": out.final_state}, session


def check(case, **options):
    found, session = called(case, **options)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    limits = budgets(case, Rounding(torch.float32, ROUNDED))
    rows = [judge("call", name, limits[name], found[name], case, whole=True) for name in found]
    assert not any(row.wrong for row in rows), "\n".join(describe(row) for row in rows if row.wrong)
    return found


OPTIONS = {
    "one chunk and a part of one": dict(T=33),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "K = V = 64": dict(T=100, K=64, V=64),
    "K = 64, V = 128": dict(T=40, K=64),
    "packed, GVA": dict(HV=2, **RAGGED),
    "packed, many tokens of none": dict(HV=2, padding=140, **RAGGED),
    "no initial state, beta up to 2": dict(T=40, initial_state=False, beta="2*sigmoid"),
    "given beta": dict(T=40, beta="given"),
    "gates that forget": dict(T=100, regime="fast"),
    "one token": dict(T=1),
    "softplus gate": dict(T=100, gate="softplus"),
    "softplus gate that forgets, packed": dict(gate="softplus", regime="fast", HV=2, **RAGGED),
    "given decays, no l2norm": dict(T=70, gate="given", l2norm=False),
    "bounded gate, no l2norm, K = V = 64": dict(T=40, K=64, V=64, l2norm=False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_is_the_definition(name):
    check(make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | OPTIONS[name]))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("schedule", [1, 2, 3])
def test_any_order_of_warps_gives_the_same_bits(schedule, gate):
    case = make_inputs(H=1, HV=2, K=128, V=128, gate=gate, **RAGGED)
    (expected, _), (found, session) = called(case), called(case, schedule=schedule, early=True)
    assert not session.findings
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name, change", {
    "every token at the lower bound": dict(g=lambda x: torch.full_like(x, 1e9)),
    "gates saturated on and off in turn": dict(
        g=lambda x: torch.full_like(x, -20.0).index_fill(1, torch.arange(0, x.shape[1], 2), 20.0)
    ),
    "no decay at all": dict(g=lambda x: torch.full_like(x, -1e9)),
    "identical keys": dict(k=lambda x: x[:, :1].expand(x.shape).contiguous(), g=lambda x: torch.full_like(x, -30.0)),
    "keys and values of 2^12": dict(k=lambda x: 4096 * x, v=lambda x: 4096 * x),
}.items())  # fmt: skip
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_gates_and_keys_at_their_limits_are_the_definition(gate, name, change):
    found = check(changed(make_inputs(T=70, H=1, K=128, V=128, gate=gate), **change))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_no_output_depends_on_later_tokens(gate):
    case = make_inputs(T=70, H=1, K=128, V=128, gate=gate)
    found = called(case)[0]["o"]
    for t in (1, 9, 31, 32, 50):
        def later(x, t=t):
            return torch.cat((x[:, :t], torch.randn(x[:, t:].shape).to(x.dtype)), 1)

        other = changed(case, **dict.fromkeys(("q", "k", "v", "g", "beta"), later))
        assert torch.equal(called(other)[0]["o"][:, :t], found[:, :t]), t


def test_alone_and_packed_have_the_same_bits():
    lengths = (65, 0, 1, 30)
    case = make_inputs(lengths, H=1, K=128, V=128, gate="bounded")
    packed, start = called(case)[0]["o"], 0
    for n, length in enumerate(lengths):
        if length:
            rows = {name: case.keywords[name][:, start : start + length] for name in ("q", "k", "v", "g", "beta")}
            state = case.keywords["initial_state"][n : n + 1]
            spec = dataclasses.replace(case.spec, lengths=None, B=1, T=length)
            alone = dataclasses.replace(case, spec=spec, keywords=case.keywords | rows | {
                "initial_state": state, "cu_seqlens": None})  # fmt: skip
            assert torch.equal(called(alone)[0]["o"], packed[:, start : start + length])
        start += length


@pytest.mark.parametrize("kind", [PrepareConfig, ChainConfig], ids=lambda kind: kind.__name__)
def test_kernels_take_the_shared_memory_that_their_configurations_say(kind, monkeypatch):
    """With 16 bytes less they reach beyond it."""
    enough = kind.shared.fget
    monkeypatch.setattr(kind, "shared", property(lambda config: enough(config) - 16))
    _, session = called(make_inputs(T=200, H=1, K=64, V=64, gate="bounded"))
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


def test_a_kernel_that_was_kept_needs_no_dsl(tmp_path, monkeypatch):
    code = (
        "import sys; from kda.backends.sm90 import launch; from kda.backends.sm90.configs import TablesConfig; "
        "k = launch.kernel(TablesConfig('int32')); print('cutlass' in sys.modules, k.registers > 0)"
    )
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    says = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
            for _ in range(2)]  # fmt: skip
    assert says == [["True", "True"], ["False", "True"]]
