"""Small kernels of the CuTe DSL, one tile each, for the simulator: every step by hand, no pipeline classes.

Operands are A (M, K) and B (N, K), the result is C (M, N); which mode is contiguous follows from the strides.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

BF16, F32 = cutlass.BFloat16, cutlass.Float32
THREADS = 128
MMA_K = 16
COLUMNS = 256                                 # of TMEM: the accumulator, then A
A_AT = 128


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
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    full = barriers(smem, (1, 1))
    done = full + 1
    base = smem.allocate_array(cutlass.Int32, 1)
    shared_a = smem.allocate_tensor(BF16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    tmem = allocate_tmem(warp, base)
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
    free_tmem(warp, tmem)


@cute.kernel
def umma_tile_from_tmem(
    mma: cute.TiledMma,
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
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    tmem = allocate_tmem(warp, base)

    part = mma.get_slice(0)
    acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(c.shape)).layout)
    held_a = mma.make_fragment_A(cute.make_tensor(tmem, layout_a.outer))
    held_a = cute.make_tensor(cute.recast_ptr(tmem + A_AT, dtype=BF16), held_a.layout)
    fill(tmem + A_AT, a, thread)
    if cutlass.const_expr(waits):
        cute.arch.fence_view_async_tmem_store()
    cute.arch.sync_threads()
    if warp == 0:
        to_b, from_b = whole_tile(shared_b, atom_b, part.partition_B(b), 3)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.size_in_bytes(BF16, layout_b))
        cute.copy(atom_b, from_b, to_b[None, 0], tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, 0)
        issue(mma, acc, held_a, mma.make_fragment_B(shared_b), done)
    cute.arch.mbarrier_wait(done, 0)
    drain(part, acc, c)
    free_tmem(warp, tmem)


@cute.kernel
def umma_tile_of_two(
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
    """Each CTA of a pair loads its half of A and of B; the even one multiplies, and its mbarrier counts all copies."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    full = barriers(smem, (1, 1))
    done = full + 1
    base = smem.allocate_array(cutlass.Int32, 1)
    shared_a = smem.allocate_tensor(BF16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    tmem = allocate_tmem(warp, base, True)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    part = mma.get_slice(rank)
    acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(c.shape)).layout)
    if warp == 0:
        to_a, from_a = whole_tile(shared_a, atom_a, part.partition_A(a), 3)
        to_b, from_b = whole_tile(shared_b, atom_b, part.partition_B(b), 3)
        if rank == 0:
            with cute.arch.elect_one():
                size = cute.size_in_bytes(BF16, layout_a) + cute.size_in_bytes(BF16, layout_b)
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * size)
        cute.copy(atom_a, from_a, to_a[None, 0], tma_bar_ptr=full)
        cute.copy(atom_b, from_b, to_b[None, 0], tma_bar_ptr=full)
        if rank == 0:
            cute.arch.mbarrier_wait(full, 0)
            issue(mma, acc, mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b), done, True)
    if cutlass.const_expr(waits):
        cute.arch.mbarrier_wait(done, 0)
    drain(part, acc, c)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    free_tmem(warp, tmem, True)


@cute.jit
def allocate_tmem(warp, base, pair: cutlass.Constexpr = False):
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, base, is_two_cta=pair)
    cute.arch.sync_threads()
    return cute.arch.retrieve_tmem_ptr(F32, 16, base)


@cute.jit
def free_tmem(warp, tmem, pair: cutlass.Constexpr = False):
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
        cute.arch.dealloc_tmem(tmem, COLUMNS, is_two_cta=pair)


@cute.jit
def fill(tmem, a, thread):
    """Row `thread` of a 128-row A into lane `thread`, two bf16 to a column."""
    words = a.shape[1] // 2
    cells = cute.make_tensor(tmem, cute.make_layout((THREADS, words), stride=(1 << 16, 1)))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(words)), F32), cells)
    mine = copy.get_slice(thread)
    there = mine.partition_D(cells)
    row = cute.make_rmem_tensor(mine.partition_S(cute.make_identity_tensor(cells.shape)).shape, F32)
    cute.autovec_copy(a[thread, None], cute.coalesce(cute.recast_tensor(row, BF16)))
    cute.copy(copy, row, there)


