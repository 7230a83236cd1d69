"""Small kernels of the CuTe DSL, one tile of C each, for the simulator.

Every step is by hand, with mbarriers of its own, except in the two that use the pipelines of the DSL.

Operands are A (M, K) and B (N, K), the result is C (M, N); which mode is contiguous follows from the strides.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

BF16, F32 = cutlass.BFloat16, cutlass.Float32
THREADS = 128
MMA_K = 16
COLUMNS = 256                                 # columns of TMEM: the accumulator, then A
A_AT = 128
STAGES, STEP = 2, 64                          # the pipelines' stages, and elements of k in each


def major(x):
    """Return which mode of a matrix is contiguous: K if it is the second."""
    return OperandMajorMode.K if x.leading_dim == 1 else OperandMajorMode.MN


@cute.jit
def barriers(smem, arrivals: cutlass.Constexpr):
    """Initialise one mbarrier for each count of arrivals; every thread may use them afterwards."""
    first = smem.allocate_array(cutlass.Int64, len(arrivals))
    if cute.arch.thread_idx()[0] == 0:
        for i, count in enumerate(arrivals):
            cute.arch.mbarrier_init(first + i, count)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return first


@cute.jit
def whole_tile(smem_tensor, atom, gmem_tensor, rank: cutlass.Constexpr):
    """Return the two sides of a TMA copy of all of `gmem_tensor`, whose first `rank` modes are the tile."""
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
    pair: cutlass.Constexpr,
    waits: cutlass.Constexpr,
):
    """Run a CTA or a pair: each loads its part of A and B; the even one multiplies, its mbarrier counts all copies."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    full = barriers(smem, (1, 1))
    done = full + 1
    base = smem.allocate_array(cutlass.Int32, 1)
    shared_a = smem.allocate_tensor(BF16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    tmem = allocate_tmem(warp, base, pair)
    sync_cluster(pair)

    part = mma.get_slice(rank)
    acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(c.shape)).layout)
    if warp == 0:
        to_a, from_a = whole_tile(shared_a, atom_a, part.partition_A(a), 3)
        to_b, from_b = whole_tile(shared_b, atom_b, part.partition_B(b), 3)
        if rank == 0:
            with cute.arch.elect_one():
                size = cute.size_in_bytes(BF16, layout_a) + cute.size_in_bytes(BF16, layout_b)
                cute.arch.mbarrier_arrive_and_expect_tx(full, size * (2 if pair else 1))
        cute.copy(atom_a, from_a, to_a[None, 0], tma_bar_ptr=full)
        cute.copy(atom_b, from_b, to_b[None, 0], tma_bar_ptr=full)
        if rank == 0:
            cute.arch.mbarrier_wait(full, 0)
            issue(mma, acc, mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b), done, pair)
    if cutlass.const_expr(waits):
        cute.arch.mbarrier_wait(done, 0)
    drain(part, acc, c)
    sync_cluster(pair)
    free_tmem(warp, tmem, pair)


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


@cute.jit
def sync_cluster(needed: cutlass.Constexpr):
    if cutlass.const_expr(needed):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


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
    """Copy row `thread` of a 128-row A into lane `thread`, two bf16 to a column."""
    words = a.shape[1] // 2
    cells = cute.make_tensor(tmem, cute.make_layout((THREADS, words), stride=(1 << 16, 1)))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(words)), F32), cells)
    mine = copy.get_slice(thread)
    tmem_cells = mine.partition_D(cells)
    row = cute.make_rmem_tensor(mine.partition_S(cute.make_identity_tensor(cells.shape)).shape, F32)
    cute.autovec_copy(a[thread, None], cute.coalesce(cute.recast_tensor(row, BF16)))
    cute.copy(copy, row, tmem_cells)


