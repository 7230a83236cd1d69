"""What tests and tools prescribe: a field of every Problem, and so of whatever is remembered."""

import contextlib
import functools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kda
from kda.backends.sm90 import plan
from kda.calls import known
from kda.model.force import NOTHING, Force, forced, forcing, with_force
from kda.model.host import host_of, standing_in
from kda.model.problem import Problem
from kda.routing.dispatch import launcher

TWO, ONE = (Force(form=form) for form in ("two kernels", "one kernel"))


def test_a_problem_has_what_was_prescribed_where_it_was_made():
    with forcing(form="one kernel"):
        inside = Problem()
        with forcing(ctas=4):
            assert Problem().force == forced() == Force(form="one kernel", ctas=4)
            with with_force(TWO):
                assert Problem().force == TWO
        assert Problem() == inside
    assert Problem().force is forced() is NOTHING and inside.force == ONE
    assert Problem() != inside and str(Problem()) == str(inside)


def test_no_word_of_a_problem_prescribes_anything():
    with pytest.raises(ValueError, match="not a known word") as failure:
        Problem.parse("force=1")
    assert "force=..." not in str(failure.value)


def test_what_force_does_not_know_is_refused():
    with pytest.raises(ValueError, match="FUSED"):
        forcing(FUSED=True)


def test_a_plan_is_remembered_by_what_is_prescribed():
    def planned():
        return plan.plan(Problem.parse("bounded l2norm T=2048 H=64"), 132)

    usual = planned()
    with forcing(form="two kernels"):
        assert (usual.name, planned().name) == ("one kernel", "two kernels")
    assert planned() is usual


@pytest.fixture
def seen(monkeypatch):
    """Return what is prescribed to each direction of calls of the portable backend, in order."""
    found, launch = [], launcher("reference")

    def recorded(name, whole, p, *args):
        found.append((name, p.force))
        return whole(p, *args)

    for name in ("forward", "backward"):
        monkeypatch.setattr(launch, name, functools.partial(recorded, name, getattr(launch, name)))
    return found


class Watching(TorchDispatchMode):
    """A mode that looks at what runs, which has to be operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def drawn():
    q, k, v, g = torch.randn(4, 1, 5, 2, 16).unbind()
    return [x.requires_grad_() for x in (q, k, v)] + [-g.abs(), torch.rand(1, 5, 2)]


def test_a_known_call_is_another_one_where_something_is_prescribed(seen):
    x = [t.detach() for t in drawn()]
    for _ in range(2):
        kda.chunk_kda(*x)
        with forcing(form="two kernels"):
            kda.chunk_kda(*x)
    assert seen == 2 * [("forward", NOTHING), ("forward", TWO)] and len(known.CALLS) == 2


@pytest.mark.parametrize("watched", [False, True], ids=["known", "operators"])
def test_a_backward_in_another_thread_has_what_its_forward_had(watched, seen):
    """The autograd of a GPU runs backwards in threads of its own."""
    with forcing(form="two kernels"), Watching() if watched else contextlib.nullcontext():
        o, _ = kda.chunk_kda(*drawn())
    thread = threading.Thread(target=lambda: o.sum().backward())
    thread.start()
    thread.join()
    assert seen == [("forward", TWO), ("backward", TWO)]


def test_a_second_derivative_has_it_too(seen):
    x = drawn()
    with forcing(form="one kernel"):
        o, _ = kda.chunk_kda(*x)
    torch.autograd.grad(o.sum(), x[0], create_graph=True)
    assert {force for _, force in seen} == {ONE}


def test_explain_says_the_same_of_a_call_to_which_something_is_prescribed():
    x = [t.detach() for t in drawn()]
    with standing_in(host_of("sm90")):
        plain = str(kda.explain(*x))
        with forcing(form="one kernel", ctas=4):
            assert str(kda.explain(*x)) == plain
