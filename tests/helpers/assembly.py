"""Hand-written PTX for tests: the frame of a kernel around a body, and runs of small kernels."""

import pytest
import torch

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

REGISTERS = """
    .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %rd<32>; .reg .f64 %fd<16>;
"""


def kernel(body, pointers=1, numbers=0, target="sm_90a", shared=4096, dynamic=False, directives="", align=1024):
    """Return a kernel k: tensors in %rd1, %rd2, ...; numbers in %r1, ...; %tid.x in %r0; shared memory is `smem`."""
    params = [f".param .u64 p{n}" for n in range(1, pointers + 1)]
    params += [f".param .u32 n{n}" for n in range(1, numbers + 1)]
    loads = [f"ld.param.u64 %rd{n}, [p{n}];" for n in range(1, pointers + 1)]
    loads += [f"ld.param.u32 %r{n}, [n{n}];" for n in range(1, numbers + 1)]
    outside = f".extern .shared .align {align} .b8 smem[];" if dynamic else ""
    inside = "" if dynamic or not shared else f".shared .align {align} .b8 smem[{shared}];"
    lines = "\n    ".join([inside, *loads, "mov.u32 %r0, %tid.x;"])
    return f"""
.version 8.8
.target {target}
.address_size 64
{outside}
.visible .entry k({", ".join(params)}) {directives}
{{
    {REGISTERS.strip()}
    {lines}
{body}
    ret;
}}
"""


def elements(tensors):
    """Return PTX that leaves in %rd10, %rd11, ... the addresses of the words of so many tensors that are a thread's."""
    adds = [f"    add.s64 %rd{10 + n}, %rd{1 + n}, %rd9;\n" for n in range(tensors)]
    return "\n    mul.wide.u32 %rd9, %r0, 4;\n" + "".join(adds)


def vector(name, count, first=0):
    """Return a vector operand of so many registers that follow each other."""
    return "{" + ", ".join(f"%{name}{n}" for n in range(first, first + count)) + "}"


def int32(words):
    """Return words of 32 bits, given as whole numbers from 0 on, as a tensor of int32."""
    words = torch.as_tensor(words, dtype=torch.int64)
    return (words - (words >> 31 << 32)).to(torch.int32)


STORE = elements(1) + "    st.global.u32 [%rd10], %r9;\n"


def run(body, threads=32, grid=1, target="sm_90a", shared=4096, **options):
    """Run a body that STOREs; return what it stored, by thread, and the Run."""
    out = torch.full((threads,), -1, dtype=torch.int32)
    text = kernel(body, target=target, shared=shared)
    return out, launch(text, grid=grid, block=threads, args=[out], **options)


def refused(instruction, target="sm_90a"):
    """Return the message of the error by which a kernel with an instruction is refused."""
    with pytest.raises(PtxError) as error:
        launch(kernel(f"    {instruction}\n", target=target), grid=1, block=32, args=[torch.zeros(32)])
    return str(error.value)


def kinds(run):
    """Return the ids of a run's findings, without repeats."""
    return sorted({f.kind for f in run.findings})


def reports(run, expected, says="", place="", other=""):
    """Check the kinds of a run's findings and what one of them says, and which instructions it names.

    A list has all kinds, and the texts are those of the first finding.  Of the kinds in a set one is found at least,
    and any finding of these kinds may have the texts.
    """
    of_these = isinstance(expected, set)
    assert expected & {*kinds(run)} if of_these else kinds(run) == expected, (kinds(run), expected)
    if says or place or other:
        found = [f for f in run.findings if f.kind in expected] if of_these else run.findings[:1]
        named = [f for f in found if says in f.says and place in f.place.ptx and (not other or other in f.other.ptx)]
        assert named, "\n".join(map(str, found))


SEEDS = range(1, 8)
