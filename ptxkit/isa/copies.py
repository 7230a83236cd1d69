"""cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, red.async, clusterlaunchcontrol; tma.py: tensor copies."""

from ptxkit.isa import fields
from ptxkit.isa.common import ATOMIC_TYPES, ATOMICS, SCOPES, SIZES, Op, one_of, operands
from ptxkit.ptx.syntax import Immediate, Negated, Register, Sink

PLAIN = -1  # in the place of an atomic operation: a copy
GROUPS_KEPT = 32  # the engine remembers as many groups of a lane
MBARRIER, GROUP, HINT, MULTICAST = "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint", "multicast::cluster"
SPACES = {"shared::cta", "shared::cluster", "global"}
REDUCTIONS = {op: n for op, n in ATOMICS.items() if op not in ("exch", "cas")}

# what a bulk reduction may be of, by where it goes
REDUCIBLE = {
    "shared::cluster": {
        "add": ("u32", "s32", "u64"),
        **dict.fromkeys(("min", "max"), ("u32", "s32")),
        **dict.fromkeys(("inc", "dec"), ("u32",)),
        **dict.fromkeys(("and", "or", "xor"), ("b32",)),
    },
    "global": {
        "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
        **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
        **dict.fromkeys(("inc", "dec"), ("u32",)),
        **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    },
}


def refuse_unknown(b, ins, known):
    if unknown := [p for p in ins.parts[1:] if p not in known]:
        b.fail(f"modifiers {', '.join(f'.{p}' for p in unknown)} are not known here", ", ".join(sorted(known)))


def needs(b, arch, what):
    if b.arch < arch:
        b.fail(f"{what} needs sm_{arch}; this is sm_{b.arch}")


def place(b, operand, generic=False):
    """Return (register, the fields of PLACE) of an address operand."""
    p = b.place(operand)
    return p.register, p.place(generic)


def places(b, operands, *names, generic=False):
    """Return the registers of address operands, and their fields of PLACE by name: `to` for the destination."""
    pairs = [place(b, operands[name], generic) for name in names]
    called = {"destination": "to", "address": "to"}
    return [register for register, _ in pairs], {called.get(n, n): fields_ for n, (_, fields_) in zip(names, pairs)}


def operands_of(b, ins, *names):
    """Return the operands by name; a name that is false was not asked for by the modifiers, so there is no operand."""
    wanted = [name for name in names if name]
    if len(ins.operands) != len(wanted):
        b.fail(f"{len(ins.operands)} operands", f"{len(wanted)} with these modifiers: {', '.join(wanted)}")
    operands = dict(zip(wanted, ins.operands))
    if "policy" in operands:
        b.value(operands["policy"], "b64")  # which has no effect here
    return operands


def loaded(b, ins, *names):
    """Return the operands of a copy into shared memory, which may go to several CTAs."""
    if MULTICAST in ins.parts and "shared::cta" in ins.parts:
        b.fail("a multicast to .shared::cta", ".shared::cluster")
    return operands_of(b, ins, *names, MULTICAST in ins.parts and "mask", HINT in ins.parts and "policy")


def cta_mask(b, operands):
    return b.value(operands["mask"], "b16") if "mask" in operands else -1


def small_number(b, ins, most):
    """Return the immediate operand of wait_group."""
    number = operands_of(b, ins, "count")["count"]
    if not isinstance(number, Immediate) or not 0 <= int(number.value) <= most:
        b.fail(f"{getattr(number, 'text', number)} pending groups", f"an immediate from 0 to {most}")
    return int(number.value)


# ---- cp.async


def lower_cp_async(b, ins):
    forms = {"async", "ca", "cg", "shared", "shared::cta", "global", HINT, "L2::64B", "L2::128B", "L2::256B"}
    refuse_unknown(b, ins, forms)
    to, source, size, *rest = operands(b, ins, "destination", "source", "size", optional=["ignore", "policy"])
    sizes = (16,) if "cg" in ins.parts else (4, 8, 16)
    if not isinstance(size, Immediate) or int(size.value) not in sizes:
        b.fail(f"a copy of {getattr(size, 'text', size)} bytes", f"an immediate {' or '.join(map(str, sizes))}")
    if HINT in ins.parts:
        rest = rest[:-1]
    if len(rest) > 1:
        wanted = "destination, source, size, and the source's size or a predicate that ignores it"
        b.fail(f"{len(ins.operands)} operands", wanted)
    read, ignored, negated = -1, -1, False
    if rest and (isinstance(rest[0], Negated) or (isinstance(rest[0], Register) and b.type_of(rest[0]) == "pred")):
        ignored, negated = b.predicate(rest[0])
    elif rest:
        read = b.value(rest[0], "u32")
    (to, source), where = places(b, {"destination": to, "source": source}, "destination", "source")
    mods = fields.CP_ASYNC(**where, bytes=int(size.value), negated=negated)
    return Op("cp_async", [to, source, read, ignored], mods)


def without_operands(handler, mods=()):
    """Return the lowering of an instruction that has no operands."""

    def lower(b, ins):
        operands_of(b, ins)
        return Op(handler, [], [*mods])

    return lower


