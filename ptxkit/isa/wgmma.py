"""wgmma: mma_async, fence, commit_group, wait_group."""

import re

from ptxkit.isa.common import ALIGNED, MATRIX_TYPES, Op, operands
from ptxkit.isa.fields import WGMMA, WGMMA_WAIT
from ptxkit.ptx.syntax import Immediate, Sink, Vector

# type of A -> (k, types that B may have, types that D may have)
FORMS = {
    "f16": (16, ("f16",), ("f32", "f16")),
    "bf16": (16, ("bf16",), ("f32",)),
    "tf32": (8, ("tf32",), ("f32",)),
    **dict.fromkeys(("e4m3", "e5m2"), (32, ("e4m3", "e5m2"), ("f32", "f16"))),
    **dict.fromkeys(("s8", "u8"), (32, ("s8", "u8"), ("s32",))),
}
INTEGERS = ("s8", "u8")


def _columns(type_):
    """Return the N that an instruction on this type of A may have."""
    return [8, 16, 24, *range(32, 257, 16)] if type_ in INTEGERS else range(8, 257, 8)


def _shape(b, ins, parts, sparse):
    """Return (N, type of D, of A, of B) of an mma_async."""
    shape, *types = [p for p in parts if p != "satfinite"]
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if not match or len(types) != 3:
        b.fail(f"modifiers {'.'.join(parts)}", "m64nNkK, then the types of D, A and B")
    d, a, type_b = types
    if a not in FORMS or type_b not in FORMS[a][1] or d not in FORMS[a][2]:
        forms = [f".{{{', '.join(ds)}}}.{a}.{{{', '.join(bs)}}}" for a, (_, bs, ds) in FORMS.items()]
        b.fail(f"types {'.'.join(types)}", "; ".join(forms))
    n, k = int(match[1]), int(match[2])
    depth = FORMS[a][0] * (2 if sparse else 1)
    if k != depth or n not in _columns(a):
        b.fail(f"shape {shape} for .{a}", f"m64nNk{depth} with N one of {', '.join(map(str, _columns(a)))}")
    if "satfinite" in parts and a not in INTEGERS:
        b.fail("satfinite is for integers")
    return n, d, a, type_b


def _literal(b, operand, what, choices):
    if not isinstance(operand, Immediate) or isinstance(operand.value, float) or operand.value not in choices:
        b.fail(f"{what} must be one of {', '.join(map(str, choices))}")
    return operand.value


def _names(a, in_registers, sparse):
    """Return the operands of an mma_async on this type of A, in their order."""
    names = ["D", "A", "B", *(("sp-meta", "sp-sel") if sparse else ()), "scale-d"]
    if a not in INTEGERS:
        names += ["imm-scale-a", "imm-scale-b"]
    if a in ("f16", "bf16"):
        names += ["imm-trans-b"] if in_registers else ["imm-trans-a", "imm-trans-b"]
    return names


def _lower_mma(b, ins, parts):
    sparse = parts[0] == "sp"
    n, d, a, type_b = _shape(b, ins, parts[sparse:], sparse)
    in_registers = len(ins.operands) > 1 and isinstance(ins.operands[1], Vector)
    names = _names(a, in_registers, sparse)
    given = dict(zip(names, operands(b, ins, *names)))

    def literal(what, choices):  # the first choice is what an absent operand stands for
        return _literal(b, given[what], what, choices) if what in given else choices[0]

    targets = b.targets(given["D"], "b32")
    from_a = b.values(given["A"], "b32") if in_registers else [b.value(given["A"], "b64")]
    wanted = {"D": n // 4 if d == "f16" else n // 2, "A": 4 if in_registers else 1}
    if any(isinstance(v, Sink) for m in ("D", "A") for v in getattr(given[m], "items", ())):
        b.fail("`_` in D or A, which are read", "registers")
    for what, registers in (("D", targets), ("A", from_a)):
        if len(registers) != wanted[what]:
            b.fail(f"{len(registers)} registers for {what}", str(wanted[what]))
    scale, negated = b.predicate(given["scale-d"])
    negative = [literal(f"imm-scale-{m}", (1, -1)) < 0 for m in "ab"]
    transposed = [literal(f"imm-trans-{m}", (0, 1)) for m in "ab"]
    metadata = [b.value(given["sp-meta"], "b32")] if sparse else []
    # With elements of 8 bits all lanes of a group of four have metadata, with larger ones two.
    selected = 2 * _literal(b, given["sp-sel"], "sp-sel", (0,) if FORMS[a][0] == 32 else (0, 1)) if sparse else 0
    mods = WGMMA(
        n=n, depth=FORMS[a][0] * (2 if sparse else 1), a=MATRIX_TYPES[a], b=MATRIX_TYPES[type_b], d=MATRIX_TYPES[d],
        registers_d=len(targets), registers_a=4 if in_registers else 0, negate_a=negative[0], negate_b=negative[1],
        rows_a=transposed[0], rows_b=transposed[1], saturate="satfinite" in parts, negate_scale=negated, sparse=sparse,
        first=selected,
    )
    return Op("wgmma", [*targets, *from_a, b.value(given["B"], "b64"), scale, *metadata], mods, ALIGNED)


def lower_wgmma(b, ins):
    if b.arch != 90:
        b.fail(f"wgmma does not exist on sm_{b.arch}", "sm_90a; tcgen05.mma replaces it on sm_100a")
    what, *parts = [p for p in ins.parts[1:] if p not in ("sync", "aligned")] or [""]
    if what == "mma_async" and len(parts) > 1:
        return _lower_mma(b, ins, parts)
    if what == "wait_group":
        (stay,) = operands(b, ins, "N")
        return Op("wgmma_wait", [], WGMMA_WAIT(stay=_literal(b, stay, "N", range(8))), ALIGNED)
    if what in ("fence", "commit_group") and not parts:
        return Op("wgmma_fence" if what == "fence" else "wgmma_commit", gather=ALIGNED)
    b.fail(f"wgmma.{'.'.join((what, *parts))}", "mma_async, fence, commit_group, wait_group")


LOWERINGS = {"wgmma": lower_wgmma}
