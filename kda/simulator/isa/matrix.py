"""ldmatrix, stmatrix, movmatrix and mma.sync."""

import re

from kda.simulator.isa.common import ALIGNED, MATRIX_TYPES, Op, operands

PARTS = (r"m\d+n\d+", r"x\d", r"b\d+")  # shape, count, type
COUNTS = {"x1": 1, "x2": 2, "x4": 4}
SHARED = ("shared", "shared::cta")
B16, B16_TRANSPOSED, B8_LOAD, B8_STORE = range(4)  # the engine's Form

# (shape, .trans, type) -> (form, registers and rows of memory of one matrix, the counts it comes in)
LOADS = {
    ("m8n8", False, "b16"): (B16, 1, 8, ("x1", "x2", "x4")),
    ("m8n8", True, "b16"): (B16_TRANSPOSED, 1, 8, ("x1", "x2", "x4")),
    ("m16n16", True, "b8"): (B8_LOAD, 2, 16, ("x1", "x2")),
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
    shape, count, type_ = (next((p for p in parts if re.fullmatch(kind, p)), "") for kind in PARTS)
    key = (shape, "trans" in parts, type_)
    if key not in table or count not in table[key][3] or len(parts) != 3 + ("trans" in parts):
        b.fail(f"modifiers {'.'.join(parts)}", _forms(table))
    form, registers, rows, _ = table[key]
    needed = 100 if type_ == "b8" else first_arch
    if b.arch < needed:
        since = f"sm_{needed}a and later" if needed >= 100 else f"sm_{needed} and later"
        b.fail(f"{ins.parts[0]} of {type_} does not exist on sm_{b.arch}", since)
    n = COUNTS[count]
    given = b.targets(vector) if table is LOADS else b.values(vector, "b32")
    if len(given) != n * registers or (table is STORES and -1 in given):
        b.fail(f"{len(given)} registers", f"{n * registers}")
    place = b.place(address)
    generic = not any(p in SHARED for p in ins.parts) and b.space_of(address) != "shared"
    mods = [len(given), form, n * rows, place.offset, int(place.wide), int(generic)]
    return Op("ldmatrix" if table is LOADS else "stmatrix", [*given, place.register], mods, ALIGNED)


def lower_ldmatrix(b, ins):
    vector, address = operands(b, ins, "d", "[address]")
    return _lower_move(b, ins, LOADS, 75, vector, address)


def lower_stmatrix(b, ins):
    address, vector = operands(b, ins, "[address]", "a")
    return _lower_move(b, ins, STORES, 90, vector, address)


def lower_movmatrix(b, ins):
    if ins.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
        b.fail(f"modifiers {'.'.join(ins.parts[1:])}", "sync.aligned.m8n8.trans.b16")
    d, a = operands(b, ins, "d", "a")
    return Op("movmatrix", [b.target(d), b.value(a, "b32")], gather=ALIGNED)


# types of A and B -> (types of D, shape -> the first arch that has it)
F8 = ("e4m3", "e5m2")
I8 = ("s8", "u8")
MMA = {
    (("f16",), ("f16",)): (("f32", "f16"), {"m16n8k8": 75, "m16n8k16": 80}),
    (("bf16",), ("bf16",)): (("f32",), {"m16n8k8": 80, "m16n8k16": 80}),
    (("tf32",), ("tf32",)): (("f32",), {"m16n8k4": 80, "m16n8k8": 80}),
    (F8, F8): (("f32", "f16"), {"m16n8k16": 89, "m16n8k32": 89}),
    (I8, I8): (("s32",), {"m8n8k16": 75, "m16n8k16": 80, "m16n8k32": 80}),
    (("f64",), ("f64",)): (("f64",), {"m8n8k4": 80, "m16n8k4": 90, "m16n8k8": 90, "m16n8k16": 90}),
}
ELEMENT_BYTES = {"f64": 8, "tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def _mma_forms():
    rows = [[_either(names) for names in (shapes, d, a, b)] for (a, b), (d, shapes) in MMA.items()]
    return "; ".join(f".{shapes} {d}.{a}.{b}" for shapes, d, a, b in rows)


def lower_mma(b, ins):
    """mma.sync.aligned.shape.row.col{.satfinite}.d.a.b.c: D = A B + C."""
    parts = [p for p in ins.parts[1:] if p not in ("sync", "aligned", "satfinite")]
    if parts[:1] == ["sp"] or any(p.startswith(("sp::", "kind::", "block_scale")) for p in parts):
        b.fail("sparse and block-scaled matrices", f"mma.sync of {_mma_forms()}")
    if len(parts) != 7 or parts[1:3] != ["row", "col"]:
        b.fail(f"modifiers {'.'.join(parts)}", f"shape.row.col and the types of D, A, B and C: {_mma_forms()}")
    shape, _, _, d, a, type_b, c = parts
    saturate = "satfinite" in ins.parts
    accumulators, shapes = next((form for (x, y), form in MMA.items() if a in x and type_b in y), ((), {}))
    if shape not in shapes or d not in accumulators or c != d or (saturate and d != "s32"):
        b.fail(f"modifiers {'.'.join(ins.parts[1:])}", _mma_forms())
    if b.arch < shapes[shape]:
        b.fail(f"{shape} of {a} does not exist on sm_{b.arch}", f"sm_{shapes[shape]} and later")
    m, n, k = map(int, re.findall(r"\d+", shape))
    register_bytes = 8 if d == "f64" else 4
    per_lane = ELEMENT_BYTES[a] * k * 8 // (32 * register_bytes)  # registers for 8 rows of A, or for B
    of_d = m * n // 32 // (2 if d == "f16" else 1)
    wanted = [of_d, m // 8 * per_lane, per_lane, of_d]
    into, *sources = operands(b, ins, "D", "A", "B", "C")
    type_ = {"f64": "f64", "f32": "f32"}.get(d, "b32")
    given = [b.targets(into), *(b.values(v, type_) for v in sources)]
    if [len(g) for g in given] != wanted or any(-1 in g for g in given):
        b.fail(f"{_numbers(map(len, given))} registers for D, A, B, C", _numbers(wanted))
    mods = [m, k, *(MATRIX_TYPES[t] for t in (a, type_b, d)), int(saturate), *wanted[:3]]
    return Op("mma_f64" if d == "f64" else "mma", [r for g in given for r in g], mods, ALIGNED)


def _numbers(values):
    return ", ".join(map(str, values))


LOWERINGS = {
    "ldmatrix": lower_ldmatrix,
    "stmatrix": lower_stmatrix,
    "movmatrix": lower_movmatrix,
    "mma": lower_mma,
}