def lower_cp_async_wait_group(b, ins):
    return Op("cp_async_wait", [], fields.CP_ASYNC_WAIT(stay=small_number(b, ins, GROUPS_KEPT - 1), all=False))


def lower_cp_async_arrive(b, ins):
    refuse_unknown(b, ins, {"async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"})
    generic = not {"shared", "shared::cta"} & set(ins.parts)
    register, where = place(b, operands_of(b, ins, "mbarrier")["mbarrier"], generic)
    return Op("cp_async_arrive", [register], fields.CP_ASYNC_ARRIVE(mbarrier=where, noinc="noinc" in ins.parts))


# ---- cp.async.bulk


def lower_bulk(b, ins):
    """cp.async.bulk and cp.reduce.async.bulk, by the two spaces that the opcode names: destination, source."""
    needs(b, 90, "cp.async.bulk")
    direction = tuple(p for p in ins.parts if p in SPACES)
    if direction not in BULK:
        b.fail(f"a bulk copy {' <- '.join(direction)}", "; ".join(" <- ".join(d) for d in BULK))
    return BULK[direction](b, ins)


def _reducing(b, ins, to, refusal):
    """Return (operation, type) of a reduction to a space."""
    op, type_ = one_of(ins.parts, {o: o for o in REDUCTIONS}), ins.parts[-1]
    if type_ not in REDUCIBLE[to].get(op, ()):
        b.fail(refusal.format(op, type_, to), "; ".join(f"{o}: {', '.join(t)}" for o, t in REDUCIBLE[to].items()))
    return op, type_


def _reduction(b, ins, to):
    """Return the fields of REDUCTION."""
    if ins.parts[1] == "async":  # not cp.reduce
        return fields.REDUCTION(op=PLAIN, type=0, bytes=1)
    op, type_ = _reducing(b, ins, to, "no reduction .{}.{} to {}")
    if op == "add" and type_ in ("f16", "bf16") and "noftz" not in ins.parts:
        b.fail(f".add.{type_} without .noftz", f".add.noftz.{type_}")
    return fields.REDUCTION(op=REDUCTIONS[op], type=ATOMIC_TYPES[type_], bytes=SIZES[type_])


def _lower_bulk_load(b, ins):
    refuse_unknown(b, ins, {"async", "bulk", MBARRIER, MULTICAST, HINT, *SPACES})
    operands = loaded(b, ins, "destination", "source", "size", "mbarrier")
    (to, source, barrier), where = places(b, operands, "destination", "source", "mbarrier")
    args = [to, source, b.value(operands["size"], "u32"), barrier, cta_mask(b, operands)]
    return Op("bulk_load", args, fields.BULK_LOAD(**where, own_cta="shared::cta" in ins.parts))


def _lower_bulk_send(b, ins):
    refuse_unknown(b, ins, {"async", "bulk", "reduce", MBARRIER, *SPACES, *REDUCTIONS, "u32", "s32", "u64", "b32"})
    operands = operands_of(b, ins, "destination", "source", "size", "mbarrier")
    (to, source, barrier), where = places(b, operands, "destination", "source", "mbarrier")
    mods = fields.BULK_SEND(**where, reduction=_reduction(b, ins, "shared::cluster"))
    return Op("bulk_send", [to, source, b.value(operands["size"], "u32"), barrier], mods)


def _lower_bulk_store(b, ins):
    types = {"f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"}
    refuse_unknown(b, ins, {"async", "bulk", "reduce", GROUP, HINT, "cp_mask", "noftz", *SPACES, *REDUCTIONS, *types})
    if masked := "cp_mask" in ins.parts:
        needs(b, 100, ".cp_mask")
    more = HINT in ins.parts and "policy", masked and "byte mask"
    operands = operands_of(b, ins, "destination", "source", "size", *more)
    (to, source), where = places(b, operands, "destination", "source")
    mask = b.value(operands["byte mask"], "b16") if "byte mask" in operands else -1
    args = [to, source, b.value(operands["size"], "u32"), mask]
    return Op("bulk_store", args, fields.BULK_STORE(**where, reduction=_reduction(b, ins, "global")))


BULK = {
    ("shared::cta", "global"): _lower_bulk_load,
    ("shared::cluster", "global"): _lower_bulk_load,
    ("shared::cluster", "shared::cta"): _lower_bulk_send,
    ("global", "shared::cta"): _lower_bulk_store,
}


def lower_bulk_prefetch(b, ins):
    needs(b, 90, "cp.async.bulk.prefetch")
    refuse_unknown(b, ins, {"async", "bulk", "prefetch", "L2", "global", HINT})
    operands = operands_of(b, ins, "source", "size", HINT in ins.parts and "policy")
    source, source_place = place(b, operands["source"])
    return Op("bulk_prefetch", [source, b.value(operands["size"], "u32")], fields.BULK_PREFETCH(source=source_place))


def lower_bulk_wait(b, ins):
    refuse_unknown(b, ins, {"async", "bulk", "wait_group", "read"})
    return Op("bulk_wait", [], fields.BULK_WAIT(stay=small_number(b, ins, GROUPS_KEPT - 1), read="read" in ins.parts))


