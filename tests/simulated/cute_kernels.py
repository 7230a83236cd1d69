"""Small kernels of the CuTe DSL, one tile each, for the simulator: every step by hand, no pipeline classes.

Operands are A (M, K) and B (N, K), the result is C (M, N); which mode is contiguous follows from the strides.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import SmemAllocator

BF16, F32 = cutlass.BFloat16, cutlass.Float32
THREADS = 128
UMMA_K = 16


def major(x):
    """Of a matrix: is its second mode contiguous?"""
    return OperandMajorMode.K if x.leading_dim == 1 else OperandMajorMode.MN


@cute.jit
def barriers(smem, arrivals: cutlass.Constexpr):
    """One initialised mbarrier for each count of arrivals; every thread may use them afterwards."""
    first = smem.allocate_array(cutlass.Int64, len(arrivals))
    if cute.arch.thread_idx()[0] == 0:
        for i, count in enumerate(arrivals):
            cute.arch.mbarrier_init(first + i, count)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return first


@cute.jit
def whole_tile(smem_tensor, atom, gmem_tensor, rank: cutlass.Constexpr):
    """The two sides of a TMA copy of all of `gmem_tensor`, whose first `rank` modes are the tile."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem_tensor, 0, rank), cute.group_modes(gmem_tensor, 0, rank)
    )


@cute.kernel
def umma_tile(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    waits: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    full = barriers(smem, (1, 1))
    done = full + 1
    base = smem.allocate_array(cutlass.Int32, 1)
    shared_a = smem.allocate_tensor(BF16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    columns = 128
    if warp == 0:
        cute.arch.alloc_tmem(columns, base)
    cute.arch.sync_threads()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, base)

    part = mma.get_slice(0)
    acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(c.shape)).layout)
    if warp == 0:
        to_a, from_a = whole_tile(shared_a, atom_a, part.partition_A(a), 3)
        to_b, from_b = whole_tile(shared_b, atom_b, part.partition_B(b), 3)
        with cute.arch.elect_one():
            size = cute.size_in_bytes(BF16, layout_a) + cute.size_in_bytes(BF16, layout_b)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        cute.copy(atom_a, from_a, to_a[None, 0], tma_bar_ptr=full)
        cute.copy(atom_b, from_b, to_b[None, 0], tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, 0)
        issue(mma, acc, mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b), done)
    if cutlass.const_expr(waits):
        cute.arch.mbarrier_wait(done, 0)
    drain(part, acc, c)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(tmem, columns)


@cute.jit
def issue(mma, acc, a, b, done):
    """Queues the products along K from one warp; `done` completes after the last of them."""
    mma.set(tcgen05.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k, 0], b[None, None, k, 0], acc)
        mma.set(tcgen05.Field.ACCUMULATE, True)
    with cute.arch.elect_one():
        tcgen05.commit(done)


@cute.jit
def drain(part, acc, c):
    """TMEM to registers to global memory; a 64-row accumulator lies in 16 of each warp's 32 lanes."""
    rows, n = cute.size(c, mode=[0]), cute.size(c, mode=[1])
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(n))
    if cutlass.const_expr(rows == 64):
        op = tcgen05.Ld16x256bOp(tcgen05.Repetition(n // 8))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, F32), acc[(None, None), 0, 0])
    mine = copy.get_slice(cute.arch.thread_idx()[0])
    there = mine.partition_D(part.partition_C(c)[(None, None), 0, 0])
    kept = cute.make_rmem_tensor(there.shape, F32)
    cute.copy(copy, mine.partition_S(acc[(None, None), 0, 0]), kept)
    cute.autovec_copy(kept, there)


@cute.jit
def umma(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, waits: cutlass.Constexpr, stream):
    tile = (*c.shape, a.shape[1])
    op = tcgen05.MmaF16BF16Op(
        BF16, F32, (*c.shape, UMMA_K), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, major(a), major(b)
    )
    mma = cute.make_tiled_mma(op)
    layout_a, layout_b = sm100.make_smem_layout_a(mma, tile, BF16, 1), sm100.make_smem_layout_b(mma, tile, BF16, 1)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    one_a, one_b = cute.select(layout_a, mode=[0, 1, 2]), cute.select(layout_b, mode=[0, 1, 2])
    atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, tile, mma)
    atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, tile, mma)
    umma_tile(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b, waits).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
