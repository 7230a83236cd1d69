"""The kernels of a training step are built together, before the first of them is launched."""

import dataclasses
import importlib
import itertools
import types

import pytest
import torch

from kda.backends.common import training
from kda.backends.common.cute.configs import TablesConfig
from kda.backends.common.routine import Draft
from kda.backends.sm90.plan import recipe
from kda.calls import ahead, autograd, plain
from kda.model.bundles import Outputs, Save
from kda.model.host import host_of, standing_in
from kda.model.problem import Inputs, Options, Problem
from kda.routing import dispatch
from ptxkit.compile import fetching

pytestmark = pytest.mark.compiler

ARCHS = ("sm90", "sm100")
STEPS = {
    "few heads, cut": "T=8192 H=4", "many heads": "T=8192 H=64", "packed": "T=3000 H=16 N=3 packed bounded",
    "gate with parameters": "T=200 H=8 bounded dt_bias=true", "final states": "T=4096 H=8 final_state=true",
    "no tokens": "T=0 H=2", "one kernel that keeps": "T=8192 H=64 bounded l2norm",
    "the same of four, shares": "T=8192 H=32 bounded l2norm final_state=true",
}


def launched(arch, p, save, offsets, monkeypatch):
    """Return the configurations that a forward and its backward launch."""
    launch, host, found = importlib.import_module(f"kda.backends.{arch}.launch"), host_of(arch), set()

    def seen(draft, config, grid, **arguments):
        if config is not None and 0 not in grid:
            found.add(config)

    monkeypatch.setattr(Draft, "launch", seen)
    described = (function.__wrapped__ for function in (
        training.forward_routine, training.backward_routine, launch.routine))
    forward_that_saves, backward_of, plain = described
    if save is not Save.NOTHING:
        forward_that_saves(launch.TRAINING, p, host.cc, host.sms, offsets, save)
    else:
        plain(p, host.sms, False, offsets) if arch == "sm90" else plain(p, host.cc, host.sms, offsets)
    for dht in {False, p.final_state}:
        backward = dataclasses.replace(p, direction="backward", final_state=dht)
        backward_of(launch.TRAINING, backward, host.cc, host.sms, offsets, save)
    return found


@pytest.mark.parametrize("save", [Save.NOTHING, Save.STATES, Save.OWN], ids=lambda save: f"{save.value} kept")
@pytest.mark.parametrize("words", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_step_launches_is_what_is_built_ahead_of_it(arch, words, save, monkeypatch):
    p = Problem.parse(words)
    offsets = "int32" if p.packed else None
    plan, needed = importlib.import_module(f"kda.backends.{arch}.plan"), launched(arch, p, save, offsets, monkeypatch)
    calls = (dataclasses.replace(p, direction=direction) for direction in ("forward", "backward"))
    built = {recipe.config for call in calls for recipe in plan.recipes_of_call(call, host_of(arch), offsets, save)}
    assert not needed - built and (built == needed or not p.T), built ^ needed


@pytest.mark.parametrize("fewer, built", [(0, [["one"]]), (1, [])])
def test_with_few_cpus_each_kernel_is_built_when_it_is_launched(fewer, built, monkeypatch):
    found = []
    monkeypatch.setattr(fetching, "attempt_all", found.append)
    monkeypatch.setattr(fetching, "_cpus", lambda: fetching.SEVERAL - fewer)
    fetching.build_together(["one"])
    assert found == built


def test_what_was_built_together_is_not_built_again(monkeypatch):
    one = recipe(TablesConfig("int32"))
    monkeypatch.setattr(fetching, "_FETCHED", {one: "its kernel"})
    assert fetching.fetch_here(one) == "its kernel"


def outputs(p, x, save):
    return Outputs(x.v.clone(), None, None, None)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("asked", ["sm90", "triton"])
def test_a_recorded_call_builds_its_step_once(asked, keeps, monkeypatch):
    built, tensors = [], [torch.zeros(1, 3, 2, 4, requires_grad=True) for _ in range(4)]
    monkeypatch.setattr(plain, "launcher", lambda name: types.SimpleNamespace(forward=outputs))
    monkeypatch.setattr(plain, "stand_in", lambda: None)
    monkeypatch.setattr(ahead, "build_together", lambda recipes: built.append([*recipes]))
    with standing_in(host_of("sm90")):
        p = Problem.parse("T=8192 H=4 cuda")
        route = dispatch.route(dataclasses.replace(p, disable_recompute=keeps), asked, training=True)
        route = route._replace(built=set())
        x = Inputs(*tensors, torch.zeros(1, 3, 2))
        for cu_seqlens in (None, None, torch.tensor([0, 3]), torch.tensor([0, 3])):
            given = x._replace(cu_seqlens=cu_seqlens)[: len(autograd.INPUTS)]
            plain.TrainingCall(Options(scale=None), route)(given)
        calls = [route.forward, route.backward]
        step = [[*itertools.chain(*(ahead.recipes_of(asked, call, route.save, offsets) for call in calls))]
                for offsets in (None, "int64")]
    assert built == step and len(set(built[0])) > 3


def test_no_kernel_is_built_for_a_call_that_has_none(monkeypatch):
    p, built = Problem.parse("T=8 H=4 cpu"), []
    monkeypatch.setattr(ahead, "build_together", lambda recipes: built.extend(recipes))
    ahead.build(dispatch.route(p, training=True), None)
    assert built == []
