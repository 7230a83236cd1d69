"""What the tests of asynchronous copies share: pieces of PTX, and where a tensor copy puts each byte.

In the PTX %r20 is the address of shared memory, %r21 that of the mbarrier BARRIER bytes on; %p1 is false in thread 0.
"""

import itertools

import numpy as np
import pytest
import torch
from assembly import SEEDS, kernel

from ptxkit.launches import launch

BARRIER = 32768
THREADS = 64
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
FILLER = 0xEE  # what shared memory holds before a copy, in every byte


def frame(body, maps=0, **options):
    """Return a kernel as assembly.kernel makes it, with tensor maps map1, map2, ... as its first parameters."""
    text = kernel(PROLOGUE + body, shared=BARRIER + 64, **options)
    params = "".join(f".param .align 64 .b8 map{n}[128], " for n in range(1, maps + 1))
    text = text.replace(".visible .entry k(", f".visible .entry k({params}")
    return text.replace(", )", ")")


def refusal(body):
    """Return the message about an instruction that is not simulated, which names the line."""
    with pytest.raises(ValueError, match="PTX line") as refused:
        launch(frame(body), grid=1, block=32, args=[torch.zeros(8)])
    return str(refused.value)


PROLOGUE = f"""
    mov.u32 %r20, smem;
    add.u32 %r21, %r20, {BARRIER};
    setp.ne.u32 %p1, %r0, 0;
"""


def each_word(name, size, do):
    """Return code that runs `do` with %r30 at 0, 4, 8, ... below size: the CTA's threads take turns."""
    return f"""
    shl.b32 %r30, %r0, 2;
{name}:
    setp.ge.u32 %p3, %r30, {size};
    @%p3 bra {name}_DONE;
    add.u32 %r31, %r20, %r30;
    cvt.u64.u32 %rd21, %r30;
    add.s64 %rd21, %rd1, %rd21;
    {do}
    add.u32 %r30, %r30, {4 * THREADS};
    bra {name};
{name}_DONE:
"""


def fill_shared(size):
    """Return code that fills shared memory with FILLER, which the async proxy may then overwrite."""
    fill = each_word("FILL", size, f"st.shared.u32 [%r31], {FILLER * 0x01010101};")
    return fill + "fence.proxy.async.shared::cta;\nbar.sync 0;\n"


def load_shared(size, name="IN"):
    """Return code that copies the tensor at %rd1 to shared memory, by generic loads and stores."""
    return each_word(name, size, "ld.global.u32 %r32, [%rd21];\n    st.shared.u32 [%r31], %r32;")


def store_shared(size, name="OUT", by_rank=False):
    """Return code that copies shared memory to the tensor at %rd1, by generic loads and stores.

    Where `by_rank` is set, each CTA of a cluster has a row of that size there.
    """
    if by_rank:
        own_row = f"mov.u32 %r43, %cluster_ctarank;\nmul.wide.u32 %rd23, %r43, {size};\nadd.s64 %rd1, %rd1, %rd23;\n"
        return own_row + store_shared(size, name)
    return each_word(name, size, "ld.shared.u32 %r32, [%r31];\n    st.global.u32 [%rd21], %r32;")


def make_barrier(arrivals=1):
    """Return code with which thread 0 makes the mbarrier, and after which every thread may use it."""
    return f"""
    @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r21], {arrivals};
    fence.mbarrier_init.release.cluster;
MADE:
    bar.sync 0;
"""


def expect(size):
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], {size};"


def wait(parity=0, name="WAIT"):
    return f"""
{name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r21], {parity};
    @!%p2 bra {name};
"""


def by_thread_0(body, name="ONE"):
    return f"    @%p1 bra {name};\n    {body}\n{name}:\n"


# ---- tensor copies

# The manual's patterns: which 16-byte piece lies at each place of a line of 128 bytes, line by line.
PATTERNS = {
    0: ["01234567"],
    32: ["01234567", "10325476"],
    64: ["01234567", "10325476", "23016745", "32107654"],
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    "128/32": ["01234567", "23016745", "45670123", "67452301"],
    "128/64": ["01234567", "45670123"],
}
PATTERNS["128/32+8"] = PATTERNS["128/32"]
SPAN = {0: 128, 32: 32, 64: 64, 128: 128, "128/32": 128, "128/32+8": 128, "128/64": 128}
SCHEDULES = [{"schedule": 0}, {"schedule": 0, "early": True}, *({"schedule": s} for s in list(SEEDS)[:3])]


def target_of(swizzle):
    return "sm_100a" if isinstance(swizzle, str) else "sm_90a"


