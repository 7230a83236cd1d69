"""Products on the tensor cores of Blackwell: operands in shared memory, results in tensor memory.

All operands are bfloat16 in rows of 128 bytes whose 16-byte pieces change places within eight rows (128B swizzle), or,
`across` with 32 elements, in rows of 64 bytes (64B swizzle). An operand is an OperandLayout and where it begins; a
step of a product reads 16 of its K indices.

  along    a row lies along K, as of [kn; qn] (rows, channels): panels of 64 indices one after the other
  across   a row lies along M or N, as of v (tokens, columns): panels of 64 of those, each with all of K
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...common.cute.copies import load_one

ROW = 128                                    # bytes
STEP = 16                                    # indices of K
SWIZZLES, VERSION = {128: 2, 64: 4}, 1       # fields of a descriptor: of the bytes of a row
WARP_LANES = 32 << 16                        # from one warp's lanes of tensor memory to the next warp's
HALF_LANES = 16 << 16                        # to the upper half of a warp's lanes


class OperandLayout(NamedTuple):
    """The layout of one operand."""

    across: bool
    panel: int                               # bytes from 64 elements of a row to the next 64
    row: int = ROW                           # bytes

    @property
    def low(self) -> int:
        """What a descriptor's low word says beside the address; `high` is its high word."""
        return self.panel >> 4 << 16

    @property
    def high(self) -> int:
        return 8 * self.row >> 4 | VERSION << 14 | SWIZZLES[self.row] << 29

    def step(self, number: int) -> int:
        """Return the bytes to a step."""
        if self.across:
            return number * STEP * self.row
        return number * STEP // 64 * self.panel + number * STEP % 64 * 2


def along(rows: int) -> OperandLayout:
    return OperandLayout(False, rows * ROW)


def across(rows: int, elements: int = 64) -> OperandLayout:
    """Return the layout for rows of at least 64 elements, or of 32."""
    row = min(2 * elements, ROW)
    return OperandLayout(True, rows * row, row)


class Product(NamedTuple):
    """D (M, N) float32 (+)= A @ B^T over some steps of K."""

    M: int
    N: int
    A: OperandLayout
    B: OperandLayout
    steps: range
    negated: bool = False                    # A

    def instruction(self) -> int:
        kinds = 1 << 4 | 1 << 7 | 1 << 10                                      # float32, bfloat16, bfloat16
        directions = self.A.across << 15 | self.B.across << 16
        return kinds | self.negated << 13 | directions | self.N >> 3 << 17 | self.M >> 4 << 24


def multiply(product, d, base_desc, a, b, accumulate: bool):
    """One thread issues a product, which follows all that it issued before.  `a` and `b` are bytes from the CTA's
    first.  `base_desc` points to that address / 16, the unit of descriptors, in shared memory: it is reloaded for every
    product, so that ptxas does not keep the sums from turn to turn of a loop, and spill them."""
    multiply_from(load_one(base_desc), product, d, a, b, accumulate)


def multiply_from(base, product, d, a, b, accumulate: bool):
    """Issue a product, likewise, where the first address is known: loaded ahead of a barrier, it holds up no product
    behind that."""
    a, b = base + Uint32(a >> 4), base + Uint32(b >> 4)
    of_A, of_B = product.A, product.B
    # p is true, and q is not.
    text = "{.reg .pred p, q; .reg .b32 d, low; .reg .b64 a, b; mov.b32 d, {$r0}; setp.eq.b32 p|q, 0, 0; "
    for number in range(len(product.steps)):
        step = product.steps[number]
        text += f"add.u32 low, {{$r1}}, {of_A.low + (of_A.step(step) >> 4)}; mov.b64 a, {{low, {of_A.high}}}; "
        text += f"add.u32 low, {{$r2}}, {of_B.low + (of_B.step(step) >> 4)}; mov.b64 b, {{low, {of_B.high}}}; "
        added = "p" if accumulate or number > 0 else "q"
        text += f"tcgen05.mma.cta_group::1.kind::f16 [d], a, b, {product.instruction()}, {added}; "
    cute.arch.inline_ptx(text + "}", read_only_args=[Int32(d), a, b])


def commit(barrier):
    """The thread that issued products requests one arrival for when all of them are done."""
    cute.arch.inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier.toint().to(Uint32)],
    )


