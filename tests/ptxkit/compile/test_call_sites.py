"""Helpers that a CuTe kernel calls: PTX says where, and is otherwise the same."""

import re
from pathlib import Path

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute  # noqa: E402
from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

from ptxkit import capture  # noqa: E402
from ptxkit.compile import call_sites, cutedsl  # noqa: E402
from ptxkit.ptx import parse  # noqa: E402

pytestmark = pytest.mark.compiler


@cute.jit
def meet():
    cute.arch.barrier(barrier_id=3, number_of_threads=32)  # here


@cute.jit
def meet_too():
    meet()  # by way of another


@cute.kernel
def kernel(x: cute.Tensor):
    """Long enough to be no helper."""
    thread = cute.arch.thread_idx()[0]
    x[thread] = x[thread] * 2
    meet()  # first
    for _ in cutlass.range(4, unroll=1):
        x[thread] = x[thread] + 1
        if thread < 4:
            meet_too()  # second
    cute.arch.barrier(barrier_id=3, number_of_threads=32)  # its own


@cute.kernel
def short(x: cute.Tensor):
    meet()  # in a short kernel
    x[0] = 1.0


@cute.jit
def launched(x: cute.Tensor, stream):
    kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def launched_short(x: cute.Tensor, stream):
    short(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


ARGUMENTS = make_fake_compact_tensor(cutlass.Float32, (32,), assumed_align=16), make_fake_stream
SOURCE = Path(__file__).read_text().splitlines()


def compiled(host):
    fake, stream = ARGUMENTS
    return cutedsl.compile(host, fake, stream(), target="sm90").ptx


def stacks(ptx):
    """Return, for every barrier, the comments of this file on its lines, from the inside out."""
    (found,) = parse(ptx).kernels.values()
    for instruction in found.body:
        if instruction.opcode.startswith("bar"):
            loc, words = instruction.loc, []
            while loc:
                assert Path(loc.file) == Path(__file__)
                words.append(SOURCE[loc.line - 1].partition("#")[2].strip())
                loc = loc.inlined_at
            yield words


def test_a_barrier_of_a_helper_is_known_by_those_that_call_it():
    assert list(stacks(compiled(launched))) == [["here", "first"], ["here", "by way of another", "second"], ["its own"]]


def test_a_short_kernel_is_the_end_of_the_calls():
    assert list(stacks(compiled(launched_short))) == [["here", "in a short kernel"]]


def test_nothing_but_lines_of_source_changes(monkeypatch):
    def code(ptx):
        return re.sub(r"(?m)^(//|\s*\.(loc|file)\b).*\n", "", ptx.split(".section")[0])

    numbered = compiled(launched)
    monkeypatch.setattr(call_sites.CallSites, "number", lambda self, callers: None)
    plain = compiled(launched)
    assert "call site" in numbered and "call site" not in plain and code(numbered) == code(plain)


@pytest.mark.exhaustive
def test_what_is_compiled_inside_a_capture_is_reported_too():
    fake, stream = ARGUMENTS
    with capture(arch="sm_90a") as session:
        cute.compile(launched, fake, stream())(torch.zeros(32), CUstream(0))
    assert [words[1:] for words in stacks(session.launches[0].kernel.ptx)] == [
        ["first"], ["by way of another", "second"], []
    ]
