"""ptxkit.library: files in CUDA C++ whose own host code launches their kernels."""

import ctypes
import gc
import shutil
import subprocess
import sys

import pytest
import torch

import ptxkit
from ptxkit import CaptureError
from ptxkit.capturing import memory
from ptxkit.compile.errors import BuildError

pytestmark = [pytest.mark.simulated, pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")]
PROGRAM = """
#include <cstdio>
#include <cuda_runtime.h>
#define CHECK(call) if (cudaError_t e = call; e != cudaSuccess) { printf("%s", cudaGetErrorString(e)); return 1; }

__global__ void add(const float *x, float *y, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + by;
}
template <int N> __global__ void fill(int *x) { x[threadIdx.x] = N; }

extern "C" int shifted(const float *x, float *y, float by, int n) {
    add<<<(n + 31) / 32, 32>>>(x, y, by, n);
    return cudaGetLastError();
}
void doubled(float *x, double by, int n) { add<<<1, n>>>(x, x, static_cast<float>(by), n); }
template <typename T> void filled(T *x) { fill<7><<<1, 32>>>(x); }
template void filled<int>(int *);

int copied(float *to, int n) {                         // through memory that the program allocates, in two streams
    float *a, *b, ms = 0;
    cudaStream_t first, second;
    cudaEvent_t start, stop;
    CHECK(cudaMalloc(&a, n * sizeof *a));
    CHECK(cudaMalloc((void **)&b, n * sizeof *b));
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreateWithFlags(&stop, cudaEventDefault));
    CHECK(cudaMemcpy(a, to, n * sizeof *a, cudaMemcpyHostToDevice));
    CHECK(cudaMemsetAsync(b, 0, n * sizeof *b, second));
    CHECK(cudaEventRecord(start, first));
    add<<<1, n, 0, first>>>(a, b, 1, n);
    CHECK(cudaEventRecord(stop, first));
    CHECK(cudaStreamWaitEvent(second, stop, 0));
    CHECK(cudaMemcpyAsync(to, b, n * sizeof *b, cudaMemcpyDeviceToHost, second));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return 0;
}
enum Order { NOTHING, EVENT, HOST, DEFAULT_STREAM };
int in_two_streams(float *x, float *y, int n, int order, int flags) {
    cudaStream_t first, second;
    cudaEvent_t event;
    CHECK(cudaStreamCreateWithFlags(&first, flags));
    CHECK(cudaStreamCreateWithFlags(&second, flags));
    CHECK(cudaEventCreate(&event));
    add<<<1, n, 0, first>>>(x, y, 1, n);
    CHECK(cudaEventRecord(event, first));
    if (order == EVENT) CHECK(cudaStreamWaitEvent(second, event, 0));
    if (order == HOST) CHECK(cudaEventSynchronize(event));
    if (order == DEFAULT_STREAM) fill<3><<<1, 1>>>((int *)x);
    add<<<1, n, 0, second>>>(y, y, 1, n);
    return 0;
}
int attributes(int which) {
    cudaFuncAttributes found;
    CHECK(cudaFuncGetAttributes(&found, add));
    const int known[] = {found.ptxVersion, found.binaryVersion, found.maxThreadsPerBlock, found.numRegs,
                         found.maxDynamicSharedSizeBytes, int(found.constSizeBytes), found.clusterDimMustBeSet};
    return known[which];
}
int asked() {
    int sms, blocks;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 1024, 0);
    return 100 * sms + blocks;
}
"""
CLUSTERS = """
#include <cooperative_groups.h>
#include <cuda_runtime.h>
namespace cg = cooperative_groups;
__device__ void rank(int *x) { if (!threadIdx.x) x[blockIdx.x] = cg::this_cluster().block_rank(); }
__global__ __cluster_dims__(2) void two(int *x) { rank(x); }
__global__ void some(int *x) { rank(x); }
extern "C" void by_two(int *x) { two<<<4, 32>>>(x); }
extern "C" int by(int n, int *x) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(n), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = 4, config.blockDim = 32, config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, some, x);
}
"""
MAPPED = """
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda/barrier>
__global__ void tile(const __grid_constant__ CUtensorMap map, int *out) {
    __shared__ alignas(128) int box[8][8];
    __shared__ cuda::barrier<cuda::thread_scope_block> bar;
    namespace cde = cuda::device::experimental;
    if (threadIdx.x == 0) { init(&bar, 1); cde::fence_proxy_async_shared_cta(); }
    __syncthreads();
    if (threadIdx.x == 0) {
        cde::cp_async_bulk_tensor_2d_global_to_shared(&box, &map, 8, 8, bar);
        bar.wait(cuda::device::barrier_arrive_tx(bar, 1, sizeof box));
    }
    __syncthreads();
    out[threadIdx.x] = box[threadIdx.x / 8][threadIdx.x % 8];
}
typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                           const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
extern "C" int run(int *x, int *out) {
    void *found;
    cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
    if (how != cudaDriverEntryPointSuccess) return 2;
    CUtensorMap map;
    cuuint64_t size[2] = {16, 16}, stride[1] = {64};
    cuuint32_t box[2] = {8, 8}, step[2] = {1, 1};
    if (((Encode)found)(&map, CU_TENSOR_MAP_DATA_TYPE_INT32, 2, x, size, stride, box, step,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return 1;
    tile<<<1, 64>>>(map, out);
    return 0;
}
"""  # noqa: E501


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Leave few objects: launches that know no arguments look for tensors among all objects, which a long run has many
    of."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def program():
    return ptxkit.library(PROGRAM, arch="sm_80", options=["-std=c++17"])


def test_host_functions_launch_their_kernels(program):
    x, y = torch.arange(40.0), torch.zeros(40)
    with ptxkit.capture(arch="sm_80") as session:
        assert program.shifted(x, y, 2.5, 40) == 0
        program.doubled(y, ctypes.c_double(1), 32)
    assert torch.equal(y[:32], x[:32] + 3.5) and torch.equal(y[32:], x[32:] + 2.5)
    assert len(session.runs) == 2 and not session.findings


OTHER_RUNTIME = "int cudaLaunchKernel() { return 35; } int cudaGetLastError() { return 35; }"
CALLS_IT = """
import ctypes, sys, torch, ptxkit
other, file = sys.argv[1:]
ctypes.CDLL(other, mode=ctypes.RTLD_GLOBAL)
program = ptxkit.library(file, arch="sm_80", options=["-std=c++17"])
with ptxkit.capture(arch="sm_80") as session:
    print(program.shifted(torch.ones(40), torch.zeros(40), 2.5, 40), len(session.runs))
"""


def test_a_program_calls_the_simulator_also_where_a_cuda_runtime_is_loaded_for_all(tmp_path):
    """A torch with CUDA loads its own runtime like that."""
    (tmp_path / "other.c").write_text(OTHER_RUNTIME)
    (tmp_path / "program.cu").write_text(PROGRAM)
    subprocess.run(["cc", "-shared", "-fPIC", "other.c", "-o", "other.so"], cwd=tmp_path, check=True)
    words = [sys.executable, "-c", CALLS_IT, tmp_path / "other.so", tmp_path / "program.cu"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() == ["0", "1"]


def test_findings_have_lines_of_the_file_and_a_remedy(program):
    with ptxkit.capture(arch="sm_80") as session:
        program.shifted(torch.zeros(40), torch.zeros(30), 1.0, 40)
    (found,) = [f for f in session.findings if f.kind == "out-of-bounds"]
    assert "program.cu:8" in str(found) and "let lanes that have no element there skip the access" in str(found)


def test_an_instance_of_a_template_is_called_by_its_plain_name(program):
    x = torch.zeros(32, dtype=torch.int32)
    with ptxkit.capture(arch="sm_80"):
        program.filled(x)
    assert x.unique().tolist() == [7]


def test_a_program_allocates_copies_and_measures(program):
    x = torch.arange(32.0)
    with ptxkit.capture(arch="sm_80") as session:
        assert program.copied(x, 32) == 0
        assert not session.gpu.allocations
    assert torch.equal(x, torch.arange(32.0) + 1)


NOTHING, EVENT, HOST, DEFAULT_STREAM = range(4)
BLOCKING, NON_BLOCKING = 0, 1


@pytest.mark.spread(every=2)
@pytest.mark.parametrize(("order", "flags", "clean"), [
    (NOTHING, NON_BLOCKING, False), (NOTHING, BLOCKING, False), (EVENT, NON_BLOCKING, True), (HOST, BLOCKING, True),
    (DEFAULT_STREAM, BLOCKING, True), (DEFAULT_STREAM, NON_BLOCKING, False),
])
def test_streams_of_a_program_need_an_order(program, order, flags, clean):
    x, y = torch.arange(1.0, 33), torch.zeros(32)
    with ptxkit.capture(arch="sm_80") as session:
        assert program.in_two_streams(x, y, 32, order, flags) == 0
    assert {f.kind for f in session.findings} == (set() if clean else {"race-streams"})


def test_launches_that_know_no_arguments_leave_little_memory_for_the_next(program):
    """Every tensor of the process is what they may touch; what is said of them must not be more such tensors."""
    x, y, kept = torch.arange(1.0, 33), torch.zeros(32), [torch.zeros(1) for _ in range(50)]
    with ptxkit.capture(arch="sm_80") as session:
        before = len(memory.live())
        program.in_two_streams(x, y, 32, EVENT, NON_BLOCKING)
        assert len(session.runs) >= 2 and len(memory.live()) < before + len(kept)


@pytest.mark.parametrize(("sms", "answer"), [(None, 10802), (3, 302)])
def test_host_code_sees_the_chip_of_the_capture(program, sms, answer):
    with ptxkit.capture(arch="sm_80", sms=sms):
        assert program.asked() == answer


@pytest.mark.exhaustive
def test_clusters_are_those_of_the_kernel_or_of_the_launch():
    lib = ptxkit.library(CLUSTERS, arch="sm_90a")
    x = torch.zeros(4, dtype=torch.int32)
    with ptxkit.capture(arch="sm_90a"):
        lib.by_two(x)
        assert x.tolist() == [0, 1, 0, 1]
        assert lib.by(4, x) == 0
        assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.exhaustive
def test_a_tensor_map_is_encoded_by_the_function_that_the_driver_would_give():
    lib = ptxkit.library(MAPPED, arch="sm_90a")
    x, out = torch.arange(256, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with ptxkit.capture(arch="sm_90a") as session:
        assert lib.run(x, out) == 0
    assert torch.equal(out.view(8, 8), x.view(16, 16)[8:, 8:]) and not session.findings


def test_a_function_that_is_not_replaced_is_refused_by_name():
    source = """
    #include <cuda_runtime.h>
    __global__ void k(int *x) { *x = 1; }
    extern "C" int run(int *x) { cudaDeviceSetCacheConfig(cudaFuncCachePreferL1); k<<<1, 1>>>(x); return 3; }
    extern "C" int plain(int *x) { k<<<1, 1>>>(x); return 98; }
    """
    lib = ptxkit.library(source, arch="sm_80")
    x = torch.zeros(1, dtype=torch.int32)
    with ptxkit.capture(arch="sm_80"), pytest.raises(CaptureError, match="called cudaDeviceSetCacheConfig"):
        lib.run(x)
    assert x.item() == 0
    says = "plain was called after the host code had called cudaDeviceSetCacheConfig.*open the library again"
    with ptxkit.capture(arch="sm_80"), pytest.raises(CaptureError, match=says):
        lib.plain(x)                         # its host code may have kept what the refused call left
    again = ptxkit.library(source, arch="sm_80")
    with ptxkit.capture(arch="sm_80"):
        assert again.plain(x) == 98
    assert x.item() == 1


def test_host_code_may_ask_for_the_attributes_of_a_kernel(program):
    with ptxkit.capture(arch="sm_80"):
        assert [program.attributes(n) for n in range(7)] == [80, 80, 1024, 32, 166912, 0, 0]


CUB = """
#include <cub/cub.cuh>
#define RUN(call)                                \\
    void *t = nullptr;                           \\
    size_t n = 0;                                \\
    if (cudaError_t e = call) return e;          \\
    if (cudaError_t e = cudaMalloc(&t, n)) return e; \\
    if (cudaError_t e = call) return e;          \\
    return cudaFree(t)
extern "C" int sum(const int *x, int *y, int m) { RUN(cub::DeviceReduce::Sum(t, n, x, y, m)); }
extern "C" int scan(const int *x, int *y, int m) { RUN(cub::DeviceScan::ExclusiveSum(t, n, x, y, m)); }
extern "C" int sort(const int *x, int *y, int m) { RUN(cub::DeviceRadixSort::SortKeys(t, n, x, y, m)); }
extern "C" int bins(const int *x, int *y, int m) { RUN(cub::DeviceHistogram::HistogramEven(t, n, x, y, 17, -8, 8, m)); }
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("m", [300, 20_000])
def test_algorithms_of_cub_run_with_their_own_host_code(m):
    lib = ptxkit.library(CUB, arch="sm_90a")
    x = torch.randint(-8, 8, (m,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    wanted = {"sum": x.sum(), "scan": x.cumsum(0) - x, "sort": x.sort().values, "bins": torch.bincount(x + 8)}
    with ptxkit.capture(arch="sm_90a") as session:
        for name, result in wanted.items():
            y = torch.zeros(result.numel(), dtype=torch.int32)
            assert getattr(lib, name)(x, y, m) == 0
            assert torch.equal(y, result.int().view(-1)), name
    assert len(session.runs) >= 4 and not session.findings


def test_calls_outside_a_capture_and_unknown_names_are_refused(program):
    with pytest.raises(CaptureError, match="outside a capture"):
        program.shifted(torch.zeros(1), torch.zeros(1), 1.0, 1)
    with pytest.raises(AttributeError, match=r"no functions called nothing; there are .*shifted"):
        program.nothing  # noqa: B018


def test_the_capture_must_stand_in_for_the_arch(program):
    with ptxkit.capture(arch="sm_90a"):
        program.shifted(torch.zeros(32), torch.zeros(32), 1.0, 32)           # sm_80 runs on later chips
    later = ptxkit.library(CLUSTERS, arch="sm_90a")
    with ptxkit.capture(arch="sm_100a"), pytest.raises(CaptureError, match="was built for sm_90a"):
        later.by_two(torch.zeros(4, dtype=torch.int32))


def test_an_error_of_the_compiler_comes_with_its_log():
    with pytest.raises(BuildError, match="expected a"):
        ptxkit.library("__global__ void k( {\n", arch="sm_80")
