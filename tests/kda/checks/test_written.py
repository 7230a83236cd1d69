"""Memory that a call writes: what it may share with other tensors, and what not."""

import itertools

import pytest
import torch

import kda
from kda.checks import written
from kda.tools.verify.steps import make_step


def met(x, y):
    """Tell whether two tensors have an element in common, by writing one and reading the other."""
    x.zero_()
    y.fill_(1)
    return bool(x.any())


def views(buffer):
    """Yield views of one buffer that lie in it in every way that callers use."""
    rows = buffer.view(4, 6, 8)
    yield from (buffer[:60], buffer[60:], buffer[59:100], buffer[::2], buffer[1::2], buffer[1::4], buffer[:0])
    yield from (rows[:, :3], rows[:, 3:], rows[..., :3], rows[..., 3:5], rows[..., 5:], rows[1], rows.mT)
    yield from (rows[:, 2:4, 2:6], rows[:, ::2], rows[:, 1::2], rows[:2, :, 4:].mT)
    yield from (buffer.as_strided((4, 5), (48, 1), 4), buffer.as_strided((3, 4), (48, 1), 47))


def test_views_that_have_an_element_in_common_are_found_and_views_that_take_turns_are_not():
    buffer = torch.zeros(192, dtype=torch.float64)
    pairs = [*itertools.combinations(views(buffer), 2)]
    found = [written.shared([x, y], ["x", "y"], ["x"]) is not None for x, y in pairs]
    exact = [met(x, y) for x, y in pairs]
    assert not any(right and not ours for ours, right in zip(found, exact))    # none is missed
    assert [ours for ours, right in zip(found, exact) if not right].count(True) <= 6
    assert exact.count(False) > 30


def test_tensors_of_other_storages_or_without_elements_share_nothing():
    x = torch.zeros(4)
    assert written.shared([x, torch.zeros(4), None, x[:0]], ["x", "y", "z", "none"], ["x", "none"]) is None


@pytest.mark.parametrize("name", ["q", "v", "g", "norm_gate", "states"])
def test_decode_step_refuses_an_out_that_is_another_of_its_tensors(name):
    x = make_step(K=16, V=16, T=1)
    given = x[name].flatten()[: x["v"].numel()].view(x["v"].shape)
    with torch.no_grad(), pytest.raises(kda.InputError) as error:
        kda.decode_step(**x | {name: x[name], "out": given}, backend="reference")
    assert error.value.check == "decode.memory.shared" and {"out", name} < {*error.value.found.split()}


def test_tensors_of_a_step_may_lie_in_one_buffer_and_take_turns_there():
    x = make_step(K=16, V=16, N=3, T=1, conv=False, norm=False)
    with torch.no_grad():
        apart = kda.decode_step(**x | {"states": x["states"].clone()}, backend="reference")
        buffer = torch.cat([x[n] for n in "qkvg"], -1)
        q, k, v, g = buffer.split(16, -1)
        mixed = x | dict(q=q, k=k, v=v, g=g, states=x["states"].clone())
        together = kda.decode_step(**mixed, backend="reference")
        slots = torch.zeros(5, 2 * 2 * 16 * 16)
        pool = slots[:, :512].view(5, 2, 16, 16).copy_(x["states"])
        paged = kda.decode_step(**x | {"states": pool, "g": x["g"]}, backend="reference")
    assert torch.equal(apart, together) and torch.equal(apart, paged)


def test_a_recurrent_call_may_write_o_over_v():
    q, k, v, g = torch.randn(4, 1, 5, 2, 16).unbind()
    inputs = q, k, v, -g.abs(), torch.rand(1, 5, 2)
    with torch.no_grad():
        alone, _ = kda.fused_recurrent_kda(*inputs)
        over, _ = kda.fused_recurrent_kda(q, k, (w := v.clone()), *inputs[3:], out=w)
    assert torch.equal(alone, over) and over is w


def test_a_pool_that_holds_another_tensor_of_the_call_is_refused():
    pool = torch.zeros(3, 2, 16, 16)
    q, k, _, g = torch.randn(4, 1, 5, 2, 16).unbind()
    v = pool[2].flatten()[:160].view(1, 5, 2, 16)
    for function in (kda.fused_recurrent_kda, kda.chunk_kda):
        with pytest.raises(kda.InputError, match="initial_state in the memory of v"):
            function(q, k, v, -g.abs(), torch.rand(1, 5, 2), initial_state=pool, ssm_state_indices=torch.tensor([1]))
