"""wmma: load, store and mma of a warp's matrices, whose fragments have no documented order.

The order here: a lane's elements follow each other along the rows of A, C and D and along the columns of B. Where the
fragments of all lanes hold more elements than the matrix has, they hold it several times.
"""

import re

from ptxkit.isa.common import ALIGNED, ELEMENT_BITS, MATRIX_TYPES, Op, exists_from, operands
from ptxkit.isa.fields import WMMA, WMMA_MOVE

FLOATS, INTEGERS = ("m16n16k16", "m8n32k16", "m32n8k16"), ("s8", "u8")
# type of A and B -> (shapes, types of C and D, first arch)
MULTIPLICANDS = {
    "f16": (FLOATS, ("f32", "f16"), 70),
    "bf16": (FLOATS, ("f32",), 80),
    **dict.fromkeys(INTEGERS, (FLOATS, ("s32",), 72)),
    "tf32": (("m16n16k8",), ("f32",), 80),
    "f64": (("m8n8k4",), ("f64",), 80),
    **dict.fromkeys(("s4", "u4"), (("m8n8k32",), ("s32",), 75)),
    "b1": (("m8n8k128",), ("s32",), 75),
}
LAYOUTS = {"row": 0, "col": 1}
SPACES = {"global": 1, "shared": 2, "shared::cta": 2}
A, B, C = "a", "b", "c"
# registers of a fragment where the matrix is held several times
HELD = {("f16", A): 8, ("f16", B): 8}


def _extent(shape, matrix):
    """Return (rows, columns) of A, B, C or D."""
    m, n, k = map(int, re.findall(r"\d+", shape))
    return {A: (m, k), B: (k, n)}.get(matrix, (m, n))


def _fail(b, ins):
    forms = [f".{{{', '.join(shapes)}}} of {t}, in {', '.join(ds)}" for t, (shapes, ds, _) in MULTIPLICANDS.items()]
    b.fail(f"modifiers {'.'.join(ins.parts[1:])}", "; ".join(forms))


def _check(b, ins, shape, type_, accumulator):
    shapes, accumulators, arch = MULTIPLICANDS.get(type_, ((), (), 0))
    if shape not in shapes or accumulator not in accumulators:
        _fail(b, ins)
    exists_from(b, arch, f"wmma of {type_}")


def _vector(b, operand, shape, matrix, type_, write=False):
    kind, bits = {"f64": "f64", "f32": "f32"}.get(type_, "b32"), ELEMENT_BITS[type_]
    rows, columns = _extent(shape, matrix)
    wanted = HELD.get((type_, matrix)) or max(rows * columns * bits // (32 * max(bits, 32)), 1)
    registers = (b.targets if write else b.values)(operand, kind)
    if -1 in registers:
        b.fail(f"`_` in {matrix.upper()}, which is read", "`_` in what is written")
    if len(registers) != wanted:
        b.fail(f"{len(registers)} registers for {matrix.upper()}", f"{wanted} of .{shape} and .{type_}")
    return registers


def _lower_move(b, ins, matrix, parts):
    """load: matrix is a, b or c; store: d."""
    layout, shape, *rest = sorted(parts, key=lambda p: (p not in LAYOUTS, not p.startswith("m")))
    space = next((SPACES[p] for p in rest if p in SPACES), 0)
    type_ = next((p for p in rest if p not in SPACES), "")
    if layout not in LAYOUTS or len(rest) != 1 + (space > 0) or type_ not in ELEMENT_BITS:
        _fail(b, ins)
    multiplicand = type_ if matrix in (A, B) else next(
        (t for t, (shapes, ds, _) in MULTIPLICANDS.items() if shape in shapes and type_ in ds), ""
    )
    accumulator = type_ if matrix not in (A, B) else MULTIPLICANDS.get(type_, ((), ("",)))[1][0]
    _check(b, ins, shape, multiplicand, accumulator)
    if ELEMENT_BITS[type_] < 8 and layout != {A: "row", B: "col"}[matrix]:
        b.fail(f".{layout} of {type_}", ".row of A and .col of B")
    store = matrix == "d"
    names = ("[address]", "r") if store else ("r", "[address]")
    stride = ins.operands[2:3]
    given = dict(zip((*names, "stride"), operands(b, ins, *names, *(["stride"] if stride else []))))
    registers = _vector(b, given["r"], shape, matrix, type_, write=not store)
    rows, columns = _extent(shape, matrix)
    default = rows if layout == "col" else columns
    place = b.place(given["[address]"])
    args = [*registers, place.register, b.value(given["stride"], "u32") if stride else b.constant(default)]
    space = space or {"shared": 2, "global": 1}.get(b.space_of(given["[address]"]), 0)
    mods = WMMA_MOVE(
        registers=len(registers), rows=rows, columns=columns, bits=ELEMENT_BITS[type_], is_b=matrix == B,
        by_columns=LAYOUTS[layout], space=space, address=place.address,
    )
    return Op("wmma_store" if store else "wmma_load", args, mods, ALIGNED)


def _lower_mma(b, ins, parts):
    saturate = "satfinite" in parts
    exclusive = "xor" in parts
    bitwise = {"and", "xor", "popc"} & set(parts)
    parts = [p for p in parts if p not in ("satfinite", "and", "xor", "popc", "rn")]
    layouts, shapes = [p for p in parts if p in LAYOUTS], [p for p in parts if p.startswith("m")]
    types = [p for p in parts if p not in LAYOUTS and p not in shapes]
    if len(types) == 2:
        types = [types[0], "f16", "f16", types[1]]  # f16 multiplicands go without saying
    if len(layouts) != 2 or len(shapes) != 1 or len(types) != 4 or types[1] != types[2]:
        _fail(b, ins)
    (shape,), (d, a, _, c) = shapes, types
    for accumulator in (d, c):
        _check(b, ins, shape, a, accumulator)
    if (saturate and d != "s32") or (a == "b1") != (len(bitwise) == 2 and "popc" in bitwise):
        _fail(b, ins)
    matrices = zip(operands(b, ins, "d", "a", "b", "c"), "dabc", (d, a, a, c))
    registers = {name: _vector(b, given, shape, name, type_, name == "d") for given, name, type_ in matrices}
    m, n, k = map(int, re.findall(r"\d+", shape))
    mods = WMMA(
        m=m, n=n, k=k, ab=MATRIX_TYPES[a], d=MATRIX_TYPES[d], c=MATRIX_TYPES[c], bits=ELEMENT_BITS[a],
        saturate=saturate, exclusive=exclusive, **{f"registers_{name}": len(r) for name, r in registers.items()},
    )
    flat = [r for of_a_matrix in registers.values() for r in of_a_matrix]
    return Op("wmma_f64" if a == "f64" else "wmma", flat, mods, ALIGNED)


def lower_wmma(b, ins):
    what, *parts = [p for p in ins.parts[1:] if p not in ("sync", "aligned")]
    matrix = parts[0] if parts else ""
    if (what, matrix) in (("load", A), ("load", B), ("load", C), ("store", "d")) and len(parts) >= 4:
        return _lower_move(b, ins, matrix, parts[1:])
    if what == "mma":
        return _lower_mma(b, ins, parts)
    b.fail(f"wmma.{'.'.join((what, *parts[:1]))}", "wmma.load.a, .load.b, .load.c, .store.d, .mma")


LOWERINGS = {"wmma": lower_wmma}