@cute.jit
def issue(mma, acc, a, b, done, pair: cutlass.Constexpr = False):
    """Queue the products along K from one warp; `done` completes after the last one, for a pair in both CTAs."""
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
    """Copy TMEM to registers to global memory; a 64-row accumulator lies in 16 of each warp's 32 lanes."""
    tile = acc[(None, None), 0, 0]
    columns = cute.size(tile) // THREADS          # where all lanes are in use: a pair's 64 rows lie in two halves
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns & -columns))
    if cutlass.const_expr(c.shape[0] == 64):
        op = tcgen05.Ld16x256bOp(tcgen05.Repetition((columns & -columns) // 4))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, F32), tile)
    mine = copy.get_slice(cute.arch.thread_idx()[0])
    outputs = mine.partition_D(part.partition_C(c)[(None, None), 0, 0])
    kept = cute.make_rmem_tensor(outputs.shape, F32)
    cute.copy(copy, mine.partition_S(tile), kept)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(kept, outputs)


@cute.jit
def umma(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, by: cutlass.Constexpr, waits: cutlass.Constexpr, stream):
    """Compute C = A B^T by tcgen05.mma, `by` "one" CTA, a "pair", or one with A in "tmem"."""
    tile = (*c.shape, a.shape[1])
    pair, from_tmem = by == "pair", by == "tmem"
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    source = tcgen05.OperandSource.TMEM if from_tmem else tcgen05.OperandSource.SMEM
    mma = cute.make_tiled_mma(tcgen05.MmaF16BF16Op(BF16, F32, (*c.shape, MMA_K), group, source, major(a), major(b)))
    layout_a, layout_b = sm100.make_smem_layout_a(mma, tile, BF16, 1), sm100.make_smem_layout_b(mma, tile, BF16, 1)
    load, cluster = cpasync.CopyBulkTensorTileG2SOp(group), (2 if pair else 1, 1, 1)
    one_b = cute.select(layout_b, mode=[0, 1, 2])
    atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, tile, mma, (*cluster, 1))
    if cutlass.const_expr(from_tmem):
        umma_tile_from_tmem(mma, a, atom_b, tma_b, c, layout_a, layout_b, waits).launch(
            grid=cluster, block=(THREADS, 1, 1), stream=stream
        )
    else:
        one_a = cute.select(layout_a, mode=[0, 1, 2])
        atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, tile, mma, (*cluster, 1))
        umma_tile(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b, pair, waits).launch(
            grid=cluster, block=(THREADS, 1, 1), cluster=cluster, stream=stream
        )


def threads(count=1):
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


