"""Generates the C handlers of scalar instructions from the tables.

Each row gives, for each of its types, a loop over the lanes in which the row's value is computed once: with the rounding and the flags as
constants, and, where the name has choices, a second time with both as numbers (`..._any`). Rows that come out alike share one handler.
"""

from __future__ import annotations

import functools
import re

from kda.simulator.isa import compare, convert, floating, integer, logic
from kda.simulator.isa.rows import KINDS, ROUNDINGS, WIDER

ROWS = integer.TABLE + logic.TABLE + floating.TABLE + convert.TABLE
CARRYING = integer.WITH_CARRY
COMPARISONS = compare.HANDLERS
IN_C = {number: name.upper() for name, number in reversed(ROUNDINGS.items()) if name[-1] != "i"}


def _element(kind, k):
    """(kind of one element, how far up it lies in the register)."""
    kind_ = KINDS[kind]
    return (kind_.element, k * kind_.bits // kind_.count) if kind_.count > 1 else (kind, 0)


def _read(letter, kind, k):
    name, shift = _element(kind, k)
    word = f"{letter.upper()}[l]" + (f" >> {shift}" if shift else "")
    if name == "pred":
        return f"const bool {letter} = {letter.upper()} >> l & 1;"
    return f"const {KINDS[name].c} {letter} = {name}_of({word}, flags);"


def _written(target, value, k):
    name, shift = _element(target, k)
    made = f"{name}_to({value}, rounding, flags)"
    return f"({KINDS[target].word}){made} << {shift}" if shift else made


def _lane(row):
    """What happens for one lane: C that sets D[l] or, of a predicate, a bit of `bits`."""
    target, letters = KINDS[row.target], "abce"[: len(row.sources)]
    values = row.value.split(";")
    lines = []
    for k in range(target.count):
        value = values[min(k, len(values) - 1)].strip()
        reads = " ".join(_read(n, kind, k) for n, kind in zip(letters, row.sources) if re.search(rf"\b{n}\b", value))
        if row.target == "pred":
            result = f"bits |= (u32)({value}) << l;"
        else:
            result = f"{'d |=' if target.count > 1 else 'D[l] ='} {_written(row.target, value, k)};"
        lines.append(f"{{ {reads} {result} }}" if target.count > 1 else f"{reads} {result}")
    if target.count > 1:
        return f"{{ {target.word} d = 0; {' '.join(lines)} D[l] = d; }}"
    return f"{{ {lines[0]} }}"


def _pointers(row, first=1):
    words = {"u32": "const u32 *{} = R32", "u64": "const u64 *{} = R64", "pred": "const u32 {} = *PRED"}
    return [
        f"{words[KINDS[kind].word].format(letter)}(w, i->arg[{n}]);" for n, (letter, kind) in enumerate(zip("ABCE", row.sources), first)
    ]


def _handler(row, general):
    """The body of a handler."""
    lines = []
    if general:
        lines.append("const Rounding rounding = (Rounding)i->mod[0]; const int flags = (int)i->mod[1];")
    else:
        rounding, flags = row.constants
        lines.append(f"const Rounding rounding = {IN_C[rounding]}; const int flags = {flags};")
    if row.masked:
        lines.append("const u32 mask = (u32)i->mod[2];")
    lines += _pointers(row)
    towards = general and rounds_in_c(row)
    lines += ["round_towards(rounding);"] if towards else []
    if row.target == "pred":
        lines += ["u32 bits = 0;", f"EVERY_LANE({_lane(row)});", "set_pred(w, i->arg[0], lanes, bits);"]
    else:
        word = KINDS[row.target].word
        lines += [f"{word} *D = R{word[1:]}(w, i->arg[0]);", f"LANES_OF(lanes, {_lane(row)});"]
    lines += ["round_towards(RN);"] if towards else []
    return "\n    ".join([*lines, "return NEXT;"])


def rounds_in_c(row):
    """Does C's own arithmetic round the value, in the direction that the instruction asks for?"""
    directed = any("rz" in words or "rm" in words for choice in row.choices for words in choice.words)
    return directed and KINDS[row.target].c in ("float", "double") and row.target[:3] in ("f32", "f64") and "rounding" not in row.value


def _carrying(row):
    """The body of a handler whose last operand is the carry flag. The flag is written where the name says .cc."""
    bits, word = KINDS[row.target].bits, KINDS[row.target].word
    reads = " ".join(_read(n, kind, 0) for n, kind in zip("abce", row.sources))
    flag = len(row.sources) + 1
    lane = f"{{ {reads} const u32 carry = carries >> l & 1; const {WIDER[word]} r = {row.value}; D[l] = ({word})r; bits |= (u32)(r >> {bits} & 1) << l; (void)carry; }}"
    return "\n    ".join([
        "const int flags = 0;",
        *_pointers(row),
        f"{word} *D = R{word[1:]}(w, i->arg[0]);",
        f"const u32 carries = *PRED(w, i->arg[{flag}]);",
        "u32 bits = 0;",
        f"LANES_OF(lanes, {lane});",
        *([f"set_pred(w, i->arg[{flag}], lanes, bits);"] if ".cc" in row.name else []),
        "return NEXT;",
    ])  # fmt: skip


def _comparison(name, kind, value):
    """A function that compares two registers in all lanes; `shift` picks the element of a packed type."""
    c, word = KINDS[kind].c, KINDS[kind].word
    at = " >> shift" if kind in ("f16", "bf16") else ""
    reads = " ".join(f"const {c} {n} = {kind}_of({n.upper()}[l]{at}, flags);" for n in "ab")
    return f"""static inline u32 {name}(const Warp *w, const s32 *arg, int flags, int shift) {{
    const {word} *A = R{word[1:]}(w, arg[0]), *B = R{word[1:]}(w, arg[1]);
    u32 bits = 0;
    EVERY_LANE({{ {reads} bits |= (u32)({value}) << l; }})
    return bits;
}}
COMPARISON({name})"""


@functools.cache
def handlers():
    """(row's name and types, general) -> the handler's C name, and C name -> its body."""
    names, bodies, by_body = {}, {}, {}
    for row in ROWS:
        for general in (False, True) if row.varies else (False,):
            name = row.handler + ("_any" if general else "")
            body = _handler(row, general)
            names[row, general] = by_body.setdefault(body, name)
            if names[row, general] == name:
                assert name not in bodies, f"two rows make a handler {name}"
                bodies[name] = body
    for row in CARRYING:
        names[row, False] = row.handler + "_carry"
        bodies[row.handler + "_carry"] = _carrying(row)
    return names, bodies


@functools.cache
def order():
    """The names of all generated handlers, in the order of the engine's table."""
    compared = [f"{p}_{name}" for name in COMPARISONS for p in ("setp", "set")]
    return [*handlers()[1], *compared]


def sources():
    """File name -> C text."""
    functions = [f"static Outcome {name}(Warp *w, const Ins *i, u32 lanes) {{\n    {body}\n}}" for name, body in handlers()[1].items()]
    functions += [_comparison(name, kind, value) for name, (kind, value) in COMPARISONS.items()]
    table = "".join(f'    {{"{name}", {name}}},\n' for name in order())
    text = '/* Generated by kda/simulator/isa/generate.py. */\n#include "scalar.h"\n\n' + "\n".join(functions)
    return {"scalar.c": f"{text}\nconst HandlerEntry scalar_handlers[] = {{\n{table}    HANDWRITTEN,\n    {{0}},\n}};\n"}
