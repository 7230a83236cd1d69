"""Calls of a program's own device functions: arguments, recursion, pointers, divergence."""

import pytest
import torch
from assembly import kernel

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

LANES = range(32)


def module(functions, body, variables="", registers=""):
    """Return a kernel `k` of one tensor: lane in %r0, its own four bytes at [%rd2]."""
    lines = f"""
    {registers}
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd2, %rd1, %rd2;
    {body}
    st.global.u32 [%rd2], %r1;
"""
    text = kernel(lines, target="sm_90", shared=0)
    return text.replace(".visible .entry", f"{functions}\n{variables}\n.visible .entry")


def call(callee, *arguments, result="%r1", prototype=""):
    """Return the lines that nvcc writes around a call of 32-bit arguments."""
    passed = "".join(f".param .b32 a{n}; st.param.b32 [a{n}], {a};\n" for n, a in enumerate(arguments))
    names = ", ".join(f"a{n}" for n in range(len(arguments)))
    return f"{{ {passed} .param .b32 r; {prototype}\n call.uni (r), {callee}, ({names})" + (
        f", proto;\n ld.param.b32 {result}, [r]; }}" if prototype else f";\n ld.param.b32 {result}, [r]; }}"
    )


def results(ptx, **options):
    out = torch.full((32,), -1, dtype=torch.int32)
    run = launch(ptx, grid=1, block=32, args=[out], **options)
    return out.tolist(), run


FIBONACCI = f"""
.func (.param .b32 r0) fib(.param .b32 n0)
{{
    .reg .pred %p<2>; .reg .b32 %r<8>;
    ld.param.b32 %r1, [n0];
    setp.lt.s32 %p1, %r1, 2;
    mov.u32 %r5, %r1;
    @%p1 bra DONE;
    sub.s32 %r2, %r1, 1;
    {call("fib", "%r2", result="%r3")}
    sub.s32 %r2, %r1, 2;
    {call("fib", "%r2", result="%r4")}
    add.s32 %r5, %r3, %r4;
DONE:
    st.param.b32 [r0], %r5;
    ret;
}}
"""


def test_a_recursion_keeps_what_each_of_its_calls_has():
    numbers = [0, 1]
    while len(numbers) < 11:
        numbers.append(numbers[-1] + numbers[-2])
    out, run = results(module(FIBONACCI, "rem.u32 %r2, %r0, 11;\n" + call("fib", "%r2")))
    assert out == [numbers[lane % 11] for lane in LANES] and not run.findings


def test_a_recursion_under_a_random_schedule_gives_the_same():
    ptx = module(FIBONACCI, "rem.u32 %r2, %r0, 7;\n" + call("fib", "%r2"))
    assert results(ptx)[0] == results(ptx, schedule=3)[0] == results(ptx, clock=True)[0]


CHAIN = """
.func (.param .b32 r0) chain(.param .b64 outer, .param .b32 n0)
{
    .local .align 8 .b8 mine[8];
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.param.b64 %rd1, [outer];
    ld.param.b32 %r1, [n0];
    st.local.u32 [mine], %r1;
    ld.u32 %r2, [%rd1];
    st.local.u32 [mine+4], %r2;
    setp.eq.s32 %p1, %r1, 0;
    mov.u32 %r3, 0;
    @%p1 bra DONE;
    mov.u64 %rd2, mine;
    cvta.local.u64 %rd2, %rd2;
    sub.s32 %r4, %r1, 1;
    { .param .b64 a; st.param.b64 [a], %rd2; .param .b32 b; st.param.b32 [b], %r4; .param .b32 r;
      call (r), chain, (a, b);
      ld.param.b32 %r3, [r]; }
DONE:
    ld.local.u32 %r5, [mine];
    ld.local.u32 %r6, [mine+4];
    mad.lo.s32 %r3, %r3, 100, %r5;
    mad.lo.s32 %r3, %r3, 10, %r6;
    st.param.b32 [r0], %r3;
    ret;
}
"""
CHAIN_CALL = """
    .local .align 8 .b8 base[8];
    mov.u32 %r3, 9;
    st.local.u32 [base], %r3;
    mov.u64 %rd3, base;
    cvta.local.u64 %rd3, %rd3;
    {start}
    { .param .b64 a; st.param.b64 [a], %rd3; .param .b32 b; st.param.b32 [b], %r2; .param .b32 r;
      call (r), chain, (a, b);
      ld.param.b32 %r1, [r]; }
"""


