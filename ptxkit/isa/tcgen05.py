"""tcgen05: the tensor core and tensor memory of sm_100a, sm_103a and sm_110a."""

import functools

from ptxkit.isa import fields
from ptxkit.isa.common import ALIGNED, Op, only_on, shared_place
from ptxkit.ptx.syntax import Address, Immediate, Vector

GROUPS = {"cta_group::1": 1, "cta_group::2": 2}
PLAIN_KINDS = ("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8")
# kind with .block_scale -> modifier (None: none) -> factors of a row of A
SCALED_KINDS = {
    "kind::mxf8f6f4": dict.fromkeys((None, "scale_vec::1X", "block32"), 1),
    "kind::mxf4": dict.fromkeys((None, "scale_vec::2X", "block32"), 2),
    "kind::mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}
KINDS = {kind: n for n, kind in enumerate((*PLAIN_KINDS, *SCALED_KINDS))}  # the engine's MmaKind
NOT_SIMULATED = {"sp": "sparse matrices", "ashift": ".ashift: which rows it moves at the edges is not documented"}
USES = ("fill", "use", "lastuse", "discard")
COLLECTORS_A = {f"collector::a::{use}" for use in USES}  # hints: a matrix is read again each time
COLLECTORS_B = {f"collector::b{n}::{use}" for n in range(4) for use in USES}
REPEATS = {f"x{1 << n}": 1 << n for n in range(8)}
# shape -> its number, registers of a repeat
MOVES = {"32x32b": (0, 1), "16x64b": (1, 1), "16x128b": (2, 2), "16x256b": (3, 4), "16x32bx2": (4, 1)}
MOST_REGISTERS = 128
REDUCTIONS, REDUCED_TYPES = {"min": 1, "max": 2}, {"f32": 0, "u32": 1, "s32": 2}
COPIES = {("128x256b",): 0, ("128x128b",): 1, ("4x256b",): 2, ("64x128b", "warpx2::02_13"): 3,
          ("64x128b", "warpx2::01_23"): 4, ("32x128b", "warpx4"): 5}
MULTICASTS = {key[1] for key in COPIES if len(key) == 2}
FORMATS = {(): 0, ("b8x16", "b6x16_p32"): 1, ("b8x16", "b4x16_p64"): 2}


def lower(b, ins):
    only_on(b, "tcgen05", 100, 103, 110)
    what = ins.parts[1]
    if what not in FORMS:
        b.fail(f"no instruction tcgen05.{what}", ", ".join(FORMS))
    return FORMS[what](b, ins, list(ins.parts[2:]))


# ---- modifiers


def _take(b, parts, wanted, *, required=True):
    """Remove from parts the one modifier that a table (or set) knows, and return it; None if it may be missing."""
    given = [p for p in parts if p in wanted]
    if len(given) > 1 or (required and not given):
        b.fail(f"{' and '.join(given) or 'none'} of a modifier that must be given once", ", ".join(sorted(wanted)))
    for p in given:
        parts.remove(p)
    return given[0] if given else None


def _all_known(b, parts, *allowed):
    if unknown := [p for p in parts if p not in allowed]:
        b.fail(f"modifiers {', '.join(unknown)}", ", ".join(allowed) or "none besides those that are there")


def _group(b, parts):
    """Return cta_group, which must be the same for all of a kernel."""
    group = GROUPS[_take(b, parts, GROUPS)]
    if vars(b).setdefault("cta_group", group) != group:
        b.fail(f"cta_group::{group} after cta_group::{b.cta_group}", "one of them for the whole kernel")
    return group


def _operands(b, ins, *counts):
    if len(ins.operands) not in counts:
        b.fail(f"{len(ins.operands)} operands", " or ".join(map(str, counts)))
    return list(ins.operands)


def _tmem(b, operand):
    """Return (register, offset) of a tensor-memory address `[taddr+offset]`."""
    place = b.place(operand)
    if place.wide:
        b.fail("a 64-bit address of tensor memory", "32-bit ones")
    return place.register, place.offset


# ---- allocation


def lower_alloc(b, ins, parts):
    group = _group(b, parts)
    _all_known(b, parts, "sync", "aligned", "shared::cta", "b32")
    address, columns = _operands(b, ins, 2)
    register, to = shared_place(b, ins, address, "shared::cta")
    return Op("tmem_alloc", [register, b.value(columns, "b32")], fields.TMEM_ALLOC(to=to, group=group), ALIGNED)


def lower_dealloc(b, ins, parts):
    group = _group(b, parts)
    _all_known(b, parts, "sync", "aligned", "b32")
    args = [b.value(operand, "b32") for operand in _operands(b, ins, 2)]
    return Op("tmem_dealloc", args, fields.TMEM_DEALLOC(group=group), ALIGNED)


def lower_relinquish(b, ins, parts):
    _group(b, parts)
    _all_known(b, parts, "sync", "aligned")
    _operands(b, ins, 0)
    return Op("tmem_relinquish", gather=ALIGNED)


# ---- ld, st, wait


def _reduction(b, parts, shape):
    """Return the fields for ld.red; reduce is 0 without."""
    if "red" not in parts:
        return {"reduce": 0, "type": 0, "abs": False, "nan": False}
    parts.remove("red")
    only_on(b, "tcgen05.ld.red", 103, 110)
    if shape != "32x32b":
        b.fail(f"ld.red.{shape}", "ld.red.32x32b (what the halves of 16x32bx2 reduce is not documented)")
    type_ = _take(b, parts, REDUCED_TYPES)
    flags = {name.lower(): _take(b, parts, {name}, required=False) is not None for name in ("abs", "NaN")}
    if any(flags.values()) and type_ != "f32":
        b.fail(f".abs or .NaN with .{type_}", ".f32")
    return {"reduce": REDUCTIONS[_take(b, parts, REDUCTIONS)], "type": REDUCED_TYPES[type_], **flags}


def _lower_move(b, ins, parts, handler, packing):
    shape, repeat = _take(b, parts, MOVES), REPEATS[_take(b, parts, REPEATS)]
    number, registers = MOVES[shape]
    reduction = _reduction(b, parts, shape)
    packed = _take(b, parts, {packing}, required=False) is not None
    _all_known(b, parts, "sync", "aligned", *([] if reduction["reduce"] else ["b32"]))
    if reduction["reduce"] and (packed or repeat < 2):
        b.fail("ld.red with pack::16b or .x1", "ld.red of .x2 and more, unpacked")
    operands = list(ins.operands)
    half = 0
    if shape == "16x32bx2":
        position = next((n for n, o in enumerate(operands) if isinstance(o, Immediate)), None)
        if position is None:
            b.fail("no offset of the second half", "an immediate after the address")
        half = operands.pop(position).value
    vectors = [o for o in operands if isinstance(o, Vector)]
    addresses = [o for o in operands if isinstance(o, Address)]
    rest = [o for o in operands if not isinstance(o, (Vector, Address))]
    if len(vectors) != 1 or len(addresses) != 1 or len(rest) != (reduction["reduce"] > 0):
        b.fail(f"{len(ins.operands)} operands", "a vector of registers and an address")
    count = registers * repeat
    if count > MOST_REGISTERS or len(vectors[0].items) != count:
        b.fail(f"{len(vectors[0].items)} registers", f"{count} for .{shape}.x{repeat}, of at most {MOST_REGISTERS}")
    register, offset = _tmem(b, addresses[0])
    values = (b.targets if handler == "tmem_ld" else b.values)(vectors[0], "b32")
    result = b.target(rest[0], "b32") if rest else -1
    mods = fields.TMEM_MOVE(offset=offset, shape=number, registers=count, half=half, packed=packed, **reduction)
    return Op(handler, [register, result, *values], mods, ALIGNED)


def lower_wait(b, ins, parts):
    _all_known(b, parts, "sync", "aligned")
    return Op("tmem_wait", [], fields.TMEM_WAIT(stores=ins.parts[1] == "wait::st"), ALIGNED)


def lower_fence(b, ins, parts):
    _all_known(b, parts)
    return Op("tmem_fence", [], fields.TMEM_FENCE(after=ins.parts[1] == "fence::after_thread_sync"))


# ---- the tensor core


def _lower_scaled_mma(b, ins, parts):
    """mma.block_scale: the factors of A and B lie in tensor memory."""
    group, kind = _group(b, parts), _take(b, parts, SCALED_KINDS)
    vec = _take(b, parts, {v for vecs in SCALED_KINDS.values() for v in vecs if v}, required=False)
    _take(b, parts, COLLECTORS_A, required=False)
    _all_known(b, parts, "block_scale")
    if vec not in SCALED_KINDS[kind]:
        b.fail(f"{vec or 'no .scale_vec'} with {kind}", ", ".join(filter(None, SCALED_KINDS[kind])))
    *matrices, scale_a, scale_b, enable = _operands(b, ins, 7)
    predicate = b.predicate(enable)
    (scale_a, factors_a), (scale_b, factors_b) = (_tmem(b, o) for o in (scale_a, scale_b))
    return _product(b, matrices, predicate, [-1, scale_a, scale_b], kind=KINDS[kind], group=group,
                    factors=SCALED_KINDS[kind][vec], factors_a_offset=factors_a, factors_b_offset=factors_b)


def _product(b, matrices, predicate, more, **numbers):
    """Return the Op of a product: `matrices` are D, A, B and their descriptor, `more` the registers that follow.  A
    number that is not given is 0."""
    d, a, matrix_b, idesc = matrices
    (d_register, d_offset), in_tmem = _tmem(b, d), isinstance(a, Address)
    a_register, a_offset = _tmem(b, a) if in_tmem else (b.value(a, "b64"), 0)
    args = [d_register, a_register, b.value(matrix_b, "b64"), b.value(idesc, "b32"), predicate[0], *more]
    numbers |= {"a_in_tmem": in_tmem, "d_offset": d_offset, "a_offset": a_offset, "negated": predicate[1]}
    return Op("tcgen05_mma", args, fields.TCGEN05_MMA(**dict.fromkeys(fields.TCGEN05_MMA.names, 0) | numbers))


def lower_mma(b, ins, parts):
    if part := next((p for p in parts if p in NOT_SIMULATED), None):
        b.fail(f"not simulated: {NOT_SIMULATED[part]}", ", ".join(KINDS))
    if "block_scale" in parts:
        return _lower_scaled_mma(b, ins, parts)
    ws = "ws" in parts
    if scaled := [p for p in parts if p in SCALED_KINDS]:
        b.fail(f"{scaled[0]} without .block_scale", f"{scaled[0]}.block_scale")
    group, kind = _group(b, parts), _take(b, parts, PLAIN_KINDS)
    _take(b, parts, COLLECTORS_B if ws else COLLECTORS_A, required=False)
    _all_known(b, parts, "ws")
    if kind == "kind::i8":
        only_on(b, kind, 100, 110)
    if ws and group == 2:
        b.fail(".ws with cta_group::2", "cta_group::1")
    given = _operands(b, ins, 5, 6, 7)
    matrices, rest = given[:4], given[4:]
    mask = [] if ws or not isinstance(rest[0], Vector) else b.values(rest.pop(0), "b32")
    if mask and len(mask) != 4 * group:
        b.fail(f"a mask of {len(mask)} words", f"{4 * group} with cta_group::{group}")
    if not rest:
        b.fail("no predicate", "one that says whether D is added to")
    predicate = b.predicate(rest.pop(0))
    zero = b.value(rest.pop(0), "b64") if ws and rest else -1
    scale = _scale(b, rest.pop(0), kind) if rest else 0
    if rest:
        b.fail(f"{len(ins.operands)} operands", "D, A, B, idesc, {mask}, predicate, scale-input-d")
    return _product(b, matrices, predicate, [zero, *mask], kind=KINDS[kind], group=group, ws=ws, scale=scale,
                    mask_words=len(mask))


def _scale(b, operand, kind):
    """scale-input-d: D counts 2^-scale times."""
    only_on(b, "scale-input-d", 100, 103)
    if kind not in ("kind::f16", "kind::tf32"):
        b.fail(f"scale-input-d with {kind}", "kind::f16, kind::tf32")
    if not isinstance(operand, Immediate) or operand.value not in range(16):
        b.fail(f"scale-input-d {operand}", "immediates 0 to 15")
    return operand.value


def lower_cp(b, ins, parts):
    group = _group(b, parts)
    formats = tuple(p for p in parts if p in {name for key in FORMATS for name in key})
    in_any_order = (p for p in parts if p not in formats)  # as ptxas takes them
    shape = tuple(sorted(in_any_order, key=MULTICASTS.__contains__))
    if shape not in COPIES or formats not in FORMATS:
        b.fail(f"modifiers {', '.join(parts)}", "; ".join(".".join(key) for key in (*COPIES, *FORMATS) if key))
    taddr, source = _operands(b, ins, 2)
    register, offset = _tmem(b, taddr)
    mods = fields.TCGEN05_CP(offset=offset, group=group, shape=COPIES[shape], format=FORMATS[formats])
    return Op("tcgen05_cp", [register, b.value(source, "b64")], mods)


def lower_shift(b, ins, parts):
    group = _group(b, parts)
    _all_known(b, parts, "down")
    register, offset = _tmem(b, *_operands(b, ins, 1))
    return Op("tcgen05_shift", [register], fields.TCGEN05_SHIFT(offset=offset, group=group))


def lower_commit(b, ins, parts):
    group = _group(b, parts)
    _take(b, parts, {"mbarrier::arrive::one"})
    multicast = _take(b, parts, {"multicast::cluster"}, required=False) is not None
    _take(b, parts, {"shared::cluster"}, required=False)
    _all_known(b, parts, "b64")
    barrier, *mask = _operands(b, ins, 2 if multicast else 1)
    register, mbarrier = shared_place(b, ins, barrier, "shared::cluster")
    args = [register, b.value(mask[0], "b16") if mask else -1]
    return Op("tcgen05_commit", args, fields.TCGEN05_COMMIT(mbarrier=mbarrier, group=group))


FORMS = {
    "alloc": lower_alloc, "dealloc": lower_dealloc, "relinquish_alloc_permit": lower_relinquish,
    "ld": functools.partial(_lower_move, handler="tmem_ld", packing="pack::16b"),
    "st": functools.partial(_lower_move, handler="tmem_st", packing="unpack::16b"),
    "wait::ld": lower_wait, "wait::st": lower_wait,
    "fence::before_thread_sync": lower_fence, "fence::after_thread_sync": lower_fence,
    "mma": lower_mma, "cp": lower_cp, "shift": lower_shift, "commit": lower_commit,
}
LOWERINGS = {"tcgen05": lower}
