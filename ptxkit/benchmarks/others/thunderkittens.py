"""ThunderKittens: its kernels in CUDA C++, launched by their own host code, by ptxkit.library.

Where a file launches a kernel only from code for torch's C++ library, or in a loop over sizes of a benchmark, HOSTS has
a host function of a few lines that launches it once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import ptxkit

from .cases import case, near

FLAGS = (
    *("-std=c++20", "-O3", "--use_fast_math", "--expt-extended-lambda", "--expt-relaxed-constexpr", "-DNDEBUG", "-w"),
    *("-Xcompiler=-Wno-psabi", "-Xcompiler=-fno-strict-aliasing"),
)
GPU = {"sm_90a": "KITTENS_HOPPER", "sm_100a": "KITTENS_BLACKWELL"}


def tk(file, title, arch, host=""):
    """Return a case: a function that gets the functions of a file of kernels/, and says whether results are correct."""

    def add(function):
        @case("ThunderKittens", f"{file}: {title}", arch)
        def captured(folder):
            root = folder / "ThunderKittens"
            source = root / "kernels" / file
            lib = ptxkit.library(
                f'#include "{source.name}"\n{host}\n', arch=arch, options=FLAGS, defines={GPU[arch]: 1},
                include=[source.parent, root / "include", root / "prototype"],
            )
            with ptxkit.capture(arch=arch) as session:
                correct = function(lib)
            return correct, session.runs

        return function

    return add


def _bf16(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).bfloat16()


def gemm(file, arch, n, name="kernel", dtype=torch.bfloat16):
    @tk(file, name, arch)
    def multiplied(lib):
        a, b, c = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype), torch.zeros(n, n, dtype=dtype)
        lib.matmul(a, b, c, n)
        return near((c, a.float() @ b.float()))


gemm("gemm/educational_h100/level_01.cu", "sm_90a", 64, dtype=torch.float32)
gemm("gemm/educational_h100/level_02.cu", "sm_90a", 64)
gemm("gemm/educational_h100/level_03.cu", "sm_90a", 64)
gemm("gemm/educational_h100/level_04.cu", "sm_90a", 128)
gemm("gemm/educational_h100/level_05.cu", "sm_90a", 128)
gemm("gemm/educational_h100/level_06.cu", "sm_90a", 128)
gemm("gemm/educational_h100/level_07.cu", "sm_90a", 128)
gemm("gemm/educational_h100/level_08.cu", "sm_90a", 256)
gemm("gemm/educational_b200/level_04.cu", "sm_100a", 128)
gemm("gemm/educational_b200/level_05.cu", "sm_100a", 256, "matmul_kernel")
gemm("gemm/educational_b200/level_06.cu", "sm_100a", 256, "matmul_kernel")
gemm("gemm/educational_b200/level_07.cu", "sm_100a", 512, "matmul_kernel")
gemm("gemm/educational_b200/level_08.cu", "sm_100a", 512, "matmul_kernel")
gemm("gemm/educational_b200/level_09.cu", "sm_100a", 512, "matmul_kernel")

OF_H100 = """
void once(bf16 *a, bf16 *b, bf16 *c, size_t m, size_t n, size_t k) {
    using t = matmul_template<2, 4, 8>;
    inner_run<t>(a, b, c, m, n, k, dim3(2), dim3(kittens::prototype::detail::NUM_THREADS_v<t>));
}
"""


@tk("gemm/bf16_h100/bf16_h100_gemm.cu", "matmul_template<2, 4, 8>", "sm_90a", OF_H100)
def _(lib):
    a, b, c = _bf16(256, 320), _bf16(320, 512), torch.zeros(256, 512).bfloat16()
    lib.once(a, b, c, 256, 512, 320)
    return near((c, a.float() @ b.float()))


OF_B200 = """
void once(bf16 *a, bf16 *b, bf16 *d, size_t m, size_t n, size_t k) {
    using C = config<256, 256, 64, 4, false, 4, 8>;
    typename globals<C>::a_gl A{a, nullptr, nullptr, m, k};
    typename globals<C>::b_gl B{b, nullptr, nullptr, n, k};
    typename globals<C>::d_gl D{d, nullptr, nullptr, m, n};
    globals<C> g{A, B, D};
    LaunchConfig<true, true> how(g.grid(), g.block(), g.dynamic_shared_memory(), 0, C::CLUSTER_SIZE);
    cudaLaunchKernelEx(how, kernel<C>, g);
}
"""


@tk("gemm/bf16_b200/bf16_b200_gemm.cu", "config<256, 256, 64, 4, false, 4, 8>", "sm_100a", OF_B200)
def _(lib):
    a, b, d = _bf16(512, 128), _bf16(256, 128), torch.zeros(512, 256).bfloat16()
    lib.once(a, b, d, 512, 256, 128)
    return near((d, a.float() @ b.float().mT))


ATTENTION = """
void once(bf16 *q, bf16 *k, bf16 *v, float *l, bf16 *o, unsigned h, unsigned n) {
    using G = fwd_globals<64>;
    G g{typename G::q_gl{q, 1u, h, n, 64u}, typename G::k_gl{k, 1u, h, n, 64u}, typename G::v_gl{v, 1u, h, n, 64u},
        typename G::l_gl{l, 1u, h, 1u, n}, typename G::o_gl{o, 1u, h, n, 64u}, int(n), 1};
    fwd_attend_ker<64, CAUSAL><<<dim3(n / (CONSUMER_WARPGROUPS * kittens::TILE_ROW_DIM<bf16> * 4), h, 1),
        32 * NUM_WORKERS, kittens::MAX_SHARED_MEMORY - 1024>>>(g);
}
"""


def attention(causal):
    name = f"fwd_attend_ker<64, {str(causal).lower()}>"

    @tk("attention/mha_h100/mha_h100.cu", name, "sm_90a", ATTENTION.replace("CAUSAL", str(causal).lower()))
    def attended(lib):
        n = 384
        q, k, v = _bf16(1, 1, n, 64), _bf16(1, 1, n, 64), _bf16(1, 1, n, 64)
        o, sums = torch.zeros_like(q), torch.zeros(1, 1, n)
        lib.once(q, k, v, sums, o, 1, n)
        return near((o, F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)))


attention(False)
attention(True)