def chain(outer, n):
    return ((chain(n, n - 1) if n else 0) * 100 + n) * 10 + outer


def test_each_call_of_a_recursion_has_variables_of_its_own_that_it_may_point_to():
    body = CHAIN_CALL.replace("{start}", "and.b32 %r2, %r0, 1;")
    out, run = results(module(CHAIN, body))
    assert out == [chain(9, lane & 1) for lane in LANES] and not run.findings


def arithmetic(name, operation):
    return f"""
.func (.param .b32 r0) {name}(.param .b32 x0)
{{
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [x0];
    {operation} %r2, %r1, 3;
    st.param.b32 [r0], %r2;
    ret;
}}
"""


THREE = arithmetic("more", "add.s32") + arithmetic("less", "sub.s32") + arithmetic("times", "mul.lo.s32")
TABLE = ".global .align 8 .u64 table[3] = {more, generic(less), times};"
LOOK_UP = """
    rem.u32 %r2, %r0, 3;
    mul.wide.u32 %rd3, %r2, 8;
    mov.u64 %rd4, table;
    add.s64 %rd4, %rd4, %rd3;
    ld.global.u64 %rd5, [%rd4];
"""
PROTOTYPE = "proto: .callprototype (.param .b32 _) _ (.param .b32 _);"
WANTED = [(lane + 3, lane - 3, lane * 3)[lane % 3] for lane in LANES]


BY_ADDRESS = call("%rd5", "%r0", prototype=PROTOTYPE)
GUARDED = call("more", "%r0").replace("call.uni", "@%p1 call")
EARLY = """
.func (.param .b32 r0) early(.param .b32 x0)
{
    .reg .pred %p<2>; .reg .b32 %r<3>;
    ld.param.b32 %r1, [x0];
    st.param.b32 [r0], %r1;
    setp.lt.u32 %p1, %r1, 10;
    @%p1 ret;
    neg.s32 %r1, %r1;
    st.param.b32 [r0], %r1;
    ret;
}
"""
MET = "{ .reg .b32 %m; activemask.b32 %m; popc.b32 %m, %m; mad.lo.s32 %r1, %r1, 100, %m; }"
CALLS = {  # the module, and what each lane has then
    "lanes call different functions by address": (module(THREE, LOOK_UP + BY_ADDRESS, TABLE), WANTED),
    "lanes meet again after a call by address":
        (module(THREE, LOOK_UP + BY_ADDRESS + MET, TABLE), [w * 100 + 32 for w in WANTED]),
    "lanes whose guard fails do not call":
        (module(THREE, "setp.lt.u32 %p1, %r0, 5;\n mov.u32 %r1, 77;\n" + GUARDED), [lane + 3 for lane in range(5)]),
    "a function that returns early returns for those lanes alone":
        (module(EARLY, call("early", "%r0") + "bar.warp.sync -1;"), [n if n < 10 else -n for n in LANES]),
    "a barrier in a function waits for all lanes":
        (module(THREE.replace("add.s32 %r2", "bar.sync 0; add.s32 %r2"), call("more", "%r0")), [n + 3 for n in LANES]),
}


@pytest.mark.parametrize(("text", "expected"), CALLS.values(), ids=CALLS)
def test_each_lane_calls_and_returns_for_itself(text, expected):
    out, run = results(text)
    assert out[: len(expected)] == expected and not run.findings


@pytest.mark.parametrize(("text", "says"), [
    (module(FIBONACCI.replace("@%p1 bra DONE;", ""), call("fib", "%r0")), "a recursion deeper than 4096 calls"),
    (module(CHAIN, CHAIN_CALL.replace("{start}", "mov.u32 %r2, 1000;")), "the stack of a thread is full"),
    (module(THREE, "mov.u64 %rd5, more; add.s64 %rd5, %rd5, 2;" + BY_ADDRESS),
     "is not the address of a function with these arguments"),
], ids=["a recursion that does not end", "a stack that is full", "an address that is no function"])
def test_a_call_that_cannot_be_is_found(text, says):
    assert says in results(text)[1].findings[0].says


def test_a_call_with_arguments_of_other_sizes_is_refused():
    with pytest.raises(PtxError, match=r"arguments of \[4, 4\] bytes.*\[4\] and \[4\], as more declares them"):
        results(module(THREE, call("more", "%r0", "%r0")))


def test_a_function_that_is_not_defined_is_refused():
    with pytest.raises(PtxError, match="a call of other, which this module does not define"):
        results(module(".extern .func (.param .b32 r) other(.param .b32 x);", call("other", "%r0")))
