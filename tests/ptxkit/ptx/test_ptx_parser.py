"""PTX text -> tree: scopes, operands, declarations, debug lines, and what is refused with its line."""

import math
import pickle
import struct
import time

import pytest

from ptxkit.ptx import (
    Address,
    Guard,
    Immediate,
    Label,
    Loc,
    Negated,
    Pair,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    parse,
)

HEAD = ".version 9.0\n.target sm_90a, debug\n.address_size 64\n"
DECLARED = ".reg .pred %p<4>;\n.reg .b32 %r<300>;\n.reg .b64 %rd<9>;\n"
BODY_LINE = 10  # where the body of `kernel` starts


def kernel(body, params=".param .u64 out", before="", directives="", declared=DECLARED):
    """Return the kernel `k` with this body."""
    return parse(f"{HEAD}{before}\n.visible .entry k({params}) {directives}\n{{\n{declared}{body}\n}}").kernels["k"]


def instruction(text, **around):
    (only,) = kernel(text, **around).body
    return only


def operand(text, **around):
    """Return how one source operand is read."""
    return instruction(f"mov.b32 %r0, {text};", **around).operands[1]


def variables(text):
    return parse(HEAD + text).variables


def refusal(body, **around):
    with pytest.raises(PtxError) as caught:
        kernel(body, **around)
    return str(caught.value)


# The module


def test_the_target_stands_without_its_options():
    module = parse(HEAD)
    assert (module.version, module.target, module.address_size) == ("9.0", "sm_90a", 64)
    assert module.kernels == {} and module.functions == {} and module.variables == ()


def test_comments_are_blank_and_lines_keep_their_numbers():
    body = "/* two\n lines; } */ mov.b32 %r1, 5; // not this: mov.b32 %r2, 6;\n@%p1 /* here */ mov.b32 %r3, 7;"
    first, second = kernel(body, declared="\n\n" + DECLARED).body
    assert first.line == BODY_LINE + 3 and second.line == BODY_LINE + 4
    assert second.guard == Guard("%p1", False)


def test_slashes_inside_a_string_are_no_comment():
    assert parse(HEAD + '.file 1 "https://host//a.py"\n').files == {1: "https://host//a.py"}


def test_an_extern_array_has_a_name_an_alignment_and_no_size():
    (memory,) = variables(".extern .shared .align 1024 .b8 smem[];")
    assert (memory.space, memory.align, memory.size, memory.count, memory.extern) == ("shared", 1024, 0, 0, True)
    assert memory.init is None and memory.line == 4


@pytest.mark.parametrize("declaration, size, count, init", [
    (".global .u32 x = 7;", 4, 1, struct.pack("<I", 7)),
    (".global .s16 x = -2;", 2, 1, struct.pack("<h", -2)),
    (".const .align 4 .b8 x[6] = {1, 0xff, 3};", 6, 6, b"\x01\xff\x03\0\0\0"),
    (".global .b16 x[] = {1, 2};", 4, 2, b"\x01\0\x02\0"),
    (".const .f32 x[2] = {0f3F800000, -2.5};", 8, 2, struct.pack("<2f", 1.0, -2.5)),
    (".const .f64 x = 0dBFF0000000000000;", 8, 1, struct.pack("<d", -1.0)),
    (".global .u32 x[2][3] = {{1, 2, 3}, {4, 5, 6}};", 24, 6, struct.pack("<6I", 1, 2, 3, 4, 5, 6)),
    (".global .v4 .f32 x[2];", 32, 8, None),
    (".visible .global .b64 x[3];", 24, 3, None),
])
def test_a_variable_knows_its_bytes(declaration, size, count, init):
    (variable,) = variables(declaration)
    assert (variable.size, variable.count, variable.init, variable.extern) == (size, count, init, False)


def test_alignment_is_natural_unless_declared():
    text = ".global .v2 .f32 a; .global .b64 b; .global .align 64 .b8 c;"
    assert [v.align for v in variables(text)] == [8, 8, 64]


