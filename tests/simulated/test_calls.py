"""Device printf and assert: calls of the CUDA runtime's functions."""

import pytest

from kda.simulator.launches import launch
from kda.simulator.ptx import PtxError


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
