"""Calls in two halves beside the same ones at once: cases, and what must be alike, in the simulator and on a GPU."""

import dataclasses

import torch

from kda.calls import autograd
from kda.checks.calls import Call, problem_of
from kda.model.bundles import Grads, Save
from kda.model.problem import Inputs, Options
from kda.parallel import halves, maps
from kda.tools.verify.cases import make_inputs

# What is drawn, and what is prescribed.
CASES = {
    "one sequence": (dict(lengths=(150,)), {}),
    "packed, with tokens of no sequence": (dict(lengths=(100, 0, 70), padding=30), {}),
    "any gate": (dict(lengths=(70,), gate="softplus"), {}),
    "cut into segments": (dict(lengths=(330,)), dict(segment_chunks=4)),
    "64 channels": (dict(lengths=(130,), K=64, V=64), {}),
}

# The same of a forward of one sequence, and what is saved.
FORWARDS = {
    "nothing is kept": (dict(lengths=(150,)), {}, Save.NOTHING),
    "nothing is kept, not packed": (dict(T=150), {}, Save.NOTHING),
    "nothing is kept, cut": (dict(lengths=(330,)), dict(segment_chunks=4), Save.NOTHING),
    "states are kept": (dict(lengths=(130,)), {}, Save.STATES),
    "all is kept": (dict(lengths=(150,)), {}, Save.OWN),
    "all is kept, not packed": (dict(T=150), {}, Save.OWN),
    "all is kept, cut": (dict(lengths=(330,)), dict(segment_chunks=4), Save.OWN),
    "states (V, K)": (dict(lengths=(330,), v_first=True), dict(segment_chunks=4), Save.OWN),
    "two value heads of one": (dict(lengths=(150,), HV=2), {}, Save.STATES),
    "64 channels": (dict(lengths=(130,), K=64, V=64), {}, Save.OWN),
    "K and V differ": (dict(lengths=(200,), K=128, V=64), dict(segment_chunks=2), Save.NOTHING),
    "any gate": (dict(lengths=(100,), gate="softplus"), {}, Save.STATES),
    "one gate per head": (dict(lengths=(100,), gate="softplus", gate_per_head=True), {}, Save.OWN),
    "a token": (dict(lengths=(1,)), {}, Save.OWN),
}


def call_of(backend, words, device="cpu"):
    case = make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | words, device=device)
    given = {n: x for n, x in case.keywords.items() if n in Options._fields}
    options = Options(**{"scale": case.keywords["q"].shape[-1] ** -0.5} | given | {"backend": backend})
    inputs = Inputs(**{n: case.keywords.get(n) for n in Inputs._fields})
    return Call("chunk_kda_bwd", inputs, options, do=case.do, dht=case.dht)


def longer(words, times):
    """Return what is drawn with so many times as many tokens."""
    more = {"T": lambda T: T * times, "lengths": lambda lengths: tuple(n * times for n in lengths)}
    return {name: more[name](x) if name in more else x for name, x in words.items()}


def in_halves(call, kept):
    """Return the gradients of both halves, of which the first one knows of no final state, and the first one."""
    first = halves.begin_backward(call._replace(dht=None), kept)
    return first.finish(call), first


def forward_of(words, device="cpu"):
    """Return a forward whose state comes late, and the call whose gradients are wanted afterwards."""
    v_first = words.get("v_first", False)
    call = call_of("sm90", dict(regime="slow") | {name: x for name, x in words.items() if name != "v_first"},
                   device)
    call = call._replace(options=call.options._replace(output_final_state=True, state_v_first=v_first))
    if v_first:
        turned = call.inputs.initial_state.mT.contiguous()
        call = call._replace(inputs=call.inputs._replace(initial_state=turned), dht=call.dht.mT.contiguous())
    return call._replace(op="chunk_kda", do=None, dht=None), call


def different(found, wanted):
    return [name for name in Grads._fields if not torch.equal(getattr(found, name), getattr(wanted, name))]


def map_alone(call):
    x = call.inputs._replace(cu_seqlens=None, cu_seqlens_cpu=None)
    return maps.segment_map(problem_of(call), x, call.options.backend, True)[:2]


def exact_map(call):
    x = call.inputs._replace(cu_seqlens=None, cu_seqlens_cpu=None)
    x = Inputs(*(y.double() if torch.is_tensor(y) and y.is_floating_point() else y for y in x))
    p = dataclasses.replace(problem_of(call), dtype="float64", g_dtype="float64", beta_dtype="float64", device="cpu")
    return maps.segment_map(p, x, "reference", True)[:2]


def error(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def assert_a_forward_in_halves_is_the_whole(call, step, save, of_map, between=lambda: None, cut_alike=True):
    """Compare o, the final state, what is kept and the map.  What is kept has the bits of the same kernels in a call at
    once, for which a backward reads it, if both are cut into the same segments.  `between` runs between the halves."""
    late = call._replace(inputs=call.inputs._replace(initial_state=None))
    whole = autograd.forward(call, save)
    begun = halves.begin_forward(late, save, of_map)
    between()
    found = begun.finish(call)
    results = [x._asdict() for x in (found, whole)]
    if save is not Save.NOTHING:
        results = [x | autograd.backward(step, [*x.pop("saved")])._asdict() for x in results]
    for name, x in results[0].items():
        y = results[1][name]
        if save is not Save.NOTHING and cut_alike:
            assert x is y is None or torch.equal(x, y), name
        elif name not in ("dA_log", "ddt_bias"):                               # sums of terms that cancel
            assert x is y is None or error(x, y) < 2**-6, name
    assert (begun.map is None) == (not of_map)
    if of_map:
        exact, alone = exact_map(late), map_alone(late)
        for x, y, wanted in zip(begun.map, alone, exact):
            assert error(x, wanted) < 2 * error(y, wanted) + 2**-8