@pytest.mark.parametrize("text, expected", [
    (".extern .global .u32 x; .visible .global .u32 x = 3;", ("global", 4, False, b"\x03\0\0\0")),
    (".common .global .align 8 .u64 x[2];", ("global", 16, False, None)),
], ids=["a definition replaces its extern declaration", "a common variable is one of this module"])
def test_a_variable_of_the_module_is_known_by_its_last_declaration(text, expected):
    (x,) = variables(text)
    assert x.name == "x" and (x.space, x.size, x.extern, x.init) == expected


@pytest.mark.parametrize("text, found", [
    (".global .u32 x; .global .u32 x;", "`x` is defined twice"),
    (".global .u32 x[];", "`x` has no size"),
    (".global .u32 x[1] = {1, 2};", "8 bytes of values for `x`, which holds 4"),
    (".global .u64 x = other;", "`other` as an initial value"),
    (".global .u32 x = 1.5;", "`1.5` as an initial value of type .u32"),
    (".const .f32 x = 1.0e300;", "`1.0e300` as an initial value of type .f32"),
    (".global .q32 x;", "type .q32"),
    (".local .b8 x[4];", ".local at module scope"),
    (".global .attribute(.managed) .b32 x;", "supported is [linking] .space"),
    (".global .texref x;", ".texref x"),
    (".alias f, g;", "found `.alias f, g;`"),
    (".visible .entry k();", "a kernel without a body"),
    (".visible .entry k() { ret;", "never closed"),
    (".visible .entry k() {} .visible .entry k() {}", "kernel `k` is defined twice"),
    (".global .b8 p; .visible .entry k(.param .u64 p) {}", "parameter `p` hides"),
    (".visible .entry k(.reg .u64 p) {}", "found `.reg .u64 p`"),
    (".visible .entry k() .unheard 3 {}", "found `.unheard 3`"),
    ("}", "found `}`"),
])
def test_a_declaration_that_is_not_taken_is_quoted_with_its_line(text, found):
    with pytest.raises(PtxError) as caught:
        parse(HEAD + text)
    assert caught.value.line == 4
    assert found in str(caught.value) and f"4 | {text}" in str(caught.value)


@pytest.mark.parametrize("text", ["", ".version 9.0\n", HEAD.replace("64", "32"), "int main() {}"])
def test_what_is_no_module_is_refused(text):
    with pytest.raises(PtxError):
        parse(text)


def test_an_error_is_a_value_error_that_survives_pickling():
    error = PtxError(7, "found x", "add x;")
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "PTX line 7: found x\n  7 | add x;"


# Kernels and functions


def test_parameters_lie_at_multiples_of_their_alignment():
    params = """.param .u64 .ptr .global .align 1 a, .param .u8 b, .param .align 64 .b8 map[128],
    .param .f32 c, .param .align 8 .b8 d[3], .param .u16 e"""
    found = [(p.name, p.offset, p.size, p.align, p.count) for p in kernel("", params).params]
    assert found == [
        ("a", 0, 8, 8, 1), ("b", 8, 1, 1, 1), ("map", 64, 128, 64, 128), ("c", 192, 4, 4, 1), ("d", 200, 3, 8, 3),
        ("e", 204, 2, 2, 1),
    ]


def test_directives_keep_their_numbers():
    text = '.reqntid 128, 2, 1 .minnctapersm 2 .maxnreg 168 .pragma "nounroll"; .reqnctapercluster 2 .explicitcluster'
    assert kernel("", directives=text).directives == {
        "reqntid": (128, 2, 1), "minnctapersm": (2,), "maxnreg": (168,), "reqnctapercluster": (2,),
        "explicitcluster": (),
    }