def fence_before_thread_sync():
    """Orders this thread's accesses to tensor memory before those of other threads after the next barrier."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync():
    """Orders what other threads did with tensor memory before the last barrier before what this thread does with it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def allocate(to, columns: int):
    """One warp allocates columns; where they begin goes to shared memory.  The CTA allocates no more."""
    cute.arch.inline_ptx(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns}; "
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        read_only_args=[to.toint().to(Uint32)],
    )


def first_column(config, s):
    """Return where the columns that a CTA has allocated begin: at 0 if they are all, else where `s.tmem` says."""
    return load_one(s.tmem).to(Int32) if config.ctas > 1 else 0


def free(columns: int, first=0):
    """The warp that allocated columns frees them; they begin at 0 unless the CTA shares tensor memory with others."""
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
    if isinstance(first, int):
        cute.arch.inline_ptx(f"{{.reg .b32 first; mov.b32 first, {first}; {free} first, {columns};}}")
    else:
        cute.arch.inline_ptx(f"{free} {{$r0}}, {columns};", read_only_args=[Int32(first)])


def load_fragments(address, columns: int, kind=Float32):
    """Load `columns` columns of 16 rows, as fragments of mma.sync: a thread has rows lane / 4 and that + 8, columns
    2 (lane % 4) + {0, 1} of every eight."""
    return load(f"16x256b.x{columns // 8}", address, columns // 2, kind)


def store_fragments(address, values):
    """Store what `load_fragments` loads; this is done after `wait_for_stores`."""
    store(f"16x256b.x{len(values) // 4}", address, values)


def load_row(address, columns: int, kind=Float32):
    """Load `columns` columns of a lane's row."""
    return load(f"32x32b.x{columns}", address, columns, kind)


def store_row(address, values):
    """Store what `load_row` loads; this is done after `wait_for_stores`."""
    store(f"32x32b.x{len(values)}", address, values)


def load_halves(address, columns: int, apart: int, kind=Float32):
    """Load columns of one of 16 rows: lane l has row l % 16, l / 16 times `apart` columns behind the address."""
    return load(f"16x32bx2.x{columns}", address, columns, kind, f", {apart}")


def store_halves(address, apart: int, values):
    """Store what `load_halves` loads; this is done after `wait_for_stores`."""
    store(f"16x32bx2.x{len(values)}", address, values, f", {apart}")


def store(shape: str, address, values, more: str = ""):
    found = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.{shape}.b32 [{{$r0}}]{more}, {{{found}}};",
        read_only_args=[Int32(address), *values],
    )


def wait_for_stores():
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def request_row(address, columns: int, kind=Float32):
    """Request what `load_row` loads: it is there behind `arrived`."""
    return request(f"32x32b.x{columns}", address, columns, kind)


def request_halves(address, columns: int, apart: int, kind=Float32):
    """Request what `load_halves` loads, likewise."""
    return request(f"16x32bx2.x{columns}", address, columns, kind, f", {apart}")


def request(shape: str, address, count: int, kind, more: str = ""):
    to = ", ".join(f"{{$w{i}}}" for i in range(count))
    found = cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.{shape}.b32 {{{to}}}, [{{$r0}}]{more};",
        write_only_types=[kind] * count, read_only_args=[Int32(address)],
    )
    return list(found)


def arrived(requested):
    """Return what was requested, once all of this thread's requests have brought theirs.  The values pass through the
    instruction that waits, so that no use of them comes before it."""
    moves = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i}}};" for i in range(len(requested)))
    return list(cute.arch.inline_ptx(
        f"{{tcgen05.wait::ld.sync.aligned; {moves}}}",
        write_only_types=[type(requested[0])] * len(requested), read_only_args=requested,
    ))


def load(shape: str, address, count: int, kind, more: str = ""):
    to = ", ".join(f"{{$w{i}}}" for i in range(count))
    # redundant: where another load follows before the first use of what this one brings
    found = cute.arch.inline_ptx(
        f"{{tcgen05.ld.sync.aligned.{shape}.b32 {{{to}}}, [{{$r0}}]{more}; tcgen05.wait::ld.sync.aligned;}}",
        write_only_types=[kind] * count, read_only_args=[Int32(address)],
    )
    return list(found)