@cute.kernel
def umma_pipeline(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
):
    """Warp 0 loads, warp 1 multiplies, all four store."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    base = smem.allocate_array(cutlass.Int32, 1)
    shared_a = smem.allocate_tensor(dtype, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(dtype, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    size = (cute.size_in_bytes(dtype, layout_a) + cute.size_in_bytes(dtype, layout_b)) // STAGES
    loads, operands = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES,
        producer_group=threads(),
        consumer_group=threads(),
        tx_count=size,
        barrier_storage=smem.allocate_array(cutlass.Int64, 2 * STAGES),
    ).make_participants()
    products, results = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=threads(),
        consumer_group=threads(THREADS),
        barrier_storage=smem.allocate_array(cutlass.Int64, 2),
    ).make_participants()
    tmem = allocate_tmem(warp, base)

    part = mma.get_slice(0)
    acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(c.shape)).layout)
    tiles = cute.size(a, mode=[1]) // STEP
    if warp == 0:
        steps_a = part.partition_A(cute.local_tile(a, (c.shape[0], STEP), (0, None)))
        steps_b = part.partition_B(cute.local_tile(b, (c.shape[1], STEP), (0, None)))
        to_a, from_a = whole_tile(shared_a, atom_a, steps_a, 3)
        to_b, from_b = whole_tile(shared_b, atom_b, steps_b, 3)
        for tile in cutlass.range(tiles, unroll=1):
            stage = loads.acquire_and_advance()
            cute.copy(atom_a, from_a[None, tile], to_a[None, stage.index], tma_bar_ptr=stage.barrier)
            cute.copy(atom_b, from_b[None, tile], to_b[None, stage.index], tma_bar_ptr=stage.barrier)
        loads.tail()
    if warp == 1:
        held_a, held_b = mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b)
        result = products.acquire_and_advance()
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(tiles, unroll=1):
            stage = operands.wait_and_advance()
            for k in cutlass.range_constexpr(cute.size(held_a, mode=[2])):
                cute.gemm(mma, acc, held_a[None, None, k, stage.index], held_b[None, None, k, stage.index], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            stage.release()
        result.commit()
    result = results.wait_and_advance()
    drain(part, acc, c)
    result.release()
    free_tmem(warp, tmem)


@cute.jit
def umma_pipelined(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
    """Compute C = A B^T, any multiple of STEP along k, by the DSL's pipelines for tcgen05; fp32 counts as tf32."""
    tile = (*c.shape, STEP)
    group, source = tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
    dtype = a.element_type
    if cutlass.const_expr(dtype is F32):
        op = tcgen05.MmaTF32Op((*c.shape, MMA_K // 2), group, source, major(a), major(b))
    else:
        op = tcgen05.MmaF16BF16Op(dtype, F32, (*c.shape, MMA_K), group, source, major(a), major(b))
    mma = cute.make_tiled_mma(op)
    layout_a = sm100.make_smem_layout_a(mma, tile, dtype, STAGES)
    layout_b = sm100.make_smem_layout_b(mma, tile, dtype, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp(group)
    one_a, one_b = cute.select(layout_a, mode=[0, 1, 2]), cute.select(layout_b, mode=[0, 1, 2])
    atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, tile, mma)
    atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, tile, mma)
    umma_pipeline(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b, dtype).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def wgmma_pipeline(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
):
    """Four warps multiply and store, a fifth loads."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    shared_a = smem.allocate_tensor(BF16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = smem.allocate_tensor(BF16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    size = (cute.size_in_bytes(BF16, layout_a) + cute.size_in_bytes(BF16, layout_b)) // STAGES
    loads, operands = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=threads(),
        consumer_group=threads(THREADS // 32),
        tx_count=size,
        barrier_storage=smem.allocate_array(cutlass.Int64, 2 * STAGES),
    ).make_participants()
    tiles = cute.size(a, mode=[1]) // STEP
    if warp == THREADS // 32:
        to_a, from_a = whole_tile(shared_a, atom_a, cute.local_tile(a, (c.shape[0], STEP), (0, None)), 2)
        to_b, from_b = whole_tile(shared_b, atom_b, cute.local_tile(b, (c.shape[1], STEP), (0, None)), 2)
        for tile in cutlass.range(tiles, unroll=1):
            stage = loads.acquire_and_advance()
            cute.copy(atom_a, from_a[None, tile], to_a[None, stage.index], tma_bar_ptr=stage.barrier)
            cute.copy(atom_b, from_b[None, tile], to_b[None, stage.index], tma_bar_ptr=stage.barrier)
        loads.tail()
    else:
        held_c = mma.get_slice(thread).partition_C(c)
        acc = cute.make_rmem_tensor(held_c.shape, F32)
        held_a = mma.make_fragment_A(mma.get_slice(0).partition_A(shared_a))
        held_b = mma.make_fragment_B(mma.get_slice(0).partition_B(shared_b))
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for _ in cutlass.range(tiles, unroll=1):
            stage = operands.wait_and_advance()
            warpgroup.fence()
            for k in cutlass.range_constexpr(STEP // MMA_K):
                cute.gemm(mma, acc, held_a[None, None, k, stage.index], held_b[None, None, k, stage.index], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            stage.release()
        cute.autovec_copy(acc, held_c)


@cute.jit
def wgmma_pipelined(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
    """Compute C = A B^T, any multiple of STEP along k, by the DSL's pipeline for wgmma."""
    m, n = c.shape
    op = warpgroup.MmaF16BF16Op(BF16, F32, (64, n, MMA_K), warpgroup.OperandSource.SMEM, major(a), major(b))
    mma = cute.make_tiled_mma(op)
    layout_a = sm90.make_smem_layout_a(LayoutEnum.from_tensor(a), (m, n, STEP), BF16, STAGES)
    layout_b = sm90.make_smem_layout_b(LayoutEnum.from_tensor(b), (m, n, STEP), BF16, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp()
    atom_a, tma_a = cpasync.make_tiled_tma_atom(load, a, cute.select(layout_a, mode=[0, 1]), (m, STEP))
    atom_b, tma_b = cpasync.make_tiled_tma_atom(load, b, cute.select(layout_b, mode=[0, 1]), (n, STEP))
    wgmma_pipeline(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b).launch(
        grid=(1, 1, 1), block=(THREADS + 32, 1, 1), stream=stream
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
    sync_cluster(ctas > 1)
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
    """Compute C = A B^T by wgmma: 64 rows of C to a CTA, all CTAs in one cluster that shares B."""
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
        element = i * THREADS + thread
        row, column = element // columns, element % columns
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
    """Compute Y = X * (column + 1) + row in a tile whose shared layout is swizzled: TMA in, threads, TMA out."""
    atom = warpgroup.make_smem_layout_atom(kind, x.element_type)
    layout = cute.tile_to_shape(atom, x.shape, order=(0, 1))
    load, tma_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, x.shape)
    store, tma_y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, y.shape)
    through_tile(load, tma_x, store, tma_y, layout, x.element_type, fences).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