def test_a_kernel_may_have_neither_parameters_nor_statements():
    empty = parse(HEAD + ".entry a {}\n.entry b() .maxntid 32 { ret; }").kernels
    assert empty["a"].body == () and empty["a"].params == () and empty["b"].directives == {"maxntid": (32,)}
    assert (empty["a"].line, empty["b"].line) == (4, 5)


CALLS = """
.extern .func (.param .b32 status) vprintf (.param .b64 format, .param .b64 values);
.func (.param .align 8 .b8 pair[16]) twice (.param .b64 x);
.func (.param .align 8 .b8 pair[16]) twice (.param .b64 x) {
    .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [x];
    st.param.b64 [pair+8], %rd1;
    ret;
}
.func trap() .noreturn { trap; }
"""


def test_a_declared_function_has_a_signature_and_a_defined_one_a_body():
    functions = parse(HEAD + CALLS).functions
    assert [(f.name, f.defined, len(f.body)) for f in functions.values()] == [
        ("vprintf", False, 0),
        ("twice", True, 3),
        ("trap", True, 1),
    ]
    assert [p.name for p in functions["vprintf"].params] == ["format", "values"]
    assert functions["twice"].results[0].size == 16
    assert functions["twice"].body[1].operands[0] == Address(Symbol("pair"), 8)
    assert functions["trap"].directives == {"noreturn": ()}


def test_a_call_carries_results_callee_and_arguments():
    body = """{ .param .b64 a; .param .b64 b; .param .b32 r;
    call.uni (r), vprintf, (a, b); }
    { .param .b64 a; call trap; call (_), twice, (a); }"""
    read = kernel(body, before=CALLS)
    assert [i.operands for i in read.body] == [
        (Vector((Symbol("r"),)), Symbol("vprintf"), Vector((Symbol("a"), Symbol("b")))),
        (Vector(()), Symbol("trap"), Vector(())),
        (Vector((Sink(),)), Symbol("twice"), Vector((Symbol("a@2"),))),
    ]
    assert [(v.name, v.space, v.size) for v in read.variables] == [
        ("a", "param", 8), ("b", "param", 8), ("r", "param", 4), ("a@2", "param", 8),
    ]


def test_a_call_through_a_register_needs_a_prototype():
    k = kernel("proto: .callprototype _ ();\ncall (), %rd1, (), proto;")
    assert k.body[0].operands == (Vector(()), Register("%rd1"), Vector(()))
    assert "a call of `%rd1`" in refusal("call (), %rd1, ();")


def test_an_address_as_an_initial_value_is_kept_by_its_place():
    text = ".global .u64 x[3] = {1, generic(y)+4, y};\n.global .u32 y;"
    assert variables(text)[0].addresses == ((8, "y", 4), (16, "y", 0))


# Statements


def test_an_opcode_is_split_at_its_dots_and_keeps_its_colons():
    found = instruction("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3];")
    assert found.parts == ("cp", "async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes")
    assert ".".join(found.parts) == found.opcode


def test_a_statement_may_span_lines_and_a_line_may_hold_several():
    body = "mma.sync\n .aligned.m8n8k4\n {%r1,\n %r2}, %r3;\nmov.b32 %r4, %r5;mov.b32 %r6, %r7; ret;"
    first, *others = kernel(body).body
    assert first.opcode == "mma.sync.aligned.m8n8k4"
    assert first.operands == (Vector((Register("%r1"), Register("%r2"))), Register("%r3"))
    assert first.text == "mma.sync .aligned.m8n8k4 {%r1, %r2}, %r3;"
    assert [i.line for i in (first, *others)] == [BODY_LINE + line for line in (0, 4, 4, 4)]


@pytest.mark.parametrize("spelling, guard", [
    ("@%p1 ret;", Guard("%p1", False)), ("@!%p2 ret;", Guard("%p2", True)), ("@ ! %p3\tret;", Guard("%p3", True)),
    ("ret;", None),
])
def test_a_guard_is_a_predicate_or_its_negation(spelling, guard):
    found = instruction(spelling)
    assert found.guard == guard and found.opcode == "ret" and found.operands == ()


