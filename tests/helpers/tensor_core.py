"""A kernel around tcgen05 instructions, and what they should do, computed in Python from the layouts of the PTX manual.

Each CTA of 128 threads copies an image to its shared memory, fills its tensor memory from `cells`, lets thread 0 of the
first CTA issue what the test gives, waits for the commit, and hands back all of its tensor memory.
"""

import assembly
import pytest
import torch
from assembly import SEEDS

from ptxkit.launches import launch

SMEM = 0x400  # where a kernel's shared memory starts; the image lies 1 KiB further
IMAGE = SMEM + 1024
A_AT, B_AT = 0x1000, 0x5000  # where the tests put their operands
SCHEDULES = [{}, {"early": True}, *({"schedule": s} for s in SEEDS)]
UNDER_ANY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
BARRIER = "smem+16"
REGISTERS = """
    .reg .pred %p<16>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b32 %x<128>; .reg .b64 %rd<32>;
"""
WAIT = f"""
waiting:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p5, [{BARRIER}], 0;
    @!%p5 bra waiting;
"""
# Thread 0 multiplies and may tell warp 1 through a barrier; thread 32 adds to the same D and commits.
TWO_ISSUERS = """
    setp.eq.u32 %p7, %r0, 32;
    @!%p3 bra first;
    {one}
first:
    {between}
    @!%p7 bra issued;
    {two}
"""
FENCE = "fence.proxy.async.shared::cta;"
STORED, LOADED = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"


def commit(group=1):
    """Return PTX that tells the barrier of every CTA of the group."""
    if group == 1:
        return f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{BARRIER}];"
    return f"""
    mov.b16 %h1, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{BARRIER}], %h1;"""


def vector(first, count):
    return assembly.vector("x", count, first)


def _rows(columns, verb):
    """Return PTX that moves this thread's lane between global memory and registers, 32 columns at a time."""
    lines, registers = [], vector(0, 32)
    for c in range(0, columns, 32):
        quads = [(vector(n, 4), 4 * (c + n)) for n in range(0, 32, 4)]
        lines.append(f"add.u32 %r10, %r9, {c};")
        if verb == "st":
            lines += [f"ld.global.v4.b32 {quad}, [%rd6+{offset}];" for quad, offset in quads]
            lines.append(f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r10], {registers};")
        else:
            lines += [f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers}, [%r10];", LOADED]
            lines += [f"st.global.v4.b32 [%rd7+{offset}], {quad};" for quad, offset in quads]
    return "\n    ".join(lines)


def source(issue, columns, image_bytes, group=1, ctas=1, **parts):
    """Return the PTX. `parts` replaces steps: target, alloc, fence, stored, sync, commit, wait, load, end."""
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if ctas > 1 else "bar.sync 0;"
    step = {
        "target": "sm_100a",
        "alloc": f"@%p1 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [smem], {columns};",
        "fence": FENCE,
        "stored": STORED,
        "sync": sync,
        "commit": commit(group),
        "wait": WAIT,
        "load": _rows(columns, "ld"),
        "end": f"""
    {sync}
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
    @%p1 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r8, {columns};""",
    } | parts
    return f"""
.version 8.8
.target {step["target"]}
.address_size 64
.visible .entry k(.param .u64 image, .param .u64 cells, .param .u64 out)
{{
    {REGISTERS.strip()}
    .shared .align 1024 .b8 smem[{1024 + max(image_bytes, 16)}];
    ld.param.u64 %rd1, [image];
    ld.param.u64 %rd2, [cells];
    ld.param.u64 %rd3, [out];
    mov.u32 %r0, %tid.x;
    mov.u32 %r4, %ctaid.x;
    mov.u32 %r1, smem;
    shr.u32 %r2, %r0, 5;
    setp.eq.u32 %p1, %r2, 0;
    setp.eq.u32 %p2, %r0, 0;
    or.b32 %r5, %r0, %r4;
    setp.eq.u32 %p3, %r5, 0;
    {step["alloc"]}
    @%p2 mbarrier.init.shared::cta.b64 [{BARRIER}], 1;
    fence.mbarrier_init.release.cluster;
    mul.lo.u32 %r5, %r4, {image_bytes};
    cvt.u64.u32 %rd4, %r5;
    add.s64 %rd4, %rd1, %rd4;
    shl.b32 %r6, %r0, 4;
copy:
    setp.ge.u32 %p4, %r6, {image_bytes};
    @%p4 bra copied;
    cvt.u64.u32 %rd5, %r6;
    add.s64 %rd5, %rd4, %rd5;
    ld.global.v4.b32 {vector(0, 4)}, [%rd5];
    add.u32 %r7, %r1, %r6;
    st.shared.v4.b32 [%r7+1024], {vector(0, 4)};
    add.u32 %r6, %r6, 2048;
    bra copy;
copied:
    {step["fence"]}
    {sync}
    ld.shared.u32 %r8, [smem];
    shl.b32 %r5, %r2, 21;
    add.u32 %r9, %r8, %r5;
    mad.lo.u32 %r5, %r4, 128, %r0;
    mul.wide.u32 %rd5, %r5, {4 * columns};
    add.s64 %rd6, %rd2, %rd5;
    add.s64 %rd7, %rd3, %rd5;
    {_rows(columns, "st")}
    {step["stored"]}
    {step["sync"]}
    @!%p3 bra issued;
    {issue}
    {step["commit"]}
issued:
    {step["wait"]}
    {step["load"]}
    {step["end"]}
    ret;
}}
"""


