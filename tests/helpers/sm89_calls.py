"""Calls of the float32 backend in the simulator: what its tests share."""

import dataclasses

from cute_calls import assert_right, called, check

import kda
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import judge
from ptxkit import capture

D128 = dict(K=128, V=128)


def case_of(**options):
    return make_inputs(**dict(H=1, K=64, V=64, dtype="float32", gate="bounded") | options)


def seen(case, **options):
    return called(case, backend="sm89", **options)


def proven(case, **options):
    return check(case, backend="sm89", **options)


def trained(case, simulator=None, **options):
    """Return o, the final states and all gradients by name, states as (K, V), of a call without findings."""
    found, findings = seen_trained(case, simulator, **options)
    assert not findings, "\n".join(map(str, findings[:5]))
    return found


def seen_trained(case, simulator=None, **options):
    """Return the same results, and the simulator's findings."""
    turned = (lambda x: x.mT.contiguous()) if options.get("state_v_first") else (lambda x: x)
    keywords = case.keywords | {"backend": "sm89"} | options
    if keywords.get("initial_state") is not None:
        keywords["initial_state"] = turned(keywords["initial_state"])
    with capture(arch="sm89", **dict(strict=True) | (simulator or {})) as session:
        out = kda.chunk_kda_fwd(**keywords)
        grads = kda.chunk_kda_bwd(do=case.do, dht=turned(case.dht), **keywords)
    found = {"o": out.o, "ht": out.final_state, **grads._asdict()}
    found |= {name: turned(found[name]) for name in ("ht", "dh0") if found[name] is not None}
    return {name: x for name, x in found.items() if x is not None}, session.findings


def proven_trained(case, **options):
    found, limits = trained(case, **options), budgets(case, Door("sm89", "cpu").rounding(case))
    assert found.keys() == limits.keys()
    assert_right(judge("call", name, limit, found[name], case, whole=True) for name, limit in limits.items())
    return found


def lacking(case, name):
    """Return the same call without an input."""
    return dataclasses.replace(case, keywords={n: x for n, x in case.keywords.items() if n != name})
