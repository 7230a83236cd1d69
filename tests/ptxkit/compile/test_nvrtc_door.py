"""CUDA C++ to kernels through NVRTC, without a GPU."""

import struct
import sys

import pytest
import torch

from ptxkit.compile import launching, nvrtc
from ptxkit.compile.errors import BuildError, MissingCompilerError
from ptxkit.compile.store import Store

pytestmark = pytest.mark.compiler

SOURCE = r"""
#include "scale.h"
struct Pair { float a; short b; };
template <int N>
__global__ void turn(const float* x, float* y, int n, float f, Pair p, double d, unsigned char c) {
  __shared__ float kept[N];
  int i = blockIdx.x * N + threadIdx.x;
  kept[threadIdx.x] = x[i];
  __syncthreads();
  if (i < n) y[i] = scale(kept[N - 1 - threadIdx.x], f) + p.a + p.b + d + c + SHIFT;
}
extern "C" __global__ void nothing() {}
"""
HEADERS = {"scale.h": "__device__ inline float scale(float a, float b) { return a * b; }"}


@pytest.fixture(scope="module", autouse=True)
def libnvrtc():
    try:
        nvrtc.version()
    except MissingCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def kept(tmp_path):
    return Store(tmp_path)


def turn(kept, **more):
    return nvrtc.compile(SOURCE, "turn<128>", defines={"SHIFT": 3}, headers=HEADERS, keep_in=kept, **more)


@pytest.mark.parametrize("target", ["sm89", "sm90", "sm100"])
def test_a_kernel_has_ptx_machine_code_and_what_it_takes(kept, target):
    kernel = turn(kept, target=target)
    assert f".target {kernel.target.spelling}" in kernel.ptx and kernel.cubin[:4] == b"\x7fELF"
    assert kernel.registers > 0 and kernel.spills == 0 and kernel.shared == 4 * 128


def test_line_information_names_the_source(kept):
    kernel = turn(kept, file="turn.cu")
    assert ".loc" in kernel.ptx and 'turn.cu"' in kernel.ptx


def test_the_cubin_and_the_ptx_agree_on_every_parameter(kept):
    from ptxkit.compile.elf import resources

    kernel = turn(kept)
    assert resources(kernel.cubin)[kernel.name].params == tuple((p.offset, p.size) for p in kernel.params)


def test_a_launch_is_the_bytes_that_the_kernel_reads(kept):
    kernel, launches = turn(kept), []

    class Notebook:
        launch = staticmethod(launches.append)

    x = torch.zeros(1024)
    with launching.redirect(Notebook()):
        kernel.launch(8, x, None, -7, 2, struct.pack("<fh2x", 1.5, -2), 3.0, 255, block=128, cluster=2, pdl=True)
        kernel.launch(8, x, None, 2**32 - 7, 2, bytes(8), 3.0, 255, block=(8, 4), dynamic_shared=64)
    first, second = launches
    assert first.args == struct.pack("<QQiffh2xdB", x.data_ptr(), 0, -7, 2.0, 1.5, -2, 3.0, 255)
    assert (first.grid, first.block, first.cluster, first.pdl) == ((8, 1, 1), (128, 1, 1), (2, 1, 1), True)
    assert (second.block, second.dynamic_shared, second.pdl) == ((8, 4, 1), 64, False)
    assert second.args[16:20] == first.args[16:20] and first.tensors == {"argument 0": x}


def test_a_kernel_without_parameters_has_an_empty_buffer(kept):
    kernel, launches = nvrtc.compile('extern "C" __global__ void nothing() {}', "nothing", keep_in=kept), []

    class Notebook:
        launch = staticmethod(launches.append)

    with launching.redirect(Notebook()):
        kernel.launch(1, block=32)
    assert kernel.params == () and launches[0].args == b""


@pytest.mark.parametrize(
    ("position", "wrong"),
    [(2, 2.5), (2, 2**32), (2, -(2**31) - 1), (3, "two"), (4, b"\0" * 7), (4, 1), (6, 256), (0, 1 << 64)],
)
def test_an_argument_that_does_not_fit_is_named(kept, position, wrong):
    arguments = [None, None, 1, 1.0, bytes(8), 1.0, 1]
    arguments[position] = wrong
    with pytest.raises(BuildError, match=f"argument {position} must fit"):
        turn(kept).launch(1, *arguments, block=32)


def test_a_second_process_need_not_compile(kept, monkeypatch):
    first = turn(kept)
    monkeypatch.setattr(nvrtc, "_build", lambda *arguments: pytest.fail("it was compiled again"))
    assert turn(Store(kept.folder)) == first
    with pytest.raises(pytest.fail.Exception):
        turn(kept, options=["-maxrregcount=32"])


def test_a_compiler_message_is_passed_on(kept):
    with pytest.raises(BuildError, match=r'bad\.cu\(1\): error: identifier "y" is undefined'):
        nvrtc.compile("__global__ void f(int* x) { x[0] = y; }", "f", file="bad.cu", keep_in=kept)
    with pytest.raises(BuildError, match='identifier "g" is undefined'):
        nvrtc.compile("__global__ void f(int* x) { x[0] = 1; }", "g", keep_in=kept)


def test_without_cuda_python_the_error_says_how_to_get_it(monkeypatch, kept):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingCompilerError, match="pip install cuda-python"):
        turn(kept)


def test_without_libnvrtc_the_error_says_how_to_get_it(monkeypatch, kept):
    from cuda.bindings import nvrtc as bindings

    def missing():
        raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setattr(bindings, "nvrtcVersion", missing)
    with pytest.raises(MissingCompilerError, match="pip install nvidia-cuda-nvrtc"):
        turn(kept)