def test_only_used_registers_of_a_range_appear():
    registers = kernel(".reg .b128 wide, %x1<3>; mov.b32 %r299, %x12; @%p0 ret;").registers
    assert registers == {"wide": "b128", "%x12": "b128", "%r299": "b32", "%p0": "pred"}


def test_the_dots_of_a_declaration_need_no_spaces():
    assert kernel("{.reg.b16 lo,hi; mov.b32 %r1, {lo, hi};}").registers == {"lo": "b16", "hi": "b16", "%r1": "b32"}


def test_pragmas_leave_nothing_behind():
    assert kernel('.pragma "nounroll";\nret;').body[0].opcode == "ret"


def test_labels_are_indices_into_the_body_and_may_end_it():
    read = kernel("start: mov.b32 %r1, %r2;\nmiddle:\nagain: ret;\nend:")
    assert read.labels == {"start": 0, "middle": 1, "again": 1, "end": 2}


# Scopes


WAIT = """{ .reg .pred done;
wait: mbarrier.try_wait.b64 done, [%r1], %r2;
@done bra.uni over; bra.uni wait;
over: }
"""


def test_a_label_inside_braces_is_its_own():
    read = kernel(WAIT * 3)
    assert read.labels == {"wait": 0, "over": 3, "wait@2": 3, "over@2": 6, "wait@3": 6, "over@3": 9}
    assert [i.operands[0].name for i in read.body if i.parts[0] == "bra"] == [
        *("over", "wait"),
        *("over@2", "wait@2"),
        *("over@3", "wait@3"),
    ]
    assert [i.guard.register for i in read.body if i.guard] == ["done", "done@2", "done@3"]
    assert read.registers["done@3"] == "pred"


def test_a_register_declared_again_hides_the_outer_one_until_the_scope_ends():
    read = kernel(
        """.reg .b32 x; mov.b32 x, 1;
        { mov.b32 x, 2; .reg .b64 x; mov.b64 x, 3; { mov.b64 x, 4; } }
        mov.b32 x, 5;"""
    )
    assert [i.operands[0].name for i in read.body] == ["x", "x", "x@2", "x@2", "x"]
    assert read.registers == {"x": "b32", "x@2": "b64"}


def test_a_range_declared_again_hides_only_its_own_members():
    read = kernel("mov.b32 %r1, %r2; { .reg .b64 %r<2>; mov.b64 %r1, %r2; } mov.b32 %r1, %r2;")
    assert [[o.name for o in i.operands] for i in read.body] == [["%r1", "%r2"], ["%r1@2", "%r2"], ["%r1", "%r2"]]
    assert read.registers["%r1@2"] == "b64"


def test_a_branch_reaches_labels_of_outer_scopes_in_both_directions():
    read = kernel("back: { { bra back; } bra ahead; } ahead: ret;")
    assert [i.operands for i in read.body[:2]] == [(Label("back"),), (Label("ahead"),)]


def test_a_branch_takes_the_innermost_label_even_when_it_comes_later():
    read = kernel("L: { bra L; L: ret; } bra L;")
    assert [i.operands[0].name for i in read.body if i.operands] == ["L@2", "L"]
    assert read.labels == {"L": 0, "L@2": 1}


def test_a_label_of_another_scope_is_out_of_reach():
    assert "`inner` is no label of this or an outer scope" in refusal("{ inner: ret; } bra inner;")


def test_a_shared_variable_of_a_kernel_does_not_meet_that_of_the_module():
    read = kernel(".shared .align 16 .b8 x[32]; mov.b32 %r1, x;", before=".shared .b32 x;")
    assert [(v.name, v.space, v.size) for v in read.variables] == [("x@2", "shared", 32)]
    assert read.body[0].operands[1] == Symbol("x@2")


