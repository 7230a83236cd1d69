"""ld, st, atom, red and address arithmetic between spaces."""

from dataclasses import replace

from ptxkit.isa import common
from ptxkit.isa.common import ATOMIC_TYPES, ATOMICS, SCOPES, SEMANTICS, SIZES, WIDTHS, Op, one_of, operands, registers
from ptxkit.isa.copies import lower_async
from ptxkit.isa.fields import ACCESS, ATOM, DISCARD, GETCTARANK, ISSPACEP, MAPA, ST_BULK
from ptxkit.ptx.syntax import Immediate, Register

SPACES = {
    **dict.fromkeys(("global", "const"), 1), **dict.fromkeys(("shared", "shared::cta", "shared::cluster"), 2),
    "local": 3, **dict.fromkeys(("param", "param::entry", "param::func"), 4),
}
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
STRONG = {"volatile": ("relaxed", "sys"), "mmio": ("relaxed", "sys")}
MULTIMEM_TYPES = {f"{t}{n}": f"b{bits}" for t in ("e4m3", "e5m2") for n, bits in (("", 8), ("x2", 16), ("x4", 32))}
CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "noftz", "unified"}


def _refuse_unknown(b, ins, *known):
    for part in ins.parts[1:]:
        if not any(part in table for table in known) and not part.startswith(("L1::", "L2::", "level::")):
            b.fail(f"modifier .{part} is not known here", ", ".join(sorted(k for table in known for k in table)))


def _semantics(ins):
    """Return (semantics, scope) of an access, as the engine's numbers."""
    for part, (sem, scope) in STRONG.items():
        if part in ins.parts and not (part == "mmio" and any(s in ins.parts for s in SCOPES)):
            return SEMANTICS[sem], SCOPES[scope]
    sem = one_of(ins.parts, SEMANTICS, 0)
    return sem, one_of(ins.parts, SCOPES, SCOPES["gpu"]) if sem else 0


def _access(b, ins, values, address, to_registers, wider=True):
    _refuse_unknown(b, ins, SPACES, VECTORS, SIZES, SEMANTICS, SCOPES, STRONG, CACHE)
    type_ = ins.parts[-1]
    if type_ not in SIZES:
        b.fail(f".{type_} cannot be loaded or stored", ", ".join(SIZES))
    place, size, count = b.place(address), SIZES[type_], one_of(ins.parts, VECTORS, 1)
    space = one_of(ins.parts, SPACES, 0)
    if b.space_of(address) in ("param", "local"):  # a kernel's parameter, or an argument of a call
        space = SPACES[b.space_of(address)]
    registers = (b.targets if to_registers else b.values)(values, type_, wider)
    if len(registers) != count:
        b.fail(f"{len(registers)} registers for {count} elements")
    held = [v for v in getattr(values, "items", (values,)) if isinstance(v, Register)]
    widths = {WIDTHS[b.type_of(v)] for v in held} or {4}  # a register may be wider than what is moved
    if len(widths) > 1:
        b.fail("registers of several widths cannot be loaded or stored together")
    declared = widths.pop()
    if declared > max(size, 4) and len(held) < count and not to_registers:
        b.fail("immediates beside registers that are wider than what is stored")
    sem, scope = _semantics(ins)
    mods = ACCESS(
        space=space, bytes=size, count=count, signed=type_[0] == "s", sem=sem, scope=scope, address=place.address,
        declared=declared,
    )
    return [*registers, place.register], mods


def _without_policy(b, ins, *names):
    """Return the operands, of which the last is a cache policy where the modifiers say so; it has no effect here."""
    if "L2::cache_hint" not in ins.parts:
        return operands(b, ins, *names)
    *rest, policy = operands(b, ins, *names, "policy")
    b.value(policy, "b64")
    return rest


def lower_ld(b, ins, wider=True):
    values, address = _without_policy(b, ins, "d", "[a]")
    return Op("ld", *_access(b, ins, values, address, True, wider))


def _lower_st_bulk(b, ins):
    address, size, value = operands(b, ins, "[a]", "size", "0")
    common.exists_from(b, 100, "st.bulk")
    if not isinstance(value, Immediate) or value.value != 0 or not {*ins.parts[2:]} <= {"weak", "shared::cta"}:
        b.fail(f"modifiers {'.'.join(ins.parts[2:])} and value {getattr(value, 'text', value)}", "st.bulk of 0")
    register, to = common.shared_place(b, ins, address, "shared::cta")
    return Op("st_bulk", [register, b.value(size, "u64")], ST_BULK(to=to))


def lower_st(b, ins):
    if ins.parts[1] == "async":
        return lower_async(b, ins)
    if ins.parts[1] == "bulk":
        return _lower_st_bulk(b, ins)
    address, values = _without_policy(b, ins, "[a]", "b")
    return Op("st", *_access(b, ins, values, address, False))


