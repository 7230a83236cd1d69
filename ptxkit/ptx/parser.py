"""Statements -> tree. `_Module` reads declarations and finds the bodies, `_Body` reads one body with its scopes."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

from ptxkit.compile import call_sites

from .lexer import LINKING, NAME, Statement, number, split_list, statements, without_comments, without_lines_of_assembly
from .syntax import (
    FLOAT_FORMATS,
    TYPE_SIZES,
    Address,
    Guard,
    Immediate,
    Instruction,
    Label,
    Loc,
    Module,
    Negated,
    Operand,
    Pair,
    PtxError,
    PtxFunction,
    PtxKernel,
    PtxParam,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

REGISTER_TYPES = ("pred", *TYPE_SIZES)
WARP_SIZE = 32
_COMPONENTS = "tid ntid ctaid nctaid clusterid nclusterid cluster_ctaid cluster_nctaid"
_SCALARS = """laneid warpid nwarpid smid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank lanemask_eq
    lanemask_le lanemask_lt lanemask_ge lanemask_gt clock clock_hi clock64 globaltimer globaltimer_lo globaltimer_hi
    total_smem_size aggr_smem_size dynamic_smem_size reserved_smem_offset_begin reserved_smem_offset_end
    reserved_smem_offset_cap reserved_smem_offset_0 reserved_smem_offset_1 current_graph_exec"""
SPECIAL_REGISTERS = frozenset(
    [f"%{name}.{axis}" for name in _COMPONENTS.split() for axis in "xyzw"]
    + [f"%{name}" for name in _SCALARS.split()]
    + [f"%envreg{i}" for i in range(32)]
    + [f"%pm{i}{width}" for i in range(8) for width in ("", "_64")]
)
AT_MODULE_SCOPE = """.version, .target, .address_size, .file, .section, .pragma, .entry, .func and variables in
    .global, .const and .shared"""
IN_A_BODY = """instructions that end in `;`, labels, `{` and `}`, .reg, .loc, .pragma, .branchtargets and variables in
    .shared, .local, .const, .global and .param"""

_OPCODE = r"[A-Za-z]\w*(?:\s*\.\s*[\w:]+)*"
_INSTRUCTION = re.compile(rf"(?:@\s*(!?)\s*({NAME})\s+)?({_OPCODE})(?:\s+|(?=[\[{{(;]))(.*);", re.DOTALL)
_WORD = re.compile(rf"({NAME}(?:\.[a-z]+)?)(?:\s*(\+\s*-?|-)\s*([\w$%]+))?")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*);", re.DOTALL)
_REGISTER_RANGE = re.compile(rf"({NAME})(?:\s*<\s*(\d+)\s*>)?")
_VARIABLE = re.compile(
    rf"(?P<linking>{LINKING})\.(?P<space>\w+)\s*(?:\.align\s+(?P<align>\d+)\s*)?(?:\.v(?P<lanes>[24])\s*)?"
    r"\.(?P<type>\w+)\s+(?P<names>.*);",
    re.DOTALL,
)
_DECLARED = re.compile(rf"({NAME})\s*((?:\[\s*\w*\s*\]\s*)*)(?:=\s*(.*))?", re.DOTALL)
_SYMBOL_ADDRESS = re.compile(rf"(?:generic\s*\(\s*(?P<name>{NAME})\s*\)|(?P<bare>{NAME}))(?:\s*\+\s*(?P<plus>\d+))?")
_PARAM = re.compile(
    r"\.param\s*(?:\.align\s+(?P<align>\d+)\s*)?\.(?P<type>\w+)"
    r"(?:\s*\.ptr(?:\s*\.(?:global|shared|const|local|generic))?(?:\s*\.align\s+\d+)?)?"
    rf"\s+(?P<name>{NAME}|_)\s*(?:\[\s*(?P<count>\w*)\s*\])?"
)
_FUNCTION = re.compile(
    rf"{LINKING}\.(?P<kind>entry|func)\s*(?:\((?P<results>[^()]*)\)\s*)?(?P<name>{NAME})\s*"
    r"(?:\((?P<params>[^()]*)\)\s*)?(?P<directives>.*)(?P<end>[;{])",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r'\s*\.(?:pragma\s+"[^"]*"\s*;|([a-z]+)((?:\s*\d+\s*,)*\s*\d+)?)\s*')
DIRECTIVES = (
    *("maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg"),
    *("reqnctapercluster", "maxclusterrank", "explicitcluster", "blocksareclusters", "noreturn"),
)
_ENDLESS_NUMBER = re.compile(r"\d{1000,}")
_SECTION_LABEL_OR_BYTES = re.compile(r"([\w$]+)\s*:|\.b8\s+(\d+(?:\s*,\s*\d+)*)")


def parse(text: str) -> Module:
    """Return the tree of a PTX module; PtxError names the first line that is not taken."""
    return _Module(text).read()


class _Reader:
    """Knows which statement is being read, so that every complaint can quote its line."""

    def __init__(self, lines: list[str]):
        self.lines = lines
        self.statement = Statement("", "", 1)

    def fail(self, message: str) -> NoReturn:
        raise PtxError(self.statement.line, message, self.lines[self.statement.line - 1].strip())

    def fail_on(self, supported: str) -> NoReturn:
        self.fail(f"found `{_one_line(self.statement.text)}`; supported here are {_one_line(supported)}")

    def match(self, pattern: re.Pattern, text: str, wanted: str) -> re.Match:
        return pattern.fullmatch(text) or self.fail(f"found `{_one_line(text)}`; supported is {wanted}")

    def items(self, text: str) -> list[str]:
        items = split_list(text)
        return self.fail(f"brackets do not pair up in `{_one_line(text)}`") if items is None else items

    def number(self, text: str) -> tuple[int | float, int | None] | None:
        """Read a number as the lexer does; one of more than 64 bits fails."""
        value = number(text)
        if value and isinstance(value[0], int) and not -(1 << 63) <= value[0] < 1 << 64:
            self.fail(f"`{text}` does not fit into 64 bits")
        return value

    def integer(self, text: str) -> int | None:
        value = self.number(text)
        return value[0] if value and isinstance(value[0], int) else None

    def count(self, text: str) -> int:
        value = self.integer(text)
        return self.fail(f"`{text}` is not a size") if value is None or value < 0 else value

    def alignment(self, text: str | None) -> int:
        """0 where none is given."""
        value = self.count(text) if text else 0
        if text and value.bit_count() != 1:
            self.fail(f".align {text}; an alignment is a power of two")
        return value

    def element_size(self, type_: str) -> int:
        return TYPE_SIZES.get(type_) or self.fail(f"type .{type_}; supported here are {_dotted(TYPE_SIZES)}")

    def variables(self, statement: Statement) -> list[Variable]:
        """`.shared .align 16 .b8 a[64], b[8];` declares as many variables as it has names."""
        head = self.match(_VARIABLE, statement.text, "[linking] .space [.align N] [.v2|.v4] .type name[count], ...;")
        return [self._variable(head, item) for item in self.items(head["names"])]

    def _variable(self, head: re.Match, item: str) -> Variable:
        name, dimensions, init = self.match(_DECLARED, item, "name, name[count] or either with = value").groups()
        lanes = int(head["lanes"] or 1)
        element = self.element_size(head["type"])
        data, addresses = (None, ()) if init is None else self.initial_bytes(init, head["type"], element)
        sizes = re.findall(r"\[\s*(\w*)\s*\]", dimensions)
        if sizes == [""]:
            sizes = [str(len(data or b"") // element // lanes)]
        count = math.prod(map(self.count, sizes), start=lanes)
        extern = "extern" in head["linking"]
        if not count and not extern:
            self.fail(f"`{name}` has no size; only an .extern array may leave it open")
        size = count * element
        if data is not None and len(data) > size:
            self.fail(f"{len(data)} bytes of values for `{name}`, which holds {size}")
        align = self.alignment(head["align"]) or element * lanes
        data = None if data is None else data.ljust(size, b"\0")
        line = self.statement.line
        return Variable(name, head["space"], head["type"], align, size, count, data, extern, line, addresses)

    def initial_bytes(self, init: str, type_: str, size: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
        """Nested braces only group: the values follow each other in memory. Addresses are zeros, and listed."""
        data, addresses = b"", []
        for text in self.items(re.sub(r"[{}]", " ", init)):
            if (address := _SYMBOL_ADDRESS.fullmatch(text)) and size == 8:
                addresses.append((len(data), address["name"] or address["bare"], int(address["plus"] or 0)))
                data += bytes(size)
            else:
                data += self._value_bytes(text, type_, size)
        return data, tuple(addresses)

    def _value_bytes(self, text: str, type_: str, size: int) -> bytes:
        if (known := self.number(text)) is None:
            self.fail(f"`{text}` as an initial value; supported are numbers, and addresses in 64 bits: symbol+bytes")
        value, bits = known
        if type_ in FLOAT_FORMATS and bits is None:
            with suppress(OverflowError):
                return struct.pack(FLOAT_FORMATS[type_], value)
        if bits is None and isinstance(value, float):
            self.fail(f"`{text}` as an initial value of type .{type_}, which does not hold it")
        whole: Any = value if bits is None else bits
        return (whole % (1 << 8 * size)).to_bytes(size, "little")


class _Module(_Reader):
    """Module scope. Bodies are read last: `.file` and `.debug_str`, which `.loc` needs, come after them in the text."""

    def __init__(self, text: str):
        super().__init__(text.split("\n"))
        if endless := _ENDLESS_NUMBER.search(text):  # Python does not read numbers of thousands of digits
            self.statement = Statement("", "", 1 + text.count("\n", 0, endless.start()))
            raise PtxError(self.statement.line, f"a number of {len(endless[0]):,} digits; no number of PTX has so many")
        self.statements = statements(without_comments(without_lines_of_assembly(text)))
        self.single = {"version": "", "target": ""}
        self.files: dict[int, str] = {}
        self.callers = _call_sites(text)  # for columns that are numbers of call sites
        self.strings: dict[str, tuple[bytes, int]] = {}  # label -> (bytes of its section, its place among them)
        self.known: dict[str, Variable] = {}
        self.functions: dict[str, Any] = {}
        self.bodies: list[tuple[Statement, re.Match, list[Statement]]] = []
        self.take = {
            **dict.fromkeys(("version", "target", "address_size"), self._take_single),
            "file": self._take_file, "section": self._take_section, "variable": self._take_variables,
            "function": self._take_function, "pragma": lambda statement: None,
        }

    def read(self) -> Module:
        for statement in self.statements:
            self.statement = statement
            take = self.take.get(statement.kind) or self.fail_on(AT_MODULE_SCOPE)
            take(statement)
        version, target = self.single["version"], self.single["target"]
        if not version or not target:
            self.fail(f"found .version `{version}` and .target `{target}`; a module needs both")
        for v in self.known.values():
            for _, symbol, _ in v.addresses:
                if symbol not in self.known and symbol not in self.functions:
                    message = f"`{symbol}` as an initial value: no variable or function of this module has that name"
                    raise PtxError(v.line, message, self.lines[v.line - 1].strip())
        kernels: dict[str, PtxKernel] = {}
        for statement, head, body in self.bodies:
            self.statement = statement
            read = self._function(head, body)
            if head["kind"] == "func":
                self.functions[read.name] = read
            elif kernels.setdefault(read.name, read) is not read:
                self.fail(f"kernel `{read.name}` is defined twice, first in line {kernels[read.name].line}")
        return Module(version, target, 64, self.files, kernels, tuple(self.known.values()), self.functions)

    def _take_single(self, statement: Statement) -> None:
        self.single[statement.kind] = value = statement.text.split(None, 1)[1].split(",")[0].strip()
        if statement.kind == "address_size" and value != "64":
            self.fail(f"found .address_size {value}; supported is 64")

    def _take_file(self, statement: Statement) -> None:
        before, name, _ = statement.text.split('"', 2)
        self.files[int(before.split()[1])] = name

    def _take_section(self, statement: Statement) -> None:
        """Take names of inlined functions from a debug section: each is a label, then bytes up to a zero."""
        if ".debug_str" not in statement.text.split("{")[0]:
            return
        data, places = bytearray(), {}
        for label, values in _SECTION_LABEL_OR_BYTES.findall(statement.text):
            if label:
                places[label] = len(data)
            else:
                data += bytes(int(value) & 255 for value in values.split(","))
        self.strings.update((label, (bytes(data), place)) for label, place in places.items())

    def _take_variables(self, statement: Statement) -> None:
        for variable in self.variables(statement):
            if variable.space in ("local", "param"):
                self.fail(f".{variable.space} at module scope; supported there are .global, .const and .shared")
            known = self.known.get(variable.name, variable)
            if not (known.extern or variable.extern or known is variable):
                self.fail(f"`{variable.name}` is defined twice, first in line {known.line}")
            if known is variable or known.extern:
                self.known[variable.name] = variable

    def _take_function(self, statement: Statement) -> None:
        head = self.match(_FUNCTION, statement.text, ".entry or .func with a name, (.param ...) and directives")
        if head["end"] == "{":
            self.bodies.append((statement, head, self._body()))
        if head["kind"] == "func":
            self.functions[head["name"]] = self._function(head, None)
        elif head["end"] == ";":
            self.fail("a kernel without a body; supported are kernels that are defined in this module")

    def _body(self) -> list[Statement]:
        """Return the statements up to the brace that closes the body."""
        body: list[Statement] = []
        depth = 1
        for statement in self.statements:
            depth += (statement.kind == "open") - (statement.kind == "close")
            if not depth:
                return body
            body.append(statement)
        self.fail("the body that starts here is never closed")

    def _function(self, head: re.Match, body: list[Statement] | None) -> PtxKernel | PtxFunction:
        params, results = self._params(head["params"]), self._params(head["results"])
        names, known = [p.name for p in params + results], (*self.known, *self.functions)
        if hidden := set(names) & set(known):
            self.fail(f"parameter `{min(hidden)}` hides a variable or function of the module; rename it")
        read = _Body(self, (*known, *names))
        read.read(body or [])
        parts = (read.registers, tuple(read.declared), tuple(read.body), read.labels, self.statement.line)
        directives = self._directives(head["directives"])
        if head["kind"] == "entry":
            return PtxKernel(head["name"], params, directives, *parts)
        return PtxFunction(head["name"], params, directives, *parts, results=results, defined=body is not None)

    def _params(self, text: str | None) -> tuple[PtxParam, ...]:
        """Lay parameters out one after the other, each at the next multiple of its alignment."""
        params, end = [], 0
        for item in self.items(text or ""):
            match = self.match(_PARAM, item, ".param [.align N] .type [.ptr ...] name or name[count]")
            element = self.element_size(match["type"])
            count = 1 if match["count"] is None else self.count(match["count"] or "0")
            align = self.alignment(match["align"]) or element
            offset = -(-end // align) * align
            end = offset + count * element
            params.append(PtxParam(match["name"], match["type"], count * element, align, offset, count))
        return tuple(params)

    def _directives(self, text: str) -> dict[str, tuple[int, ...]]:
        values, place = {}, 0
        while place < len(text):
            match = _DIRECTIVE.match(text, place)
            if not match or (match[1] and match[1] not in DIRECTIVES):
                self.fail(f"found `{_one_line(text[place:])}`; supported are {_dotted(DIRECTIVES)} and .pragma")
            if match[1]:
                values[match[1]] = tuple(int(n) for n in (match[2] or "").split(",") if n)
            place = match.end()
        return values


class _Scope:
    """What one pair of braces declares, and the operands already read inside it."""

    __slots__ = ("names", "operands", "outer", "ranges", "tables")

    def __init__(self, outer: _Scope | None, names: dict[str, Operand] | None = None):
        self.outer = outer
        self.names = names or {}             # source name -> Register, Symbol or Label with its unique name
        self.ranges: dict[str, tuple[int, str]] = {}  # prefix of `%r<120>` -> (120, type)
        self.tables: dict[str, Vector] = {}  # .branchtargets -> its labels
        self.operands: dict[str, Operand] = {}


class _Body(_Reader):
    """One kernel or function. Labels are collected first, since a branch may jump forward out of its scope."""

    def __init__(self, module: _Module, symbols: Iterable[str]):
        super().__init__(module.lines)
        self.files, self.strings, self.callers = module.files, module.strings, module.callers
        self.registers: dict[str, str] = {}
        self.declared: list[Variable] = []
        self.body: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.loc: Loc | None = None
        self.latest: dict[tuple[int, int, int], Loc] = {}  # the last .loc at each place, which later ones inline at
        self.uses = dict.fromkeys(symbols, 1)  # source name -> how many unique names were made of it
        self.scope = _Scope(None, {name: Symbol(name) for name in self.uses})
        self.take = {
            "instruction": self._take_instruction, "loc": self._take_loc, "label": self._take_label,
            "register": self._take_registers, "variable": self._take_variables, "targets": self._take_targets,
            # a prototype says no more than the arguments of a call
            **dict.fromkeys(("prototype", "pragma"), lambda statement: None),
        }
        self.read_form = {"{": self._vector, "[": self._address, "!": self._negated}

    def read(self, body: list[Statement]) -> None:
        scopes = iter(self._scopes_with_labels(body))
        self.scope = next(scopes)
        for statement in body:
            self.statement = statement
            if statement.kind == "open":
                self.scope = next(scopes)
            elif statement.kind == "close":
                self.scope = self._outer(self.scope)
            else:
                take = self.take.get(statement.kind) or self.fail_on(IN_A_BODY)
                take(statement)

    def _scopes_with_labels(self, body: list[Statement]) -> list[_Scope]:
        """Return all scopes in the order in which they open, the body itself first."""
        scope = _Scope(self.scope)
        scopes = [scope]
        for statement in body:
            self.statement = statement
            if statement.kind == "open":
                scope = _Scope(scope)
                scopes.append(scope)
            elif statement.kind == "close":
                scope = self._outer(scope)
            elif statement.kind == "label":
                name = statement.text[:-1].rstrip()
                self.declare(scope, name, Label(self.unique(name)))
        return scopes

    def _outer(self, scope: _Scope) -> _Scope:
        return scope.outer or self.fail("this brace closes nothing")

    # Names

    def unique(self, name: str) -> str:
        self.uses[name] = uses = self.uses.get(name, 0) + 1
        return name if uses == 1 else f"{name}@{uses}"

    def declare(self, scope: _Scope, name: str, operand: Operand) -> None:
        if name in scope.names:
            self.fail(f"`{name}` is declared twice in one scope")
        scope.names[name] = operand
        scope.operands.clear()

    def lookup(self, name: str) -> Operand | None:
        """Return the operand that `name` stands for in the innermost scope that knows it."""
        scope: _Scope | None = self.scope
        named = None
        while scope and not (named := scope.names.get(name) or self._range_member(scope, name)):
            scope = scope.outer
        return named

    def _range_member(self, scope: _Scope, name: str) -> Register | None:
        """`%r7` of `%r<120>`. A prefix may itself end in digits, so every cut is tried."""
        cut = len(name) - 1
        while scope.ranges and cut > 0 and name[cut:].isdigit():
            known = scope.ranges.get(name[:cut])
            if known and int(name[cut:]) < known[0] and str(int(name[cut:])) == name[cut:]:
                register = scope.names[name] = Register(self.unique(name))
                self.registers[register.name] = known[1]
                return register
            cut -= 1
        return None

    # Statements

    def _take_label(self, statement: Statement) -> None:
        label: Any = self.scope.names[statement.text[:-1].rstrip()]
        self.labels[label.name] = len(self.body)

    def _take_registers(self, statement: Statement) -> None:
        type_, names = self.match(_REGISTERS, statement.text, ".reg .type name, name<count>, ...;").groups()
        if type_ not in REGISTER_TYPES:
            self.fail(f"registers of type .{type_}; supported are {_dotted(REGISTER_TYPES)}")
        for item in self.items(names):
            name, count = self.match(_REGISTER_RANGE, item, "a name or name<count>").groups()
            if count is None:
                register = Register(self.unique(name))
                self.declare(self.scope, name, register)
                self.registers[register.name] = type_
            elif name in self.scope.ranges:
                self.fail(f"`{name}<{count}>` is declared twice in one scope")
            else:
                self.scope.ranges[name] = (int(count), type_)
                self.scope.operands.clear()

    def _take_variables(self, statement: Statement) -> None:
        for variable in self.variables(statement):
            unique = self.unique(variable.name)
            self.declare(self.scope, variable.name, Symbol(unique))
            self.declared.append(replace(variable, name=unique))

    def _take_targets(self, statement: Statement) -> None:
        """`table: .branchtargets L0, L1;` names the labels of a later `brx.idx`."""
        name, labels = re.split(r"\s*:\s*\.branchtargets", statement.text[:-1])
        self.scope.tables[name] = Vector(tuple(self._label(label) for label in self.items(labels)))

    def _take_loc(self, statement: Statement) -> None:
        place, *inlined = statement.text.split("inlined_at")
        key: Any = tuple(int(n) for n in place.split(",")[0].split()[1:])
        function = re.search(r"function_name\s+([\w$]+)(?:\s*\+\s*(\d+))?", place)
        if inlined:
            caller_key: Any = tuple(int(n) for n in inlined[0].split())
            caller = self.latest.get(caller_key) if caller_key != key else None
            caller = caller or self._loc(caller_key, None, None)
        else:
            caller = self.callers.get(key[2])
        named: Any = function and self._string(function[1], function[2])
        self.loc = self.latest[key] = self._loc(key, caller, named)

    def _loc(self, key: tuple[int, int, int], caller: Loc | None, function: str | None) -> Loc:
        if key[0] not in self.files:
            self.fail(f"file {key[0]} is named by no .file; known are {sorted(self.files)}")
        return Loc(self.files[key[0]], key[1], key[2], caller, function)

    def _string(self, label: str, offset: str | None) -> str:
        if label not in self.strings:
            self.fail(f"`{label}` is no label of .section .debug_str")
        data, place = self.strings[label]
        return data[place + int(offset or 0) :].partition(b"\0")[0].decode("utf-8", "replace")

    def _take_instruction(self, statement: Statement) -> None:
        match = self.match(_INSTRUCTION, statement.text, "[@p | @!p] opcode operand, operand, ...;")
        negation, guard, spelling, rest = match.groups()
        opcode, parts = _opcode(spelling)
        if parts[0] == "call":
            operands = self._call_operands(rest)
        elif parts[0] in ("bra", "brx"):
            operands = self._branch_operands(parts, rest)
        else:
            operands = self._operands(rest)
        text = _one_line(statement.text)
        guard = self._guard(guard, negation) if guard else None
        self.body.append(Instruction(opcode, parts, guard, operands, statement.line, self.loc, text))

    def _guard(self, name: str, negation: str) -> Guard:
        register = self.lookup(name)
        if not isinstance(register, Register) or self.registers[register.name] != "pred":
            self.fail(f"guard `{name}` is not a .pred register of this or an outer scope")
        return Guard(register.name, bool(negation))

    # Operands

    def _operands(self, text: str) -> tuple[Operand, ...]:
        return tuple([self.operand(item) for item in self.items(text)])

    def operand(self, text: str) -> Operand:
        if (operand := self.scope.operands.get(text)) is None:
            operand = self.scope.operands[text] = self._read_operand(text)
        return operand

    def _read_operand(self, text: str) -> Operand:
        if read := self.read_form.get(text[:1]):
            return read(text)  # type: ignore[return-value]
        if text == "_":
            return Sink()
        if text == "WARP_SZ":
            return Immediate(WARP_SIZE, None, text)
        if value := self.number(text):
            return Immediate(*value, text)
        return self._pair(text) if "|" in text else self._named(text)

    def _named(self, text: str) -> Operand:
        """Return a register, symbol or special register; `symbol+4` too."""
        match = self.match(_WORD, text, "a register, symbol, symbol+bytes, number, `_`, p|q, !p, [address] or {a, b}")
        base, offset = self._base_and_offset(match)
        if match[2] is None:
            return base
        if not isinstance(base, Symbol):
            self.fail(f"`{text}`: only the address of a variable may have an offset outside brackets")
        return Symbol(base.name, offset)

    def _base_and_offset(self, match: re.Match) -> tuple[Operand, int]:
        name, sign, digits = match.groups()
        base = self.lookup(name) or (Special(name) if name in SPECIAL_REGISTERS else None)
        if base is None:
            self.fail(f"`{name}` is neither declared in this or an outer scope nor a special register of PTX")
        if sign is None:
            return base, 0
        if (offset := self.integer(digits)) is None:
            self.fail(f"`{digits}` is not an offset in bytes")
        return base, -offset if "-" in sign else offset

    def _pair(self, text: str) -> Pair:
        halves = [self.operand(half.strip()) for half in text.split("|")]
        if len(halves) != 2 or not all(isinstance(half, Register | Sink) for half in halves):
            self.fail(f"`{text}`; supported around `|` are two registers or `_`")
        return Pair(*halves)  # type: ignore[arg-type]

    def _negated(self, text: str) -> Negated:
        register = self.operand(text[1:].strip())
        return Negated(register) if isinstance(register, Register) else self.fail(f"`{text}`: `!` needs a register")

    def _vector(self, text: str) -> Vector:
        return Vector(self._operands(text[1:-1]))

    def _address(self, text: str) -> Address:
        inner, *rest = self.items(text[1:-1]) or [""]
        coordinates = [self.operand(item) for item in rest]
        if len(rest) > 1 or not all(isinstance(item, Vector) for item in coordinates):
            self.fail(f"`{_one_line(text)}`; supported are [base], [base+bytes] and [base, {{coordinates}}]")
        items = coordinates[0].items if coordinates else ()  # type: ignore[union-attr]
        if value := self.number(inner):
            return Address(Immediate(*value, inner), 0, items)
        base, offset = self._base_and_offset(self.match(_WORD, inner, "a register, symbol or number, plus bytes"))
        if not isinstance(base, Register | Symbol):
            self.fail(f"`{inner}` is not an address; supported are a register, a symbol or a number")
        return Address(base, offset, items)

    def _call_operands(self, text: str) -> tuple[Operand, ...]:
        """`call (results), callee, (arguments);` where results and arguments may be missing."""
        items = self.items(text)
        results = items.pop(0) if items and items[0].startswith("(") else "()"
        callee, arguments, *prototype = [*items, "()", "()"][: max(2, len(items))]
        named = self.lookup(callee)
        by_address = isinstance(named, Register) and len(prototype) == 1
        if not (by_address or (isinstance(named, Symbol) and not prototype)) or not arguments.startswith("("):
            forms = "`call (results), function, (arguments);` and `call (results), register, (arguments), prototype;`"
            self.fail(f"a call of `{callee}`; supported are {forms}")
        return Vector(self._operands(results[1:-1])), named, Vector(self._operands(arguments[1:-1]))  # type: ignore[return-value]

    def _branch_operands(self, parts: tuple[str, ...], text: str) -> tuple[Operand, ...]:
        items = self.items(text)
        if parts[0] == "bra" and len(items) == 1:
            return (self._label(items[0]),)
        if parts[:2] == ("brx", "idx") and len(items) == 2:
            return self.operand(items[0]), self._table(items[1])
        self.fail("a branch; supported are `bra label;` and `brx.idx index, table;`")

    def _label(self, name: str) -> Label:
        label = self.lookup(name)
        return label if isinstance(label, Label) else self.fail(f"`{name}` is no label of this or an outer scope")

    def _table(self, name: str) -> Vector:
        scope: _Scope | None = self.scope
        while scope and name not in scope.tables:
            scope = scope.outer
        return scope.tables[name] if scope else self.fail(f"`{name}` is no .branchtargets of this or an outer scope")


def _call_sites(text: str) -> dict[int, Loc]:
    """Read what ptxkit.compile.call_sites wrote: the calls that a helper was inlined at, from the inside out."""
    callers = {}
    for column, places in call_sites.read(text).items():
        caller: Loc | None = None
        for file, line in reversed(places):
            callers[column] = caller = Loc(file, line, 0, caller)
    return callers


@lru_cache(maxsize=4096)
def _opcode(spelling: str) -> tuple[str, tuple[str, ...]]:
    opcode = "".join(spelling.split())
    return opcode, tuple(opcode.split("."))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _dotted(names: Iterable[str]) -> str:
    return ", ".join(f".{name}" for name in names)