def test_an_indexed_branch_carries_its_labels():
    body = "table: .branchtargets one, two;\nbrx.idx %r1, table;\none: ret;\ntwo: ret;"
    assert kernel(body).body[0].operands == (Register("%r1"), Vector((Label("one"), Label("two"))))


def test_an_indexed_branch_keeps_to_the_labels_that_its_table_saw():
    read = kernel("one: ret; table: .branchtargets one; { brx.idx %r1, table; one: ret; }")
    assert read.body[1].operands[1] == Vector((Label("one"),))
    assert read.labels == {"one": 0, "one@2": 2}


@pytest.mark.parametrize("body, found", [
    ("a: ret; a: ret;", "`a` is declared twice in one scope"),
    (".reg .b32 x; .reg .b32 x;", "`x` is declared twice in one scope"),
    (".reg .b32 %r<3>;", "`%r<3>` is declared twice in one scope"),
    (".reg .b32 x; .shared .b32 x;", "`x` is declared twice in one scope"),
    (".shared .align 3 .b8 x[4];", ".align 3; an alignment is a power of two"),
    (".shared .align 0 .b8 x[4];", ".align 0; an alignment is a power of two"),
    ("mov.u64 %rd1, 99999999999999999999;", "`99999999999999999999` does not fit into 64 bits"),
    ("ld.b32 %r1, [%r2+0x10000000000000000];", "`0x10000000000000000` does not fit into 64 bits"),
    ("mov.b32 %r1, x; .reg .b32 x;", "`x` is neither declared"),
    ("mov.b32 %r1, %r300;", "`%r300` is neither declared"),
    ("mov.b32 %r1, %r07;", "`%r07` is neither declared"),
    ("mov.b32 %r1, %tid;", "`%tid` is neither declared in this or an outer scope nor a special register"),
    ("{ .reg .b32 x; } mov.b32 x, 1;", "`x` is neither declared"),
    ("@%r1 ret;", "guard `%r1` is not a .pred register"),
    ("@%q ret;", "guard `%q` is not a .pred register"),
    ("bra %r1;", "`%r1` is no label"),
    ("call (), k;", "a call of `k`"),
    ("call;", "a call of `()`"),
    ("table: .branchtargets %r1;", "`%r1` is no label"),
    ("brx.idx %r1, %r2;", "`%r2` is no .branchtargets"),
    (".reg .v4 .f32 x;", "registers of type .v4"),
    (".reg .tex x;", "registers of type .tex"),
    ("add.s32 %r1, %r2 %r3;", "found `%r2 %r3`"),
    ("add.s32 %r1, %r2,;", "found ``"),
    ("mov.b32 %r1, {%r2, %r3;", "found `mov.b32 %r1, {%r2, %r3;`"),
    ("ld.b32 %r1, [%r2;", "brackets do not pair up"),
    ("ld.b32 %r1, [];", "found ``"),
    ("ld.b32 %r1, [%r2+%r3];", "`%r3` is not an offset in bytes"),
    ("ld.b32 %r1, [%tid.x];", "`%tid.x` is not an address"),
    ("ld.b32 %r1, [%r2, %r3];", "supported are [base], [base+bytes] and [base, {coordinates}]"),
    ("mov.b32 %r1, %r2+4;", "only the address of a variable may have an offset"),
    ("mov.b32 %r1, !5;", "`!` needs a register"),
    ("setp.eq.s32 %p1|%p2|%p3, %r1, 0;", "supported around `|` are two registers or `_`"),
    ("mov.b32 %r1, (1+2);", "found `(1+2)`"),
    ("mov.b32 %r1, 08;", "found `08`"),
    ("ret", "found `ret`; supported here are instructions that end in `;`"),
    (";", "found `;`"),
    (".loc 3 1 1", "file 3 is named by no .file"),
    (".section .debug_str { }", "supported here are instructions"),
])
def test_a_statement_that_is_not_taken_is_quoted_with_its_line(body, found):
    message = refusal(body)
    assert found in message
    assert message.startswith(f"PTX line {BODY_LINE}: ") and message.endswith(f"{BODY_LINE} | {body}")


