"""The Hopper forward, run on the CPU from its PTX: whole calls against the definition, clean in several schedules."""

import dataclasses

import pytest
import torch
from cute_calls import (
    RAGGED,
    called,
    has_products_that_wait_for_no_other,
    kept_nowhere,
    reads_nothing_before_the_kernel_ahead_is_done,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.sm90 import launch
from kda.backends.sm90.configs import ChainConfig, PrepareConfig
from kda.model.bundles import Save
from kda.model.host import host_of
from kda.routing.dispatch import weigh
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]


def test_a_hopper_gpu_picks_it_and_its_backward_if_both_head_dims_are_equal():
    door = SimulatedDoor("sm90", parse("sm90"))
    case = make_inputs(T=33, H=1, K=64, V=64, gate="bounded")
    assert door.call(case, False).keys() == {"o", "ht"} and door.launches == 2 and not door.findings
    mixed = make_inputs(T=33, H=1, K=128, V=64, gate="bounded")
    taken = [weigh(each.problem("backward"), host_of("sm90")).backend for each in (case, mixed)]
    assert taken == ["sm90", "triton"]


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
                "initial_state": state, "cu_seqlens": None})
            assert torch.equal(called(alone)[0]["o"], packed[:, start : start + length])
        start += length


@pytest.mark.parametrize("kind", [PrepareConfig, ChainConfig], ids=lambda kind: kind.__name__)
def test_kernels_take_the_shared_memory_that_their_configurations_say(kind, monkeypatch):
    """With 16 bytes less they reach beyond it."""
    enough = kind.shared.fget
    monkeypatch.setattr(kind, "shared", property(lambda config: enough(config) - 16))
    kept_nowhere(monkeypatch)
    _, session = called(make_inputs(T=200, H=1, K=64, V=64, gate="bounded"))
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


def test_a_kernel_reads_nothing_before_the_kernel_ahead_of_it_is_done():
    case = make_inputs(**RAGGED, H=1, K=64, V=64, gate="bounded")
    with capture(arch="sm90") as session:
        launch.forward(case.problem(), case.inputs, Save.PRODUCTS)
    assert [launched.pdl for launched in session.launches] == [False, True, False, False]
    for launched in session.launches:
        if launched.pdl:
            reads_nothing_before_the_kernel_ahead_is_done(launched.kernel)
        else:
            assert "griddepcontrol.wait" not in launched.kernel.ptx


def test_no_product_waits_for_another(tmp_path):
    with capture(arch="sm90") as session:
        kda.chunk_kda_fwd(**make_inputs(T=33, H=1, K=128, V=128, gate="bounded").keywords, backend="sm90")
    for launched in session.launches:
        has_products_that_wait_for_no_other(launched.kernel, tmp_path)