def swizzled(swizzle, offset):
    """Return the place at which the byte of a linear offset lands."""
    line, piece, byte = offset // 128, offset % 128 // 16, offset % 16
    pattern = PATTERNS[swizzle]
    place = pattern[line % len(pattern)].index(str(piece))
    if swizzle == "128/32+8" and line % 2:
        byte ^= 8
    return 128 * line + 16 * place + byte


def tensor(*shape, dtype=torch.uint16):
    """Return a tensor whose elements tell their index; the last dimension is contiguous."""
    count = int(np.prod(shape))
    values = torch.arange(1, count + 1, dtype=torch.int64)
    if dtype.is_floating_point:
        return (values % 251).to(dtype).reshape(shape)
    return (values % 251 if dtype == torch.uint8 else values).to(dtype).reshape(shape)


def bytes_of(x):
    return np.frombuffer(x.contiguous().view(torch.uint8).numpy().tobytes(), dtype=np.uint8)


def image_of(x, m, start, size):
    """Return shared memory after the load of a box of x at `start`, as NumPy computes it."""
    image = np.full(size, FILLER, dtype=np.uint8)
    item = m.itemsize
    data = bytes_of(x).reshape(*x.shape, item) if x.dim() else bytes_of(x)
    for row, index in enumerate(itertools.product(*(range(n) for n in m.steps[:0:-1]))):
        place = [s + i * e for s, i, e in zip(start[:0:-1], index, m.element_strides[:0:-1])]
        for k in range(m.steps[0]):
            where = (*place, start[0] + k)
            inside = all(0 <= c < n for c, n in zip(where, x.shape))
            element = data[where] if inside else np.frombuffer(m.fill_bytes, dtype=np.uint8)
            for b in range(item):
                image[swizzled(m.swizzle, row * m.pitch + k * item + b)] = element[b]
    return image


def loading(m, start, size, target="sm_90a", count=None, after=""):
    """Return a kernel that fills shared memory, loads one box, waits, and writes `size` bytes of it to its tensor."""
    coordinates = ", ".join(map(str, start))
    copy = f"""
    {expect(m.box_bytes if count is None else count)}
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    cp.async.bulk.tensor.{m.rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r20], [%rd20, {{{coordinates}}}], [%r21];
    """
    body = fill_shared(size) + make_barrier() + by_thread_0(copy) + wait() + after + store_shared(size)
    return frame(body, maps=1, target=target)


def load(x, m, start, size=None, **options):
    size = size or int(np.prod(m.steps[1:])) * m.pitch
    out = torch.zeros(size, dtype=torch.uint8)
    kernel_options = {k: options.pop(k) for k in ("target", "count") if k in options}
    run = launch(loading(m, start, size, **kernel_options), grid=1, block=THREADS, args=[m, out], **options)
    return out.numpy(), run


def storing(m, start, size, op="", wait_for="cp.async.bulk.wait_group 0;", fence="fence.proxy.async.shared::cta;",
            target="sm_90a", after=""):
    """Return a kernel that copies its tensor to shared memory and stores one box of it."""
    coordinates = ", ".join(map(str, start))
    verb, op = ("cp.reduce", f".{op}") if op else ("cp", "")
    copy = f"""
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    {verb}.async.bulk.tensor.{m.rank}d.global.shared::cta{op}.tile.bulk_group [%rd20, {{{coordinates}}}], [%r20];
    cp.async.bulk.commit_group;
    {wait_for}
    """
    return frame(load_shared(size) + fence + "\nbar.sync 0;\n" + by_thread_0(copy) + after, maps=1, target=target)


def store(x, m, start, source, **options):
    kernel_options = {k: options.pop(k) for k in ("op", "wait_for", "fence", "target", "after") if k in options}
    ptx = storing(m, start, source.numel(), **kernel_options)
    return launch(ptx, grid=1, block=THREADS, args=[m, source], **options)


def scattered(x, m, start, source, reduce=lambda old, new: new):
    """Return the tensor after the store of a box, as NumPy computes it."""
    result, item = x.clone(), m.itemsize
    data = source.numpy()
    for row, index in enumerate(itertools.product(*(range(n) for n in m.steps[:0:-1]))):
        place = [s + i * e for s, i, e in zip(start[:0:-1], index, m.element_strides[:0:-1])]
        for k in range(m.steps[0]):
            where = (*place, start[0] + k)
            if all(0 <= c < n for c, n in zip(where, x.shape)):
                raw = bytes(data[swizzled(m.swizzle, row * m.pitch + k * item + b)] for b in range(item))
                result[where] = reduce(result[where], torch.frombuffer(bytearray(raw), dtype=x.dtype)[0])
    return result


def noise(size, seed=3):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
