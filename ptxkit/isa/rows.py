"""What a row of the scalar tables says, and how it is spelled out.

A row is a line of scalar.txt, or `(name, types, value, operands)` in convert.py:

    add{.rnd}{.ftz}{.sat}  f32                      a + b
    shl                    b16|u16 b32|u32 b64|u64  b < BITS ? a << b : 0  T = T, u32

`name`: the opcode as the PTX manual writes it. `{.ftz}` may be left out, `.rnd` stands for one of a group; the order of
    modifiers is free.
`types`: what ends the opcode, one entry for each handler. `|` joins spellings that share it, `f32.bf16` is two types.
`value`: C. a, b, c, e are the sources; T and S stand for the C types of the opcode's first and second type, W for T at
    twice the width, BITS for T's width. A packed type (f16x2) runs the value for each element.
`operands`: how the destination and the sources are held; by default as many T as the value names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Operand(NamedTuple):
    """How C holds an operand: its type there, the register's words, and the bits of one element of `count`."""

    c: str
    word: str  # u32 or u64; pred: one mask of lanes
    bits: int
    count: int = 1  # type: ignore[assignment]
    element: str = ""  # the element's type in a packed one


_NARROW = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "e2m3": 8, "e3m2": 8, "e2m1": 4, "ue8m0": 8}
KINDS = {
    "pred": Operand("u32", "pred", 1),
    **{f"{s}{n}": Operand(f"{s}{n}", "u64" if n == 64 else "u32", n) for s in "us" for n in (8, 16, 32, 64)},
    **{f"b{n}": Operand(f"u{n}", "u64" if n == 64 else "u32", n) for n in (8, 16, 32, 64)},
    "f32": Operand("float", "u32", 32),
    "f64": Operand("double", "u64", 64),
    "tf32": Operand("float", "u32", 32),
    # a NaN keeps its payload
    "f32nan": Operand("float", "u32", 32),
    "f16nan": Operand("float", "u32", 16),
    "bf16nan": Operand("float", "u32", 16),
    **{name: Operand("float", "u32", bits) for name, bits in _NARROW.items()},
    **{f"{name}x2": Operand("float", "u32", 2 * bits, 2, name) for name, bits in _NARROW.items()},
    "u16x2": Operand("u16", "u32", 32, 2, "u16"),
    "s16x2": Operand("s16", "u32", 32, 2, "s16"),
    "f32x2": Operand("float", "u64", 64, 2, "f32"),
}
TYPES = frozenset(KINDS) - {"f32nan", "f16nan", "bf16nan"} | {"b128", "u2", "s2", "u4", "s4"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64", "u64": "unsigned __int128", "s64": "__int128"}

# engine/numerics.h has the same: modifiers that a handler gets as numbers
ROUNDINGS = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4, "rs": 5, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
FLAGS = {"ftz": 1, "sat": 2, "relu": 4, "satfinite": 8, "NaN": 16, "xorsign": 32, "abs": 64}
# the first of a group is the one that gets a handler of its own, with constants for rounding and flags
GROUPS = {
    "rnd": ("rn", "rz", "rm", "rp"),
    "rnd2": ("rn", "rz"),
    "rnd3": ("rp", "rz"),
    "irnd": ("rzi", "rni", "rmi", "rpi"),
}


class Words(NamedTuple):
    """One place of a name: the words that may stand there; each is a tuple, since `{.xorsign.abs}` comes whole."""

    words: tuple[tuple[str, ...], ...]
    optional: bool


class InstructionRow(NamedTuple):
    name: str
    literals: frozenset[str]  # words that must be there
    choices: tuple[Words, ...]
    types: tuple[str, ...]  # spellings that share a handler: ("u32", "s32"), or ("f32.bf16",)
    value: str
    target: str  # kinds
    sources: tuple[str, ...]

    @property
    def opcode(self):
        return self.name.partition(".")[0].partition("{")[0]

    @property
    def spelling(self):
        types = self.types[0] if len(self.types) == 1 else f"{{{'|'.join(self.types)}}}"
        return f"{self.name}.{types}"

    @property
    def masked(self):
        """Return whether its value names the mask of the destination register."""
        return bool(re.search(r"\bmask\b", self.value))

    @property
    def carries(self):
        """Return whether it reads or writes the carry flag."""
        return "cc" in self.literals or self.opcode in ("addc", "subc", "madc")

    def match(self, words):
        """Return (rounding, flags) that the words ask for, or None."""
        rest = set(words)
        if not self.literals <= rest:
            return None
        rest -= self.literals
        rounding, flags = self.constants
        for choice in self.choices:
            taken = [group for group in choice.words if rest >= {*group}]
            if len(taken) > 1 or (not taken and not choice.optional):
                return None
            for word in taken[0] if taken else ():
                rest.discard(word)
                rounding = ROUNDINGS.get(word, rounding)
                flags |= FLAGS.get(word, 0)
        return None if rest else (rounding, flags)

    @property
    def constants(self):
        """Return (rounding, flags) of the handler with both as constants: the literals' and the first of a group's."""
        words = [*self.literals, *(choice.words[0][0] for choice in self.choices if len(choice.words) > 1)]
        return next((ROUNDINGS[w] for w in words if w in ROUNDINGS), 0), sum(FLAGS.get(w, 0) for w in self.literals)

    @property
    def variants(self):
        """Return the handlers it gets: suffix -> (rounding, flags) as constants; None: it takes them as numbers."""
        rounding, flags = self.constants
        words = {w for choice in self.choices for group in choice.words for w in group}
        variants = {"": (rounding, flags)}
        if "ftz" in words and self.opcode != "cvt":
            variants["_ftz"] = (rounding, flags | FLAGS["ftz"])
        if any(w in FLAGS or ROUNDINGS[w] != rounding for w in words):
            variants["_any"] = None
        return variants

    @property
    def handler(self):
        """Return the C name of the handler; its variants have a suffix."""
        alike = self.sources == (self.target,) * len(self.sources)
        words = [self.opcode, *(w for w in re.findall(r"\w+", re.sub(r"\{.*?\}", "", self.name))[1:])]
        shape = [str(len(self.sources))] if alike else [self.target, *self.sources]
        return "_".join((re.sub(r"\W", "_", "_".join((*words, self.types[0]))), *shape))


def _choices(name):
    """Return (literals, choices) of `add{.rnd}.x`."""
    literals, choices = set(), []
    for braced, plain in re.findall(r"\{\.([\w.]+)\}|\.(\w+(?:::\w+)?)", name):
        words = braced or plain
        if words in GROUPS:
            choices.append(Words(tuple((w,) for w in GROUPS[words]), bool(braced)))
        elif braced:
            choices.append(Words((tuple(words.split(".")),), True))
        else:
            literals.add(plain)
    return frozenset(literals), tuple(choices)


def listed(section):
    """Return the fields of each row in a section of scalar.txt."""
    text = Path(__file__).with_name("scalar.txt").read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    return [re.split(" {2,}", line) for line in text.splitlines() if line and line[0] != "#"]


def rows(*table):
    """Return the rows from `(name, types, value[, operands])`, one for each entry of `types`."""
    parsed = []
    for name, types, value, *operands in table:
        literals, choices = _choices(name)
        for entry in types.split():
            spelled = tuple(entry.split("|"))
            first, second = (*spelled[0].split("."), "")[:2]
            text = operands[0] if operands else "T = " + ", ".join("T" for v in "abce" if re.search(rf"\b{v}\b", value))
            kinds = [_kind(k, first, second) for k in re.findall(r"\w+", text)]
            value_in_c = _spelled_out(value, first, second)
            parsed.append(InstructionRow(name, literals, choices, spelled, value_in_c, kinds[0], tuple(kinds[1:])))
    return tuple(parsed)


def _kind(name, first, second):
    return {"T": first, "S": second, "W": WIDER.get(first, "")}.get(name, name)


def _spelled_out(value, first, second):
    words = {"S": second and KINDS[second].c, "W": WIDER.get(first)}
    if kind := KINDS.get(first):
        words |= {"T": kind.c, "BITS": str(kind.bits // kind.count)}
    return re.sub(r"\b(T|S|W|BITS)\b", lambda m: words.get(m[0]) or m[0], value)