FORMS = {  # how an opcode goes on after cp, tensors apart (tma.py)
    ("async", "ca"): lower_cp_async, ("async", "cg"): lower_cp_async,
    ("async", "commit_group"): without_operands("cp_async_commit"),
    ("async", "wait_group"): lower_cp_async_wait_group,
    ("async", "wait_all"): without_operands("cp_async_wait", fields.CP_ASYNC_WAIT(stay=0, all=True)),
    ("async", "mbarrier", "arrive"): lower_cp_async_arrive,
    ("async", "bulk"): lower_bulk, ("reduce", "async", "bulk"): lower_bulk,
    ("async", "bulk", "commit_group"): without_operands("bulk_commit"),
    ("async", "bulk", "wait_group"): lower_bulk_wait,
    ("async", "bulk", "prefetch"): lower_bulk_prefetch,
}


# ---- st.async and red.async


ASYNC_FORMS = {"st": "st.async{.weak}.shared::cluster", "red": "red.async.relaxed.cluster.shared::cluster"}
ASYNC_TYPES, ASYNC_VECTORS = {"b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"}, {"v2": 2, "v4": 4}


def lower_async(b, ins):
    """Lower st.async and red.async."""
    what, parts = ins.parts[0], ins.parts
    if "global" in parts or "release" in parts:
        form = f"{ASYNC_FORMS[what]} with an mbarrier"
        b.fail(f"a {what}.async that releases to global memory is not simulated", form)
    known = {"async", "cluster", "shared::cluster", MBARRIER}
    if what == "st":
        refuse_unknown(b, ins, {*known, "weak", *ASYNC_VECTORS, *ASYNC_TYPES})
        if parts[-1] not in ASYNC_TYPES:
            b.fail("the type is missing", ", ".join(sorted(ASYNC_TYPES)))
        op, type_ = PLAIN, parts[-1]
    else:
        refuse_unknown(b, ins, {*known, "relaxed", *REDUCTIONS, "b32", "u32", "s32", "u64"})
        name, type_ = _reducing(b, ins, "shared::cluster", "no such reduction .{}.{}")
        op = REDUCTIONS[name]
    needs(b, 90, f"{what}.async")
    operands = operands_of(b, ins, "address", "value", "mbarrier")
    generic = "shared::cluster" not in ins.parts
    (to, barrier), where = places(b, operands, "address", "mbarrier", generic=generic)
    values, count = b.values(operands["value"], type_), one_of(parts, ASYNC_VECTORS, 1)
    if len(values) != count:
        b.fail(f"{len(values)} registers for {count} elements")
    mods = fields.ST_ASYNC(
        **where, bytes=SIZES[type_], count=count, op=op, type=ATOMIC_TYPES.get(type_, 0),
        scope=SCOPES["cluster"] if what == "red" or "cluster" in parts else 0,
    )
    return Op("st_async", [to, barrier, *values], mods)


# ---- clusterlaunchcontrol

DIMENSIONS = {"get_first_ctaid::x": 0, "get_first_ctaid::y": 1, "get_first_ctaid::z": 2}


def lower_launch_control(b, ins):
    needs(b, 100, "clusterlaunchcontrol")
    if ins.parts[1] not in LAUNCH_CONTROL:
        b.fail(f"no clusterlaunchcontrol.{ins.parts[1]}", ", ".join(LAUNCH_CONTROL))
    return LAUNCH_CONTROL[ins.parts[1]](b, ins)


def _lower_try_cancel(b, ins):
    everywhere = "multicast::cluster::all"
    refuse_unknown(b, ins, {"try_cancel", "async", "shared::cta", MBARRIER, everywhere, "b128"})
    operands = operands_of(b, ins, "address", "mbarrier")
    registers, where = places(b, operands, "address", "mbarrier", generic="shared::cta" not in ins.parts)
    return Op("try_cancel", registers, fields.TRY_CANCEL(**where, all_ctas=everywhere in ins.parts))


def _lower_query_cancel(b, ins):
    refuse_unknown(b, ins, {"query_cancel", "is_canceled", "get_first_ctaid", *DIMENSIONS, "v4", "pred", "b32", "b128"})
    operands = operands_of(b, ins, "result", "answer")
    answer = b.value(operands["answer"], "b128")
    if "is_canceled" in ins.parts:
        return Op("is_canceled", [b.target(operands["result"], "pred"), answer])
    targets = b.targets(operands["result"], "b32")
    dimension = one_of(ins.parts, DIMENSIONS)
    if dimension is None and len(targets) != 4:
        b.fail(f"{len(targets)} registers", "{x, y, z, _}")
    if dimension is not None:
        if len(targets) != 1 or isinstance(operands["result"], Sink):
            b.fail("one register holds one coordinate")
        targets = [targets[0] if n == dimension else -1 for n in range(3)]
    return Op("first_ctaid", [answer, *targets[:3]])


LAUNCH_CONTROL = {"try_cancel": _lower_try_cancel, "query_cancel": _lower_query_cancel}
LOWERINGS = {"clusterlaunchcontrol": lower_launch_control}
