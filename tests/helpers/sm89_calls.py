"""Calls of the float32 backend in the simulator: what its tests share."""

import dataclasses

from cute_calls import assert_right, called, check, seen_trained

from kda.tools.verify.cases import make_inputs
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import judge

OF_SM89 = dict(arch="sm89", strict=True)
D128 = dict(K=128, V=128)


def case_of(**options):
    return make_inputs(**dict(H=1, K=64, V=64, dtype="float32", gate="bounded") | options)


def seen(case, **options):
    return called(case, backend="sm89", **options)


def proven(case, **options):
    return check(case, backend="sm89", **options)


def trained(case, simulator=None, **options):
    """Return o, the final states and all gradients by name, states as (K, V), of a call without findings."""
    found, findings = seen_trained(case, "sm89", OF_SM89 | (simulator or {}), **options)
    assert not findings, "\n".join(map(str, findings[:5]))
    return found


def proven_trained(case, **options):
    found, limits = trained(case, **options), budgets(case, Door("sm89", "cpu").rounding(case))
    assert found.keys() == limits.keys()
    assert_right(judge("call", name, limit, found[name], case, whole=True) for name, limit in limits.items())
    return found


def lacking(case, name):
    """Return the same call without an input."""
    return dataclasses.replace(case, keywords={n: x for n, x in case.keywords.items() if n != name})
