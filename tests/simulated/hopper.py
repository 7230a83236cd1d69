"""Calls of the Hopper backend in the simulator, held against the definition."""

import dataclasses

import kda
from kda.simulator import capture
from kda.verify.definition import budgets
from kda.verify.doors import Door
from kda.verify.parity import describe, judge

RAGGED = dict(lengths=(65, 0, 1, 30))


def changed(case, **given):
    new = {name: change(case.keywords[name]) for name, change in given.items()}
    return dataclasses.replace(case, keywords=case.keywords | new)


def called(case, state_v_first=False, **options):
    """o and ht, (K, V), of one call, and what the simulator objects to."""
    keywords = dict(case.keywords, state_v_first=state_v_first, backend="sm90")
    if state_v_first:
        keywords["initial_state"] = keywords["initial_state"].mT.contiguous()
    with capture(arch="sm90", **options) as session:
        out = kda.chunk_kda_fwd(**keywords)
    found = {"o": out.o, "ht": out.final_state, "h": out.h}
    found = {name: x.mT if state_v_first and name != "o" else x for name, x in found.items() if x is not None}
    return found, session


def check(case, **options):
    found, session = called(case, **options)
    assert not session.findings, "\n".join(map(str, session.findings[:5]))
    limits = budgets(case, Door("sm90", "cpu").rounding(case))
    rows = [judge("call", name, limits[name], found[name], case, whole=True) for name in found]
    assert not any(row.wrong for row in rows), "\n".join(describe(row) for row in rows if row.wrong)
    return found
