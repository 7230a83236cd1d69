"""Device printf and assert: calls of the CUDA runtime's functions."""

import pytest

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated


def program(call, text="lane %d: %.2f %s 100%% %llx\n", word="words"):
    def data(name, s):
        return f".global .align 1 .b8 {name}[{len(s) + 1}] = {{{', '.join(str(b) for b in s.encode())}, 0}};"

    return f"""
.version 8.0
.target sm_90
.address_size 64
.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 values);
.extern .func __assertfail (.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 s);
.extern .func unknown (.param .b64 x);
{data("text", text)}
{data("word", word)}
.visible .entry k()
{{
    .reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f64 %fd<3>;
    .local .align 8 .b8 values[32];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 3;
    @%p1 bra END;
    mov.u64 %rd1, values;
    cvta.local.u64 %rd2, %rd1;
    st.local.u32 [values], %r1;
    mov.f64 %fd1, 0d4004000000000000;
    st.local.f64 [values+8], %fd1;
    mov.u64 %rd3, word;
    cvta.global.u64 %rd4, %rd3;
    st.local.u64 [values+16], %rd4;
    mov.u64 %rd7, 0x123456789a;
    st.local.u64 [values+24], %rd7;
    mov.u64 %rd5, text;
    cvta.global.u64 %rd6, %rd5;
    {{
    {call}
    }}
END:
    ret;
}}
"""


PRINT = """
    .param .b64 a; st.param.b64 [a], %rd6;
    .param .b64 b; st.param.b64 [b], %rd2;
    .param .b32 r;
    call.uni (r), vprintf, (a, b);
    ld.param.b32 %r2, [r];
"""
ASSERT = """
    .param .b64 a; st.param.b64 [a], %rd4;
    .param .b64 b; st.param.b64 [b], %rd6;
    .param .b32 c; st.param.b32 [c], 17;
    .param .b64 d; st.param.b64 [d], %rd6;
    .param .b64 e; st.param.b64 [e], 1;
    call.uni __assertfail, (a, b, c, d, e);
"""


@pytest.mark.simulated_only
def test_printf_prints_what_each_lane_has(capfd):
    run = launch(program(PRINT), grid=1, block=32, args=[])
    assert capfd.readouterr().out == "lane 3: 2.50 words 100% 123456789a\n"
    assert not run.findings


def printed(text, *values, word="words"):
    """Return the output of one lane's printf and what the launch found; values are (type, number), in their order."""
    offset, stores = 0, []
    for type_, value in values:
        size = int(type_[1:]) // 8
        offset = -(-offset // size) * size
        stores.append(f"st.local.{type_} [values+{offset}], {value};")
        offset += size
    ptx = program("\n".join(stores) + PRINT, text=text, word=word)
    return launch(ptx, grid=1, block=32, args=[])


@pytest.mark.simulated_only
@pytest.mark.parametrize("text, values, out", [
    ("[%*d]", [("u32", 5), ("u32", 42)], "[   42]"),
    ("[%-*d]", [("u32", 5), ("u32", 42)], "[42   ]"),
    ("[%*d]", [("s32", -5), ("u32", 42)], "[42   ]"),
    ("[%.*f]", [("u32", 3), ("f64", "0d40091EB851EB851F")], "[3.140]"),
    ("[%+08.2f]", [("f64", "0d40091EB851EB851F")], "[+0003.14]"),
    ("[%05d|%+d|%#x]", [("u32", 7), ("u32", 8), ("u32", 255)], "[00007|+8|0xff]"),
    ("[%lld %hd %hhu]", [("s64", -(2**40)), ("u32", 65537), ("u32", 257)], f"[{-(2**40)} 1 1]"),
    ("[%3c%-3c]", [("u32", 65), ("u32", 66)], "[  AB  ]"),
    ("[%lc]", [("u32", 65)], "[A]"),
    ("[%12p]", [("u64", 4660)], "[      0x1234]"),
    ("[%Lf]", [("f64", "0d4004000000000000")], "[2.500000]"),
])
def test_printf_knows_the_conversions_of_cuda(capfd, text, values, out):
    run = printed(text, *values)
    assert capfd.readouterr().out == out and not run.findings


@pytest.mark.simulated_only
@pytest.mark.parametrize("conversion, out", [("%s", "[words]"), ("%ls", "[words]"), ("%8.3ls", "[     wor]")])
def test_printf_reads_no_string_beyond_its_end(capfd, conversion, out):
    call = PRINT.replace(".param .b64 a;", "st.local.u64 [values], %rd4; .param .b64 a;")
    run = launch(program(call, text=f"[{conversion}]"), grid=1, block=32, args=[])
    assert capfd.readouterr().out == out and not run.findings


@pytest.mark.simulated_only
@pytest.mark.parametrize("text", ["abc%nd", "abc%ln", "100%", "%k"])
def test_printf_prints_what_is_no_conversion_and_says_so(capfd, text):
    run = printed(text, ("u64", 4096), ("u64", 4096))
    assert capfd.readouterr().out == text
    (finding,) = run.findings
    assert finding.kind == "operand" and "is no conversion" in finding.says


@pytest.mark.simulated_only
@pytest.mark.parametrize("text", ["%2000000000d", "%.2000000000d", "%99999999999999999999999d"])
def test_a_field_of_printf_has_a_limit(capfd, text):
    run = printed(text, ("u32", 7))
    assert capfd.readouterr().out == "7"
    assert "more than 4096 characters" in run.findings[0].says


def test_a_string_without_an_end_is_found(capfd):
    run = launch(program(PRINT).replace(", 0};", ", 1};"), grid=1, block=32, args=[])
    assert any("does not end" in f.says for f in run.findings)


def test_an_assertion_that_fails_ends_the_launch_with_its_words():
    run = launch(program(ASSERT, text="file.py", word="x > 0"), grid=4, block=32, args=[])
    (finding,) = run.findings
    assert finding.says == "assertion failed: x > 0 (file.py:17)" and finding.lane == 3


def test_other_calls_are_refused():
    with pytest.raises(PtxError, match=r"a call of unknown, which this module does not define.*vprintf"):
        launch(program(".param .b64 a; st.param.b64 [a], %rd6; call.uni unknown, (a);"), grid=1, block=32, args=[])


def test_a_call_of_the_runtime_with_too_few_arguments_is_refused():
    body = ".param .b64 a; .param .b32 r; st.param.b64 [a], %rd6; call.uni (r), vprintf, (a);"
    with pytest.raises(PtxError, match="1 arguments of vprintf; supported: 2 or more"):
        launch(program(body), grid=1, block=32, args=[])
