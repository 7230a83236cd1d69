"""Correct kernels, and faults planted in their text: each must be reported, or give a wrong answer.

`python tests/helpers/planted.py` writes ptxkit/docs/data/planted_faults.json.
"""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

import torch

from ptxkit import TensorMap, launch

HERE = pathlib.Path(__file__).parent
FILE = HERE.parents[1] / "ptxkit" / "docs" / "data" / "planted_faults.json"
TILE = HERE.parents[1] / "ptxkit" / "benchmarks" / "kernels" / "tile_sm100.ptx"


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def nan(*shape):
    return torch.full(shape, float("nan"))


def product(a, b):
    return a.double() @ b.double().T


def apart(*tensors, gap=4096):
    """Return copies in one block of memory, with a gap between them: what lies behind one of them is none of the others."""
    block, begin, copies = torch.empty(sum(x.nbytes + gap for x in tensors), dtype=torch.uint8), 0, []
    for x in tensors:
        copies.append(block[begin : begin + x.nbytes].view(x.dtype).view(x.shape).copy_(x))
        begin += x.nbytes + gap
    return copies


def agrees(found, wanted):
    return bool(((found.double() - wanted).abs() <= 1e-4 * wanted.abs().max()).all())


# ---- the kernels: each returns (Run, whether the answer is right)


def tile_sm100(ptx, **options):
    a, b, d = *random(2, 128, 64).unbind(), nan(128, 128)
    maps = [TensorMap(x, box=(64, 128), swizzle=128) for x in (a, b)]
    run = launch(ptx, grid=1, block=128, dynamic_shared=33024, args=[*maps, d], **options)
    return run, agrees(d, product(a, b))


def pipeline_sm100(ptx, tiles=5, **options):
    a, b, d = random(128, 64 * tiles), random(64, 64 * tiles), nan(128, 64)
    maps = [TensorMap(a, box=(64, 128), swizzle=128), TensorMap(b, box=(64, 64), swizzle=128), TensorMap(d, box=(32, 128))]
    run = launch(ptx, grid=1, block=128, dynamic_shared=82000, args=[*maps, tiles], **options)
    return run, agrees(d, product(a, b))


def tmem_sm100(ptx, **options):
    a, b, d = random(128, 16), random(32, 16), nan(128, 32)
    image = b.reshape(4, 8, 2, 8).transpose(1, 2).contiguous()  # core matrices: [8 rows][K chunk][row][8 elements]
    run = launch(ptx, grid=1, block=128, dynamic_shared=1040, args=[a, image, d], **options)
    return run, agrees(d, product(a, b))


def pipeline_sm90(ptx, tiles=5, **options):
    a, b, d = random(64, 64 * tiles), random(64, 64 * tiles).flip(0).contiguous(), nan(64, 64)
    maps = [TensorMap(a, box=(64, 64), swizzle=128), TensorMap(b, box=(64, 64), swizzle=128), TensorMap(d, box=(32, 64))]
    run = launch(ptx, grid=1, block=160, dynamic_shared=49184, args=[*maps, tiles], **options)
    return run, agrees(d, product(a, b))


def pipeline_sm80(ptx, tiles=5, **options):
    a, b = random(64, 32 * tiles, dtype=torch.float16), random(64, 32 * tiles, dtype=torch.float16).flip(0).contiguous()
    (a, b), d = apart(a, b), nan(64, 64)
    run = launch(ptx, grid=1, block=128, args=[a, b, d, tiles], **options)
    return run, agrees(d, product(a, b))


def cluster_sm90(ptx, **options):
    x, out = torch.arange(1024.0).reshape(32, 32), nan(2, 32, 32)
    run = launch(ptx, grid=2, block=32, cluster=2, dynamic_shared=8208, args=[TensorMap(x, box=(32, 32)), out], **options)
    return run, torch.equal(out, torch.stack([x + 2, x + 1]))


def last_block_sm80(ptx, **options):
    x, parts, counter, total = torch.arange(5 * 256, dtype=torch.int32), *(torch.zeros(n, dtype=torch.int32) for n in (5, 1, 1))
    run = launch(ptx, grid=5, block=256, args=[x, parts, counter, total], **options)
    return run, total.item() == x.sum().item()


KERNELS = {
    "tile_sm100": (TILE, tile_sm100),
    **{f.__name__: (HERE / "ptx" / f"{f.__name__}.ptx", f)
       for f in (pipeline_sm100, tmem_sm100, pipeline_sm90, pipeline_sm80, cluster_sm90, last_block_sm80)},
}


