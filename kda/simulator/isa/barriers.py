"""bar, barrier.cluster, mbarrier, fence, griddepcontrol, setmaxnreg."""

from kda.simulator.isa.common import ALIGNED, NOT_GATHERED, SYNC, Op
from kda.simulator.ptx.syntax import Immediate, Sink

BAR = {"sync": 0, "arrive": 1, "popc": 2, "and": 3, "or": 4}
SHARED, GLOBAL = 1 << 1, 1 << 2  # the engine's views FENCED_SHARED and FENCED_GLOBAL
RELEASE, ACQUIRE = 1, 2
TO_ASYNC, TO_CTAS = 1, 2  # to whom a fence makes mbarriers known


def lower_bar(b, ins):
    """bar{.cta}.{sync,arrive,red}, bar.warp.sync, barrier.cluster; and barrier{.cta}, where threads arrive one by one
    unless it is .aligned."""
    parts = [p for p in ins.parts[1:] if p not in ("cta", "aligned")]
    if parts[0] == "warp":
        return Op("warp_sync", [b.value(ins.operands[0], "b32")], [0], SYNC)
    if parts[0] == "cluster":
        return _lower_cluster(b, ins, parts[1:])
    kind = parts[1] if parts[0] == "red" else parts[0]
    if kind not in BAR:
        b.fail(f"no barrier operation .{kind}", ", ".join(BAR))
    operands = list(ins.operands)
    target = b.target(operands.pop(0), "u32" if kind == "popc" else "pred") if parts[0] == "red" else -1
    predicate = -1
    if parts[0] == "red":
        predicate, negated = b.predicate(operands.pop())
        if negated:
            b.fail("a negated predicate is not supported here")
    barrier = b.value(operands[0], "u32")
    count = b.value(operands[1], "u32") if len(operands) > 1 else -1
    if kind == "arrive" and count < 0:
        b.fail("bar.arrive needs a thread count")
    gather = ALIGNED if ins.parts[0] == "bar" or "aligned" in ins.parts else NOT_GATHERED
    return Op("bar", [target, barrier, count, predicate], [BAR[kind]], gather)


def _lower_cluster(b, ins, parts):
    known = {"arrive", "wait", "release", "relaxed", "acquire"}
    gather = ALIGNED if "aligned" in ins.parts else NOT_GATHERED
    if not set(parts) <= known:
        b.fail(f"unknown modifiers {set(parts) - known}", ", ".join(sorted(known)))
    if "arrive" in parts:
        return Op("cluster_arrive", [], [int("relaxed" in parts)], gather)
    return Op("cluster_wait", [], [], gather)


MBARRIER_MODIFIERS = {
    "shared",
    "shared::cta",
    "shared::cluster",
    "b64",
    "release",
    "acquire",
    "relaxed",
    "cta",
    "cluster",
    "parity",
    "expect_tx",
    "noComplete",
    "init",
    "inval",
    "arrive",
    "arrive_drop",
    "test_wait",
    "try_wait",
    "pending_count",
    "complete_tx",
}


def lower_mbarrier(b, ins):
    what, parts, operands = ins.parts[1], ins.parts[2:], list(ins.operands)
    unknown = [p for p in ins.parts[1:] if p not in MBARRIER_MODIFIERS]
    if unknown:
        b.fail(f"unknown modifiers {unknown}", ", ".join(sorted(MBARRIER_MODIFIERS)))
    relaxed = int("relaxed" in parts)
    if what == "pending_count":
        return Op("pending_count", [b.target(operands[0], "u32"), b.value(operands[1], "b64")])
    if what in ("test_wait", "try_wait"):
        target, address, phase, *hint = operands
        for time in hint:  # how long to wait at most, which has no effect here
            b.value(time, "u32")
        place = b.place(address)
        parity = "parity" in parts
        args = [b.target(target, "pred"), place.register, b.value(phase, "u32" if parity else "b64")]
        return Op(what, args, [place.offset, int(place.wide), int(parity), relaxed])
    if what in ("arrive", "arrive_drop"):
        state = -1
        if isinstance(operands[0], Sink) or (len(operands) > 1 and not hasattr(operands[0], "base")):
            state = b.target(operands.pop(0), "b64")
        place = b.place(operands.pop(0))
        expects = "expect_tx" in parts
        count = b.value(operands[0], "u32") if operands and not expects else -1
        bytes_ = b.value(operands[0], "u32") if expects else -1
        mods = [place.offset, int(place.wide), int(what == "arrive_drop"), relaxed, int("noComplete" in parts)]
        return Op("mbarrier_arrive", [state, place.register, count, bytes_], mods)
    place = b.place(operands[0])
    where = [place.offset, int(place.wide)]
    if what == "init":
        return Op("mbarrier_init", [place.register, b.value(operands[1], "u32")], where)
    if what == "inval":
        return Op("mbarrier_inval", [place.register], where)
    return Op("mbarrier_tx", [place.register, b.value(operands[1], "u32")], [*where, int(what == "complete_tx")])


def lower_fence(b, ins):
    parts = set(ins.parts[1:])
    if "mbarrier_init" in parts:
        return Op("fence", [], [0, RELEASE, TO_CTAS])
    if "proxy" in parts:
        if parts & {"tensormap::generic", "alias"}:
            return Op("fence", [], [SHARED | GLOBAL, RELEASE | ACQUIRE, 0])
        if not parts & {"async", "async::generic"} and not any(p.startswith("async") for p in parts):
            b.fail("unknown proxy", "async, alias, tensormap::generic")
        spaces = [p.removeprefix("async::") for p in parts]
        views = (
            SHARED if any(p.startswith("shared") for p in spaces) else GLOBAL if "global" in spaces else SHARED | GLOBAL
        )
        return Op("fence", [], [views, 0, TO_ASYNC if views & SHARED else 0])
    known = 0 if "cta" in parts else TO_CTAS
    if parts & {"acq_rel", "sc"}:
        return Op("fence", [], [0, RELEASE | ACQUIRE, known])
    if parts & {"acquire", "release"}:
        return Op("fence", [], [0, RELEASE, known] if "release" in parts else [0, ACQUIRE, 0])
    if not parts <= {"cta", "cluster", "gpu", "sys"}:
        b.fail(f"unknown modifiers {sorted(parts)}", "acq_rel, sc, acquire, release, proxy.async, mbarrier_init")
    return Op("fence", [], [0, RELEASE | ACQUIRE, known])


def lower_membar(b, ins):
    if "proxy" in ins.parts:
        return lower_fence(b, ins)
    return Op("fence", [], [0, RELEASE | ACQUIRE, 0 if "cta" in ins.parts else TO_CTAS])


def lower_griddepcontrol(b, ins):
    if ins.parts[1:] not in (("wait",), ("launch_dependents",)):
        b.fail(f"griddepcontrol.{'.'.join(ins.parts[1:])}", "wait, launch_dependents")
    return Op("grid", [], [int(ins.parts[1] == "wait")])


def lower_setmaxnreg(b, ins):
    if not isinstance(ins.operands[0], Immediate):
        b.fail("setmaxnreg needs an immediate")
    return Op("setmaxnreg", [], [int("inc" in ins.parts), int(ins.operands[0].value)], ALIGNED)


LOWERINGS = {
    "bar": lower_bar,
    "barrier": lower_bar,
    "mbarrier": lower_mbarrier,
    "fence": lower_fence,
    "membar": lower_membar,
    "griddepcontrol": lower_griddepcontrol,
    "setmaxnreg": lower_setmaxnreg,
}