@cute.jit
def issue(mma, acc, a, b, done, pair: cutlass.Constexpr = False):
    """Queues the products along K from one warp; `done` completes after the last of them, of a pair in both CTAs."""
    mma.set(tcgen05.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k, 0], b[None, None, k, 0], acc)
        mma.set(tcgen05.Field.ACCUMULATE, True)
    with cute.arch.elect_one():
        if cutlass.const_expr(pair):
            tcgen05.commit(done, cutlass.Int16(3), tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(done)


@cute.jit
def drain(part, acc, c):
    """TMEM to registers to global memory; a 64-row accumulator lies in 16 of each warp's 32 lanes."""
    tile = acc[(None, None), 0, 0]
    columns = cute.size(tile) // THREADS          # where all lanes are in use: a pair's 64 rows lie in two halves
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns & -columns))
    if cutlass.const_expr(c.shape[0] == 64):
        op = tcgen05.Ld16x256bOp(tcgen05.Repetition((columns & -columns) // 4))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, F32), tile)
    mine = copy.get_slice(cute.arch.thread_idx()[0])
    there = mine.partition_D(part.partition_C(c)[(None, None), 0, 0])
    kept = cute.make_rmem_tensor(there.shape, F32)
    cute.copy(copy, mine.partition_S(tile), kept)
    cute.autovec_copy(kept, there)


@cute.jit
def umma(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    from_tmem: cutlass.Constexpr,
    waits: cutlass.Constexpr,
    stream,
):
    """C = A B^T by tcgen05.mma. `waits`: for the products, or for A's way to TMEM."""
    tile = (*c.shape, a.shape[1])
    source = tcgen05.OperandSource.TMEM if from_tmem else tcgen05.OperandSource.SMEM
    op = tcgen05.MmaF16BF16Op(BF16, F32, (*c.shape, MMA_K), tcgen05.CtaGroup.ONE, source, major(a), major(b))
    mma = cute.make_tiled_mma(op)
    layout_a, layout_b = sm100.make_smem_layout_a(mma, tile, BF16, 1), sm100.make_smem_layout_b(mma, tile, BF16, 1)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    one_b = cute.select(layout_b, mode=[0, 1, 2])
    atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, tile, mma)
    if cutlass.const_expr(from_tmem):
        umma_tile_from_tmem(mma, a, atom_b, tma_b, c, layout_a, layout_b, waits).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )
    else:
        one_a = cute.select(layout_a, mode=[0, 1, 2])
        atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, tile, mma)
        umma_tile(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b, waits).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )


@cute.jit
def umma_of_two(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, waits: cutlass.Constexpr, stream):
    """C = A B^T by a pair of CTAs and its tcgen05.mma.cta_group::2."""
    tile = (*c.shape, a.shape[1])
    group, source = tcgen05.CtaGroup.TWO, tcgen05.OperandSource.SMEM
    mma = cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(BF16, F32, (*c.shape, MMA_K), group, source, major(a), major(b))
    )
    layout_a, layout_b = sm100.make_smem_layout_a(mma, tile, BF16, 1), sm100.make_smem_layout_b(mma, tile, BF16, 1)
    load = cpasync.CopyBulkTensorTileG2SOp(group)
    one_a, one_b = cute.select(layout_a, mode=[0, 1, 2]), cute.select(layout_b, mode=[0, 1, 2])
    atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, tile, mma, (2, 1, 1, 1))
    atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, tile, mma, (2, 1, 1, 1))
    umma_tile_of_two(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b, waits).launch(
        grid=(2, 1, 1), block=(THREADS, 1, 1), cluster=(2, 1, 1), stream=stream
    )