def lower_discard(b, ins):
    """discard{.global}.L2 [a], 128: L2 need not write the line to memory, so it must be written before it is read."""
    address, size = operands(b, ins, "[a]", "128")
    if ins.parts[1:] not in (("L2",), ("global", "L2")) or not isinstance(size, Immediate) or size.value != 128:
        b.fail(f"discard{''.join(f'.{part}' for part in ins.parts[1:])} of {getattr(size, 'value', size)} bytes",
               "discard{.global}.L2 of 128")
    place = b.place(address)
    return Op("discard", [place.register], DISCARD(space=one_of(ins.parts, SPACES, 0), address=place.address))


def _atomic(b, ins, target, address, operands):
    _refuse_unknown(b, ins, SPACES, VECTORS, ATOMIC_TYPES, SEMANTICS, SCOPES, ATOMICS, CACHE)
    type_ = next((p for p in reversed(ins.parts) if p in ATOMIC_TYPES), None)
    name = next((p for p in ins.parts if p in ATOMICS), None)
    for what, given, known in (("type", type_, ATOMIC_TYPES), ("operation", name, ATOMICS)):
        if given is None:
            b.fail(f"the {what} of an atomic is missing", ", ".join(known))
    if type_ in ("f32", "f64") and name not in ("add", "exch", "min", "max"):
        b.fail(f"no such operation on .{type_}")
    count = one_of(ins.parts, VECTORS, 1)
    place = b.place(address)
    targets = [-1] * count if target is None else b.targets(target, type_)
    values = b.values(operands[0], type_)
    if len(values) != count or len(targets) != count:
        b.fail(f"{len(values)} values and {len(targets)} results for {count} elements")
    rest = [b.value(o, type_) for o in operands[1:] if name == "cas"]
    mods = ATOM(
        space=one_of(ins.parts, SPACES, 0), op=ATOMICS[name], type=ATOMIC_TYPES[type_], bytes=SIZES[type_], count=count,
        sem=one_of(ins.parts, SEMANTICS, SEMANTICS["relaxed"]), scope=one_of(ins.parts, SCOPES, SCOPES["gpu"]),
        address=place.address,
    )
    return Op("atom", [*targets, place.register, *values, *rest], mods)


def lower_atom(b, ins):
    target, address, *values = _without_policy(b, ins, "d", "[a]", "b", *(["c"] if "cas" in ins.parts else []))
    return _atomic(b, ins, target, address, values)


def lower_red(b, ins):
    if ins.parts[1] == "async":
        return lower_async(b, ins)
    address, *values = _without_policy(b, ins, "[a]", "b")
    return _atomic(b, ins, None, address, values)


def lower_multimem(b, ins):
    """Lower a plain access: on one device, which is all there is here, a multimem address stands for one place."""
    common.exists_from(b, 90, "multimem")
    what, *parts = ins.parts[1:]
    parts = [MULTIMEM_TYPES.get(p, p) for p in parts if not p.startswith("acc::")]
    if what == "ld_reduce":
        return lower_ld(b, replace(ins, parts=("ld", *(p for p in parts if p not in ATOMICS))), wider=False)
    if what in ("st", "red"):
        return {"st": lower_st, "red": lower_red}[what](b, replace(ins, parts=(what, *parts)))
    b.fail(f"multimem.{what}", "multimem.ld_reduce, multimem.st, multimem.red")


def _address_type(b, ins):
    """Return (the type of the address that mapa and getctarank take, is it generic)."""
    *parts, type_ = ins.parts[1:]
    if parts not in ([], ["shared::cluster"]) or type_ not in ("u32", "u64"):
        b.fail(f"modifiers {'.'.join(ins.parts[1:])}", "{.shared::cluster}.u32, {.shared::cluster}.u64")
    return type_, not parts


def lower_mapa(b, ins):
    type_, generic = _address_type(b, ins)
    args = registers(b, ins, d=f"={type_}", a=type_, rank="u32")
    return Op("mapa", args, MAPA(wide=type_ == "u64", generic=generic))


def lower_getctarank(b, ins):
    type_, _ = _address_type(b, ins)
    return Op("getctarank", registers(b, ins, d="=u32", a=type_), GETCTARANK(wide=type_ == "u64"))


# space -> its window, and whether of this CTA alone
WINDOWS = {
    "global": (0, 0), "shared": (2, 1), "shared::cta": (2, 1), "shared::cluster": (2, 0), "local": (3, 0),
    "param": (4, 0), "const": (0, 0), "param::entry": (4, 0),
}


def lower_isspacep(b, ins):
    if ins.parts[1] not in WINDOWS:
        b.fail(f".{ins.parts[1]} is no space", ", ".join(WINDOWS))
    window, own_cta = WINDOWS[ins.parts[1]]
    return Op("isspacep", registers(b, ins, p="=pred", a="u64"), ISSPACEP(window=window, own_cta=own_cta))


LOWERINGS = {
    "ld": lower_ld, "ldu": lower_ld, "st": lower_st, "discard": lower_discard, "atom": lower_atom, "red": lower_red,
    "multimem": lower_multimem, "mapa": lower_mapa, "getctarank": lower_getctarank, "isspacep": lower_isspacep,
}
