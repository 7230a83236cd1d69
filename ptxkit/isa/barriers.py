"""bar, barrier.cluster, mbarrier, fence, griddepcontrol, setmaxnreg."""

from ptxkit.isa import fields
from ptxkit.isa.common import ALIGNED, NOT_GATHERED, SYNC, Op, operands, registers
from ptxkit.ptx.syntax import Address, Immediate

BAR_OPS = {"sync": 0, "arrive": 1, "popc": 2, "and": 3, "or": 4}
SHARED, GLOBAL = 1 << 1, 1 << 2  # the engine's views FENCED_SHARED and FENCED_GLOBAL
RELEASE, ACQUIRE = 1, 2
TO_ASYNC, TO_CTAS = 1, 2  # to whom a fence makes mbarriers known


def lower_bar(b, ins):
    """bar{.cta}.{sync,arrive,red}, bar.warp.sync, barrier.cluster; and barrier{.cta}, where threads arrive one by one
    unless it is .aligned."""
    parts = [p for p in ins.parts[1:] if p not in ("cta", "aligned")]
    if parts[:1] == ["warp"]:
        return Op("warp_sync", registers(b, ins, membermask="b32"), fields.MEMBERS(mask=0), SYNC)
    if parts[:1] == ["cluster"]:
        return _lower_cluster(b, ins, parts[1:])
    red = parts[:1] == ["red"]
    kind = (*parts[red:], "")[0]
    if kind not in BAR_OPS or red != (kind in ("popc", "and", "or")):
        b.fail(f"no barrier operation .{'.'.join(parts)}", ".sync, .arrive, .red.popc, .red.and, .red.or")
    target = predicate = -1
    if red:
        counted = ["b"] if len(ins.operands) > 3 else []
        result, *which, predicate = operands(b, ins, "d", "a", *counted, "p")
        target = b.target(result, "u32" if kind == "popc" else "pred")
        predicate, negated = b.predicate(predicate)
        if negated:
            b.fail("a negated predicate is not supported here")
    else:
        which = operands(b, ins, "a", optional=["b"])
    barrier, count = (*(b.value(each, "u32") for each in which), -1)[:2]
    if kind == "arrive" and count < 0:
        b.fail("bar.arrive needs a thread count")
    gather = ALIGNED if ins.parts[0] == "bar" or "aligned" in ins.parts else NOT_GATHERED
    return Op("bar", [target, barrier, count, predicate], fields.BAR(op=BAR_OPS[kind]), gather)


def _lower_cluster(b, ins, parts):
    known = {"arrive", "wait", "release", "relaxed", "acquire"}
    gather = ALIGNED if "aligned" in ins.parts else NOT_GATHERED
    if not set(parts) <= known or len({"arrive", "wait"} & {*parts}) != 1:
        b.fail(f"modifiers {'.'.join(parts)}", ", ".join(sorted(known)))
    if "arrive" in parts:
        return Op("cluster_arrive", [], fields.CLUSTER_ARRIVE(relaxed="relaxed" in parts), gather)
    return Op("cluster_wait", [], [], gather)


