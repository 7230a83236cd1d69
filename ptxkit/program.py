"""A kernel as the engine runs it: flat records, one register file, branch joins, addresses of variables."""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from array import array

from ptxkit import isa, limits
from ptxkit.engine import binding
from ptxkit.isa import calls, fields
from ptxkit.isa.common import BITS, WIDTHS, AddressOperand, Op
from ptxkit.linking import link
from ptxkit.ptx import PtxError
from ptxkit.ptx.syntax import FLOAT_FORMATS, Address, Immediate, Negated, Register, Sink, Special, Symbol, Vector

# special registers -> the engine's Source, in its order
_XYZ = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_PLAIN = (
    *("cluster_ctarank", "cluster_nctarank", "is_explicit_cluster", "laneid", "warpid", "nwarpid", "smid", "nsmid"),
    *("gridid", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt"),
    *("total_smem_size", "dynamic_smem_size", "aggr_smem_size"),
)
SOURCES = {f"%{name}.{axis}": 3 * n + a for n, name in enumerate(_XYZ) for a, axis in enumerate("xyz")}
SOURCES |= {f"%{name}": 3 * len(_XYZ) + n for n, name in enumerate(_PLAIN)}
CONSTANT, SHARED_ADDRESS = 3 * len(_XYZ) + len(_PLAIN), 3 * len(_XYZ) + len(_PLAIN) + 1
WINDOW_CODE = 0x05 << 56  # the address of a function: this, and where its body begins
GRID_WORKSPACE = 1024  # bytes
STACK_BYTES = 4096  # a thread's, where functions that call themselves have variables
FLOATS = FLOAT_FORMATS | {"tf32": "<f"}


def align_up(n, to):
    return -(-n // to) * to


def zeros(size):
    """Return (object to keep alive, address) of memory that the system provides where it is first touched."""
    memory = ctypes.c_char.from_buffer(mmap.mmap(-1, max(size, 1)))
    return memory, ctypes.addressof(memory)


def encode(value, type_):
    """Return the bits of an immediate, as an operand of this type."""
    if isinstance(value.value, float) or type_ in FLOATS:
        number = float(value.value)
        if value.bits is not None:
            as_written = 8 if value.text[:2] in ("0d", "0D") else 4
            wanted = WIDTHS[type_]
            if wanted == as_written or type_ not in FLOATS:
                return value.bits
            number = struct.unpack("<d" if as_written == 8 else "<f", value.bits.to_bytes(as_written, "little"))[0]
        if type_ == "bf16":
            return int.from_bytes(struct.pack("<f", number), "little") >> 16
        return int.from_bytes(struct.pack(FLOATS.get(type_, "<f"), number), "little")
    bits = {0: 1, 4: 32, 8: 64, 16: 128}[WIDTHS[type_]]
    if type_ in ("b16", "u16", "s16"):
        bits = 16
    return int(value.value) & ((1 << bits) - 1)


class ProgramBuilder:
    """Hands out places in the register file while the families lower instructions."""

    def __init__(self, module, kernel, linked, arch):
        self.module, self.kernel, self.linked, self.arch = module, kernel, linked, arch
        self.in_function = False  # is the instruction at hand in a device function?
        self.calls = []  # (Op, .param variables of its arguments, of its results, the functions that it may be of)
        self.frames = {}  # function that may be called while it runs -> bytes of its variables on the stack
        self.on_stack = {}  # variable -> (function, place in its frame)
        self.stack_pointers = {}  # function -> {place in its frame: the register that holds its address}
        self.stack_end = None  # the register that says where a lane's stack ends
        self.shared_base = 0x400 if arch >= 90 else 0
        self.size = 0
        self.registers = {}
        self.constants = {}  # (width, source, value) -> offset
        self.params = {p.name: p for p in kernel.params}
        self.symbols = {}  # name -> (space, offset or host address)
        self.buffers = []  # module-scope .global and .const variables: (name, ctypes buffer)
        self.dynamic_start = self.shared_base
        self.local_bytes = 0
        self._check_sizes()
        self._place_variables()
        self._place_addresses()

    # ---- variables

    def _check_sizes(self):
        """Check all that is declared against the limits of the hardware; shared memory is the launch's affair."""
        most = {
            "local": (".local variables of a thread", limits.LOCAL), "const": (".const variables", limits.CONSTANT),
            "global": (".global variables", limits.GLOBAL), "params": ("parameters", limits.PARAMETERS),
        }
        sizes = dict.fromkeys(most, 0)
        for v in (*self.module.variables, *self.kernel.variables):
            if v.space in sizes:
                sizes[v.space] = align_up(sizes[v.space], v.align) + v.size
        sizes["params"] = max((q.offset + q.size for q in self.kernel.params), default=0)
        for space, (what, limit) in most.items():
            if sizes[space] > limit:
                self.fail(f"{self.kernel.name} needs {sizes[space]:,} bytes of {what}; there are {limit:,}")

    def _place_variables(self):
        shared, local, dynamic = self.shared_base, 0, []
        self.param_variables = {v.name: v for v in self.kernel.variables if v.space == "param"}
        for f in self.linked.values():
            for v in f.variables if f.recursive else ():
                if v.space == "local":
                    place = align_up(self.frames.get(f.name, 0), max(v.align, 1))
                    self.on_stack[v.name], self.frames[f.name] = (f.name, place), align_up(place + v.size, 16)
        for v in (*self.module.variables, *self.kernel.variables):
            if v.space == "shared" and (v.extern or not v.size):
                dynamic.append(v)
            elif v.space == "shared":
                shared = align_up(shared, max(v.align, 1))
                self.symbols[v.name] = ("shared", shared)
                shared += v.size
            elif v.name in self.on_stack:
                self.symbols[v.name] = ("local", 0)  # value and place know better
            elif v.space in ("local", "param"):  # .param variables carry the arguments of calls
                local = align_up(local, max(v.align, 1))
                self.symbols[v.name] = ("local", local)
                local += v.size
            elif v.space in ("global", "const"):
                try:
                    buffer, place = zeros(v.size)
                except OSError as error:
                    self.fail(f"{v.name} needs {v.size:,} bytes, which this machine does not have: {error}")
                if v.init:
                    ctypes.memmove(place, v.init, v.size)
                self.buffers.append((v.name, buffer, place, v.size))
                self.symbols[v.name] = ("global", place)
        self.dynamic_start = align_up(shared, max((v.align for v in dynamic), default=1))
        for v in dynamic:
            self.symbols[v.name] = ("shared", self.dynamic_start)
        self.local_bytes = align_up(local, 16)
        if self.frames:
            self.stack_end = self._constant(4, CONSTANT, 1 << 32 | self.local_bytes)  # bit 32: nobody else's constant
            self.local_bytes += STACK_BYTES

    def _place_addresses(self):
        """Write the addresses that variables begin with."""
        for v in self.module.variables:
            for offset, name, plus in v.addresses:
                if name in self.symbols or name in self.linked:
                    _, address = self.symbol(name)
                    ctypes.memmove(self.symbols[v.name][1] + offset, (address + plus).to_bytes(8, "little"), 8)

    def code_address(self, function):
        return WINDOW_CODE + self.linked[function].first

    # ---- the register file

    def room(self, width):
        """Return the offset of a new register of 4, 8 or 16 bytes a lane, or of a predicate (0)."""
        size = {0: 4, 4: 128, 8: 256, 16: 512}[width]
        self.size = align_up(self.size, min(size, 64))
        offset, self.size = self.size, self.size + size
        return offset

    def register(self, name):
        """Return the offset of a declared register."""
        if name not in self.registers:
            if name not in self.kernel.registers:
                self.fail(f"register {name} is not declared")
            self.registers[name] = self.room(WIDTHS[self.kernel.registers[name]])
        return self.registers[name]

    def type_of(self, operand):
        """Return the declared type of a register operand."""
        return self.kernel.registers[operand.name]

    def _constant(self, width, source, value):
        key = (width, source, value)
        if key not in self.constants:
            self.constants[key] = self.room(width)
        return self.constants[key]

    def constant(self, value, width=4):
        """Return the offset of a constant: `value` holds its bits; width 4, 8 or 16 bytes a lane, 0 for a predicate."""
        return self._constant(width, CONSTANT, value & ((1 << max(8 * width, 1)) - 1))

    # ---- operands

    def check_width(self, register, type_, wider=False):
        """Refuse a register that has not the bits of `type_`; some instructions take one that has more (`wider`)."""
        declared, needed = BITS[self.type_of(register)], BITS[type_]
        if declared < needed or (declared > needed and not wider):
            bits = "a predicate" if type_ == "pred" else f"a register of {needed} bits"
            more = " or more" if wider else ""
            self.fail(f"{register.name} is declared .{self.type_of(register)}; .{type_} needs {bits}{more}")

    def value(self, operand, type_, wider=False):
        """Return the offset of a source operand read as `type_`: a register, immediate, or variable's address."""
        width = WIDTHS[type_]
        match operand:
            case Register(name=name):
                self.check_width(operand, type_, wider)
                return self.register(name)
            case Immediate():
                try:
                    return self.constant(encode(operand, type_), width)
                except OverflowError:
                    self.fail(f"{operand.text} does not fit into .{type_}")
            case Special(name=name) if name in SOURCES:
                value = self.dynamic_size if name == "%dynamic_smem_size" else 0
                return self._constant(width, SOURCES[name], value)
            case Special(name="%envreg1" | "%envreg2" as name):
                return self.constant(self._grid_workspace() >> (32 if name == "%envreg1" else 0) & 0xFFFFFFFF)
            case Symbol(name=name, offset=offset) if name in self.on_stack:
                return self._stack_pointer(name, offset) if width == 8 else self.fail(f"{name} is no .{type_}")
            case Symbol(name=name, offset=offset):
                space, address = self.symbol(name)
                if space == "shared":
                    return self._constant(width, SHARED_ADDRESS, address + offset)
                return self.constant(address + offset, width)
        self.fail(f"{operand} cannot be read as .{type_}")

    dynamic_size = 0  # set by the launch; only %dynamic_smem_size asks

    def _grid_workspace(self):
        """Return the address in %envreg1 and 2, of the driver's zeros for grid barriers of cooperative groups."""
        if "%envreg1" not in self.symbols:
            buffer, address = zeros(GRID_WORKSPACE)
            self.buffers.append(("%envreg1", buffer, address, GRID_WORKSPACE))
            self.symbols["%envreg1"] = ("global", address)
        return self.symbols["%envreg1"][1]

    def _stack_pointer(self, name, offset):
        """Return the register with the address of a variable on the stack: a call sets it."""
        function, place = self.on_stack[name]
        pointers = self.stack_pointers.setdefault(function, {})
        if place + offset not in pointers:
            pointers[place + offset] = self.room(8)
        return pointers[place + offset]

    def symbol(self, name):
        """Return (space, address in it) of a variable, parameter or function."""
        if name in self.params:
            return "param", self.params[name].offset
        if name in self.linked:
            return "code", self.code_address(name)
        if name not in self.symbols:
            self.fail(f"{name} is not declared")
        return self.symbols[name]

    def values(self, operand, type_, wider=False):
        """Return the offsets of a vector's items; a lone operand counts as a vector of one; `_` gives -1."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [-1 if isinstance(item, Sink) else self.value(item, type_, wider) for item in items]

    def target(self, operand, type_, wider=False):
        """Return the offset of a destination register of `type_`; `_` stands for one that nothing reads."""
        if isinstance(operand, Sink):
            return self.room(WIDTHS[type_])
        if not isinstance(operand, Register):
            self.fail(f"{operand} cannot be written to")
        self.check_width(operand, type_, wider)
        return self.register(operand.name)

    def targets(self, operand, type_, wider=False):
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.target(item, type_, wider) for item in items]

    def predicate(self, operand):
        """Return (offset, negated) of a source predicate: `p`, `!p` or an immediate 0 or 1."""
        if isinstance(operand, Negated):
            return self.value(operand.register, "pred"), True
        return self.value(operand, "pred"), False

    def place(self, operand):
        """Return an address operand `[base+offset]`."""
        if not isinstance(operand, Address):
            self.fail(f"{operand} is not an address")
        base, offset = operand.base, operand.offset
        if isinstance(base, Register):
            declared = self.type_of(base)
            if BITS[declared] not in (16, 32, 64):
                self.fail(f"{base.name} is declared .{declared}; an address needs a register of 32 or 64 bits")
            return AddressOperand(self.register(base.name), WIDTHS[declared] == 8, offset)
        if isinstance(base, Symbol) and base.name in self.on_stack:
            return AddressOperand(self._stack_pointer(base.name, 0), True, base.offset + offset)
        if isinstance(base, Symbol):
            space, address = self.symbol(base.name)
            if space == "shared":
                return AddressOperand(self._constant(4, SHARED_ADDRESS, address + base.offset), False, offset)
            return AddressOperand(self.constant(address + base.offset, 8), True, offset)
        return AddressOperand(self.constant(int(base.value), 8), True, offset)

    def space_of(self, operand):
        """Return the space that an address operand's symbol lies in; None for a register."""
        base = operand.base if isinstance(operand, Address) else operand
        return self.symbol(base.name)[0] if isinstance(base, Symbol) else None

    # ---- refusals

    current = None

    def fail(self, found, supported=""):
        """Refuse the instruction at hand."""
        ins = self.current
        message = f"`{ins.text}`: {found}" if ins else found
        message += f"; supported: {supported}" if supported else ""
        raise PtxError(ins.line if ins else self.kernel.line, message)


def _post_order(root, following):
    """Return the blocks that can be reached from one, each behind those that follow it."""
    order, seen, stack = [], {root}, [(root, iter(following(root)))]
    while stack:
        block, rest = stack[-1]
        for nxt in rest:
            if nxt not in seen:
                seen.add(nxt)
                stack.append((nxt, iter(following(nxt))))
                break
        else:
            order.append(block)
            stack.pop()
    return order


def post_dominators(targets, count):
    """Return for each instruction the first one that every path from it to the exit passes (None: only the exit).
    targets[i]: where instruction i may go on, `count` standing for the exit."""
    leaders = sorted({0} | {t for i, ts in enumerate(targets) if ts != [i + 1] for t in (*ts, i + 1) if t < count})
    block_of = {start: n for n, start in enumerate(leaders)}
    ends = [*(start - 1 for start in leaders[1:]), count - 1]
    exit_block = len(leaders)
    successors = [[exit_block if t >= count else block_of[t] for t in targets[end]] or [exit_block] for end in ends]
    order = _post_order(0, lambda block: [s for s in successors[block] if s != exit_block]) if leaders else []
    # in the reversed graph a block that only loops never reaches the exit: let it
    ipdom = {exit_block: exit_block}
    reaches, before = {exit_block}, 0
    while len(reaches) > before:
        before = len(reaches)
        for block in order:
            if not reaches.isdisjoint(successors[block]):
                reaches.add(block)
    successors = [following if n in reaches else [exit_block] for n, following in enumerate(successors)]
    reverse = {block: [] for block in (*order, exit_block)}
    for block in order:
        for s in successors[block]:
            reverse[s].append(block)
    post = _post_order(exit_block, reverse.__getitem__)
    rank = {block: n for n, block in enumerate(post)}

    def meet(a, b):
        while a != b:
            while rank[a] < rank[b]:
                a = ipdom[a]
            while rank[b] < rank[a]:
                b = ipdom[b]
        return a

    before = None
    while before != ipdom:
        before = dict(ipdom)
        for block in reversed(post[:-1]):
            ipdom[block] = functools.reduce(meet, [s for s in successors[block] if s in ipdom])
    joins = ((end, ipdom.get(n, exit_block)) for n, end in enumerate(ends))
    return {end: None if block == exit_block else leaders[block] for end, block in joins}


class Program:
    """One kernel lowered for one arch; owns the engine's copy."""

    def __init__(self, module, kernel, arch):
        kernel, linked = link(module, kernel)
        self.module, self.kernel, self.arch = module, kernel, arch
        self.functions = linked
        table = isa.lowerings()
        b = self.builder = ProgramBuilder(module, kernel, linked, arch)
        ops = []
        functions_from = min((f.first for f in linked.values()), default=len(kernel.body))
        for n, ins in enumerate(kernel.body):
            b.current, b.in_function = ins, n >= functions_from
            if ins.parts[0] not in table:
                b.fail(f"opcode {ins.parts[0]} is unknown", ", ".join(sorted(table)))
            if len(ins.parts) == 1 and ins.opcode not in isa.BARE:
                b.fail(f"opcode {ins.opcode} without modifiers, such as its type")
            ops.append(table[ins.parts[0]](b, ins))
        ops.append(Op("exit"))  # a kernel may end without ret
        b.current = None
        calls.finish(b)
        self.lines = [ins.line for ins in kernel.body] + [kernel.line]
        self._encode(ops)

    def _encode(self, ops):
        b, body = self.builder, self.kernel.body
        handlers = binding.handlers()
        joins = self._joins(ops)
        records, args, mods = array("i"), array("i"), array("q")
        for n, op in enumerate(ops):
            guard, negate = -1, 0
            if n < len(body) and body[n].guard:
                guard, negate = b.register(body[n].guard.register), int(body[n].guard.negated)
            if op.handler not in handlers:
                raise PtxError(self.lines[n], f"the engine has no handler {op.handler}")
            join, numbers = joins.get(n), (len(args), len(op.args), len(mods), len(op.mods))
            records.extend((handlers[op.handler], guard, negate, *numbers, -1 if join is None else join, op.gather))
            args.extend(op.args)
            mods.extend((m + (1 << 63)) % (1 << 64) - (1 << 63) for m in op.mods)  # 64 bits, signed
        self.ops = ops
        triggers = fields.GRID(wait=False)  # lets the next grid begin
        self.triggers = any(op.handler == "grid" and op.mods == triggers for op in ops)
        self.count = len(ops)
        self.local_bytes = b.local_bytes
        self.handle = binding.new_program(records, args, mods, b.constants, b.size, b.local_bytes)

    def _joins(self, ops):
        """Return post_dominators of the kernel's instructions and each function's, which end at their own returns."""
        targets = [self._successors(n, op) for n, op in enumerate(ops)]
        firsts = sorted(f.first for f in self.functions.values())
        all_joins = {}
        for begin, end in zip([0, *firsts], [*firsts, len(ops)]):
            within = [[min(t, end) - begin for t in ends] for ends in targets[begin:end]]
            joins = post_dominators(within, end - begin)
            all_joins |= {begin + n: None if join is None else begin + join for n, join in joins.items()}
        return all_joins

    def _successors(self, n, op):
        guarded = n < len(self.kernel.body) and self.kernel.body[n].guard
        if op.handler in ("exit", "return", "bra"):
            targets = op.mods if op.handler == "bra" else [len(self.kernel.body) + 1]
            return [*targets, n + 1] if guarded else targets
        return [*(op.mods[fields.BRX.size :] if op.handler == "brx" else ()), n + 1]

    def instruction(self, index):
        """Return the syntax of an instruction by its index; None for the implied exit at the end."""
        return self.kernel.body[index] if 0 <= index < len(self.kernel.body) else None

    def __del__(self):
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            binding.free_program(handle)