@pytest.mark.parametrize("body", ["mov.u64 %rd1, {0};", ".reg .b32 x<{0}>;", ".shared .align {0} .b8 x[4];"])
def test_a_number_of_thousands_of_digits_is_refused_with_its_line(body):
    message = f"PTX line {BODY_LINE}: a number of 5,000 digits; no number of PTX has so many"
    assert refusal(body.format("9" * 5000)) == message


# Operands


@pytest.mark.parametrize("text, value", [
    ("5", 5), ("-5", -5), ("0", 0), ("017", 15), ("0x1F", 31), ("-0x10", -16), ("0b101", 5), ("7U", 7),
    ("0xFFFFFFFFFFFFFFFFU", 2**64 - 1), ("WARP_SZ", 32), ("1.5", 1.5), ("-2.", -2.0), ("1e3", 1000.0),
])
def test_numbers_are_read_as_ptx_spells_them(text, value):
    found = operand(text)
    assert found == Immediate(value, None, text) and type(found.value) is type(value)


def test_float_literals_keep_their_bits():
    assert operand("0f3F800000") == Immediate(1.0, 0x3F800000, "0f3F800000")
    assert operand("0dC000000000000000") == Immediate(-2.0, 0xC000000000000000, "0dC000000000000000")
    nan = operand("0f7FC12345")
    assert math.isnan(nan.value) and nan.bits == 0x7FC12345


@pytest.mark.parametrize("text, address", [
    ("[%rd1]", Address(Register("%rd1"))),
    ("[%r1+16]", Address(Register("%r1"), 16)),
    ("[ %r1 + 0x10 ]", Address(Register("%r1"), 16)),
    ("[%rd1+-4]", Address(Register("%rd1"), -4)),
    ("[%rd1-4]", Address(Register("%rd1"), -4)),
    ("[out]", Address(Symbol("out"))),
    ("[out+8]", Address(Symbol("out"), 8)),
    ("[64]", Address(Immediate(64, None, "64"))),
    ("[%rd1, {%r1}]", Address(Register("%rd1"), 0, (Register("%r1"),))),
    ("[%rd1, {%r1, 0}]", Address(Register("%rd1"), 0, (Register("%r1"), Immediate(0, None, "0")))),
])
def test_addresses_have_a_base_an_offset_and_coordinates(text, address):
    assert operand(text) == address


@pytest.mark.parametrize("text, read", [
    ("%r1", Register("%r1")),
    ("out", Symbol("out")),
    ("out+4", Symbol("out", 4)),
    ("_", Sink()),
    ("!%p1", Negated(Register("%p1"))),
    ("%r1|%p1", Pair(Register("%r1"), Register("%p1"))),
    ("_|%p1", Pair(Sink(), Register("%p1"))),
    ("{%r1, _}", Vector((Register("%r1"), Sink()))),
    ("%tid.x", Special("%tid.x")),
    ("%cluster_ctarank", Special("%cluster_ctarank")),
    ("%envreg31", Special("%envreg31")),
    ("%globaltimer_lo", Special("%globaltimer_lo")),
])
def test_operands_are_read_by_their_shape(text, read):
    assert operand(text) == read


def test_a_declared_register_may_have_the_name_of_a_special_one():
    assert operand("%laneid", declared=".reg .b32 %r0, %laneid;") == Register("%laneid")


def test_a_tensor_copy_has_a_map_with_coordinates_a_barrier_and_offsets():
    found = instruction("cp.async.bulk.tensor.3d.im2col [%r1], [%rd1, {%r2, %r3, 0}], [%r4+8], {%r5}, %rd2;").operands
    assert found[1].coordinates == (Register("%r2"), Register("%r3"), Immediate(0, None, "0"))
    assert found[2:] == (Address(Register("%r4"), 8), Vector((Register("%r5"),)), Register("%rd2"))