MBARRIER_MODIFIERS = {
    *("shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed", "cta", "cluster", "parity"),
    *("expect_tx", "noComplete", "init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "pending_count"),
    "complete_tx",
}


def lower_mbarrier(b, ins):
    what, parts = ins.parts[1], ins.parts[2:]
    unknown = [p for p in ins.parts[1:] if p not in MBARRIER_MODIFIERS]
    if unknown or what not in MBARRIER:
        b.fail(f"unknown modifiers {unknown or what}", ", ".join(sorted(MBARRIER_MODIFIERS)))
    return MBARRIER[what](b, ins, what, parts, "relaxed" in parts)


def _lower_pending_count(b, ins, what, parts, relaxed):
    return Op("pending_count", registers(b, ins, d="=u32", state="b64"))


def _lower_wait(b, ins, what, parts, relaxed):
    target, address, phase, *hint = operands(b, ins, "p", "[a]", "phase", optional=["time"])
    for time in hint:  # how long to wait at most, which has no effect here
        b.value(time, "u32")
    place = b.place(address)
    parity = "parity" in parts
    args = [b.target(target, "pred"), place.register, b.value(phase, "u32" if parity else "b64")]
    mods = fields.MBARRIER_WAIT(address=place.address, parity=parity, relaxed=relaxed, cluster="cluster" in parts)
    return Op(what, args, mods)


def _lower_arrive(b, ins, what, parts, relaxed):
    """Lower an arrival: `arrive d, [a]{, count}` returns a local mbarrier's state, but not that of another CTA's."""
    expects = "expect_tx" in parts
    answered = ["state"] if ins.operands and not isinstance(ins.operands[0], Address) else []
    counted = [] if expects else ["count"]
    given = [*operands(b, ins, *answered, "[a]", *(["bytes"] if expects else []), optional=counted)]
    state = b.target(given.pop(0), "b64") if answered else -1
    place = b.place(given.pop(0))
    value = b.value(given[0], "u32") if given else -1
    drop, no_complete = what == "arrive_drop", "noComplete" in parts
    order = dict(relaxed=relaxed, cluster="cluster" in parts)
    mods = fields.MBARRIER_ARRIVE(address=place.address, drop=drop, no_complete=no_complete, **order)
    return Op("mbarrier_arrive", [state, place.register, *((-1, value) if expects else (value, -1))], mods)


def _lower_mbarrier_memory(b, ins, what, parts, relaxed):
    """init, inval, expect_tx, complete_tx"""
    address, *number = operands(b, ins, "[a]", *({"init": ["count"], "inval": []}.get(what, ["bytes"])))
    place = b.place(address)
    if what == "inval":
        return Op("mbarrier_inval", [place.register], fields.MBARRIER_INVAL(address=place.address))
    args = [place.register, b.value(number[0], "u32")]
    if what == "init":
        return Op("mbarrier_init", args, fields.MBARRIER_INIT(address=place.address))
    return Op("mbarrier_tx", args, fields.MBARRIER_TX(address=place.address, complete=what == "complete_tx"))


MBARRIER = {
    "pending_count": _lower_pending_count,
    **dict.fromkeys(("test_wait", "try_wait"), _lower_wait),
    **dict.fromkeys(("arrive", "arrive_drop"), _lower_arrive),
    **dict.fromkeys(("init", "inval", "expect_tx", "complete_tx"), _lower_mbarrier_memory),
}


def _fence(views, order, mbarriers):
    return Op("fence", [], fields.FENCE(views=views, order=order, mbarriers=mbarriers))


def lower_fence(b, ins):
    parts = set(ins.parts[1:])
    if "mbarrier_init" in parts:
        return _fence(0, RELEASE, TO_CTAS)
    if "proxy" in parts:
        if parts & {"tensormap::generic", "alias"}:
            return _fence(SHARED | GLOBAL, RELEASE | ACQUIRE, 0)
        if not any(p.startswith("async") for p in parts):
            b.fail("unknown proxy", "async, alias, tensormap::generic")
        spaces = [p.removeprefix("async::") for p in parts]
        in_shared = any(p.startswith("shared") for p in spaces)
        views = SHARED if in_shared else GLOBAL if "global" in spaces else SHARED | GLOBAL
        return _fence(views, 0, TO_ASYNC if views & SHARED else 0)
    known = 0 if "cta" in parts else TO_CTAS
    if parts & {"acq_rel", "sc"}:
        return _fence(0, RELEASE | ACQUIRE, known)
    if parts & {"acquire", "release"}:
        return _fence(0, RELEASE, known) if "release" in parts else _fence(0, ACQUIRE, 0)
    if not parts <= {"cta", "cluster", "gpu", "sys"}:
        b.fail(f"unknown modifiers {sorted(parts)}", "acq_rel, sc, acquire, release, proxy.async, mbarrier_init")
    return _fence(0, RELEASE | ACQUIRE, known)


def lower_membar(b, ins):
    if "proxy" in ins.parts:
        return lower_fence(b, ins)
    return _fence(0, RELEASE | ACQUIRE, 0 if "cta" in ins.parts else TO_CTAS)


def lower_griddepcontrol(b, ins):
    if ins.parts[1:] not in (("wait",), ("launch_dependents",)):
        b.fail(f"griddepcontrol.{'.'.join(ins.parts[1:])}", "wait, launch_dependents")
    return Op("grid", [], fields.GRID(wait=ins.parts[1] == "wait"))


def lower_setmaxnreg(b, ins):
    (count,) = operands(b, ins, "count")
    if not isinstance(count, Immediate):
        b.fail("setmaxnreg needs an immediate")
    return Op("setmaxnreg", [], fields.SETMAXNREG(inc="inc" in ins.parts, registers=int(count.value)), ALIGNED)


LOWERINGS = {
    "bar": lower_bar, "barrier": lower_bar, "mbarrier": lower_mbarrier, "fence": lower_fence, "membar": lower_membar,
    "griddepcontrol": lower_griddepcontrol, "setmaxnreg": lower_setmaxnreg,
}