def run(issue, *, image=None, cells=None, columns=64, group=1, schedule=0, early=False, strict=True, **parts):
    """Return (cells afterwards [cta][lane][column], int32; the Run). Tensor memory holds `cells` or a pattern first."""
    image = torch.zeros(group, 16, dtype=torch.uint8) if image is None else image.reshape(group, -1).contiguous()
    cells = pattern(group, columns) if cells is None else cells.reshape(group, 128, columns).contiguous()
    out = torch.zeros_like(cells)
    ptx = source(issue, columns, image.shape[1], group, group, **parts)
    args = [image, cells, out]
    result = launch(ptx, grid=group, block=128, cluster=group, args=args, schedule=schedule, early=early)
    if strict:
        assert not result.findings, "\n".join(map(str, result.findings))
    return out, result


def pattern(ctas, columns):
    """Return cells that tell where they are: lane << 16 | column."""
    c, lane, column = torch.meshgrid(torch.arange(ctas), torch.arange(128), torch.arange(columns), indexing="ij")
    return (0x20000000 + (c << 24) + (lane << 16) + column).to(torch.int32)


# ---- number formats


def _table(exponent_bits, mantissa_bits, bias):
    """Return all values of a small format without infinities, by their bits."""
    values = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        mantissa, exponent = code & ((1 << mantissa_bits) - 1), code >> mantissa_bits & ((1 << exponent_bits) - 1)
        value = (mantissa / (1 << mantissa_bits) + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        values.append(-value if code >> (exponent_bits + mantissa_bits) else value)
    return torch.tensor(values, dtype=torch.float64)


# name -> (kind, code in idesc, bytes in shared memory, torch dtype or table of values)
TYPES = {
    "f16": ("f16", 0, 2, torch.float16),
    "bf16": ("f16", 1, 2, torch.bfloat16),
    "tf32": ("tf32", 2, 4, torch.float32),
    "e4m3": ("f8f6f4", 0, 1, torch.float8_e4m3fn),
    "e5m2": ("f8f6f4", 1, 1, torch.float8_e5m2),
    "e2m3": ("f8f6f4", 3, 1, _table(2, 3, 1)),
    "e3m2": ("f8f6f4", 4, 1, _table(3, 2, 3)),
    "e2m1": ("f8f6f4", 5, 1, _table(2, 1, 1)),
    "u8": ("i8", 0, 1, torch.uint8),
    "s8": ("i8", 1, 1, torch.int8),
}
SUB_BYTE = {"e2m3": 6, "e3m2": 6, "e2m1": 4}
D_TYPES = {"f16": 0, "f32": 1, "s32": 2}


def depth(name):
    """Return K of one mma."""
    return 32 // TYPES[name][2]


def values(name, rows, seed=0, exact=True):
    """Return [rows][K] values of a type, in float64; `exact` ones are small: sums of their products are exact."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows, depth(name))
    how = TYPES[name][3]
    if name in SUB_BYTE:
        return how[torch.randint(0, len(how), shape, generator=random)]
    if not how.is_floating_point:
        low, high = (0, 256) if name == "u8" else (-128, 128)
        return torch.randint(low, high, shape, generator=random).double()
    if exact:
        return torch.randint(-8, 9, shape, generator=random).double()
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    if name == "tf32":
        return (x.float().view(torch.int32) & -8192).view(torch.float32).double()
    return x.to(how).double()


def codes(name, x):
    """Return the bits of values, as int64."""
    how = TYPES[name][3]
    if isinstance(how, torch.Tensor):
        return (x[..., None] == how).double().argmax(-1)
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[TYPES[name][2]]
    return x.to(how).view(width).to(torch.int64)


# ---- descriptors and layouts in shared memory


SWIZZLES = {"none": 0, "128B/32B": 1, "128B": 2, "64B": 4, "32B": 6}
WIDTHS = {"none": 0, "128B/32B": 128, "128B": 128, "64B": 64, "32B": 32}
# address bits from 7 on are masked, shifted left, and added without carry
XORS = {"none": (0, 0), "128B/32B": (3, 5), "128B": (7, 4), "64B": (3, 4), "32B": (1, 4)}


def descriptor(start, lbo, sbo, swizzle):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | SWIZZLES[swizzle] << 61


IDESC_FLAGS = {"saturate": 3, "negate_a": 13, "negate_b": 14, "transpose_a": 15, "transpose_b": 16}


def idesc(a, b, m, n, d="f32", **flags):
    fields = D_TYPES[d] << 4 | TYPES[a][1] << 7 | TYPES[b][1] << 10 | n >> 3 << 17 | m >> 4 << 24
    return fields | sum(int(on) << IDESC_FLAGS[flag] for flag, on in flags.items())


def byte_address(mn, k, size, start, lbo, sbo, swizzle, mn_major):
    """Return where element (mn, k) lies in shared memory."""
    width = WIDTHS[swizzle]
    if mn_major:
        x = mn * size
        if swizzle == "none":
            off = x // 16 * sbo + x % 16 + k % 8 * 16 + k // 8 * lbo
        else:
            rows = 4 if swizzle == "128B/32B" else 8
            off = x // width * lbo + x % width + k % rows * width + k // rows * sbo
    elif swizzle == "none":
        off = mn // 8 * sbo + mn % 8 * 16 + k * size // 16 * lbo + k * size % 16
    else:
        off = mn // 8 * sbo + mn % 8 * width + k * size
    mask, shift = XORS[swizzle]
    address = start + off
    return address ^ (address >> 7 & mask) << shift


class Operand:
    """A matrix [rows][K] of one type in shared memory: its descriptor, and how it lies in an image."""

    def __init__(self, name, x, start, swizzle="none", mn_major=False, lbo=None, sbo=None):
        self.name, self.x, self.start, self.swizzle, self.mn_major = name, x, start, swizzle, mn_major
        size, rows, k = TYPES[name][2], x.shape[0], x.shape[1]
        width = WIDTHS[swizzle]
        if not mn_major:
            default = (128, 256) if swizzle == "none" else (16, 8 * width)
        elif swizzle == "none":
            default = (128 * -(-rows * size // 16), 128)
        else:
            panel = k * width
            default = (panel, (4 if swizzle == "128B/32B" else 8) * width)
        self.lbo, self.sbo = lbo or default[0], sbo or default[1]
        self.descriptor = descriptor(start, self.lbo, self.sbo, swizzle)

    def address(self, mn, k, size):
        return byte_address(mn, k, size, self.start, self.lbo, self.sbo, self.swizzle, self.mn_major)

    def place(self, image):
        """Write the matrix into an image (bytes of shared memory from IMAGE on)."""
        size, bits = TYPES[self.name][2], SUB_BYTE.get(self.name)
        for mn, row in enumerate(codes(self.name, self.x).tolist()):
            if bits:  # groups of 16 elements, packed, at the start of 16 bytes
                for k in range(0, len(row), 16):
                    packed = sum(code << bits * n for n, code in enumerate(row[k : k + 16]))
                    put(image, self.address(mn, k, 1), packed, 2 * bits)
            else:
                for k, code in enumerate(row):
                    put(image, self.address(mn, k, size), code, size)


def put(image, address, code, size):
    offset = address - IMAGE
    image[offset : offset + size] = torch.tensor(list(code.to_bytes(size, "little")), dtype=torch.uint8)


def operands(name, m, n, seed=1, swizzle="128B", mn_major=False, b_at=B_AT, exact=True):
    """Return A and B in shared memory, where the tests expect them."""
    a, b = values(name, m, seed, exact), values(name, n, seed + 1, exact)
    return Operand(name, a, A_AT, swizzle, mn_major), Operand(name, b, b_at, swizzle, mn_major)


def operands_of_a_pair(a, b, swizzle="128B", mn_major=False):
    """Return halves of bf16 matrices: (A and B of the last CTA, whose descriptors serve both; each CTA's image)."""
    images = []
    for rows, columns in zip(a.chunk(2), b.chunk(2)):
        parts = [Operand("bf16", x, start, swizzle, mn_major) for x, start in ((rows, A_AT), (columns, B_AT))]
        images.append(image_of(*parts))
    return parts, torch.stack(images)


def image_of(*operands, size=0x8000):
    image = torch.zeros(size, dtype=torch.uint8)
    for operand in operands:
        operand.place(image)
    return image


# ---- tensor memory


def d_spot(group, m, n, i, j, ws=False, half=0):
    """Return (cta, lane, column) of element (i, j) of D, relative to its address."""
    if group == 2 and m == 256:
        return i // 128, i % 128, j
    if group == 2:
        return i // 64, i % 64 + 64 * (j // (n // 2)), j % (n // 2)
    if m == 128:
        return 0, i, j
    if m == 64 and ws:
        return 0, i + 64 * (j // (n // 2)), j % (n // 2)
    if m == 64:
        return 0, 32 * (i // 16) + i % 16 + 16 * half, j
    return 0, i + 32 * (j // (n // 4)), j % (n // 4)


def d_spots(group, m, n, ws=False, half=0):
    """Return the same for all of D: three tensors [m][n]."""
    spots = [d_spot(group, m, n, i, j, ws, half) for i in range(m) for j in range(n)]
    return torch.tensor(spots).reshape(m, n, 3).unbind(-1)


def float_bits(x):
    return x.float().contiguous().view(torch.int32)


def bits_float(x):
    return x.contiguous().view(torch.float32).double()


def mma(kind, descriptors, number, *, d="%r8", a="%rd10", accumulate=0, group=1, ws="", mask="", tail=""):
    """Return PTX of one mma, which sets its registers to numbers first."""
    lines = [f"mov.b64 %rd{10 + n}, {value};" for n, value in enumerate(descriptors)]
    lines += [f"mov.b32 %r11, {number};", f"setp.ne.s32 %p6, {int(accumulate)}, 0;"]
    lines += [f"tcgen05.mma{ws}.cta_group::{group}.kind::{kind} [{d}], {a}, %rd11, %r11, {mask}%p6{tail};"]
    return "\n    ".join(lines)


def d_type_of(name):
    return "s32" if TYPES[name][0] == "i8" else "f32"


def multiply(a, b, m, n, *, number=None, flags=None, d_type=None, half=0, group=1, accumulate=0, ws="", mask="",
             tail="", before="", columns=64, cells=None, image=None, **options):
    """Run one mma of operands in shared memory; return (cells afterwards, the Run, cells before).

    `flags` are those of idesc.
    """
    flags = {"transpose_a": a.mn_major, "transpose_b": b.mn_major} | (flags or {})
    number = idesc(a.name, b.name, m, n, d_type or d_type_of(a.name), **flags) if number is None else number
    image = image_of(a, b) if image is None else image
    cells = pattern(group, columns) if cells is None else cells
    issue = mma(TYPES[a.name][0], (a.descriptor, b.descriptor), number, d=f"%r8+{half << 20}", accumulate=accumulate,
                group=group, ws=ws, mask=mask, tail=tail)
    out, result = run(before + issue, image=image, cells=cells, columns=columns, group=group, **options)
    return out, result, cells


def with_d(cells, d, m, n, *, group=1, ws=False, half=0, d_type="f32"):
    """Return the cells with D in its place."""
    if d_type == "s32":
        bits = d.to(torch.int64).to(torch.int32)
    elif d_type == "f16":  # in the lower half, and poison above
        bits = d.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF | -65536
    else:
        bits = float_bits(d + 0.0)  # a sum of zeros is +0
    wanted = cells.clone().reshape(group, 128, -1)
    wanted[d_spots(group, m, n, ws, half)] = bits
    return wanted


def copy(shape, number, address="%r8+8", group=1):
    """Return PTX of one tcgen05.cp."""
    return f"mov.b64 %rd10, {number};\n tcgen05.cp.cta_group::{group}.{shape} [{address}], %rd10;\n"


def random_image(seed, size=0x8000):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
