"""ldmatrix, stmatrix, movmatrix and mma.sync."""

import re

from ptxkit.isa.common import ALIGNED, ELEMENT_BITS, MATRIX_TYPES, Op, exists_from, one_of, operands, shared_place
from ptxkit.isa.fields import FRAGMENTS, MATRIX_MOVE, MMA
from ptxkit.ptx.syntax import Immediate

PARTS = (r"m\d+n\d+", r"x\d", r"b\d+(x16.*)?")  # shape, count, type
COUNTS = {"x1": 1, "x2": 2, "x4": 4}
SHARED = ("shared", "shared::cta")
B16, B16_TRANSPOSED, B8_LOAD, B8_STORE = range(4)  # the engine's Form

# 16 elements of so many bits begin each 16 bytes of memory; each becomes the low bits of a byte
UNPACKED = {"b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}

# (shape, .trans, type) -> (form, registers and rows of memory of one matrix, the counts it comes in)
LOADS = {
    ("m8n8", False, "b16"): (B16, 1, 8, ("x1", "x2", "x4")),
    ("m8n8", True, "b16"): (B16_TRANSPOSED, 1, 8, ("x1", "x2", "x4")),
    ("m16n16", True, "b8"): (B8_LOAD, 2, 16, ("x1", "x2")),
    **{("m16n16", True, type_): (B8_LOAD, 2, 16, ("x1", "x2")) for type_ in UNPACKED},
    **{("m8n16", False, type_): (B16, 1, 8, ("x1", "x2", "x4")) for type_ in UNPACKED},
}
STORES = {
    ("m8n8", False, "b16"): (B16, 1, 8, ("x1", "x2", "x4")),
    ("m8n8", True, "b16"): (B16_TRANSPOSED, 1, 8, ("x1", "x2", "x4")),
    ("m16n8", True, "b8"): (B8_STORE, 1, 8, ("x1", "x2", "x4")),
}


def _either(names):
    return f"{{{', '.join(names)}}}" if len(names) > 1 else "".join(names)


def _forms(table):
    rows = [(shape, _either(row[-1]), ".trans" * trans, type_) for (shape, trans, type_), row in table.items()]
    return "; ".join(f".{shape}.{counts}{trans}.{type_}" for shape, counts, trans, type_ in rows)


def _lower_move(b, ins, table, first_arch, vector, address):
    """ldmatrix or stmatrix: the registers in `vector`, the rows' addresses in `address`."""
    parts = [p for p in ins.parts[1:] if p not in ("sync", "aligned", *SHARED)]
    if (unpacked := ".".join(parts[-2:])) in UNPACKED:
        parts[-2:] = [unpacked]
    shape, count, type_ = (next((p for p in parts if re.fullmatch(kind, p)), "") for kind in PARTS)
    key = (shape, "trans" in parts, type_)
    if key not in table or count not in table[key][3] or len(parts) != 3 + ("trans" in parts):
        b.fail(f"modifiers {'.'.join(parts)}", _forms(table))
    form, each, rows, _ = table[key]
    needed = 100 if type_.startswith("b8") else first_arch
    exists_from(b, needed, f"{ins.parts[0]} of {type_}", f"sm_{needed}a" if needed >= 100 else None)
    n = COUNTS[count]
    given = (b.targets if table is LOADS else b.values)(vector, "b32")
    if len(given) != n * each or (table is STORES and -1 in given):
        b.fail(f"{len(given)} registers", f"{n * each}")
    register, row = shared_place(b, ins, address, *SHARED)
    mods = MATRIX_MOVE(count=len(given), form=form, rows=n * rows, row=row, bits=UNPACKED.get(type_, 0))
    return Op("ldmatrix" if table is LOADS else "stmatrix", [*given, register], mods, ALIGNED)


def lower_movmatrix(b, ins):
    if ins.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
        b.fail(f"modifiers {'.'.join(ins.parts[1:])}", "sync.aligned.m8n8.trans.b16")
    d, a = operands(b, ins, "d", "a")
    return Op("movmatrix", [b.target(d, "b32"), b.value(a, "b32")], gather=ALIGNED)


# types of A and B -> (types of D, shape -> the first arch that has it)
F8 = ("e4m3", "e5m2")
F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
I8, I4 = ("s8", "u8"), ("s4", "u4")
DENSE = {
    (("f16",), ("f16",)): (("f32", "f16"), {"m16n8k8": 75, "m16n8k16": 80}),
    (("bf16",), ("bf16",)): (("f32",), {"m16n8k8": 80, "m16n8k16": 80}),
    (("tf32",), ("tf32",)): (("f32",), {"m16n8k4": 80, "m16n8k8": 80}),
    (F8, F8): (("f32", "f16"), {"m16n8k16": 89, "m16n8k32": 89}),
    (I8, I8): (("s32",), {"m8n8k16": 75, "m16n8k16": 80, "m16n8k32": 80}),
    (I4, I4): (("s32",), {"m8n8k32": 75, "m16n8k32": 80, "m16n8k64": 80}),
    (("b1",), ("b1",)): (("s32",), {"m8n8k128": 75, "m16n8k128": 80, "m16n8k256": 80}),
    (("f64",), ("f64",)): (("f64",), {"m8n8k4": 80, "m16n8k4": 90, "m16n8k8": 90, "m16n8k16": 90}),
}
SPARSE = {  # the same where half of A is zero
    (("f16",), ("f16",)): (("f32", "f16"), {"m16n8k16": 80, "m16n8k32": 80}),
    (("bf16",), ("bf16",)): (("f32",), {"m16n8k16": 80, "m16n8k32": 80}),
    (("tf32",), ("tf32",)): (("f32",), {"m16n8k8": 80, "m16n8k16": 80}),
    (F8, F8): (("f32",), {"m16n8k64": 89}),
    (I8, I8): (("s32",), {"m16n8k32": 80, "m16n8k64": 80}),
    (I4, I4): (("s32",), {"m16n8k64": 80, "m16n8k128": 80}),
}
VARIANTS = {"sp": 1, "sp::ordered_metadata": 2}
CHUNKS = {32: 2, 16: 4, 8: 4, 4: 8}  # neighbours in k, by bits of an element, for which metadata has 4 bits
FP4 = ("e2m1",)
# kind of sm_120a -> (types of A and B, types of D, shape, bits of an element in its register,
#                     {(number of factors of a row, their type): may .scale_vec be left out?})
KINDS = {
    "kind::f8f6f4": (F8F6F4, ("f32", "f16"), "m16n8k32", 8, {}),
    "kind::mxf8f6f4": (F8F6F4, ("f32",), "m16n8k32", 8, {(1, "ue8m0"): True}),
    "kind::mxf4": (FP4, ("f32",), "m16n8k64", 4, {(2, "ue8m0"): True}),
    "kind::mxf4nvf4": (FP4, ("f32",), "m16n8k64", 4, dict.fromkeys(((2, "ue8m0"), (4, "ue8m0"), (4, "ue4m3")), False)),
}
SCALE_VECS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
CONTAINED = {"e2m1": 2}  # in containers of 8 bits: how far up it lies; others begin at bit 0


def _mma_forms(table=DENSE):
    rows = [[_either(names) for names in (shapes, d, a, b)] for (a, b), (d, shapes) in table.items()]
    return "; ".join(f".{shapes} {d}.{a}.{b}" for shapes, d, a, b in rows)


def lower_mma(b, ins):
    """mma{.sp}.sync.aligned.shape.row.col{.satfinite}.d.a.b.c: D = A B + C."""
    sparse = one_of(ins.parts, VARIANTS, 0)
    table = SPARSE if sparse else DENSE
    parts = [p for p in ins.parts[1:] if p not in ("sync", "aligned", "satfinite", *VARIANTS)]
    if any(p.startswith("kind::") for p in parts):
        return _lower_kind(b, ins, parts, sparse)
    bitwise = [parts.pop(parts.index(p)) for p in ("and", "xor", "popc") if p in parts]
    if len(parts) != 7 or parts[1:3] != ["row", "col"]:
        b.fail(f"modifiers {'.'.join(parts)}", f"shape.row.col and the types of D, A, B and C: {_mma_forms(table)}")
    shape, _, _, d, a, type_b, c = parts
    saturate = "satfinite" in ins.parts
    accumulators, shapes = next((form for (x, y), form in table.items() if a in x and type_b in y), ((), {}))
    if shape not in shapes or d not in accumulators or c != d or (saturate and d != "s32") or (a == "b1") != (
        bitwise in (["and", "popc"], ["xor", "popc"])
    ):
        b.fail(f"modifiers {'.'.join(ins.parts[1:])}", _mma_forms(table))
    exists_from(b, shapes[shape], f"{shape} of {a}")
    m, n, k = map(int, re.findall(r"\d+", shape))
    if d == "f64":
        registers = _fragments(b, ins.operands, (d, a), (m, n, k), 64, "f64")
        return Op("mma_f64", _flat(registers), _fragment_fields(m, k, (a, type_b, d), saturate, registers), ALIGNED)
    bits = ELEMENT_BITS[a]
    metadata, selector = _metadata(b, ins.operands, k, bits) if sparse else ([], 0)
    dense = ins.operands[:4] if sparse else ins.operands
    registers = _fragments(b, dense, (d, a), (m, n, k), bits, "f32" if d == "f32" else "b32", sparse)
    mods = MMA(
        fragments=_fragment_fields(m, k, (a, type_b, d), saturate, registers), bits=bits, shift_a=0, shift_b=0,
        exclusive="xor" in bitwise, scales=0, scale_type=0, sparse=sparse, first=selector,
    )
    return Op("mma", [*_flat(registers), *metadata], mods, ALIGNED)


def _metadata(b, given, k, bits):
    """Return the register that tells where A is not zero, and which lanes' it is: the first one of a group of four."""
    if len(given) != 6:
        b.fail(f"{len(given)} operands", "D, A, B, C, metadata, selector")
    word, selector = b.values(given[4], "b32"), given[5]
    each = 16 * 4 * k // CHUNKS[bits] // (8 * 32)  # lanes of a group of four that have a part of it
    if len(word) != 1 or -1 in word:
        b.fail(f"{len(word)} registers of metadata", "1")
    if not isinstance(selector, Immediate) or not 0 <= int(selector.value) < 4 // each:
        last = 4 // each - 1
        b.fail(f"selector {getattr(selector, 'text', selector)}", f"an immediate from 0 to {last}" if last else "0")
    return word, each * int(selector.value)


def _fragments(b, given, types, shape, bits, type_, sparse=0):
    """Return the registers of D, A, B and C."""
    (d, _), (m, n, k) = types, shape
    per_lane = bits * k * 8 // (32 * (64 if d == "f64" else 32))  # registers for 8 rows of A, or for B
    of_d = m * n // 32 // (2 if d == "f16" else 1)
    wanted = [of_d, m // 8 * per_lane // (2 if sparse else 1), per_lane, of_d]
    if len(given) != 4:
        b.fail(f"{len(given)} operands", "D, A, B, C")
    into, *sources = given
    registers = [b.targets(into, type_), *(b.values(v, type_) for v in sources)]
    if -1 in _flat(registers[1:]):
        b.fail("`_` in A, B or C", "`_` in D")
    if [len(g) for g in registers] != wanted:
        b.fail(f"{_numbers(map(len, registers))} registers for D, A, B, C", _numbers(wanted))
    return registers


def _flat(registers):
    return [r for of_a_matrix in registers for r in of_a_matrix]


def _fragment_fields(m, k, types, saturate, registers):
    numbers = dict(zip("abd", (MATRIX_TYPES[t] for t in types)))
    numbers |= {f"registers_{name}": len(r) for name, r in zip("dab", registers)}
    return FRAGMENTS(rows=m, depth=k, saturate=saturate, **numbers)


def _kind_forms():
    for kind, (types, d, shape, _, scales) in KINDS.items():
        vecs = "".join(f".block_scale.scale_vec::{n}X of {s}" for n, s in scales)
        yield f".{shape}.row.col.{kind}{vecs} {_either(d)}.{_either(types)}.{_either(types)}"


SPARSE_KINDS = "mma.sp::ordered_metadata: of these, k is twice as large"


def _lower_kind(b, ins, parts, sparse):
    """mma.sync.aligned.shape.row.col.kind{.block_scale{.scale_vec}}.d.a.b.c{.scales}, of sm_120a."""
    kind = next(p for p in parts if p.startswith("kind::"))
    vec = next((SCALE_VECS[p] for p in parts if p in SCALE_VECS), None)
    scaled = "block_scale" in parts
    shape, *rest = [p for p in parts if p not in SCALE_VECS and p not in (kind, "block_scale")]
    types, accumulators, wanted, bits, scales = KINDS.get(kind, ((), (), "", 0, {}))
    if sparse and ins.parts[1] != "sp::ordered_metadata":
        b.fail(f"mma.{ins.parts[1]} with {kind}", f"mma.sp::ordered_metadata; mma.sp of {_mma_forms(SPARSE)}")
    wanted = {"m16n8k32": "m16n8k64", "m16n8k64": "m16n8k128"}.get(wanted, "") if sparse else wanted
    layouts, named = rest[:2], rest[2:]
    if b.arch < 120:
        b.fail(f"{kind} of mma.sync does not exist on sm_{b.arch}", "sm_120a; tcgen05.mma has it on sm_100a")
    count = next((n for (n, s), free in scales.items() if named[4:] == [s] and (vec == n or (vec is None and free))), 0)
    if (
        shape != wanted or layouts != ["row", "col"] or len(named) != 4 + scaled or scaled != bool(scales)
        or not {named[1], named[2]} <= set(types) or named[0] not in accumulators or named[0] != named[3]
        or bool(count) != scaled
    ):
        b.fail(f"modifiers {'.'.join(parts)}", "; ".join([*_kind_forms(), SPARSE_KINDS]))
    d, type_a, type_b, _ = named[:4]
    m, n, k = map(int, re.findall(r"\d+", shape))
    given = ins.operands[:4]
    registers = _fragments(b, given, (d, type_a), (m, n, k), bits, "f32" if d == "f32" else "b32", sparse)
    selected, rest = [], ins.operands[4:]
    if sparse:
        selected, rest = [*_metadata(b, ins.operands[:6], k, bits)[0]], rest[2:]
    if scaled:
        if len(rest) != 4:
            b.fail(f"{len(rest)} operands for factors", "factors of A, {byte, thread}, of B, {byte, thread}")
        for data, selectors in (rest[:2], rest[2:]):
            word, pair = b.values(data, "b32"), b.values(selectors, "b16")
            if len(word) != 1 or len(pair) != 2 or -1 in (*word, *pair):
                b.fail(f"{len(word)} registers of factors and {len(pair)} selectors", "1, and {byte, thread}")
            selected += [*word, *pair]
    elif rest:
        b.fail(f"{len(ins.operands)} operands", "D, A, B, C" + (", metadata, selector" if sparse else ""))
    shift_a, shift_b = (CONTAINED.get(t, 0) if bits == 8 else 0 for t in (type_a, type_b))
    mods = MMA(
        fragments=_fragment_fields(m, k, (type_a, type_b, d), False, registers), bits=bits, shift_a=shift_a,
        shift_b=shift_b, exclusive=False, scales=count, scale_type=MATRIX_TYPES[named[-1]], sparse=sparse, first=0,
    )
    return Op("mma", [*_flat(registers), *selected], mods, ALIGNED)


def _numbers(values):
    return ", ".join(map(str, values))


LOWERINGS = {
    "ldmatrix": lambda b, ins: _lower_move(b, ins, LOADS, 75, *operands(b, ins, "d", "[address]")),
    "stmatrix": lambda b, ins: _lower_move(b, ins, STORES, 90, *operands(b, ins, "[address]", "a")[::-1]),
    "movmatrix": lower_movmatrix, "mma": lower_mma,
}
