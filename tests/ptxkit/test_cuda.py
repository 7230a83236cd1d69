"""ptxkit.run: CUDA C++ from text and from files, through NVRTC and nvcc."""

import re
import shutil

import pytest
import torch

import ptxkit
from ptxkit import cuda
from ptxkit.compile.errors import BuildError

NEEDS_NVCC = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("libnvrtc")]
SCALE = """
#include "by.h"
template <int N> __global__ void scale(float *x, float *out) {
    out[blockIdx.x * N + threadIdx.x] = BY * x[blockIdx.x * N + threadIdx.x];
}
"""
TRIGONOMETRY = 'extern "C" __global__ void k(double *x) { x[threadIdx.x] = sin(x[threadIdx.x]); }'
SHAPES = """
struct Shape { __device__ virtual float area() = 0; };
struct Square : Shape { float a; __device__ Square(float a) : a(a) {} __device__ float area() override { return a * a; } };
struct Line : Shape { __device__ float area() override { return 0; } };
extern "C" __global__ void k(float *out) {
    Square square(threadIdx.x);
    Line line;
    Shape *shape = threadIdx.x & 1 ? static_cast<Shape *>(&square) : &line;
    out[threadIdx.x] = shape->area();
}
"""  # noqa: E501


def run(source, kernel="k", *args, **options):
    return ptxkit.run(source, kernel, grid=1, block=32, args=args, arch="sm_90a", **options)


def test_a_template_in_a_file_finds_its_headers_and_macros(tmp_path):
    (tmp_path / "by.h").write_text("#define BY (FACTOR + 1)\n")
    (tmp_path / "scale.cu").write_text(SCALE)
    x, out = torch.arange(64.0), torch.zeros(64)
    ptxkit.run(tmp_path / "scale.cu", "scale<32>", grid=2, block=32, args=[x, out], arch="sm_80", defines={"FACTOR": 2})
    assert torch.equal(out, 3 * x)


@pytest.mark.parametrize("compiler", ["nvrtc", pytest.param("nvcc", marks=NEEDS_NVCC)])
def test_a_header_that_has_changed_is_compiled_again(compiler, tmp_path):
    source = '#include "a.h"\nextern "C" __global__ void k(int *x) { x[threadIdx.x] = NUMBER; }'
    (tmp_path / "kernel.cu").write_text(source)
    (tmp_path / "a.h").write_text('#include "b.h"\n')
    for number in (5, 6):
        (tmp_path / "b.h").write_text(f"#define NUMBER {number}\n")
        x = torch.zeros(32, dtype=torch.int32)
        run(tmp_path / "kernel.cu", "k", x, compiler=compiler)
        assert x.unique().tolist() == [number]


def test_findings_have_the_lines_of_the_source(tmp_path):
    file = tmp_path / "kernel.cu"
    file.write_text('extern "C" __global__ void k(float *x) {\n    x[threadIdx.x + 1] = 1;\n}\n')
    found = run(str(file), "k", torch.zeros(32))
    assert f"({file}:2)" in str(found.findings[0]) and found.findings[0].kind == "out-of-bounds"


@pytest.mark.parametrize("compiler", ["nvrtc", pytest.param("nvcc", marks=NEEDS_NVCC)])
def test_text_is_called_a_string_and_no_file_of_the_current_folder(compiler):
    source = 'extern "C" __global__ void k(float *x) {\n    x[threadIdx.x + 1] = 1;\n}\n'
    assert "(<string>:2)" in str(run(source, "k", torch.zeros(32), compiler=compiler).findings[0])


def test_a_compilers_error_names_the_line():
    with pytest.raises(BuildError, match=r'<string>\(2\): error: identifier "y" is undefined\n.*x\[0\] = y'):
        run("__global__ void k(float *x) {\n    x[0] = y;\n}", "k", torch.zeros(1))


def test_neither_a_file_nor_text_is_an_error():
    with pytest.raises(FileNotFoundError, match="neither a file nor the text of a kernel"):
        run("missing.cu")