def test_a_vector_of_128_registers_keeps_its_order():
    names = [f"%r{i}" for i in range(128)]
    found = instruction(f"tcgen05.ld.sync.aligned.32x32b.x128.b32 {{{', '.join(names)}}}, [%r200];")
    assert [register.name for register in found.operands[0].items] == names


# Debug lines


LOCATED = """
.file 2 "/src/b.py"
.visible .entry k() {
    .reg .b32 %r<9>;
    mov.b32 %r0, 0;
    .loc 1 10 3 // a.py:10:3
    mov.b32 %r1, 1;
    mov.b32 %r2, 2;
    .loc 2 20 5, function_name $L__info0, inlined_at 1 10 3
    mov.b32 %r3, 3;
    .loc 2 30 7, function_name $L__info0 + 6, inlined_at 2 20 5
    mov.b32 %r4, 4;
    .loc 2 40 1, function_name $L__info1, inlined_at 1 99 9
    mov.b32 %r5, 5;
    .loc 2 40 1, function_name $L__info1, inlined_at 2 40 1
    mov.b32 %r6, 6;
}
.visible .entry other() { ret; }
.file 1 "/src/a.py", 1700000000, 1234
.section .debug_str {
$L__info0:
.b8 111 .b8 117, 116
.b8 101,114,0
.b8 105 // i
.b8 110
.b8 0
$L__info1: .b8 102 .b8 0
}
.section .debug_info { .b32 12 .b8 $L__info0 .b64 .debug_str }
"""


def test_lines_stay_until_the_next_loc_and_calls_chain():
    kernels = parse(HEAD + LOCATED).kernels
    line = Loc("/src/a.py", 10, 3)
    outer = Loc("/src/b.py", 20, 5, line, "outer")
    assert [i.loc for i in kernels["k"].body] == [
        None,
        line,
        line,
        outer,
        Loc("/src/b.py", 30, 7, outer, "in"),
        Loc("/src/b.py", 40, 1, Loc("/src/a.py", 99, 9), "f"),
        Loc("/src/b.py", 40, 1, Loc("/src/b.py", 40, 1), "f"),
    ]
    assert kernels["other"].body[0].loc is None


ASSEMBLED = """
    .loc 1 6 9
    // begin inline asm
    .loc 1 6 9
    mov.b32 %r1, 1;
    .loc 1 7 9
    mov.b32 %r2, 2;

    // end inline asm
    .loc 1 9 1
    mov.b32 %r3, 3;
"""


def test_inline_assembly_has_one_line_of_the_source_whatever_the_compiler_counts():
    found = kernel(ASSEMBLED, before='.file 1 "a.py"').body
    assert [(i.loc.line, i.line - found[0].line) for i in found[:3]] == [(6, 0), (6, 2), (9, 6)]


def test_an_inlined_name_that_no_section_holds_is_refused():
    text = HEAD + LOCATED.replace(".debug_str {", ".debug_other {")
    with pytest.raises(PtxError, match=r"`\$L__info0` is no label of .section .debug_str"):
        parse(text)


# Size


BLOCK = """
.loc 1 LINE 5
tcgen05.st.sync.aligned.32x32b.x16.b32 [%r250+LINE], {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9, %r10, %r11};
mad.lo.s32 %r20, %r21, %r22, LINE; // a.py:LINE:5, and some words to make the line as long as those of a compiler
@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+LINE];
"""


def test_a_kernel_of_a_megabyte_takes_less_than_two_seconds():
    body = "".join(BLOCK.replace("LINE", str(i)) + WAIT * (i % 10 == 0) for i in range(3400))
    start = time.process_time()
    read = kernel(body, before='.file 1 "a.py"')
    assert time.process_time() - start < 2
    assert len(body) > 1_000_000 and len(read.body) == 3400 * 3 + 340 * 3
