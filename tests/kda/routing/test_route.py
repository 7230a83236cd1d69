"""A call has one route: what `explain` prints, `rehearse` returns and `chunk_kda` runs is found once."""

import pytest
import torch

import kda
from kda.calls import known
from kda.calls.arguments import by_name, prepare
from kda.calls.rehearsal import rehearse
from kda.model.bundles import Save
from kda.model.host import host_of, standing_in
from kda.model.problem import Problem
from kda.routing import dispatch
from kda.routing.capability import Capability

HOSTS = ("sm80", "sm89", "sm90", "sm100")


def arguments(dtype=torch.bfloat16, K=128, **options):
    q, k, v, g = torch.randn(4, 1, 3, 2, K, dtype=dtype).unbind()
    beta = torch.rand(1, 3, 2, dtype=dtype)
    return dict(q=q.requires_grad_(), k=k, v=v, g=-g.abs(), beta=beta, **options)


def bound(given):
    """Return the call that chunk_kda would run, and remember."""
    return known.bind(*prepare("chunk_kda", *by_name(given)))


def no_rule(*args, **keywords):
    pytest.fail("a rule was asked again")


@pytest.mark.parametrize("keeps", [False, True, "states"])
@pytest.mark.parametrize("arch", HOSTS)
def test_explain_and_rehearse_show_the_route_that_runs_and_ask_nobody_again(arch, keeps, monkeypatch):
    given = arguments(disable_recompute=keeps)
    with standing_in(host_of(arch)):
        route = bound(given).route
        monkeypatch.setattr(Capability, "rejections", no_rule)
        found = kda.explain(**given)
        rehearsed = rehearse("chunk_kda", **given)
    assert (found.forward, found.backward) == rehearsed == route.choices
    kept = "nothing is kept" if route.save is Save.NOTHING else f"{route.backend} keeps "
    assert kept in found.notes[-1]


def test_without_gradients_there_is_one_direction():
    given = arguments()
    with torch.no_grad(), standing_in(host_of("sm90")):
        call, found = bound(given), kda.explain(**given)
        assert rehearse("chunk_kda", **given) == (found.forward,)
    assert (call.backend, call.problem) == (found.backend, found.forward.problem)


SAVED = [
    ("sm90", "auto", {}, Save.NOTHING, "sm90"),
    ("sm90", "auto", {"disable_recompute": True}, Save.OWN, "sm90"),
    ("sm90", "triton", {}, Save.PRODUCTS, "triton"),
    ("sm90", "triton", {"disable_recompute": True}, Save.ALL, "triton"),
    ("sm100", "sm100", {"packed": True, "N": 70_000}, Save.PRODUCTS, "triton"),  # sm100 saves nothing for others
    ("sm100", "auto", {"intermediate_states": True}, Save.NOTHING, "sm100"),              # no gradient flows
    (None, "auto", {}, Save.NOTHING, "reference"),
    (None, "auto", {"disable_recompute": True}, Save.ALL, "reference"),
]


@pytest.mark.parametrize(("arch", "requested", "fields", "save", "backend"), SAVED)
def test_what_is_saved_and_who_runs_the_forward_follow_from_the_backends_of_both_directions(
    arch, requested, fields, save, backend
):
    p = Problem(**{"device": "cpu", "T": 33, **fields})
    with standing_in(host_of(arch) if arch else None):
        route = dispatch.route(p, requested, training=True)
        assert (route.save, route.backend) == (save, backend)
        assert dispatch.route(p, requested, training=True, save=save).backend == backend          # as an operator asks
    assert route.forward.disable_recompute is route.backward.disable_recompute is (save is Save.ALL)


def test_states_alone_are_kept_where_they_are_requested_and_a_backend_can():
    p = Problem(device="cpu", T=33)
    with standing_in(host_of("sm90")):
        saved = [dispatch.route(p, name, training=True, states=True).save for name in ("sm90", "triton")]
    assert saved == [Save.STATES, Save.PRODUCTS]


def test_a_call_that_nobody_accepts_has_a_route_to_explain_and_none_to_run():
    p = Problem(device="cpu", dtype="float64", K=64)
    with standing_in(host_of("sm90")):
        found = dispatch.weigh_route(p, "sm90", training=True)
        assert found.refused is found.choices[0] and found.backend == "" and found.save is Save.NOTHING
        with pytest.raises(kda.NoBackendError, match=r"sm90\.dtype"):
            dispatch.route(p, "sm90", training=True)


def test_a_route_that_was_found_before_is_printed_with_the_place_where_its_backend_is_named_now():
    given = arguments()
    assert "(requested: backend='reference')" in str(kda.explain(**given, backend="reference"))
    with kda.use_backend("reference"):
        assert "(requested: use_backend('reference'))" in str(kda.explain(**given))