class Fault(NamedTuple):
    family: str
    kernel: str
    says: str
    edits: tuple[tuple[str, str], ...]  # (text that occurs once, what stands there instead)


def fault(family, kernel, says, *edits):
    return Fault(family, kernel, says, tuple(zip(edits[::2], edits[1::2])))


def drop(family, kernel, says, text):
    return Fault(family, kernel, says, ((text, ""),))


FAULTS = (
    # mbarriers and TMA loads
    drop("mbarrier", "pipeline_sm100", "the producer does not wait for `empty`", "    @!%p4 bra WAIT_EMPTY;\n"),
    drop("mbarrier", "pipeline_sm100", "the multiplier does not wait for `full`", "    @!%p4 bra WAIT_FULL;\n"),
    fault("mbarrier", "pipeline_sm100", "`full` expects an arrival too many",
          "mbarrier.init.shared::cta.b64 [%r4+8], 1;", "mbarrier.init.shared::cta.b64 [%r4+8], 2;"),
    fault("mbarrier", "pipeline_sm100", "too few bytes expected", "_, [%r25], 24576;", "_, [%r25], 16384;"),
    fault("mbarrier", "pipeline_sm100", "too many bytes expected", "_, [%r25], 24576;", "_, [%r25], 24592;"),
    fault("mbarrier", "pipeline_sm100", "the producer's phase is not flipped", "    setp.eq.u32 %p4, %r21, 0;\n    @%p4 xor.b32 %r22, %r22, 1;\n    "
          "add.u32 %r20, %r20, 1;\n    setp.lt.u32 %p4, %r20, %r8;\n    @%p4 bra LOAD_TILE;",
          "    add.u32 %r20, %r20, 1;\n    setp.lt.u32 %p4, %r20, %r8;\n    @%p4 bra LOAD_TILE;"),
    fault("mbarrier", "pipeline_sm100", "the multiplier's phase is not flipped", "    setp.eq.u32 %p4, %r21, 0;\n    @%p4 xor.b32 %r22, %r22, 1;\n    "
          "add.u32 %r20, %r20, 1;\n    setp.lt.u32 %p4, %r20, %r8;\n    @%p4 bra MULTIPLY_TILE;",
          "    add.u32 %r20, %r20, 1;\n    setp.lt.u32 %p4, %r20, %r8;\n    @%p4 bra MULTIPLY_TILE;"),
    fault("mbarrier", "pipeline_sm100", "the producer starts with the other parity", "mov.u32 %r22, 1;            // parity of empty", "mov.u32 %r22, 0;"),
    fault("mbarrier", "pipeline_sm90", "`empty` expects an arrival too few: a stage is refilled early",
          "mbarrier.init.shared::cta.b64 [%r5], 4;", "mbarrier.init.shared::cta.b64 [%r5], 3;"),
    fault("mbarrier", "pipeline_sm90", "`empty` expects an arrival too many",
          "mbarrier.init.shared::cta.b64 [%r5], 4;", "mbarrier.init.shared::cta.b64 [%r5], 5;"),
    drop("mbarrier", "pipeline_sm90", "nothing orders the initialisation before its use", "    bar.sync 0;\n"),
    drop("mbarrier", "pipeline_sm90", "copies are not told of the initialisation", "    fence.mbarrier_init.release.cluster;\n"),
    fault("mbarrier", "pipeline_sm90", "an mbarrier overlaps the ring", "add.u32 %r4, %r3, 49152;", "add.u32 %r4, %r3, 16384;"),
    # TMA
    fault("TMA", "tile_sm100", "coordinates swapped off the tensor", "[%rd2, {%r11, %r11}]", "[%rd2, {%r1, %r4}]"),
    fault("TMA", "pipeline_sm100", "the box goes 16 bytes too far", "add.u32 %r28, %r27, 16384;\n    shl.b32 %r29", "add.u32 %r28, %r27, 16400;\n    shl.b32 %r29"),
    fault("TMA", "pipeline_sm100", "B is loaded over A", "add.u32 %r28, %r27, 16384;\n    shl.b32 %r29", "add.u32 %r28, %r27, 8192;\n    shl.b32 %r29"),
    fault("TMA", "pipeline_sm100", "the ring's stage is one row short", "mad.lo.u32 %r27, %r21, 24576, %r3;\n    add.u32 %r28, %r27, 16384;\n    shl.b32",
          "mad.lo.u32 %r27, %r21, 23552, %r3;\n    add.u32 %r28, %r27, 16384;\n    shl.b32"),
    drop("TMA", "pipeline_sm100", "no fence.proxy.async before the store", "    fence.proxy.async.shared::cta;\n"),
    drop("TMA", "pipeline_sm90", "no fence.proxy.async before the store", "    fence.proxy.async.shared::cta;\n"),
    drop("TMA", "pipeline_sm90", "no barrier before the store", "    bar.sync 1, 128;\n"),
    drop("TMA", "pipeline_sm100", "the fence after the barrier in one thread, none in the writers", "    fence.proxy.async.shared::cta;\n    bar.sync 1, 128;\n"),
    fault("TMA", "pipeline_sm100", "the second box of D is stored from the first", "add.u32 %r33, %r3, 65536;", "add.u32 %r33, %r3, 49152;"),
    drop("TMA", "pipeline_sm90", "no wait for the store before the CTA ends", "    cp.async.bulk.wait_group.read 0;\n"),
    drop("TMA", "pipeline_sm100", "the store is not committed", "    cp.async.bulk.commit_group;\n"),
    # cluster
    drop("cluster", "cluster_sm90", "no wait for the tile", "    @!%p3 bra WAIT_TILE;\n"),
    drop("cluster", "cluster_sm90", "no wait for the other CTA", "    @!%p3 bra WAIT_GOT;\n"),
    drop("cluster", "cluster_sm90", "the other CTA is not told of the initialisation", "    fence.mbarrier_init.release.cluster;\n"),
    fault("cluster", "cluster_sm90", "the multicast misses a CTA", "mov.b16 %h1, 3;", "mov.b16 %h1, 1;"),
    fault("cluster", "cluster_sm90", "a multicast to a CTA that does not exist", "mov.b16 %h1, 3;", "mov.b16 %h1, 7;"),
    fault("cluster", "cluster_sm90", "the arrival goes to the CTA's own mbarrier", "shared::cluster.b64 _, [%r8];", "shared::cluster.b64 _, [%r5];"),
    fault("cluster", "cluster_sm90", "the arrival is relaxed", "mbarrier.arrive.release.cluster", "mbarrier.arrive.relaxed.cluster"),
    fault("cluster", "cluster_sm90", "the wait is relaxed", "mbarrier.try_wait.parity.acquire.cluster", "mbarrier.try_wait.parity.relaxed.cluster"),
    fault("cluster", "cluster_sm90", "no cluster barrier after the initialisation",
          "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n    or.b32", "    or.b32"),
    fault("cluster", "cluster_sm90", "the result overwrites the tile", "st.shared::cluster.f32 [%r15+4096]", "st.shared::cluster.f32 [%r15]"),
    # wgmma
    drop("wgmma", "pipeline_sm90", "no wgmma.fence before the first product", "    wgmma.fence.sync.aligned;\n"),
    drop("wgmma", "pipeline_sm90", "no wait before the stage is given back", "    wgmma.wait_group.sync.aligned 0;\n"),
    fault("wgmma", "pipeline_sm90", "the wait lets one group run on", "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
    fault("wgmma", "pipeline_sm90", "the wrong swizzle in A's descriptor", "or.b64 %rd5, %rd5, 0x4000004000010000;", "or.b64 %rd5, %rd5, 0x8000004000010000;"),
    fault("wgmma", "pipeline_sm90", "the wrong stride in B's descriptor", "or.b64 %rd6, %rd6, 0x4000004000010000;", "or.b64 %rd6, %rd6, 0x4000002000010000;"),
    fault("wgmma", "pipeline_sm90", "the first product accumulates", "setp.ne.u32 %p5, %r1, %r1;", "setp.eq.u32 %p5, %r1, %r1;"),
    fault("wgmma", "pipeline_sm90", "B taken as MN-major", "%p5, 1, 1, 0, 0;", "%p5, 1, 1, 0, 1;"),
    # tcgen05 and tensor memory
    drop("tcgen05", "tile_sm100", "no wait for the product", "    @!%p3 bra WAIT_MULTIPLIED;\n"),
    drop("tcgen05", "tile_sm100", "no wait for the operands", "    @!%p3 bra WAIT_LOADED;\n"),
    drop("tcgen05", "tile_sm100", "the product is never committed", "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];\n"),
    fault("tcgen05", "tile_sm100", "the first step accumulates", "setp.ne.u32 %p3, %r1, %r1;", "setp.eq.u32 %p3, %r1, %r1;"),
    fault("tcgen05", "tile_sm100", "the wrong swizzle in A's descriptor", "or.b64 %rd5, %rd5, 0x4000404000010000;", "or.b64 %rd5, %rd5, 0x8000404000010000;"),
    fault("tcgen05", "tile_sm100", "the wrong stride in B's descriptor", "or.b64 %rd6, %rd6, 0x4000404000010000;", "or.b64 %rd6, %rd6, 0x4000402000010000;"),
    fault("tcgen05", "tile_sm100", "an invalid swizzle code", "or.b64 %rd5, %rd5, 0x4000404000010000;", "or.b64 %rd5, %rd5, 0x6000404000010000;"),
    fault("tcgen05", "tile_sm100", "N in the instruction's descriptor is half", "mov.b32 %r14, 0x8200490;", "mov.b32 %r14, 0x8100490;"),
    fault("tcgen05", "tile_sm100", "an M that does not exist", "mov.b32 %r14, 0x8200490;", "mov.b32 %r14, 0x6200490;"),
    drop("tcgen05", "pipeline_sm100", "a stage is given back before the product has read it",
         "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r26];\n    xor.b32 %r21, %r21, 1;\n    "
         "setp.eq.u32 %p4, %r21, 0;\n    @%p4 xor.b32 %r22, %r22, 1;\n    add.u32 %r20, %r20, 1;\n    setp.lt.u32 %p4, %r20, %r8;\n    @%p4 bra MULTIPLY_TILE;\n"),
    fault("tcgen05", "pipeline_sm100", "an arrival in the commit's place", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r26];",
          "mbarrier.arrive.shared::cta.b64 _, [%r26];"),
    drop("tcgen05", "tmem_sm100", "no fence.proxy.async after B is written", "    fence.proxy.async.shared::cta;\n"),
    drop("tmem", "tmem_sm100", "no wait::st before A is read", "    tcgen05.wait::st.sync.aligned;\n"),
    fault("tmem", "tmem_sm100", "A is written a column off", "[%r11+32], {%v0, %v1, %v2, %v3, %v4, %v5, %v6, %v7};", "[%r11+33], {%v0, %v1, %v2, %v3, %v4, %v5, %v6, %v7};"),
    fault("tmem", "tmem_sm100", "a warp reads another's lanes", "shl.b32 %r11, %r2, 21;\n    add.u32 %r11, %r11, %r10;", "xor.b32 %r11, %r2, 2;\n    shl.b32 %r11, %r11, 21;\n    add.u32 %r11, %r11, %r10;"),
    fault("tmem", "tmem_sm100", "a lane off", "shl.b32 %r11, %r2, 21;\n    add.u32", "shl.b32 %r11, %r2, 21;\n    add.u32 %r11, %r11, 65536;\n    add.u32"),
    fault("tmem", "tmem_sm100", "too few columns allocated", "shared::cta.b32 [%r3+1032], 64;", "shared::cta.b32 [%r3+1032], 32;",
          "dealloc.cta_group::1.sync.aligned.b32 %r10, 64;", "dealloc.cta_group::1.sync.aligned.b32 %r10, 32;"),
    drop("tmem", "tmem_sm100", "never given back", "    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;\n"),
    fault("tmem", "tile_sm100", "given back while others may still read it", "    bar.sync 0;\n    @%p2 bra END;\n", "    @%p2 bra END;\n"),
    drop("tmem", "tile_sm100", "given back while loads may still run", "    tcgen05.wait::ld.sync.aligned;\n"),
    # tcgen05.fence
    fault("tcgen05.fence", "pipeline_sm100", "none after the allocation", "ALLOCATED:\n    bar.sync 0;\n    tcgen05.fence::after_thread_sync;\n", "ALLOCATED:\n    bar.sync 0;\n"),
    fault("tcgen05.fence", "tile_sm100", "none after the wait for the product", "bra WAIT_MULTIPLIED;\n    tcgen05.fence::after_thread_sync;\n", "bra WAIT_MULTIPLIED;\n"),
    fault("tcgen05.fence", "tmem_sm100", "none between the stores and the barrier", "    fence.proxy.async.shared::cta;\n    tcgen05.fence::before_thread_sync;\n", "    fence.proxy.async.shared::cta;\n"),
    fault("tcgen05.fence", "tmem_sm100", "none between the barrier and the product", "    tcgen05.fence::after_thread_sync;\n\n    @%p1 bra MULTIPLIED;\n", "    @%p1 bra MULTIPLIED;\n"),
    fault("tcgen05.fence", "pipeline_sm100", "none before tensor memory is given back", "STORED:\n    tcgen05.fence::before_thread_sync;\n", "STORED:\n"),
    drop("tmem", "tmem_sm100", "never allocated", "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+1032], 64;\n"),
    # cp.async, ldmatrix, mma.sync
    drop("cp.async", "pipeline_sm80", "no wait for the copies", "    cp.async.wait_group 1;\n"),
    fault("cp.async", "pipeline_sm80", "the wait lets one copy too many run on", "cp.async.wait_group 1;", "cp.async.wait_group 2;"),
    drop("cp.async", "pipeline_sm80", "no barrier after the wait", "    bar.sync 0;\n"),
    drop("cp.async", "pipeline_sm80", "no barrier before the stage is refilled", "    bar.sync 1;\n"),
    fault("cp.async", "pipeline_sm80", "rows one past the end", "shr.u32 %r12, %r1, 1;", "shr.u32 %r12, %r1, 1;\n    add.u32 %r12, %r12, 1;"),
    fault("cp.async", "pipeline_sm80", "half of A is not copied", "cp.async.cg.shared.global [%r15+16], [%rd1+16], 16;", "cp.async.cg.shared.global [%r15+16], [%rd1+16], 16, 8;"),
    fault("mma.sync", "pipeline_sm80", "ldmatrix with a row pitch of 72", "mad.lo.u32 %r18, %r16, 80, %r17;", "mad.lo.u32 %r18, %r16, 72, %r17;"),
    fault("mma.sync", "pipeline_sm80", "B transposed by ldmatrix", "x2.shared.b16 {%r34, %r35}, [%r28+640];", "x2.trans.shared.b16 {%r34, %r35}, [%r28+640];"),
    fault("mma.sync", "pipeline_sm80", "A's registers in the order of tf32", "{%f0, %f1, %f2, %f3}, {%r30, %r31, %r32, %r33}", "{%f0, %f1, %f2, %f3}, {%r30, %r32, %r31, %r33}"),
    # atomics, fences, shuffles
    fault("memory", "last_block_sm80", "the fence before the counter is missing", "    st.global.u32 [%rd6], %r13;\n    fence.acq_rel.gpu;\n", "    st.global.u32 [%rd6], %r13;\n"),
    fault("memory", "last_block_sm80", "the fence after the counter is missing", "1;\n    fence.acq_rel.gpu;\n", "1;\n"),
    fault("memory", "last_block_sm80", "no barrier between the warps' sums", "    bar.sync 0;\n    setp.ne.u32 %p2, %r1, 0;\n", "    setp.ne.u32 %p2, %r1, 0;\n"),
    fault("memory", "last_block_sm80", "one warp's sum is left out", "setp.lt.u32 %p3, %r14, 32;", "setp.lt.u32 %p3, %r14, 28;"),
    fault("memory", "last_block_sm80", "one part past the end", "setp.lt.u32 %p5, %r21, %r3;", "setp.le.u32 %p5, %r21, %r3;"),
    fault("memory", "last_block_sm80", "a plain increment in the atomic's place", "atom.relaxed.gpu.global.add.u32 %r17, [%rd3], 1;",
          "ld.global.u32 %r17, [%rd3];\n    add.u32 %r19, %r17, 1;\n    st.global.u32 [%rd3], %r19;"),
    fault("memory", "last_block_sm80", "a shuffle within half the lanes", "%r10, 16, 31, -1;", "%r10, 16, 31, 0xffff;"),
)


def source(name):
    return KERNELS[name][0].read_text()


def edited(text, edits, file):
    """Return the text of a file with each edit's old text, which stands there once, replaced by the new one."""
    for old, new in edits:
        times = text.count(old)
        assert times == 1, f"{old!r} stands {times} times in {file}"
        text = text.replace(old, new)
    return text


def planted(fault):
    return edited(source(fault.kernel), fault.edits, fault.kernel)


def verdict(fault, **options):
    """Return what became of a fault: the kinds of findings, "wrong answer", or "" if it went unnoticed."""
    run, right = KERNELS[fault.kernel][1](planted(fault), strict=True, **options)
    reported = ", ".join(sorted({f.kind for f in run.findings}))
    return reported or ("" if right else "wrong answer")


def table():
    return [[f.family, f.kernel, f.says, verdict(f) or "NOT NOTICED"] for f in FAULTS]


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, table())) + "\n]\n")