@cute.kernel
def wgmma_tile(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    tma_a: cute.Tensor,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    tma_b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    from_registers: cutlass.Constexpr,
    ctas: cutlass.Constexpr,
    waits: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    n, k = tma_b.shape
    smem = SmemAllocator()
    full = barriers(smem, (1,))
    if cutlass.const_expr(ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    shared_a = smem.allocate_tensor(BF16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    size = cute.size_in_bytes(BF16, layout_b)
    if cutlass.const_expr(not from_registers):
        size += cute.size_in_bytes(BF16, layout_a)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        if cutlass.const_expr(not from_registers):
            mine = cute.local_tile(tma_a, (64, k), (rank, 0))
            to_a, from_a = whole_tile(shared_a, atom_a, mine, 2)
            cute.copy(atom_a, from_a, to_a[None, 0], tma_bar_ptr=full)
        # each CTA loads its share of B for all of them
        to_b, from_b = cpasync.tma_partition(
            atom_b, rank, cute.make_layout(ctas), cute.group_modes(shared_b, 0, 2), cute.group_modes(tma_b, 0, 2)
        )
        everyone = {"mcast_mask": cutlass.Int16((1 << ctas) - 1)} if ctas > 1 else {}
        cute.copy(atom_b, from_b, to_b[None, 0], tma_bar_ptr=full, **everyone)

    part = mma.get_slice(thread)
    held_c = part.partition_C(cute.local_tile(c, (64, n), (rank, 0)))
    acc = cute.make_rmem_tensor(held_c.shape, F32)
    held_b = mma.make_fragment_B(mma.get_slice(0).partition_B(shared_b))
    if cutlass.const_expr(from_registers):
        rows = part.partition_A(cute.local_tile(a, (64, k), (rank, 0)))
        held_a = cute.make_rmem_tensor(rows.shape, BF16)
        cute.autovec_copy(rows, held_a)
    else:
        held_a = mma.make_fragment_A(mma.get_slice(0).partition_A(shared_a))[None, None, None, 0]
    cute.arch.mbarrier_wait(full, 0)
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for step in cutlass.range_constexpr(cute.size(held_b, mode=[2])):
        cute.gemm(mma, acc, held_a[None, None, step], held_b[None, None, step, 0], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    if cutlass.const_expr(waits):
        warpgroup.wait_group(0)
    cute.autovec_copy(acc, held_c)


@cute.jit
def wgmma(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    from_registers: cutlass.Constexpr,
    waits: cutlass.Constexpr,
    stream,
):
    """C = A B^T by wgmma: 64 rows of C to a CTA, all CTAs in one cluster that shares B."""
    ctas, n, k = c.shape[0] // 64, c.shape[1], a.shape[1]
    source = warpgroup.OperandSource.RMEM if from_registers else warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(BF16, F32, (64, n, MMA_K), source, major(a), major(b))
    mma = cute.make_tiled_mma(op)
    layout_a = sm90.make_smem_layout_a(LayoutEnum.from_tensor(a), (64, n, k), BF16, 1)
    layout_b = sm90.make_smem_layout_b(LayoutEnum.from_tensor(b), (64, n, k), BF16, 1)
    one_a, one_b = cute.select(layout_a, mode=[0, 1]), cute.select(layout_b, mode=[0, 1])
    load = cpasync.CopyBulkTensorTileG2SOp()
    share = cpasync.CopyBulkTensorTileG2SMulticastOp() if ctas > 1 else load
    atom_a, tma_a = cpasync.make_tiled_tma_atom(load, a, one_a, (64, k))
    atom_b, tma_b = cpasync.make_tiled_tma_atom(share, b, one_b, (n, k), num_multicast=ctas)
    wgmma_tile(mma, atom_a, tma_a, a, atom_b, tma_b, c, layout_a, layout_b, from_registers, ctas, waits).launch(
        grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1), stream=stream
    )


@cute.kernel
def through_tile(
    load: cute.CopyAtom,
    x: cute.Tensor,
    store: cute.CopyAtom,
    y: cute.Tensor,
    layout: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
    fences: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    full = barriers(smem, (1,))
    shared = smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    if warp == 0:
        inside, outside = whole_tile(shared, load, x, 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.size_in_bytes(dtype, layout))
        cute.copy(load, outside, inside, tma_bar_ptr=full)
    cute.arch.mbarrier_wait(full, 0)
    rows, columns = x.shape
    for i in cutlass.range_constexpr(rows * columns // THREADS):
        at = i * THREADS + thread
        row, column = at // columns, at % columns
        shared[row, column] = shared[row, column] * dtype(column + 1) + dtype(row)
    if cutlass.const_expr(fences):
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if warp == 0:
        inside, outside = whole_tile(shared, store, y, 2)
        with cute.arch.elect_one():                # the DSL elects a lane for loads, not for stores
            cute.copy(store, inside, outside)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def through_shared(x: cute.Tensor, y: cute.Tensor, kind: cutlass.Constexpr, fences: cutlass.Constexpr, stream):
    """Y = X * (column + 1) + row, in a tile whose shared layout is one of the swizzles: TMA in, threads, TMA out."""
    atom = warpgroup.make_smem_layout_atom(kind, x.element_type)
    layout = cute.tile_to_shape(atom, x.shape, order=(0, 1))
    load, tma_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, x.shape)
    store, tma_y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, y.shape)
    through_tile(load, tma_x, store, tma_y, layout, x.element_type, fences).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