def test_double_precision_trigonometry_calls_its_slow_path():
    x = torch.tensor([1.0, 1e3, 1e9, 1e15] * 8, dtype=torch.float64)
    wanted = x.sin()
    assert not run(TRIGONOMETRY, "k", x).findings
    assert torch.allclose(x, wanted, rtol=1e-15, atol=0)


def test_virtual_functions_are_called_through_their_table():
    out = torch.full((32,), -1.0)
    assert not run(SHAPES, "k", out).findings
    assert out.tolist() == [float(n * n) if n & 1 else 0.0 for n in range(32)]


@NEEDS_NVCC
@pytest.mark.parametrize("options", [(), ("-G",)], ids=["", "with debug information"])
def test_nvcc_takes_host_code_and_mangled_names(options):
    source = SHAPES.replace('extern "C" ', "") + "int main() { k<<<1, 32>>>(nullptr); }"
    out = torch.full((32,), -1.0)
    assert not run(source, "k", out, compiler="nvcc", options=options).findings
    assert out[5] == 25
    with pytest.raises(ValueError, match=re.escape("kernel='other' is none of _Z1kPf")):
        run(source, "other", out, compiler="nvcc", options=options)
    with pytest.raises(BuildError, match=r"nvcc cannot build <string>(.|\n)*identifier"):
        run(source.replace("threadIdx.x & 1", "y"), "k", out, compiler="nvcc")


GRID_BARRIER = """
#include <cooperative_groups.h>
extern "C" __global__ void k(int *x, int *out) {
    x[blockIdx.x * 32 + threadIdx.x] = blockIdx.x + 1;
    cooperative_groups::this_grid().sync();
    out[blockIdx.x * 32 + threadIdx.x] = x[(gridDim.x - 1 - blockIdx.x) * 32 + threadIdx.x];
}
"""


@pytest.mark.skipif(len(cuda.headers()) < 2, reason="needs the headers of a CUDA toolkit")
def test_a_grid_barrier_of_cooperative_groups_orders_all_of_a_grid():
    without = GRID_BARRIER.replace("cooperative_groups::this_grid().sync();", "")
    for source, ordered in ((GRID_BARRIER, True), (without, False)):
        x, out = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
        found = ptxkit.run(source, "k", grid=4, block=32, args=[x, out], arch="sm_90a").findings
        assert ordered == (not found) == (out.view(4, 32)[:, 0].tolist() == [4, 3, 2, 1])


def test_an_unknown_compiler_is_named():
    with pytest.raises(ValueError, match="compiler='clang'; there are 'nvrtc', 'nvcc'"):
        run(TRIGONOMETRY, "k", compiler="clang")


SWAP = """
extern "C" __global__ void k(const int *x, int *out) {
    __shared__ int kept[64];
    kept[threadIdx.x] = x[threadIdx.x];
    SYNC
    out[threadIdx.x] = kept[threadIdx.x ^ 32];
}
"""


def swap(**options):
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    run = ptxkit.run(SWAP, "k", grid=1, block=64, args=[x, out], arch="sm_90a", **options)
    return run, out


@pytest.mark.parametrize("compiler", ["nvrtc", pytest.param("nvcc", marks=NEEDS_NVCC)])
def test_inside_of_a_capture_it_is_a_launch_of_that(compiler):
    with ptxkit.capture(arch="sm_90a", schedule=3) as session:
        run, _ = swap(defines={"SYNC": ""}, compiler=compiler)
        assert session.runs == [run] and {f.kind for f in session.findings} >= {"uninitialised"}
        with pytest.raises(ptxkit.LaunchError, match="schedule beside an open capture, whose options hold"):
            swap(defines={"SYNC": "__syncthreads();"}, schedule=1)


def test_its_synchronisation_has_mutants():
    found = ptxkit.mutants(lambda: swap(defines={"SYNC": "__syncthreads();"})[1], arch="sm_90a")
    assert len(found.outcomes) >= 1 and not found.survivors


def test_macros_that_are_no_mapping_are_named():
    with pytest.raises(TypeError, match=r"defines: macros and their values, such as \{'N': 4\}; found list"):
        swap(defines=["SYNC"])
    with pytest.raises(TypeError, match="defines: macros and their values"):
        ptxkit.library(SWAP, arch="sm_90a", defines=["SYNC"])
